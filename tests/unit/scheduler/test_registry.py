"""The backend of a new run: a job that is meant for a cluster never starts on the login node."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertrain.cli.main import main
from tests.fakes.slurm.fixture import FakeSlurm

RunCli = Callable[..., tuple[int, str, str]]
PROFILES = {"queue": 'partition = "gpu"\n', "bare": 'setup = ["true"]\n'}


@pytest.fixture
def run_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCli:
    """Run a command line in an empty folder. It returns the exit code, stdout and stderr."""
    profiles = tmp_path / "config" / "clustertrain" / "clusters"
    profiles.mkdir(parents=True)
    for name, text in PROFILES.items():
        (profiles / f"{name}.toml").write_text(text)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CLUSTERTRAIN_CLUSTER", raising=False)
    monkeypatch.delattr("clustertrain.proc.start")  # nothing here may start ranks
    monkeypatch.chdir(tmp_path)

    def run_cli(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clustertrain", *args])
        code = main()
        return code, *capsys.readouterr()

    return run_cli


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with no Slurm command on PATH."""
    (tmp_path / "bin").mkdir()
    for name in ("git", "bash", "sh"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.fixture
def unreachable_slurm(fake_slurm: FakeSlurm) -> None:
    """A machine with sbatch, which cannot get Slurm's configuration."""
    (fake_slurm.folder / "sbatch").write_text(
        "#!/bin/sh\necho 'error: DNS SRV lookup failed' >&2\n"
        "echo 'fatal: Could not establish a configuration' >&2\nexit 1"
    )


SLURM_OPTIONS = (
    ("--partition", "gpu"), ("--account", "a"), ("--qos", "q"), ("--time", "60"), ("--constraint", "c"),
    ("--exclude", "n1"), ("--nodelist", "n1"), ("--reservation", "r"), ("--mem", "4G"),
    ("--dependency", "afterok:1"), ("--sbatch", "nice=1"), ("--nodes", "2"), ("--cluster", "queue"),
    ("--set", "job.partition=gpu"),
)  # fmt: skip


@pytest.mark.usefixtures("laptop")
@pytest.mark.parametrize("options", SLURM_OPTIONS, ids=" ".join)
@pytest.mark.parametrize("command", [("submit",), ("submit", "--dry-run"), ("sweep", "--grid", "train.seed=1,2")])
def test_job_with_slurm_options_never_starts_without_slurm(
    command: tuple[str, ...], options: tuple[str, ...], run_cli: RunCli, tmp_path: Path
) -> None:
    code, out, err = run_cli(*command, *options)
    assert (code, out) == (78, "")
    assert "sbatch is not installed" in err and "--backend local" in err
    assert not (tmp_path / "home" / "runs").exists() and not (tmp_path / "home" / "local").exists()


@pytest.mark.usefixtures("unreachable_slurm")
@pytest.mark.parametrize("options", [(), ("--partition", "gpu"), ("--backend", "slurm")])
def test_submit_is_refused_when_slurm_does_not_answer(
    options: tuple[str, ...], run_cli: RunCli, tmp_path: Path
) -> None:
    code, out, err = run_cli("submit", *options)
    assert (code, out) == (78, "")
    assert "does not answer" in err and "Could not establish a configuration" in err and "--backend local" in err
    assert "DNS SRV" not in err and "`sinfo`" in err  # one line says why, and this may be the login node
    assert not (tmp_path / "home" / "runs").exists()


@pytest.mark.usefixtures("laptop")
def test_without_slurm_options_the_local_backend_is_used(run_cli: RunCli) -> None:
    code, _, err = run_cli("submit", "--dry-run", "--device", "cpu", "--cluster", "bare")
    assert code == 0 and "local backend: CPU, 1 rank on this machine" in err


@pytest.mark.usefixtures("laptop")
@pytest.mark.parametrize("command", [("submit",), ("submit", "--dry-run"), ("sweep", "--grid", "train.seed=1,2")])
def test_job_that_is_far_too_large_for_this_machine_is_refused(
    command: tuple[str, ...], run_cli: RunCli, tmp_path: Path
) -> None:
    cores = len(os.sched_getaffinity(0))
    size = ("--device", "cpu", "--set", "train.global_batch=4096", "--gpus")
    code, out, err = run_cli(*command, *size, "512")
    assert (code, out) == (78, "")
    assert f"512 ranks on a machine with {cores} core" in err and "nothing was started" in err
    assert "--backend local" in err and "login node" in err
    assert not (tmp_path / "home" / "runs").exists() and not (tmp_path / "home" / "local").exists()
    code, _, err = run_cli("submit", "--dry-run", "--backend", "local", *size, "512")
    assert code == 0 and "512 ranks on this machine" in err
    code, _, err = run_cli("submit", "--dry-run", *size, str(4 * cores))
    assert code == 0, err


@pytest.mark.usefixtures("laptop")
def test_more_ranks_than_gpus_are_refused(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clustertrain.submit.resolve.count_gpus", lambda: 2)
    monkeypatch.setattr("clustertrain.submit.preflight.machine.count_gpus", lambda: 2)
    code, out, err = run_cli("submit", "--dry-run", "--gpus", "8")
    assert (code, out) == (78, "") and "8 ranks on a machine with 2 GPUs" in err and "--backend local" in err
    assert run_cli("submit", "--dry-run", "--gpus", "2")[0] == 0
    assert run_cli("submit", "--dry-run", "--backend", "local", "--gpus", "8")[0] == 0


@pytest.mark.usefixtures("laptop")
def test_values_of_the_profile_are_not_reported_as_without_effect(run_cli: RunCli) -> None:
    code, _, err = run_cli("submit", "--dry-run", "--backend", "local", "--device", "cpu", "--cluster", "queue")
    assert code == 0 and "local backend: CPU" in err and "without effect" not in err


@pytest.mark.usefixtures("laptop")
def test_local_backend_accepts_slurm_options(run_cli: RunCli) -> None:
    cores = len(os.sched_getaffinity(0))
    code, _, err = run_cli(
        "submit", "--dry-run", "--backend", "local", "--device", "cpu", "--nodes", "1000", "--time=60",
        "--partition", "gpu", "--exclude", "node07",
    )  # fmt: skip
    assert code == 0 and f"local backend: CPU, 1000 nodes, 1000 ranks on this machine with {cores} core" in err
    assert "for Slurm only, without effect here: " in err and 'job.partition = "gpu", job.exclude = "node07"' in err


@pytest.mark.usefixtures("laptop")
def test_dry_run_prints_the_job_script_without_slurm(run_cli: RunCli) -> None:
    code, out, _ = run_cli("submit", "--dry-run", "--backend", "slurm", "--nodes", "2", "--partition", "gpu")
    assert code == 0 and "#SBATCH --partition=gpu" in out and "#SBATCH --nodes=2" in out
    code, out, _ = run_cli("sweep", "--dry-run", "--backend", "slurm", "--grid", "train.seed=1,2")
    assert code == 0 and "#SBATCH --array=0-1" in out


@pytest.mark.usefixtures("laptop")
@pytest.mark.parametrize("options", [("--gpu-type", "h100"), ("--nodes", "2"), ("--partition", "gpu")])
def test_plan_for_gpus_needs_neither_slurm_nor_gpus(run_cli: RunCli, options: tuple[str, ...]) -> None:
    code, out, _ = run_cli("plan", *options)
    assert code == 0 and "device cuda" in out


@pytest.mark.usefixtures("unreachable_slurm")
def test_plan_works_when_slurm_does_not_answer(run_cli: RunCli) -> None:
    code, out, _ = run_cli("plan", "--gpus", "2")
    assert code == 0 and "device cuda" in out


@pytest.mark.usefixtures("laptop")
def test_every_size_in_a_gpu_range_has_a_plan(run_cli: RunCli) -> None:
    code, out, _ = run_cli("plan", "--gpus", "8", "--gpu-type", "h100", "--gpus-range", "4-16")
    title, _, *rows = out.splitlines()
    assert title.startswith("8 GPUs per node, global batch ")
    assert code == 0 and len(rows) == 3 and not any(" - " in row for row in rows)


@pytest.mark.usefixtures("laptop")
def test_part_of_a_node_is_planned_like_a_job_of_that_size(run_cli: RunCli) -> None:
    _, small, _ = run_cli("plan", "--gpus", "8", "--gpus-range", "4-16", "--json")
    _, alone, _ = run_cli("plan", "--gpus", "4", "--device", "cuda", "--set", "train.global_batch=32", "--json")
    assert f'"peak_gib": {_peak(alone)}' in small


def _peak(plan: str) -> str:
    return plan.split('"peak_gib": ')[1].split(",", maxsplit=1)[0].split("\n", maxsplit=1)[0]
