"""Which backend a new run gets: a job that was meant for a cluster never starts on the login node."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertrain.cli.main import main
from tests.fakes.slurm.fixture import FakeSlurm

Type = Callable[..., tuple[int, str, str]]
PROFILES = {"queue": 'partition = "gpu"\n', "bare": 'setup = ["true"]\n'}


@pytest.fixture
def type_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Type:
    """Type a command line in an empty folder; returns exit code, stdout and stderr."""
    profiles = tmp_path / "config" / "clustertrain" / "clusters"
    profiles.mkdir(parents=True)
    for name, text in PROFILES.items():
        (profiles / f"{name}.toml").write_text(text)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CLUSTERTRAIN_CLUSTER", raising=False)
    monkeypatch.delattr("clustertrain.proc.start")  # nothing here may start ranks
    monkeypatch.chdir(tmp_path)

    def type_(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clustertrain", *words])
        code = main()
        return code, *capsys.readouterr()

    return type_


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No command of Slurm on PATH."""
    (tmp_path / "bin").mkdir()
    for name in ("git", "bash", "sh"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.fixture
def silent(fake_slurm: FakeSlurm) -> None:
    """sbatch is installed, and Slurm's configuration does not come."""
    (fake_slurm.folder / "sbatch").write_text(
        "#!/bin/sh\necho 'fatal: Could not establish a configuration' >&2\nexit 1"
    )


OF_SLURM = (
    ("--partition", "gpu"), ("--account", "a"), ("--qos", "q"), ("--time", "60"), ("--constraint", "c"),
    ("--exclude", "n1"), ("--nodelist", "n1"), ("--reservation", "r"), ("--mem", "4G"),
    ("--dependency", "afterok:1"), ("--sbatch", "nice=1"), ("--nodes", "2"), ("--cluster", "queue"),
    ("--set", "job.partition=gpu"),
)  # fmt: skip


@pytest.mark.usefixtures("laptop")
@pytest.mark.parametrize("asked", OF_SLURM, ids=" ".join)
@pytest.mark.parametrize("command", [("submit",), ("submit", "--dry-run"), ("sweep", "--grid", "train.seed=1,2")])
def test_a_job_for_a_cluster_never_starts_here(
    command: tuple[str, ...], asked: tuple[str, ...], type_: Type, tmp_path: Path
) -> None:
    code, out, err = type_(*command, *asked)
    assert (code, out) == (78, "")
    assert "sbatch is not installed" in err and "--backend local" in err
    assert not (tmp_path / "home" / "runs").exists() and not (tmp_path / "home" / "local").exists()


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("asked", [(), ("--partition", "gpu"), ("--backend", "slurm")])
def test_a_slurm_that_does_not_answer_is_no_laptop(asked: tuple[str, ...], type_: Type, tmp_path: Path) -> None:
    code, out, err = type_("submit", *asked)
    assert (code, out) == (78, "")
    assert "does not answer" in err and "Could not establish a configuration" in err and "--backend local" in err
    assert not (tmp_path / "home" / "runs").exists()


@pytest.mark.usefixtures("laptop")
def test_what_asks_for_nothing_runs_here_and_says_so(type_: Type) -> None:
    code, _, err = type_("submit", "--dry-run", "--device", "cpu", "--cluster", "bare")
    assert code == 0 and "local backend: CPU, 1 rank on this machine" in err


@pytest.mark.usefixtures("laptop")
def test_the_name_of_the_local_backend_is_enough(type_: Type) -> None:
    cores = len(os.sched_getaffinity(0))
    code, _, err = type_("submit", "--dry-run", "--backend", "local", "--device", "cpu", "--nodes", "1000", "--time=60")
    assert code == 0 and f"local backend: CPU, 1000 nodes, 1000 ranks on this machine with {cores} core" in err


@pytest.mark.usefixtures("laptop")
def test_the_job_script_can_be_read_without_slurm(type_: Type) -> None:
    code, out, _ = type_("submit", "--dry-run", "--backend", "slurm", "--nodes", "2", "--partition", "gpu")
    assert code == 0 and "#SBATCH --partition=gpu" in out and "#SBATCH --nodes=2" in out
    code, out, _ = type_("sweep", "--dry-run", "--backend", "slurm", "--grid", "train.seed=1,2")
    assert code == 0 and "#SBATCH --array=0-1" in out


@pytest.mark.usefixtures("laptop")
@pytest.mark.parametrize("asked", [("--gpu-type", "h100"), ("--nodes", "2"), ("--partition", "gpu")])
def test_a_plan_for_gpus_needs_neither_slurm_nor_gpus(type_: Type, asked: tuple[str, ...]) -> None:
    code, out, _ = type_("plan", *asked)
    assert code == 0 and "device cuda" in out


@pytest.mark.usefixtures("silent")
def test_a_plan_needs_no_answer(type_: Type) -> None:
    code, out, _ = type_("plan", "--gpus", "2")
    assert code == 0 and "device cuda" in out


@pytest.mark.usefixtures("laptop")
def test_a_range_of_gpus_is_planned_for_one_device(type_: Type) -> None:
    code, out, _ = type_("plan", "--gpus", "8", "--gpu-type", "h100", "--gpus-range", "4-16")
    rows = out.splitlines()[2:]
    assert code == 0 and len(rows) == 3 and not any(" - " in row for row in rows)


@pytest.mark.usefixtures("laptop")
def test_parts_of_a_node_are_planned_as_the_whole_ones(type_: Type) -> None:
    _, small, _ = type_("plan", "--gpus", "8", "--gpus-range", "4-16", "--json")
    _, alone, _ = type_("plan", "--gpus", "4", "--device", "cuda", "--set", "train.global_batch=32", "--json")
    assert f'"peak_gib": {_peak(alone)}' in small


def _peak(plan: str) -> str:
    return plan.split('"peak_gib": ')[1].split(",", maxsplit=1)[0].split("\n", maxsplit=1)[0]
