"""``submit --sweep``, and ``cancel`` and ``wait`` of several runs, as a user types them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertrain import fsio
from clustertrain.cli.common import find_run, find_runs
from clustertrain.cli.main import main
from clustertrain.errors import Ambiguous
from clustertrain.run.folder import RunDir
from tests.fake_slurm.fixture import FakeSlurm

Type = Callable[..., int]
FAILED = "4711_{}|FAILED|0|10|20|N/A|node01|NonZeroExitCode|\n"
PENDING = "4711_{}|PENDING|0|N/A|N/A|N/A||JobArrayTaskLimit|\n"


@pytest.fixture
def type_(fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Type:
    monkeypatch.chdir(tmp_path)

    def type_(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["clustertrain", *words])
        return main()

    return type_


@pytest.fixture
def three(type_: Type, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What ``submit --json`` said of a sweep of three pending runs."""
    assert type_("submit", "--json", "--sweep", "train.seed=1,2,3") == 0
    fake_slurm.answers("squeue", stdout="".join(PENDING.format(n) for n in range(3)))
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    return shown


def test_a_line_for_each_run(type_: Type, capsys: pytest.CaptureFixture[str]) -> None:
    assert type_("submit", "--sweep", "optim.lr=1e-4,3e-4", "--sweep", "train.seed=1,2", "--at-once", "1") == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("sweep default-") and first.endswith("  job 4711")
    assert [line.split()[2:] for line in lines][1] == ["job", "4711_1", "optim.lr=0.0001", "train.seed=2"]
    assert len(lines) == 4 and all(line.startswith("run default-") for line in lines)


def test_the_keys_of_the_contract(three: dict[str, Any], tmp_path: Path) -> None:
    assert set(three) == {"sweep", "job_id", "backend", "sweep_dir", "runs"}
    assert (three["job_id"], three["backend"]) == ("4711", "slurm")
    assert three["sweep_dir"] == str(tmp_path / "home" / "sweeps" / three["sweep"])
    for n, row in enumerate(three["runs"]):
        assert row["run_dir"] == str(tmp_path / "home" / "runs" / row["run"])
        assert {k: row[k] for k in ("job_id", "state", "set")} == {
            "job_id": f"4711_{n}", "state": "pending", "set": {"train.seed": n + 1}
        }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--at-once", "2"], "--at-once: only a sweep"),
        (["--sweep", "train.seed=1,2", "--follow"], "--follow shows one run"),
        (["--sweep", "train.seed=1,2", "--at-once", "0"], "0 is not in the range"),
        (["--sweep", "train.seed="], "an empty value"),
    ],
)
def test_bad_usage(
    words: list[str], said: str, type_: Type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert type_("submit", *words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_a_dry_run_shows_the_arrays_script_and_the_first_runs(
    type_: Type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert type_("submit", "--dry-run", "--sweep", "train.seed=4,5") == 0
    shown = capsys.readouterr()
    array, _, first = shown.out.partition("\n# Run 0:\n\n")
    assert array.startswith("#!/bin/bash\n#SBATCH --array=0-1\n") and array.endswith("exec bash job.sh\n")
    assert first.startswith("#!/bin/bash\n#SBATCH --job-name=default-") and " -m clustertrain batch " in first
    assert shown.err.startswith("run 0: train.seed=4\nrun 1: train.seed=5\nsingle: ")
    assert type_("submit", "--dry-run", "--json", "--sweep", "train.seed=4,5") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["script"] == array
    assert [set(run) for run in document["runs"]] == [{"set", "script", "plan"}] * 2
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("named", ["sweep", "array", "runs"])
def test_cancel_ends_all_runs_with_one_command(
    named: str, three: dict[str, Any], type_: Type, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [row["run"] for row in three["runs"]]
    names = {"sweep": [three["sweep"]], "array": ["4711"], "runs": [*runs, "4711_1"]}[named]
    assert type_("cancel", "--json", *names) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["run"]: (row["job_id"], row["state"]) for row in rows} == {
        run: (f"4711_{n}", "cancelled") for n, run in enumerate(runs)
    }
    (call,) = fake_slurm.calls("scancel")
    assert sorted(call.argv) == ["4711_0", "4711_1", "4711_2"]
    assert all((Path(row["run_dir"]) / "cancelled.json").exists() for row in three["runs"])


def test_cancel_of_one_task_leaves_the_others(
    three: dict[str, Any], type_: Type, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert type_("cancel", "--json", "4711_1") == 0
    assert json.loads(capsys.readouterr().out)["run"] == three["runs"][1]["run"]
    assert [c.argv for c in fake_slurm.calls("scancel")] == [["4711_1"]]


def test_what_has_ended_is_told_and_the_others_are_cancelled(
    three: dict[str, Any], type_: Type, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answers("squeue", stdout=FAILED.format(0) + FAILED.format(1) + PENDING.format(2))
    assert type_("cancel", three["sweep"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{three['runs'][2]['run']}: cancelled\n"
    assert [line.partition(" ")[2] for line in shown.err.splitlines()] == ["has ended already: failed"] * 2
    fake_slurm.answers("squeue", stdout="")
    assert type_("cancel", three["sweep"]) == 1
    assert len(fake_slurm.calls("scancel")) == 1


def test_an_unknown_name_among_several_cancels_nothing(
    three: dict[str, Any], type_: Type, fake_slurm: FakeSlurm
) -> None:
    assert type_("cancel", three["sweep"], "nope") == 1
    assert fake_slurm.calls("scancel") == []
    assert type_("cancel") == 2


def test_wait_is_0_only_when_all_have_completed(
    three: dict[str, Any], type_: Type, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answers("squeue", stdout="")
    # Neither the queue nor accounting knows of an array task that was cancelled while it waited.
    fake_slurm.answers("sacct", stdout="")
    assert type_("wait", three["sweep"]) == 1
    assert sorted(capsys.readouterr().err.splitlines()) == sorted(f"{row['run']}: cancelled" for row in three["runs"])
    for row in three["runs"]:
        completed(RunDir(Path(row["run_dir"])), row["job_id"])
    assert type_("wait", "4711") == 0


def completed(run: RunDir, job_id: str) -> None:
    attempt = run.attempt(1)
    attempt.events.mkdir(parents=True)
    fsio.write_json(attempt.record, {"job_id": job_id, "nodes": ["a"]})
    attempt.events_of("batch").write_text('{"t": 20, "event": "ended", "ending": "completed"}\n')


def test_the_number_of_an_array_fits_all_its_runs(three: dict[str, Any]) -> None:
    with pytest.raises(Ambiguous, match="'4711' fits 3 runs"):
        find_run("4711")


def test_anothers_sweep_is_found_through_the_jobs_working_directory(
    three: dict[str, Any], fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [row["run"] for row in three["runs"]]
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "my-own"))
    fake_slurm.answers("squeue", stdout=f"{three['sweep_dir']}|\n")
    assert find_run("4711_2").id == ids[2]
    with pytest.raises(Ambiguous, match="'4711' fits 3 runs"):
        find_run("4711")
    assert [run.id for run in find_runs(["4711_2", "4711"])] == [ids[2], ids[0], ids[1]]
