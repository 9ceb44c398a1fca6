"""How far a run has come, how fast it is, and what ended it, from the ends of its files."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from clustertrain import fsio, reading
from clustertrain.errors import ClusterTrainError
from clustertrain.report import eta
from clustertrain.run import endings, event_types, events, metrics_file, results, state
from clustertrain.run.logs import files
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.scheduler.run_status import RunStatus
from clustertrain.telemetry import findings

METRICS_BYTES, EVENTS_BYTES = 16384, 262_144  # read from the end of each file
LOG_BYTES, MAX_LINES = 16384, 6  # of the log or traceback of the rank that failed


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The failure that explains the end of an attempt."""

    @property
    def who(self) -> str:
        return f"torchrun on {self.node}" if self.rank is None else f"rank {self.rank} on {self.node}"

    rank: int | None
    """The rank that failed; null: torchrun failed on the node, not its ranks."""
    node: str
    """The node on which it failed."""
    reason: str
    """The first line of the error."""
    log: str
    """Path of the log of the rank, or of torchrun."""
    lines: list[str] = []
    """The end of its traceback; without one, of its log."""


class ActiveAlert(msgspec.Struct, frozen=True, kw_only=True):
    """An alert that was raised and has not been cleared."""

    t: float
    """When it was raised."""
    severity: str
    """`critical`, `warning` or `info`."""
    code: str
    """The rule that raised it."""
    text: str
    """What is wrong, with figures."""
    fix: str | None = None
    """What to do about it; null if there is no advice."""
    node: str | None = None
    """The node that it concerns; null if it concerns no single one."""
    rank: int | None = None
    """The rank that it concerns; null if it concerns no single one."""


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
    alerts: tuple[ActiveAlert, ...] = ()
    """Of a running run, the most severe first."""


# Attempts that ended in another way than by a failure, whose ranks may have been killed in the end.
NOT_FAILED = frozenset(
    {None, endings.COMPLETED, endings.CANCELLED, endings.PREEMPTED, endings.TIME_LIMIT, endings.SIGNAL}
)


def load_progress(status: RunStatus, now: float, *, with_failure: bool = True) -> Progress:
    """Return the progress of a run at ``now``, UTC epoch s, as far as its files can be read."""
    progress = Progress()
    with contextlib.suppress(ClusterTrainError, OSError, ValueError):  # damaged, or deleted meanwhile
        progress = _load_progress(status, now, with_failure=with_failure)
    return progress


def _load_progress(status: RunStatus, now: float, *, with_failure: bool) -> Progress:
    run, is_running = status.run, status.state == state.RUNNING
    attempts = run.attempts()
    job = load_spec(run).job
    submitted = next(events.select(events.for_run(run), event_types.Submitted), None)
    checkpoint_step, checkpoint_t = _find_checkpoint(status)
    rates: dict[str, Any] = {}
    failure, alerts = None, list[ActiveAlert]()
    if attempts:
        rows = _read_rows(run, attempts)
        log = _read_events(attempts[-1])
        total = status.total_steps
        rates = (
            eta.estimate(eta.recent_rows(rows), log, status.step, total, now if is_running else None) if rows else {}
        )
        rates.pop("overhead", None)
        alerts = find_active_alerts(log) if is_running else []
        has_failed = bool(status.history) and status.history[-1].ending not in NOT_FAILED
        if with_failure and has_failed and not is_running:
            failure = next(iter_failures(attempts[-1]), None)
    return Progress(
        submitted=submitted.t if submitted else None,
        nodes=job.nodes,
        gpus_per_node=job.gpus,
        checkpoint_step=checkpoint_step,
        checkpoint_t=checkpoint_t,
        failure=failure,
        alerts=tuple(alerts),
        **rates,
    )


