"""The command ``sweep``, and ``cancel`` and ``wait`` with several runs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertrain import fsio
from clustertrain.cli.common import find_run, find_runs
from clustertrain.cli.main import main
from clustertrain.errors import AmbiguousName
from clustertrain.report.runs.compare import MetricValue
from clustertrain.report.runs.sweep import SweepReader
from clustertrain.run import metric_curves
from clustertrain.run.run_dir import RunDir
from tests.fakes.slurm.fixture import FakeSlurm

pytestmark = pytest.mark.long

RunCli = Callable[..., int]
FAILED = "4711_{}|FAILED|0|10|20|N/A|node01|NonZeroExitCode|\n"
PENDING = "4711_{}|PENDING|0|N/A|N/A|N/A||JobArrayTaskLimit|\n"


@pytest.fixture
def run_cli(fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunCli:
    monkeypatch.chdir(tmp_path)

    def run_cli(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", ["clustertrain", *args])
        return main()

    return run_cli


@pytest.fixture
def pending_sweep(run_cli: RunCli, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The output of ``sweep --json`` for a sweep of three pending runs."""
    assert run_cli("sweep", "--json", "--grid", "train.seed=1,2,3") == 0
    fake_slurm.answers("squeue", stdout="".join(PENDING.format(n) for n in range(3)))
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    return shown


