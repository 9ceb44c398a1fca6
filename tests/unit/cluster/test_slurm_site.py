"""Slurm's answers as they were printed, and what a profile takes from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clustertrain.cluster import slurm_site, slurm_site_profile
from clustertrain.cluster.slurm_site import Gres, Site
from clustertrain.cluster.slurm_site_profile import DetectedProfile
from clustertrain.errors import UsageError
from tests.fakes.slurm.said import said


@pytest.fixture
def testbed() -> Site:
    return Site(
        config=slurm_site.parse_config(said("config-22.05.8")),
        partitions=slurm_site.parse_partitions(said("partition-22.05.8")),
        nodes=slurm_site.parse_nodes(said("node-22.05.8")),
    )


def values(found: DetectedProfile) -> dict[str, Any]:
    return {key: it.value for key, it in found.keys.items()}


def with_fields(of: Site, **fields: str) -> Site:
    """The same with other fields in every partition."""
    return replace(of, partitions=tuple(replace(p, fields={**p.fields, **fields}) for p in of.partitions))


def with_gres(of: Site, *gres: str) -> Site:
    """The same with the Gres of its first nodes changed, as many as are given; the others have none."""
    texts = [*gres, *[""] * (len(of.nodes) - len(gres))]
    return replace(
        of, nodes=tuple(replace(n, gres=slurm_site.parse_gres(t)) for n, t in zip(of.nodes, texts, strict=True))
    )


def test_a_site_of_22_05(testbed: Site) -> None:
    assert testbed.cluster_name == "testbed"
    assert [(p.name, p.is_default, p.is_open) for p in testbed.partitions] == [
        ("low", True, True),
        ("high", False, True),
    ]
    assert [n.name for n in testbed.nodes_in_partition("high")] == ["node01", "node02", "node03", "node04"]
    first = testbed.nodes[0]
    assert (first.cpus, first.memory_mib, first.gpus) == (16, 128000, (Gres("gpu", "h100", 8),))
    found = slurm_site_profile.detect_profile(testbed)
    assert values(found) == {
        "partition": "low",
        "device": "cuda",
        "gpus_per_node": 8,
        "gpu_type": "h100",
        "gpus_flag": "gpus-per-node",
        "cpus_per_gpu": 2,
        "grace_s": 20.0,
    }
    assert any("125 GiB" in note and "DefMemPerCPU=2000" in note for note in found.notes)
    assert any("01:00:00" in note for note in found.notes)


def test_a_partition_that_is_not_preempted_has_no_grace_time(testbed: Site) -> None:
    found = slurm_site_profile.detect_profile(testbed, "high")
    assert "grace_s" not in found.keys
    assert any("not preempted" in note for note in found.notes)


def test_nodes_of_23_11_without_types_and_of_different_sizes() -> None:
    nodes = slurm_site.parse_nodes(said("node-23.11.0"))
    assert [n.gpus for n in nodes] == [(Gres("gpu", "", 2),), (Gres("gpu", "", 5),)]
    partition = replace(slurm_site.parse_partitions(said("partition-24.11.3"))[0], name="debug")
    found = slurm_site_profile.detect_profile(Site({"GresTypes": "gpu"}, (partition,), nodes))
    assert "gpu_type" not in found.keys
    assert values(found)["gpus_per_node"] == 5
    assert any("1 nodes with 2 x GPU" in note for note in found.notes)
    assert any("no type" in note for note in found.notes)


def test_24_11_with_a_type_of_autodetect_and_cores_kept_for_the_system() -> None:
    nodes = slurm_site.parse_nodes(said("node-24.11.3"))
    here = Site(
        slurm_site.parse_config(said("config-25.05.5")), slurm_site.parse_partitions(said("partition-24.11.3")), nodes
    )
    found = slurm_site_profile.detect_profile(here)
    assert values(found) == {
        "partition": "normal",
        "device": "cuda",
        "gpus_per_node": 2,
        "gpu_type": "nvidia_a100_80gb_pcie",  # the site's word, since sbatch is asked for it
        "gpus_flag": "gpus-per-node",
        "cpus_per_gpu": 112,  # of CPUEfctv=224, not CPUTot=256
    }
    assert "a100-pcie-80gb with 80 GiB" in found.keys["gpu_type"].source
    assert any("no time limit" in note for note in found.notes)
    assert any("no default" in note for note in found.notes)


def test_defaults_of_the_site_are_left_to_it(testbed: Site) -> None:
    (h100,) = slurm_site.parse_partitions(said("partition-23.11"))
    nodes = tuple(replace(n, partitions=("h100",)) for n in testbed.nodes)
    found = slurm_site_profile.detect_profile(Site(testbed.config, (h100,), nodes))
    assert "cpus_per_gpu" not in found.keys and "grace_s" not in found.keys  # GraceTime=0
    assert any("DefCpuPerGPU=32" in note for note in found.notes)
    assert any("at most 3-00:00:00" in note for note in found.notes)
    assert any("DefMemPerCPU=12000" in note for note in found.notes)  # the partition's, not the site's 2000


@pytest.mark.parametrize(
    ("text", "gres"),
    [
        ("(null)", []),
        ("", []),
        ("gpu:2(S:0)", [("gpu", "", 2)]),
        ("gpu:a100:4(S:0,2),shard:a100:8(S:0-1)", [("gpu", "a100", 4), ("shard", "a100", 8)]),
        ("gpu:nvidia_a100-sxm4-40gb:8(S:1,3,5,7)", [("gpu", "nvidia_a100-sxm4-40gb", 8)]),
        ("gpu:tesla:2,gpu:kepler:2,mps:400,bandwidth:lustre:no_consume:4G",
         [("gpu", "tesla", 2), ("gpu", "kepler", 2), ("mps", "", 400)]),
        ("gpu", []),
    ],
)  # fmt: skip
def test_gres(text: str, gres: list[tuple[str, str, int]]) -> None:
    assert [(g.name, g.type, g.count) for g in slurm_site.parse_gres(text)] == gres


def test_names_and_reasons_with_blanks_and_equal_signs() -> None:
    # skypilot's tests have a partition of this name.
    text = (
        "PartitionName=dev AllowGroups=ALL Default=YES State=UP\n"
        "PartitionName=CPU nodes (amd) AllowGroups=ALL Default=NO State=UP\n"
    )
    assert [p.name for p in slurm_site.parse_partitions(text)] == ["dev", "CPU nodes (amd)"]
    (node,) = slurm_site.parse_nodes(
        "NodeName=n1 CPUTot=4 Gres=gpu:2 Partitions=dev,CPU nodes (amd) Reason=swap Gres=none [root@2024-01-01]"
    )
    assert node.partitions == ("dev", "CPU nodes (amd)")
    assert node.gpus == (Gres("gpu", "", 2),) and node.cpus == 4  # before 22.05 there was no CPUEfctv


def test_the_partition_with_most_gpus_where_the_default_one_has_none(testbed: Site) -> None:
    big, small = testbed.partitions
    nodes = tuple(replace(n, partitions=("high",)) for n in testbed.nodes)
    here = replace(testbed, nodes=nodes)
    assert slurm_site_profile.choose_partition(here)[0].name == "high"
    assert "32" in slurm_site_profile.choose_partition(here)[1]
    closed = replace(small, fields={**small.fields, "State": "DOWN"})
    assert slurm_site_profile.choose_partition(replace(here, partitions=(big, closed)))[0].name == "low"


def test_no_gpus_anywhere_is_a_cpu_cluster(testbed: Site) -> None:
    assert values(slurm_site_profile.detect_profile(with_gres(testbed))) == {
        "partition": "low",
        "device": "cpu",
        "grace_s": 20.0,
    }


def test_a_type_that_is_not_in_the_catalogue_stays_the_sites_word(testbed: Site) -> None:
    found = slurm_site_profile.detect_profile(with_gres(testbed, *["gpu:a100_3g.20gb:4"] * 4))
    assert values(found)["gpu_type"] == "a100_3g.20gb"
    assert any("'a100_3g.20gb' is the site's word" in note for note in found.notes)


def test_of_several_types_the_one_with_most_gpus(testbed: Site) -> None:
    found = slurm_site_profile.detect_profile(
        with_gres(testbed, "gpu:v100:4", "gpu:v100:4", "gpu:h100:8", "gpu:h100:8")
    )
    assert (values(found)["gpu_type"], values(found)["gpus_per_node"]) == ("h100", 8)
    assert found.keys["gpus_per_node"].source == "Gres of 2 of 4 nodes"
    assert any("2 nodes with 4 x v100" in note for note in found.notes)


def test_other_select_plugins_take_gres_only(testbed: Site) -> None:
    here = replace(testbed, config={**testbed.config, "SelectType": "select/linear", "GresTypes": "mps"})
    found = slurm_site_profile.detect_profile(here)
    assert values(found)["gpus_flag"] == "gres"
    assert any("GresTypes=mps" in note for note in found.notes)


def test_processors_are_shared_within_the_partitions_limit(testbed: Site) -> None:
    assert values(slurm_site_profile.detect_profile(with_fields(testbed, MaxCPUsPerNode="8")))["cpus_per_gpu"] == 1
    assert "cpus_per_gpu" not in slurm_site_profile.detect_profile(with_fields(testbed, MaxCPUsPerNode="4")).keys


def test_grace_by_qos_is_not_the_partitions(testbed: Site) -> None:
    found = slurm_site_profile.detect_profile(replace(testbed, config={**testbed.config, "PreemptType": "preempt/qos"}))
    assert "grace_s" not in found.keys
    assert any("QOS" in note for note in found.notes)


def test_an_unknown_partition_suggests(testbed: Site) -> None:
    with pytest.raises(UsageError, match="did you mean high"):
        slurm_site_profile.detect_profile(testbed, "hihg")
    with pytest.raises(UsageError, match="no partition that is up"):
        slurm_site_profile.detect_profile(with_fields(testbed, State="INACTIVE"))