def find_active_alerts(log: Iterable[events.Event]) -> list[ActiveAlert]:
    """Return the alerts of an attempt's events, by time, that are not cleared: the most severe first, then the newest.

    One that its rule has raised again counts once.
    """
    active: dict[tuple[str | None, ...], ActiveAlert] = {}
    for alert in events.select(log, event_types.AlertEvent):
        key = (alert.code, alert.node, alert.uuid, str(alert.rank))
        active.pop(key, None)
        if alert.state != "cleared":
            active[key] = ActiveAlert(
                t=alert.t,
                severity=alert.severity or findings.WARNING,
                code=alert.code or "",
                text=alert.text or "",
                fix=alert.fix,
                node=alert.node,
                rank=alert.rank,
            )
    return sorted(active.values(), key=lambda a: (findings.SEVERITY_ORDER.get(a.severity, 3), -a.t))


def _read_rows(run: RunDir, attempts: Sequence[AttemptDir]) -> list[dict[str, Any]]:
    """Return the last rows of the newest attempt that has any, oldest first."""
    for attempt in reversed(attempts):
        for path in reversed(run.metrics_files(attempt.n)):  # a rollback begins a new file
            rows = metrics_file.read_last(path, METRICS_BYTES)
            if rows := [r for r in rows if eta.as_finite(r.get("t")) is not None]:
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
    """Return step and time of the newest checkpoint; only the time of those that ``job.checkpoints`` names."""
    run, committed = status.run, status.run.committed_steps()
    if committed:
        try:
            return committed[-1], (run.checkpoints / f"step-{committed[-1]:08d}" / "COMMITTED").stat().st_mtime
        except OSError:  # pruned meanwhile
            return committed[-1], None
    looks = [a.checkpoint_times for a in status.history if a.checkpoint_times and a.newest_checkpoint]
    if looks:
        return None, looks[-1][1] or None
    for attempt in reversed(status.history):
        if attempt.newest_checkpoint and attempt.committed_step is not None:  # of a framework
            try:
                return attempt.committed_step, Path(attempt.newest_checkpoint).stat().st_mtime
            except OSError:  # pruned meanwhile
                return attempt.committed_step, None
    return None, None


def iter_failures(attempt: AttemptDir) -> Iterator[Failure]:
    """Yield how the ranks of all nodes failed, the one first that explains the others.

    If torchrun failed and not the ranks, yield one failure per node.
    """
    nodes = results.load_node_results(attempt.results)
    launchers = [node for node in nodes if node.kind == "launcher"]
    for node in launchers:
        log = attempt.logs / f"agent-{node.node}.log"
        yield Failure(
            rank=None,
            node=node.node,
            reason=_one_line(node.message),
            log=str(log),
            lines=last_lines(_read_log_end(attempt, log)),
        )
    if launchers:
        return
    node_of = {id(rank): node.node for node in nodes for rank in node.ranks}
    for rank in results.sort_failures([rank for node in nodes for rank in node.ranks]):
        log, error = attempt.rank_log(rank.rank), rank.error
        text = (error.traceback if error else None) or _read_log_end(attempt, log)
        reason = f"{error.type}: {error.message}" if error else rank.reason
        yield Failure(
            rank=rank.rank,
            node=node_of[id(rank)],
            reason=_one_line(reason),
            log=str(log),
            lines=last_lines(text),
        )


def _read_log_end(attempt: AttemptDir, log: Path) -> str:
    return "" if files.leads_outside(attempt, log) else read_tail(log)


def _one_line(reason: str | None) -> str:
    """Return the first line of a reason: that of CUDA errors has many."""
    lines = (reason or "").strip().splitlines()
    return lines[0] if lines else "it was killed and left no record"


def last_lines(text: str, count: int = MAX_LINES) -> list[str]:
    """Return the last lines with text. Of a line that a progress bar wrote over, only what was shown last counts."""
    lines = [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]
    return [line for line in lines if line.strip()][-count:]


def read_tail(path: Path) -> str:
    """Return the end of a file of text; empty if it cannot be read."""
    try:
        with reading.open_regular(path) as f:
            f.seek(max(0, path.stat().st_size - LOG_BYTES))
            return f.read(LOG_BYTES).decode(errors="backslashreplace")
    except OSError:
        return ""


def format_share(step: int, total: int) -> str:
    """Return the share of the steps that are done, such as ``53%``; 100 % only if all are."""
    return f"{math.floor(100 * step / total)}%"