def test_sweep_prints_one_line_per_run(run_cli: RunCli, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("sweep", "--grid", "optim.lr=1e-4,3e-4", "--grid", "train.seed=1,2", "--at-once", "1") == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("sweep default-") and first.endswith("  job 4711")
    assert [line.split()[2:] for line in lines][1] == ["job", "4711_1", "optim.lr=0.0001", "train.seed=2"]
    assert len(lines) == 4 and all(line.startswith("run default-") for line in lines)


def test_sweep_json_has_the_documented_keys(pending_sweep: dict[str, Any], tmp_path: Path) -> None:
    assert set(pending_sweep) == {"schema_version", "sweep", "job_id", "backend", "sweep_dir", "runs"}
    assert (pending_sweep["job_id"], pending_sweep["backend"]) == ("4711", "slurm")
    assert pending_sweep["sweep_dir"] == str(tmp_path / "home" / "sweeps" / pending_sweep["sweep"])
    for n, row in enumerate(pending_sweep["runs"]):
        assert row["run_dir"] == str(tmp_path / "home" / "runs" / row["run"])
        assert {k: row[k] for k in ("job_id", "state", "values")} == {
            "job_id": f"4711_{n}", "state": "pending", "values": {"train.seed": n + 1}
        }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--at-once", "2"], "no --grid"),
        (["--grid", "train.seed=1,2", "--at-once", "0"], "0 is not in the range"),
        (["--grid", "train.seed="], "an empty value"),
    ],
    ids=["no-grid", "no-run-at-once", "empty-value"],
)
def test_bad_usage_exits_with_2_and_creates_nothing(
    args: list[str], message: str, run_cli: RunCli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("sweep", *args) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_dry_run_shows_the_scripts_of_the_array_and_first_run(
    run_cli: RunCli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("sweep", "--dry-run", "--grid", "train.seed=4,5") == 0
    shown = capsys.readouterr()
    array, _, first = shown.out.partition("\n# Run 0:\n\n")
    assert array.startswith("#!/bin/bash\n#SBATCH --array=0-1\n") and array.endswith("exec bash job.sh\n")
    assert first.startswith("#!/bin/bash\n#SBATCH --job-name=default-") and " -P -m clustertrain batch " in first
    assert shown.err.startswith("run 0: train.seed=4\nrun 1: train.seed=5\nmodel: decoder, ")
    assert run_cli("sweep", "--dry-run", "--json", "--grid", "train.seed=4,5") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["script"] == array
    assert [set(run) for run in document["runs"]] == [{"values", "script", "plan"}] * 2
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("kind", ["sweep", "array", "runs"])
def test_cancel_ends_all_runs_with_one_command(
    kind: str, pending_sweep: dict[str, Any], run_cli: RunCli, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [row["run"] for row in pending_sweep["runs"]]
    names = {"sweep": [pending_sweep["sweep"]], "array": ["4711"], "runs": [*runs, "4711_1"]}[kind]
    fake_slurm.answers("scancel", then={"squeue": ""})
    assert run_cli("cancel", "--json", *names) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert {row["run"]: (row["job_id"], row["state"]) for row in rows} == {
        run: (f"4711_{n}", "cancelled") for n, run in enumerate(runs)
    }
    (call,) = fake_slurm.calls("scancel")
    assert sorted(call.argv) == ["4711_0", "4711_1", "4711_2"]
    assert all((Path(row["run_dir"]) / "cancelled.json").exists() for row in pending_sweep["runs"])


def test_cancel_of_one_task_leaves_the_others(
    pending_sweep: dict[str, Any], run_cli: RunCli, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("cancel", "--json", "4711_1") == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert row["run"] == pending_sweep["runs"][1]["run"]
    assert [c.argv for c in fake_slurm.calls("scancel")] == [["4711_1"]]


def test_cancel_reports_ended_runs_and_cancels_the_others(
    pending_sweep: dict[str, Any], run_cli: RunCli, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answers("squeue", stdout=FAILED.format(0) + FAILED.format(1) + PENDING.format(2))
    fake_slurm.answers("scancel", then={"squeue": ""})
    assert run_cli("cancel", pending_sweep["sweep"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{pending_sweep['runs'][2]['run']}: cancelled\n"
    assert [line.partition(" ")[2] for line in shown.err.splitlines()] == ["has already ended: failed"] * 2
    fake_slurm.answers("squeue", stdout="")
    assert run_cli("cancel", pending_sweep["sweep"]) == 1
    assert len(fake_slurm.calls("scancel")) == 1


RUNNING = "4711_1|RUNNING|0|10|N/A|N/A|n1|None|\n"
NO_CONTACT = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"


def test_run_whose_job_still_runs_is_cancelling(
    pending_sweep: dict[str, Any], run_cli: RunCli, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answers("scancel", then={"squeue": RUNNING})
    assert run_cli("cancel", "--json", pending_sweep["sweep"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [row["state"] for row in rows] == ["cancelled", "cancelling", "cancelled"]
    assert run_cli("status", "4711_1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["cancelling"] is True


def test_cancel_writes_markers_when_slurmctld_is_down(
    pending_sweep: dict[str, Any], run_cli: RunCli, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answers("squeue", stderr=NO_CONTACT, rc=1)
    fake_slurm.answers("sacct", stderr="sacct: error: slurm_persist_conn_open: Connection refused\n", rc=1)
    before = len(fake_slurm.calls("squeue"))
    assert run_cli("list") == 0
    shown = capsys.readouterr().out
    assert shown.count("Unable to contact") == 1 and shown.count("pending") == 3
    assert (len(fake_slurm.calls("squeue")) - before, len(fake_slurm.calls("sacct"))) == (1, 1)
    assert run_cli("cancel", "--json", pending_sweep["sweep"]) == 0
    out, err = capsys.readouterr()
    assert {row["state"] for row in json.loads(out)["runs"]} == {"cancelling"}
    assert "Unable to contact" in err and "marked as cancelled" in err
    assert (len(fake_slurm.calls("squeue")) - before, len(fake_slurm.calls("scancel"))) == (2, 0)
    assert all((Path(row["run_dir"]) / "cancelled.json").exists() for row in pending_sweep["runs"])


def test_unknown_name_among_several_cancels_nothing(
    pending_sweep: dict[str, Any], run_cli: RunCli, fake_slurm: FakeSlurm
) -> None:
    assert run_cli("cancel", pending_sweep["sweep"], "nope") == 1
    assert fake_slurm.calls("scancel") == []
    assert run_cli("cancel") == 2


def test_wait_returns_0_only_if_all_runs_completed(
    pending_sweep: dict[str, Any], run_cli: RunCli, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answers("squeue", stdout="")
    # Neither squeue nor sacct lists an array task that was cancelled while it was pending.
    fake_slurm.answers("sacct", stdout="")
    assert run_cli("wait", pending_sweep["sweep"]) == 1
    assert sorted(capsys.readouterr().err.splitlines()) == sorted(
        f"{row['run']}: cancelled" for row in pending_sweep["runs"]
    )
    for row in pending_sweep["runs"]:
        write_completed_attempt(RunDir(Path(row["run_dir"])), row["job_id"])
    assert run_cli("wait", "4711") == 0


def write_completed_attempt(run: RunDir, job_id: str) -> None:
    attempt = run.attempt(1)
    attempt.events.mkdir(parents=True)
    fsio.write_json(attempt.record, {"job_id": job_id, "nodes": ["a"]})
    attempt.events_path("batch").write_text('{"t": 20, "event": "ended", "ending": "completed"}\n')


def test_array_job_id_matches_all_its_runs(pending_sweep: dict[str, Any]) -> None:
    with pytest.raises(AmbiguousName, match="'4711' matches 3 runs"):
        find_run("4711")


def test_other_users_sweep_is_found_by_the_jobs_work_dir(
    pending_sweep: dict[str, Any], fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [row["run"] for row in pending_sweep["runs"]]
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "other-home"))
    fake_slurm.answers("squeue", stdout=f"{pending_sweep['sweep_dir']}|\n")
    assert find_run("4711_2").id == ids[2]
    with pytest.raises(AmbiguousName, match="'4711' matches 3 runs"):
        find_run("4711")
    assert [run.id for run in find_runs(["4711_2", "4711"])] == [ids[2], ids[0], ids[1]]


def test_log_grid_expands_and_at_once_limits_the_array(
    run_cli: RunCli, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("sweep", "--grid", "optim.lr=log:1e-4:1e-2:3", "--at-once", "2", "--json", "--name", "lr") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["values"] for row in shown["runs"]] == [{"optim.lr": lr} for lr in (1e-4, 1e-3, 1e-2)]
    assert shown["sweep"].startswith("lr-") and "#SBATCH --array=0-2%2\n" in fake_slurm.calls("sbatch")[0].script
    assert run_cli("sweep", "--grid", "train.seed=1,2", "--dry-run") == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --array=0-1\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "sweep: no --grid"),
        (["train.py", "--grid", "train.seed=1,2"], "put it before: clustertrain sweep --grid \u2026 train.py"),
        (["train.py", "--lr", "1", "--grid=train.seed=1,2"], "--grid after train.py would be passed to the script"),
        (["--grid", "train.seed="], "--grid train.seed=: an empty value"),
        (["--grid", "train.seed=1", "--grid", "train.seed=2"], "give all its values in one --grid"),
    ],
    ids=["none", "after-script", "after-script-options", "empty-value", "key-twice"],
)
def test_bad_grid_exits_with_2(
    args: list[str], message: str, run_cli: RunCli, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("sweep", *args) == 2
    assert message in capsys.readouterr().err


def write_rows(run: RunDir, attempt: int, losses: dict[int, float]) -> None:
    lines = [json.dumps({"step": step, "t": 10.0 + step, "loss": loss}) for step, loss in losses.items()]
    run.metrics_path(attempt).write_text("\n".join(lines) + "\n")


@pytest.fixture
def active_sweep(pending_sweep: dict[str, Any], fake_slurm: FakeSlurm) -> dict[str, Any]:
    """A sweep whose first run has ended, whose second runs after one requeue, and whose third is pending."""
    first, second, _ = (RunDir(Path(row["run_dir"])) for row in pending_sweep["runs"])
    write_completed_attempt(first, "4711_0")
    write_rows(first, 1, {1: 5.0, 2: 4.0, 3: 4.5})
    for n in (1, 2):
        second.attempt(n).events.mkdir(parents=True)
        fsio.write_json(second.attempt(n).record, {"job_id": "4711_1", "restart": n - 1, "t": 10.0 * n})
    second.attempt(1).events_path("batch").write_text(
        '{"t": 12, "event": "ended", "ending": "preempted"}\n{"t": 12, "event": "requeued", "method": "requeue"}\n'
    )
    write_rows(second, 1, {1: 5.0, 2: 1.0})
    write_rows(second, 2, {2: 3.5, 3: 3.0, 4: 3.25})
    running = "4711_1|RUNNING|1|10|N/A|N/A|node01|None|\n"
    fake_slurm.answers("squeue", stdout=running + PENDING.format(2))
    return pending_sweep


def test_show_json_has_the_results_of_an_active_sweep(
    active_sweep: dict[str, Any], run_cli: RunCli, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (active_sweep["sweep"], "4711", "4711_1", active_sweep["sweep"][:-2], "latest"):
        assert run_cli("sweep", "show", name, "--json") == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["sweep"] == active_sweep["sweep"]
    ids = [row["run"] for row in active_sweep["runs"]]
    assert (shown["metric"], shown["higher_is_better"], shown["best"], shown["deleted"]) == ("loss", False, ids[1], 0)
    assert [(r["run"], r["values"]["train.seed"], r["state"], r["attempts"]) for r in shown["runs"]] == [
        (ids[1], 2, "running", 2), (ids[0], 1, "completed", 1), (ids[2], 3, "pending", 0)
    ]  # fmt: skip
    # The 1.0 of step 2 was replaced by 3.5 when the step was repeated.
    assert [(r["best"], r["last"]) for r in shown["runs"]] == [
        ({"step": 3, "value": 3.0}, {"step": 4, "value": 3.25}),
        ({"step": 2, "value": 4.0}, {"step": 3, "value": 4.5}),
        (None, None),
    ]


def test_show_prints_the_results_as_a_table(
    active_sweep: dict[str, Any], run_cli: RunCli, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert run_cli("sweep", "show") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{active_sweep['sweep']}  1 of 3 runs have ended; by loss, lower is better"
    args = [line.split() for line in lines[2:]]
    assert args[0] == ["train.seed", "best", "at", "step", "last", "step", "state", "starts", "run"]
    assert args[1][:5] == ["*", "2", "3", "3", "3.25"] and args[1][6:8] == ["running", "2"]
    assert args[2][:4] == ["1", "4", "2", "4.5"] and args[3][:4] == ["3", "–", "–", "–"]
    monkeypatch.setenv("COLUMNS", "60")
    assert run_cli("sweep", "show") == 0
    narrow = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["train.seed", "best", "step", "step", "state", "run"] in narrow
    assert {row["run"] for row in active_sweep["runs"]} <= {args[-1] for args in narrow if args}
    assert run_cli("sweep", "show", "--watch") == 2 and "--watch needs a terminal" in capsys.readouterr().err


def test_show_with_deleted_and_unreadable_runs(
    active_sweep: dict[str, Any], run_cli: RunCli, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(active_sweep["runs"][1]["run_dir"])
    Path(active_sweep["runs"][2]["run_dir"], "spec.toml").write_text("version = [")
    assert run_cli("sweep", "show", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["deleted"] == 1 and shown["best"] == active_sweep["runs"][0]["run"]
    assert "not valid TOML" in shown["runs"][1]["error"]
    assert run_cli("sweep", "show", "nope") == 1
    assert f"the newest one is {active_sweep['sweep']}" in capsys.readouterr().err


def test_rows_of_an_ended_run_are_read_once(active_sweep: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    reader = SweepReader(Path(active_sweep["sweep_dir"]))
    first = reader.read()
    load_step_table, loaded = metric_curves.load_step_table, []

    def counting(run: RunDir, names: list[str]) -> metric_curves.StepTable:
        loaded.append(run.id)
        return load_step_table(run, names)

    monkeypatch.setattr(metric_curves, "load_step_table", counting)
    assert reader.read() == first and loaded == []
    running = RunDir(Path(active_sweep["runs"][1]["run_dir"]))
    with running.metrics_path(2).open("a") as f:
        f.write('{"step": 5, "t": 30, "loss": 2.5}\n')
    assert loaded == [] and reader.read().runs[0].best == MetricValue(5, 2.5) and loaded == [running.id]
