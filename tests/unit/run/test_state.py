"""The attempts, rows and state of a run, derived from its events, and the lookup of runs by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertrain import fsio
from clustertrain.errors import AmbiguousName, NotFound, UsageError
from clustertrain.run import attempts, lookup, metrics, run_dir, state
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.backend import JobView


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    run = run_dir.create_run("My Run!")
    run.spec.write_text("version = 1\n")
    return run


def write_events(run: RunDir, n: int, *events: tuple[float, str, dict[str, Any]], writer: str = "batch") -> None:
    path = run.attempt(n).path
    path.mkdir(parents=True, exist_ok=True)
    log = fsio.JsonlAppender(run.attempt(n).events_path(writer))
    for t, name, fields in events:
        log.append({"t": t, "event": name, **fields})
    log.close()


def write_rows(run: RunDir, n: int, *steps: tuple[float, int]) -> None:
    log = fsio.JsonlAppender(run.metrics_path(n))
    log.append(*({"t": t, "step": s, "loss": 1.0} for t, s in steps))
    log.close()


def write_submission(run: RunDir, t: float = 0.0, job_id: str = "7") -> None:
    log = fsio.JsonlAppender(run.events / "submit.jsonl")
    log.append({"t": t, "event": "submitted", "job_id": job_id, "backend": "slurm"})
    log.close()


def write_two_attempts(run: RunDir) -> None:
    write_submission(run)
    write_events(run, 1, (10, "started", {"job_id": "7"}), (50, "ended", {"ending": "preempted", "last_step": 20}))
    write_events(run, 1, (50.5, "requeued", {"method": "requeue", "job_id": "7"}), writer="batch2")
    write_events(
        run,
        1,
        (20, "first_step", {"step": 0}),
        (30, "checkpoint", {"step": 10, "save_s": 5.0, "stall_s": 2.0}),
        (44, "stop_agreed", {"step": 20}),
        writer="rank-0",
    )
    write_rows(run, 1, *((20 + i, i) for i in range(1, 21)))
    write_events(run, 2, (60, "started", {"job_id": "7"}), (100, "ended", {"ending": "completed", "last_step": 40}))
    write_events(
        run,
        2,
        (68, "restored", {"step": 15, "restore_s": 3.0}),
        (70, "first_step", {"step": 15}),
        (95, "checkpoint", {"step": 40, "save_s": 5.0, "stall_s": 1.0}),
        writer="rank-0",
    )
    write_rows(run, 2, *((70 + i, 15 + i) for i in range(1, 26)))


def test_step_of_two_attempts_counts_once(run: RunDir) -> None:
    write_two_attempts(run)
    loaded = metrics.load_rows(run)
    assert [r["step"] for r in loaded] == list(range(1, 41))
    assert [r["attempt"] for r in loaded] == [1] * 15 + [2] * 25


RUNNING, PENDING = JobView("7", "RUNNING"), JobView("7", "PENDING")


def write_start(run: RunDir) -> None:
    write_events(run, 1, (10, "started", {"job_id": "7"}))
    fsio.write_json(run.attempt(1).record, {"job_id": "7"})


def write_ending(run: RunDir, ending: str) -> None:
    write_start(run)
    write_events(run, 1, (20, "ended", {"ending": ending}))


@pytest.mark.parametrize(
    ("prepare", "job", "accounted", "expected"),
    [
        (lambda r: None, PENDING, "", state.PENDING),
        (lambda r: None, None, "CANCELLED by 0", state.CANCELLED),
        (write_start, RUNNING, "", state.RUNNING),
        (write_start, PENDING, "", state.REQUEUED),
        (write_start, None, "NODE_FAIL", state.FAILED),
        (write_start, JobView("7", "CANCELLED"), "", state.CANCELLED),
        (lambda r: write_ending(r, "completed"), None, "", state.COMPLETED),
        (lambda r: write_ending(r, "preempted"), PENDING, "", state.REQUEUED),
        (lambda r: write_ending(r, "cancelled"), JobView("7", "COMPLETING"), "", state.CANCELLED),
        (lambda r: write_ending(r, "cancelled"), JobView("8", "PENDING"), "", state.REQUEUED),
    ],
    ids=[
        "pending",
        "cancelled-before-start",
        "running",
        "requeued-by-slurm",
        "node-failed",
        "cancelled-while-running",
        "completed",
        "preempted-and-pending",
        "cancelled-and-completing",
        "cancelled-and-continued",
    ],
)
def test_state_follows_the_attempts_and_the_job(
    run: RunDir, prepare: Callable[[RunDir], None], job: JobView | None, accounted: str, expected: str
) -> None:
    prepare(run)
    assert state.determine_state(run, attempts.load_attempts(run), job, accounted) == expected


def test_run_with_a_stopped_event_has_failed(run: RunDir) -> None:
    write_ending(run, "unknown")
    write_events(run, 1, (21, "stopped", {"reason": "no progress"}))
    assert state.determine_state(run, attempts.load_attempts(run), None) == state.FAILED


def test_job_ids_end_with_the_newest_job(run: RunDir) -> None:
    write_submission(run, job_id="9")
    write_events(run, 1, (10, "started", {"job_id": "9"}), (50, "ended", {"ending": "node_failure"}))
    fsio.write_json(run.attempt(1).record, {"job_id": "9"})
    write_events(run, 1, (51, "requeued", {"method": "resubmit", "job_id": "10"}))
    assert attempts.list_job_ids(run) == ["9", "10"]


def test_runs_are_found_by_id_prefix_job_and_latest(run: RunDir) -> None:
    write_submission(run)
    names = [run.id, run.id[:-2], "7", "latest"]
    assert [lookup.resolve_run(n).id for n in names] == [run.id] * 4
    with pytest.raises(NotFound):
        lookup.resolve_run("nosuch")


@pytest.mark.parametrize("name", ["", " "])
@pytest.mark.parametrize("find", [lookup.resolve_run, lookup.resolve_runs])
def test_empty_name_is_refused_and_not_the_newest_run(run: RunDir, find: Callable[[str], object], name: str) -> None:
    write_submission(run)
    with pytest.raises(UsageError, match="RUN is '") as e:
        find(name)
    assert e.value.fix is not None and "latest" in e.value.fix


def test_unknown_job_suggests_a_similar_one_or_the_newest_run(run: RunDir) -> None:
    write_submission(run, job_id="local-41")

    def fix(name: str) -> str:
        with pytest.raises(NotFound) as e:
            lookup.resolve_run(name)
        return e.value.fix or ""

    assert f"did you mean {run.id} (job local-41)?" in fix("41") and "did you mean" in fix("local-411")
    for name in ("99", "local-99"):
        assert "did you mean" not in fix(name) and f"the newest run is {run.id} (job local-41)" in fix(name)
    assert fix("nosuch") == "`clustertrain list` shows the runs"


def test_ambiguous_prefix_lists_the_candidates(run: RunDir) -> None:
    other = run_dir.create_run("my run")
    other.spec.write_text("version = 1\n")
    with pytest.raises(AmbiguousName) as e:
        lookup.resolve_run("my-run")
    assert run.id in str(e.value)
    assert other.id in str(e.value)


@pytest.mark.parametrize("name", ["../../etc", "a b", "$(touch x)", "x\ny", "ÄÖ", "'", "", "-rf"])
def test_any_name_becomes_a_safe_folder_name(name: str) -> None:
    assert set(run_dir.slugify(name)) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert not run_dir.slugify(name).startswith("-")


def test_torn_line_is_skipped_and_the_next_write_starts_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    log = fsio.JsonlAppender(path)
    log.append({"a": 3})
    log.close()
    assert [r["a"] for r in fsio.read_jsonl(path)] == [1, 3]


def test_failed_write_leaves_the_old_file_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    fsio.write_json(path, {"old": True})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        fsio.write_json(path, {"new": True})
    assert fsio.read_json(path) == {"old": True}
    assert list(itertools.chain(tmp_path.iterdir())) == [path]
