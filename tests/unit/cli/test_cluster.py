"""``cluster list``, ``show`` and ``detect`` with Slurm's stand-in; the real one: tests/slurm/test_cluster_detect.py."""

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
from tests.fakes.slurm import said as slurm
from tests.fakes.slurm.fixture import FakeSlurm

pytestmark = pytest.mark.long


def call(*argv: str) -> Result:
    return CliRunner().invoke(cluster, argv)


def said(*argv: str) -> Any:
    done = call(*argv, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def folder(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where profiles lie; Slurm answers as 22.05 does."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    # The stand-in knows one answer for a command; each reader takes its own part of it.
    names = ("config-22.05.8", "partition-22.05.8", "node-22.05.8")
    fake_slurm.answers("scontrol", stdout="".join(map(slurm.said, names)))
    made = Path(os.environ["XDG_CONFIG_HOME"]) / "clustertrain" / "clusters"
    made.mkdir(parents=True)
    return made


def test_without_a_profile_the_list_says_where_it_looked(folder: Path) -> None:
    done = call("list")
    assert done.exit_code == 0
    assert f"no cluster profile in {folder}" in done.stdout and "cluster detect" in done.stdout
    assert said("list") == []


def test_the_list_marks_the_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a.toml").write_text("")
    (folder / "b.toml").write_text("")
    monkeypatch.setenv("CLUSTERTRAIN_CLUSTER", "b")
    assert said("list") == [
        {"name": "a", "path": str(folder / "a.toml"), "default": False},
        {"name": "b", "path": str(folder / "b.toml"), "default": True},
    ]
    assert f"b  {folder / 'b.toml'}  (default" in call("list").stdout
    monkeypatch.setenv("CLUSTERTRAIN_CLUSTER", "c")
    assert "that profile does not exist" in call("list").stderr


def test_show_has_every_key(folder: Path) -> None:
    (folder / "a.toml").write_text('partition = "gpu"\n[measured]\ngemm_tflops = 600.0\n')
    shown = said("show", "a")
    assert shown["path"] == str(folder / "a.toml")
    assert set(shown["profile"]) == set(profiles.ClusterProfile.__struct_fields__)
    text = call("show", "a").stdout
    assert all(f"{key} =" in text or f"# {key}:" in text or f"[{key}]" in text for key in shown["profile"])
    assert "# grace_s: unknown" in text and "gemm_tflops = 600.0" in text


def test_show_of_a_profile_that_is_not_there_or_bad(folder: Path) -> None:
    assert isinstance(call("show", "nowhere").exception, ConfigError)
    (folder / "a.toml").write_text("partitoin = 1\n")
    assert "did you mean partition" in str(call("show", "a").exception)
    assert "the name of the profile is empty" in str(call("show", "").exception)


def test_detect_writes_what_a_dry_run_shows(folder: Path) -> None:
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


def test_detect_keeps_a_persons_keys_unless_forced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "mine.toml"
    path.write_text('grace_s = 60  # agreed\naccount = "p1"\n')
    monkeypatch.setenv("CLUSTERTRAIN_CLUSTER", "mine")
    done = call("detect")
    assert "kept: grace_s = 60; detected: 20.0" in done.stdout and "--force" in done.stdout
    assert path.read_text().startswith('grace_s = 60  # agreed\naccount = "p1"\npartition = "low"')
    seen = said("detect")
    assert seen["conflicts"] == {"grace_s": {"profile": 60, "detected": 20.0}}
    assert (seen["written"], seen["changed"], seen["failures"], seen["measured"]) == (False, [], [], None)
    assert said("detect", "--force")["changed"] == ["grace_s"]
    assert profiles.load_profile("mine").grace_s == 20.0 and profiles.load_profile("mine").account == "p1"


def test_the_partition_is_the_one_asked_for_then_the_profiles_then_the_jobs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_JOB_PARTITION", "high")
    assert said("detect", "--no-measure", "--dry-run")["profile"]["partition"] == "high"
    (folder / "testbed.toml").write_text('partition = "low"\n')
    assert said("detect", "--no-measure", "--dry-run")["profile"]["partition"] == "low"
    seen = said("detect", "--no-measure", "--dry-run", "--partition", "high")
    assert seen["conflicts"]["partition"] == {"profile": "low", "detected": "high"}
    assert "did you mean high" in str(call("detect", "--no-measure", "--partition", "hihg").exception)


def test_slurm_that_does_not_answer_is_told_and_nothing_is_written(folder: Path, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answers("scontrol", stderr="scontrol: error: Unable to contact slurm controller\n", rc=1)
    failed = call("detect")
    assert isinstance(failed.exception, CommandFailed) and "Unable to contact" in str(failed.exception)
    assert "--local" in str(failed.exception) and list(folder.iterdir()) == []


def test_without_slurm_this_machine_is_what_there_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    seen = said("detect", "here")
    assert "without Slurm" in seen["notes"][0] and "partition" not in seen["detected"]
    assert profiles.load_profile("here").device == seen["detected"]["device"]["value"]
    assert isinstance(call("detect", "--partition", "low").exception, UsageError)


@pytest.mark.parametrize("name", ["a/b", "../x", ".hidden", "a b", "-x\n"])
def test_names_that_would_not_be_files_of_the_folder(name: str, folder: Path) -> None:
    assert isinstance(call("detect", "--dry-run", "--", name).exception, UsageError)
