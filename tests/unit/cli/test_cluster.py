"""``cluster list``, ``show`` and ``detect`` with fake Slurm commands; with a real one: slurm/test_cluster_detect.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from clustertrain.cli.cluster import cluster
from clustertrain.config import cluster as profiles
from clustertrain.errors import CommandFailed, ConfigError, UsageError
from tests.fakes.slurm.fixture import FakeSlurm
from tests.fakes.slurm.recorded import read_answer

pytestmark = pytest.mark.long


def call(*argv: str) -> Result:
    return CliRunner().invoke(cluster, argv)


def call_json(*argv: str) -> Any:
    done = call(*argv, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def folder(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the profiles. Slurm answers like 22.05."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    # The fake has one answer per command. Each reader takes its part of it.
    names = ("config-22.05.8", "partition-22.05.8", "node-22.05.8")
    fake_slurm.answers("scontrol", stdout="".join(map(read_answer, names)))
    folder = Path(os.environ["XDG_CONFIG_HOME"]) / "clustertrain" / "clusters"
    folder.mkdir(parents=True)
    return folder


def test_empty_list_names_the_folder_of_profiles(folder: Path) -> None:
    done = call("list")
    assert done.exit_code == 0
    assert f"no cluster profile in {folder}" in done.stdout and "cluster detect" in done.stdout
    assert call_json("list")["profiles"] == []


def test_list_marks_the_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a.toml").write_text("")
    (folder / "b.toml").write_text("")
    monkeypatch.setenv("CLUSTERTRAIN_CLUSTER", "b")
    assert call_json("list")["profiles"] == [
        {"name": "a", "path": str(folder / "a.toml"), "default": False},
        {"name": "b", "path": str(folder / "b.toml"), "default": True},
    ]
    assert f"b  {folder / 'b.toml'}  (default" in call("list").stdout
    monkeypatch.setenv("CLUSTERTRAIN_CLUSTER", "c")
    assert "that profile does not exist" in call("list").stderr


def test_show_has_every_key(folder: Path) -> None:
    (folder / "a.toml").write_text('partition = "gpu"\n[measured]\ngemm_tflops = 600.0\n')
    shown = call_json("show", "a")
    assert shown["path"] == str(folder / "a.toml")
    assert set(shown["profile"]) == set(profiles.ClusterProfile.__struct_fields__)
    text = call("show", "a").stdout
    assert all(f"{key} =" in text or f"# {key}:" in text or f"[{key}]" in text for key in shown["profile"])
    assert "# grace_s: unknown" in text and "gemm_tflops = 600.0" in text


def test_show_of_a_missing_or_invalid_profile_is_an_error(folder: Path) -> None:
    assert isinstance(call("show", "nowhere").exception, ConfigError)
    (folder / "a.toml").write_text("partitoin = 1\n")
    assert "did you mean partition" in str(call("show", "a").exception)
    assert "the name of the profile is empty" in str(call("show", "").exception)


def test_detect_writes_what_its_dry_run_shows(folder: Path) -> None:
    dry = call("detect", "--dry-run")
    assert dry.exit_code == 0 and list(folder.iterdir()) == []
    done = call("detect")
    path = folder / "testbed.toml"  # Slurm's ClusterName
    assert done.exit_code == 0 and path.read_text() == dry.stdout
    profile = profiles.load_profile("testbed")
    assert (profile.partition, profile.gpu_type, profile.gpus_per_node) == ("low", "h100", 8)
    assert (profile.grace_s, profile.cpus_per_gpu, profile.measured) == (20.0, 2, None)
    assert f"{path}: written" in done.stdout
    again = call("detect")
    assert "unchanged" in again.stdout and path.read_text() == dry.stdout


def test_detect_keeps_the_users_keys_unless_forced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "mine.toml"
    path.write_text('grace_s = 60  # agreed\naccount = "p1"\n')
    monkeypatch.setenv("CLUSTERTRAIN_CLUSTER", "mine")
    done = call("detect")
    assert "kept: grace_s = 60; detected: 20.0" in done.stdout and "--force" in done.stdout
    assert path.read_text().startswith('grace_s = 60  # agreed\naccount = "p1"\npartition = "low"')
    detected = call_json("detect")
    assert detected["conflicts"] == {"grace_s": {"profile": 60, "detected": 20.0}}
    assert (detected["written"], detected["changed"], detected["failures"], detected["measured"]) == (
        False,
        [],
        [],
        None,
    )
    assert call_json("detect", "--force")["changed"] == ["grace_s"]
    assert profiles.load_profile("mine").grace_s == 20.0 and profiles.load_profile("mine").account == "p1"


def test_partition_comes_from_option_then_profile_then_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_JOB_PARTITION", "high")
    assert call_json("detect", "--no-measure", "--dry-run")["profile"]["partition"] == "high"
    (folder / "testbed.toml").write_text('partition = "low"\n')
    assert call_json("detect", "--no-measure", "--dry-run")["profile"]["partition"] == "low"
    detected = call_json("detect", "--no-measure", "--dry-run", "--partition", "high")
    assert detected["conflicts"]["partition"] == {"profile": "low", "detected": "high"}
    assert "did you mean high" in str(call("detect", "--no-measure", "--partition", "hihg").exception)


def test_detect_writes_nothing_when_slurm_does_not_answer(folder: Path, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answers("scontrol", stderr="scontrol: error: Unable to contact slurm controller\n", rc=1)
    failed = call("detect")
    assert isinstance(failed.exception, CommandFailed) and "Unable to contact" in str(failed.exception)
    assert "--local" in str(failed.exception) and list(folder.iterdir()) == []


def test_detect_without_slurm_describes_this_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    detected = call_json("detect", "here")
    assert "without Slurm" in detected["notes"][0] and "partition" not in detected["detected"]
    assert profiles.load_profile("here").device == detected["detected"]["device"]["value"]
    assert isinstance(call("detect", "--partition", "low").exception, UsageError)


@pytest.mark.parametrize("name", ["a/b", "../x", ".hidden", "a b", "-x\n"])
def test_unsafe_profile_names_are_refused(name: str, folder: Path) -> None:
    assert isinstance(call("detect", "--dry-run", "--", name).exception, UsageError)
