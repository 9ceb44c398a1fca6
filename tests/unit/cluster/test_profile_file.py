"""Merging detected values into a profile without changing what the user wrote."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest

from clustertrain.cluster import profile_file
from clustertrain.cluster.profile_file import KeyConflict
from clustertrain.cluster.slurm_site_profile import DetectedValue
from clustertrain.config import cluster
from clustertrain.config.cluster import MeasuredRates
from clustertrain.config.node_facts import Cpus, Interface, NodeFacts
from clustertrain.errors import ConfigError

DETECTED = {
    "partition": DetectedValue("gpu", "the default partition"),
    "gpus_per_node": DetectedValue(8, "Gres of 4 of 4 nodes"),
    "grace_s": DetectedValue(20.0, "GraceTime of partition gpu"),
}
MEASURED = MeasuredRates(
    gemm_tflops=612.5, gemm_dtype="bf16", node_bus_gb_s=360.0, device="NVIDIA H100", ranks=8, nodes=1, measured_at=1e9
)
USER_PROFILE = """\
# ours
account = "p1"  # the group's
grace_s = 60  # agreed with the site
setup = [
    "module load cuda",
]

[env]
NCCL_DEBUG = "WARN"
"""


def test_new_profile_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "clusters" / "big.toml"
    node = NodeFacts(interfaces=(Interface(name="eth0", addresses=("10.0.0.7/16",)),), cpus=Cpus(sockets=2))
    merged = profile_file.merge(None, DETECTED, {"measured": MEASURED, "node": node}, header=["one", "two"])
    profile_file.write(path, merged.text)
    assert merged.written == ("partition", "gpus_per_node", "grace_s", "measured", "node") and merged.conflicts == ()
    profile = cluster.load_profile("big", {"CLUSTERTRAIN_CLUSTER_PATH": str(path.parent)})
    assert profile == cluster.ClusterProfile(
        partition="gpu", gpus_per_node=8, grace_s=20.0, measured=MEASURED, node=node
    )
    assert merged.text.startswith("# one\n# two\n")
    assert "gpus_per_node = 8 # Gres of 4 of 4 nodes\n" in merged.text
    assert "fabric_bus_gb_s" not in merged.text  # not measured, and TOML has no null


def test_user_values_are_kept_and_reported() -> None:
    merged = profile_file.merge(USER_PROFILE, DETECTED, {"measured": None})
    assert merged.conflicts == (KeyConflict("grace_s", 60, 20.0),)
    assert merged.written == ("partition", "gpus_per_node")
    added = {'partition = "gpu" # the default partition', "gpus_per_node = 8 # Gres of 4 of 4 nodes"}
    lines = merged.text.splitlines()
    assert [line for line in lines if line not in added] == USER_PROFILE.splitlines()
    assert all(lines.index(line) < lines.index("[env]") for line in added)


def test_force_overwrites_values() -> None:
    merged = profile_file.merge(USER_PROFILE, DETECTED, {}, force=True)
    assert merged.conflicts == () and "grace_s" in merged.written
    assert 'account = "p1"  # the group\'s\ngrace_s = 20.0 # GraceTime of partition gpu\n' in merged.text
    assert tomllib.loads(merged.text)["setup"] == ["module load cuda"]


def test_repeated_merge_changes_nothing() -> None:
    text = profile_file.merge(USER_PROFILE, DETECTED, {}, force=True).text
    repeated = profile_file.merge(
        text, {**DETECTED, "grace_s": DetectedValue(20, "an integer is the same")}, {"measured": None}
    )
    assert (repeated.text, repeated.written, repeated.conflicts) == (text, (), ())


def test_measured_rates_are_replaced() -> None:
    old = profile_file.merge(USER_PROFILE, {}, {"measured": MEASURED}).text
    new = msgspec.structs.replace(MEASURED, gemm_tflops=None, node_bus_gb_s=100.0)
    profile = profile_file.parse_profile(profile_file.merge(old, {}, {"measured": new}).text, "x")
    assert profile.measured == new and profile.env == {"NCCL_DEBUG": "WARN"}


def test_fabric_rate_is_kept_by_a_one_node_measurement() -> None:
    two = msgspec.structs.replace(MEASURED, fabric_bus_gb_s=45.0, nodes=2)
    carried_over = profile_file.carry_over_fabric_rate(two, MEASURED)
    assert carried_over == msgspec.structs.replace(MEASURED, fabric_bus_gb_s=45.0, nodes=2)
    newer = msgspec.structs.replace(MEASURED, fabric_bus_gb_s=40.0, nodes=4)
    assert profile_file.carry_over_fabric_rate(two, newer) == newer
    other = msgspec.structs.replace(MEASURED, device="NVIDIA A100")
    assert profile_file.carry_over_fabric_rate(two, other) == other
    assert profile_file.carry_over_fabric_rate(None, MEASURED) == MEASURED


def test_hostile_text_stays_in_its_comment() -> None:
    detected = {"partition": DetectedValue('a"b\n[env]', 'x\ngrace_s = 1\r\n"""')}
    merged = profile_file.merge(None, detected, {}, header=["two\nlines = 1"])
    assert tomllib.loads(merged.text) == {"partition": 'a"b\n[env]'}


def test_link_and_permissions_are_kept(tmp_path: Path) -> None:
    target, link = tmp_path / "real.toml", tmp_path / "link.toml"
    target.write_text("")
    target.chmod(0o664)
    link.symlink_to(target)
    profile_file.write(link, 'partition = "x"\n')
    assert link.is_symlink() and target.read_text() == 'partition = "x"\n'
    assert target.stat().st_mode & 0o777 == 0o664


def test_invalid_profile_raises() -> None:
    with pytest.raises(ConfigError, match="partitoin"):
        profile_file.parse_profile('partitoin = "x"', "x")
    with pytest.raises(ConfigError, match="x: not valid TOML"):
        profile_file.parse_profile("partition = [", "x")


def test_unwritable_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("a file where a folder should be")
    with pytest.raises(ConfigError, match=r"x\.toml cannot be written"):
        profile_file.write(tmp_path / "config" / "clusters" / "x.toml", "partition = 'a'\n")
