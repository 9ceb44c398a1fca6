"""Recorded scontrol output and the profiles derived from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clustertrain.cluster import slurm_site, slurm_site_profile
from clustertrain.cluster.slurm_site import Gres, Site
from clustertrain.cluster.slurm_site_profile import DetectedProfile
from clustertrain.errors import UsageError
from tests.fakes.slurm.recorded import read_answer


@pytest.fixture
def testbed() -> Site:
    return Site(
        config=slurm_site.parse_config(read_answer("config-22.05.8")),
        partitions=slurm_site.parse_partitions(read_answer("partition-22.05.8")),
        nodes=slurm_site.parse_nodes(read_answer("node-22.05.8")),
    )


def values(detected: DetectedProfile) -> dict[str, Any]:
    return {key: entry.value for key, entry in detected.keys.items()}


def with_fields(site: Site, **fields: str) -> Site:
    """Return the site with ``fields`` changed in every partition."""
    return replace(site, partitions=tuple(replace(p, fields={**p.fields, **fields}) for p in site.partitions))


def with_gres(site: Site, *gres: str) -> Site:
    """Return the site with ``gres`` on its first nodes and none on the others."""
    texts = [*gres, *[""] * (len(site.nodes) - len(gres))]
    return replace(
        site, nodes=tuple(replace(n, gres=slurm_site.parse_gres(t)) for n, t in zip(site.nodes, texts, strict=True))
    )


def test_site_22_05(testbed: Site) -> None:
    assert testbed.cluster_name == "testbed"
    assert [(p.name, p.is_default, p.is_open) for p in testbed.partitions] == [
        ("low", True, True),
        ("high", False, True),
    ]
    assert [n.name for n in testbed.nodes_in_partition("high")] == ["node01", "node02", "node03", "node04"]
    first = testbed.nodes[0]
    assert (first.cpus, first.memory_mib, first.gpus) == (16, 128000, (Gres("gpu", "h100", 8),))
    detected = slurm_site_profile.detect_profile(testbed)
    assert values(detected) == {
        "partition": "low",
        "device": "cuda",
        "gpus_per_node": 8,
        "gpu_type": "h100",
        "gpus_flag": "gpus-per-node",
        "cpus_per_gpu": 2,
        "grace_s": 20.0,
    }
    assert any("125 GiB" in note and "DefMemPerCPU=2000" in note for note in detected.notes)
    assert any("01:00:00" in note for note in detected.notes)


def test_partition_without_preemption_has_no_grace_time(testbed: Site) -> None:
    detected = slurm_site_profile.detect_profile(testbed, "high")
    assert "grace_s" not in detected.keys
    assert any("not preempted" in note for note in detected.notes)


def test_nodes_23_11_without_types_and_of_different_sizes() -> None:
    nodes = slurm_site.parse_nodes(read_answer("node-23.11.0"))
    assert [n.gpus for n in nodes] == [(Gres("gpu", "", 2),), (Gres("gpu", "", 5),)]
    partition = replace(slurm_site.parse_partitions(read_answer("partition-24.11.3"))[0], name="debug")
    detected = slurm_site_profile.detect_profile(Site({"GresTypes": "gpu"}, (partition,), nodes))
    assert "gpu_type" not in detected.keys
    assert values(detected)["gpus_per_node"] == 5
    assert any("1 nodes with 2 x GPU" in note for note in detected.notes)
    assert any("no type" in note for note in detected.notes)


def test_site_24_11_with_autodetected_type_and_reserved_cores() -> None:
    nodes = slurm_site.parse_nodes(read_answer("node-24.11.3"))
    site = Site(
        slurm_site.parse_config(read_answer("config-25.05.5")),
        slurm_site.parse_partitions(read_answer("partition-24.11.3")),
        nodes,
    )
    detected = slurm_site_profile.detect_profile(site)
    assert values(detected) == {
        "partition": "normal",
        "device": "cuda",
        "gpus_per_node": 2,
        "gpu_type": "nvidia_a100_80gb_pcie",  # sbatch needs the site's name
        "gpus_flag": "gpus-per-node",
        "cpus_per_gpu": 112,  # from CPUEfctv=224, not CPUTot=256
    }
    assert "a100-pcie-80gb with 80 GiB" in detected.keys["gpu_type"].source
    assert any("no time limit" in note for note in detected.notes)
    assert any("no default" in note for note in detected.notes)


def test_site_defaults_are_not_overridden(testbed: Site) -> None:
    (h100,) = slurm_site.parse_partitions(read_answer("partition-23.11"))
    nodes = tuple(replace(n, partitions=("h100",)) for n in testbed.nodes)
    detected = slurm_site_profile.detect_profile(Site(testbed.config, (h100,), nodes))
    assert "cpus_per_gpu" not in detected.keys and "grace_s" not in detected.keys  # GraceTime=0
    assert any("DefCpuPerGPU=32" in note for note in detected.notes)
    assert any("at most 3-00:00:00" in note for note in detected.notes)
    assert any("DefMemPerCPU=12000" in note for note in detected.notes)  # the partition's, not the site's 2000


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
def test_parse_gres(text: str, gres: list[tuple[str, str, int]]) -> None:
    assert [(g.name, g.type, g.count) for g in slurm_site.parse_gres(text)] == gres


def test_values_with_blanks_and_equal_signs() -> None:
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
    assert node.gpus == (Gres("gpu", "", 2),) and node.cpus == 4  # no CPUEfctv before 22.05


def test_partition_with_most_gpus_if_default_has_none(testbed: Site) -> None:
    big, small = testbed.partitions
    nodes = tuple(replace(n, partitions=("high",)) for n in testbed.nodes)
    site = replace(testbed, nodes=nodes)
    assert slurm_site_profile.choose_partition(site)[0].name == "high"
    assert "32" in slurm_site_profile.choose_partition(site)[1]
    closed = replace(small, fields={**small.fields, "State": "DOWN"})
    assert slurm_site_profile.choose_partition(replace(site, partitions=(big, closed)))[0].name == "low"


def test_site_without_gpus_is_a_cpu_cluster(testbed: Site) -> None:
    assert values(slurm_site_profile.detect_profile(with_gres(testbed))) == {
        "partition": "low",
        "device": "cpu",
        "grace_s": 20.0,
    }


def test_unknown_gpu_type_keeps_the_site_name(testbed: Site) -> None:
    detected = slurm_site_profile.detect_profile(with_gres(testbed, *["gpu:a100_3g.20gb:4"] * 4))
    assert values(detected)["gpu_type"] == "a100_3g.20gb"
    assert any("'a100_3g.20gb' is site-specific" in note for note in detected.notes)


def test_gpu_type_with_most_gpus_is_chosen(testbed: Site) -> None:
    detected = slurm_site_profile.detect_profile(
        with_gres(testbed, "gpu:v100:4", "gpu:v100:4", "gpu:h100:8", "gpu:h100:8")
    )
    assert (values(detected)["gpu_type"], values(detected)["gpus_per_node"]) == ("h100", 8)
    assert detected.keys["gpus_per_node"].source == "Gres of 2 of 4 nodes"
    assert any("2 nodes with 4 x v100" in note for note in detected.notes)


def test_other_select_plugins_use_gres(testbed: Site) -> None:
    site = replace(testbed, config={**testbed.config, "SelectType": "select/linear", "GresTypes": "mps"})
    detected = slurm_site_profile.detect_profile(site)
    assert values(detected)["gpus_flag"] == "gres"
    assert any("GresTypes=mps" in note for note in detected.notes)


def test_cpus_per_gpu_respect_the_partition_limit(testbed: Site) -> None:
    assert values(slurm_site_profile.detect_profile(with_fields(testbed, MaxCPUsPerNode="8")))["cpus_per_gpu"] == 1
    assert "cpus_per_gpu" not in slurm_site_profile.detect_profile(with_fields(testbed, MaxCPUsPerNode="4")).keys


def test_qos_preemption_has_no_partition_grace_time(testbed: Site) -> None:
    detected = slurm_site_profile.detect_profile(
        replace(testbed, config={**testbed.config, "PreemptType": "preempt/qos"})
    )
    assert "grace_s" not in detected.keys
    assert any("QOS" in note for note in detected.notes)


def test_unknown_partition_raises_with_a_suggestion(testbed: Site) -> None:
    with pytest.raises(UsageError, match="did you mean high"):
        slurm_site_profile.detect_profile(testbed, "hihg")
    with pytest.raises(UsageError, match="no partition that is up"):
        slurm_site_profile.detect_profile(with_fields(testbed, State="INACTIVE"))
