"""Events -> attempts and state."""

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
    made = run_dir.create_run("My Run!")
    made.spec.write_text("version = 1\n")
    return made


def write(run: RunDir, n: int, *events: tuple[float, str, dict[str, Any]], writer: str = "batch") -> None:
    path = run.attempt(n).path
    path.mkdir(parents=True, exist_ok=True)
    log = fsio.JsonlAppender(run.attempt(n).events_path(writer))
    for t, name, fields in events:
        log.append({"t": t, "event": name, **fields})
    log.close()


def rows(run: RunDir, n: int, *steps: tuple[float, int]) -> None:
    log = fsio.JsonlAppender(run.metrics_path(n))
    log.append(*({"t": t, "step": s, "loss": 1.0} for t, s in steps))
    log.close()


def submitted(run: RunDir, t: float = 0.0, job_id: str = "7") -> None:
    log = fsio.JsonlAppender(run.events / "submit.jsonl")
    log.append({"t": t, "event": "submitted", "job_id": job_id, "backend": "slurm"})
    log.close()


def two_attempts(run: RunDir) -> None:
    submitted(run)
    write(run, 1, (10, "started", {"job_id": "7"}), (50, "ended", {"ending": "preempted", "last_step": 20}))
    write(run, 1, (50.5, "requeued", {"method": "requeue", "job_id": "7"}), writer="batch2")
    write(
        run,
        1,
        (20, "first_step", {"step": 0}),
        (30, "checkpoint", {"step": 10, "save_s": 5.0, "stall_s": 2.0}),
        (44, "stop_agreed", {"step": 20}),
        writer="rank-0",
    )
    rows(run, 1, *((20 + i, i) for i in range(1, 21)))
    write(run, 2, (60, "started", {"job_id": "7"}), (100, "ended", {"ending": "completed", "last_step": 40}))
    write(
        run,
        2,
        (68, "restored", {"step": 15, "restore_s": 3.0}),
        (70, "first_step", {"step": 15}),
        (95, "checkpoint", {"step": 40, "save_s": 5.0, "stall_s": 1.0}),
        writer="rank-0",
    )
    rows(run, 2, *((70 + i, 15 + i) for i in range(1, 26)))


def test_a_step_that_two_attempts_ran_counts_once(run: RunDir) -> None:
    two_attempts(run)
    read = metrics.load_rows(run)
    assert [r["step"] for r in read] == list(range(1, 41))
    assert [r["attempt"] for r in read] == [1] * 15 + [2] * 25


RUNNING, PENDING = JobView("7", "RUNNING"), JobView("7", "PENDING")


def started(run: RunDir) -> None:
    write(run, 1, (10, "started", {"job_id": "7"}))
    fsio.write_json(run.attempt(1).record, {"job_id": "7"})


def ended(run: RunDir, ending: str) -> None:
    started(run)
    write(run, 1, (20, "ended", {"ending": ending}))


@pytest.mark.parametrize(
    ("prepare", "job", "accounted", "expected"),
    [
        (lambda r: None, PENDING, "", state.PENDING),
        (lambda r: None, None, "CANCELLED by 0", state.CANCELLED),
        (started, RUNNING, "", state.RUNNING),
        (started, PENDING, "", state.REQUEUED),
        (started, None, "NODE_FAIL", state.FAILED),
        (started, JobView("7", "CANCELLED"), "", state.CANCELLED),
        (lambda r: ended(r, "completed"), None, "", state.COMPLETED),
        (lambda r: ended(r, "preempted"), PENDING, "", state.REQUEUED),
        (lambda r: ended(r, "cancelled"), JobView("7", "COMPLETING"), "", state.CANCELLED),
        (lambda r: ended(r, "cancelled"), JobView("8", "PENDING"), "", state.REQUEUED),
    ],
)
def test_states(
    run: RunDir, prepare: Callable[[RunDir], None], job: JobView | None, accounted: str, expected: str
) -> None:
    prepare(run)
    assert state.determine_state(run, attempts.load_attempts(run), job, accounted) == expected


def test_a_run_that_was_stopped_for_good_has_failed(run: RunDir) -> None:
    ended(run, "unknown")
    write(run, 1, (21, "stopped", {"reason": "no progress"}))
    assert state.determine_state(run, attempts.load_attempts(run), None) == state.FAILED


def test_the_newest_job_is_the_one_mentioned_last(run: RunDir) -> None:
    submitted(run, job_id="9")
    write(run, 1, (10, "started", {"job_id": "9"}), (50, "ended", {"ending": "node_failure"}))
    fsio.write_json(run.attempt(1).record, {"job_id": "9"})
    write(run, 1, (51, "requeued", {"method": "resubmit", "job_id": "10"}))
    assert attempts.list_job_ids(run) == ["9", "10"]


def test_runs_are_found_by_id_prefix_job_and_latest(run: RunDir) -> None:
    submitted(run)
    names = [run.id, run.id[:-2], "7", "latest"]
    assert [lookup.resolve_run(n).id for n in names] == [run.id] * 4
    with pytest.raises(NotFound):
        lookup.resolve_run("nosuch")


@pytest.mark.parametrize("name", ["", " "])
@pytest.mark.parametrize("find", [lookup.resolve_run, lookup.resolve_runs])
def test_an_empty_name_is_an_empty_variable_and_not_the_newest_run(
    run: RunDir, find: Callable[[str], object], name: str
) -> None:
    submitted(run)
    with pytest.raises(UsageError, match="RUN is '") as e:
        find(name)
    assert e.value.fix is not None and "latest" in e.value.fix


def test_an_unknown_job_is_like_those_with_a_like_number_and_else_the_newest_is_named(run: RunDir) -> None:
    submitted(run, job_id="local-41")

    def fix(name: str) -> str:
        with pytest.raises(NotFound) as e:
            lookup.resolve_run(name)
        return e.value.fix or ""

    assert f"did you mean {run.id} (job local-41)?" in fix("41") and "did you mean" in fix("local-411")
    for name in ("99", "local-99"):
        assert "did you mean" not in fix(name) and f"the newest run is {run.id} (job local-41)" in fix(name)
    assert fix("nosuch") == "`clustertrain list` shows the runs"


def test_an_ambiguous_prefix_lists_the_candidates(run: RunDir) -> None:
    other = run_dir.create_run("my run")
    other.spec.write_text("version = 1\n")
    with pytest.raises(AmbiguousName) as e:
        lookup.resolve_run("my-run")
    assert run.id in str(e.value)
    assert other.id in str(e.value)


@pytest.mark.parametrize("name", ["../../etc", "a b", "$(touch x)", "x\ny", "ÄÖ", "'", "", "-rf"])
def test_a_name_becomes_a_harmless_folder_name(name: str) -> None:
    assert set(run_dir.slugify(name)) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert not run_dir.slugify(name).startswith("-")


def test_a_torn_line_is_skipped_and_the_next_writer_starts_on_a_fresh_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    log = fsio.JsonlAppender(path)
    log.append({"a": 3})
    log.close()
    assert [r["a"] for r in fsio.read_jsonl(path)] == [1, 3]


def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(
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
