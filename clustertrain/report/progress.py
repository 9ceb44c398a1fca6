"""How far a run has come, how fast it is, and what ended it, from the ends of its files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from clustertrain import fsio, reading
from clustertrain.report import eta
from clustertrain.run import event_types, events, json_files, metrics_file, results, state
from clustertrain.run.results import RankOutcome
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.scheduler.run_status import RunStatus

METRICS_BYTES, EVENTS_BYTES = 16384, 32768  # read from the end of each file
LOG_BYTES, MAX_LINES = 16384, 6  # of the log or traceback of the rank that failed


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The rank whose failure explains the end of an attempt."""

    rank: int
    node: str
    reason: str
    """The error in one sentence."""
    log: str
    """Path of the rank's log."""
    lines: list[str] = []
    """The end of its traceback; without one, of its log."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Times are UTC epoch s; durations end in ``_s``. None: unknown."""

    submitted: float | None = None
    nodes: int = 1
    gpus_per_node: int = 1
    loss: float | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    """Of all ranks."""
    since_step_s: float | None = None
    """Time since the last logged step of a running run."""
    eta_s: float | None = None
    """Time for the remaining steps at the recent rate, with checkpoints and evaluations; only of a running run."""
    checkpoint_step: int | None = None
    """Step of the newest committed checkpoint."""
    checkpoint_t: float | None = None
    """When it was committed."""
    failure: Failure | None = None
    """Why the last attempt failed."""


def load_progress(status: RunStatus, now: float) -> Progress:
    """Return the progress of a run at ``now``, UTC epoch s."""
    run, is_running = status.run, status.state == state.RUNNING
    attempts = run.attempts()
    job = load_spec(run).job
    submitted = next(events.select(events.for_run(run), event_types.Submitted), None)
    checkpoint_step, checkpoint_t = _find_checkpoint(status)
    rates: dict[str, Any] = {}
    if attempts:
        rows = _read_rows(run, attempts)
        log = _read_events(attempts[-1])
        total = status.total_steps
        rates = eta.estimate(eta.recent_rows(rows), log, status.step, total, now if is_running else None)
        rates.pop("overhead", None)
    return Progress(
        submitted=submitted.t if submitted else None,
        nodes=job.nodes,
        gpus_per_node=job.gpus,
        checkpoint_step=checkpoint_step,
        checkpoint_t=checkpoint_t,
        failure=next(iter(list_failures(attempts[-1])), None) if attempts and not is_running else None,
        **rates,
    )


def _read_rows(run: RunDir, attempts: Sequence[AttemptDir]) -> list[dict[str, Any]]:
    """Return the last rows of the newest attempt that has any, oldest first."""
    for attempt in reversed(attempts):
        rows = metrics_file.read_last(run.metrics_files(attempt.n)[-1], METRICS_BYTES)
        if rows := [r for r in rows if json_files.is_number(r.get("t"))]:
            return rows
    return []


def _read_events(attempt: AttemptDir) -> list[events.Event]:
    try:
        files = sorted(attempt.events.glob("*.jsonl"))
    except OSError:
        return []
    records = [e for path in files for e in events.filter_valid(fsio.read_jsonl_tail(path, EVENTS_BYTES))]
    return sorted(records, key=lambda e: float(e["t"]))


def _find_checkpoint(status: RunStatus) -> tuple[int | None, float | None]:
    """Return step and time of the newest checkpoint; of a program's own checkpoint only the time."""
    run, committed = status.run, status.run.committed_steps()
    if committed:
        try:
            return committed[-1], (run.checkpoints / f"step-{committed[-1]:08d}" / "COMMITTED").stat().st_mtime
        except OSError:  # pruned meanwhile
            return committed[-1], None
    looks = [a.checkpoint_times for a in status.history if a.checkpoint_times and a.newest_checkpoint]
    return None, looks[-1][1] or None if looks else None


def list_failures(attempt: AttemptDir) -> list[Failure]:
    """Return how the ranks of all nodes failed, the one first that explains the others."""
    try:
        files = sorted(attempt.results.glob("*.json"))
    except OSError:
        return []
    nodes = [results.parse_node_result(json_files.load_document(path).value) for path in files]
    node_of = {id(rank): node.node for node in nodes if node is not None for rank in node.ranks}
    outcomes = [rank for node in nodes if node is not None for rank in node.ranks]
    return [_to_failure(attempt, rank, node_of[id(rank)]) for rank in results.sort_failures(outcomes)]


def _to_failure(attempt: AttemptDir, rank: RankOutcome, node: str) -> Failure:
    log, error = attempt.rank_log(rank.rank), rank.error
    text = (error.traceback if error else None) or _read_tail(log)
    return Failure(
        rank=rank.rank,
        node=node,
        reason=f"{error.type}: {error.message}" if error else rank.reason or "it was killed and left no record",
        log=str(log),
        lines=[line.rstrip() for line in text.splitlines() if line.strip()][-MAX_LINES:],
    )


def _read_tail(path: Path) -> str:
    try:
        with reading.open_regular(path) as f:
            f.seek(max(0, path.stat().st_size - LOG_BYTES))
            return f.read(LOG_BYTES).decode(errors="backslashreplace")
    except OSError:
        return ""


def format_share(step: int, total: int) -> str:
    """Return the share of the steps that are done, such as ``53%``; 100 % only if all are."""
    return f"{math.floor(100 * step / total)}%"
