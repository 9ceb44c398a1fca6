"""The current state of a running job for ``clustertrain top``, read from the ends of the files in its run directory.

The cost of a poll does not grow with the run: it reads the last kilobytes of metrics and events and the newest
aggregates of the newest telemetry segment. Scheduler queries, and goodput, which needs all files, run rarely and in a
thread.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from clustertrain import clock, fsio
from clustertrain.errors import ClusterTrainError, PermissionDenied
from clustertrain.report import eta
from clustertrain.report.event_text import format_event
from clustertrain.report.progress import last_lines, read_tail
from clustertrain.report.top.history import BusyHistory, History, LossHistory
from clustertrain.report.top.view import EventView, GpuRow, NodeView, RunView
from clustertrain.run import events, heartbeat, json_files, metrics_file, state
from clustertrain.run.events import Event
from clustertrain.run.results import last_steps, load_node_results
from clustertrain.run.run_dir import AttemptDir, RunDir, explain_permission_errors
from clustertrain.run.run_spec import load_spec
from clustertrain.scheduler.run_status import RunStatus, run_status
from clustertrain.telemetry.fields import column_name
from clustertrain.telemetry.store.latest import LatestReader, NodeStatus
from clustertrain.telemetry.store.writer import GpuFacts

GIB = 1 << 30
_TRAIN = heartbeat.PHASES[heartbeat.TRAIN]
STATUS_INTERVAL_S = 15.0  # at least, between two status queries
FIRST_STATUS_S = 0.5
MAX_STATUS_SHARE = 1 / 200  # of the time, for status queries
CLOSE_TIMEOUT_S = 1.0  # a status query takes a tenth of this if the scheduler answers
METRICS_BYTES, EVENTS_BYTES = 16384, 32768
MAX_EVENTS, MAX_LOG_LINES = 50, 100
MAX_NODES_PER_S = 16  # whose files are read: a run on a thousand nodes must not load the file system


class RunMonitor:
    """Polls the state of one run."""

    def __init__(self, run: RunDir, *, now: Callable[[], float] = clock.now) -> None:
        """Raise ConfigError if the run's spec.toml cannot be read."""
        self._run, self._now = run, now
        self._telemetry = load_spec(run).recipe.telemetry.enabled
        self._status_poller = _StatusPoller(lambda: run_status(run))
        self._attempt_files: _AttemptFiles | None = None

    def poll(self, *, wait: bool = False) -> RunView:
        """Return the current frame; ``wait`` for the scheduler's answer instead of showing it in a later frame."""
        status, error = self._status_poller.get(wait)
        attempt = _latest_attempt(self._run)
        if attempt is not None and (self._attempt_files is None or self._attempt_files.dir.n != attempt.n):
            self._attempt_files = _AttemptFiles(attempt, lambda: self._run.metrics_files(attempt.n)[-1])
        now = self._now()
        frame = RunView(t=now, run=self._run.id, telemetry=self._telemetry, scheduler_error=error)
        if status is not None:
            frame = _with_status(frame, status, error)
        is_running = status is None or status.state == state.RUNNING
        return frame if self._attempt_files is None else self._attempt_files.extend_view(frame, now, is_running)

    def history(self) -> History:
        """Return what preceded the frame of the last poll."""
        return History() if self._attempt_files is None else self._attempt_files.history()

    def read_log(self, rank: int) -> tuple[list[str], Path | None]:
        """Return the last lines of a rank's log in the newest attempt, and its path."""
        if self._attempt_files is None:
            return [], None
        path = self._attempt_files.dir.rank_log(rank)
        return last_lines(read_tail(path), MAX_LOG_LINES), path

    def close(self) -> bool:
        """Wait at most :data:`CLOSE_TIMEOUT_S` for a pending status query; return whether none is pending."""
        return self._status_poller.wait_idle(CLOSE_TIMEOUT_S)


def _latest_attempt(run: RunDir) -> AttemptDir | None:
    attempts = run.attempts()
    return attempts[-1] if attempts else None


def _with_status(frame: RunView, status: RunStatus, error: str | None) -> RunView:
    job = status.view
    pending_job = job if job is not None and job.state == "PENDING" else None
    last_attempt = status.history[-1] if status.history else None
    return msgspec.structs.replace(
        frame,
        job_id=status.job_id,
        backend=status.backend,
        state=status.state,
        cancelling=status.is_cancelling,
        step=status.step,
        total_steps=status.total_steps,
        goodput=status.goodput.ratio,
        wall_s=status.goodput.wall_s,
        pending_reason=pending_job.reason or None if pending_job is not None else None,
        start_estimate=pending_job.start_time if pending_job is not None else None,
        scheduler_error=error or status.scheduler_error,
        ending=last_attempt.ending if last_attempt is not None else None,
    )


class _StatusPoller:
    """Queries the run status, which is too expensive for every frame, in a thread.

    A query starts at most every :data:`STATUS_INTERVAL_S`, and less often if it is slow.
    """

    def __init__(self, fetch: Callable[[], RunStatus]) -> None:
        self._fetch = fetch
        self._latest: tuple[RunStatus | None, str | None] = None, None
        self._permission_error: PermissionDenied | None = None
        self._next_poll = float("-inf")
        self._thread: threading.Thread | None = None

    def get(self, wait: bool) -> tuple[RunStatus | None, str | None]:
        """Return the newest status and the error of the last query, if it failed.

        Raises:
            PermissionDenied: the first query was refused.
        """
        if (self._thread is None or not self._thread.is_alive()) and clock.monotonic() >= self._next_poll:
            self._thread = threading.Thread(target=self._poll_once, name="run-status", daemon=True)
            self._thread.start()
            if self._latest == (None, None):  # the first frame can have the state if the scheduler answers at once
                self._thread.join(FIRST_STATUS_S)
        if wait and self._thread is not None:
            self._thread.join()
        if self._permission_error is not None:
            raise self._permission_error
        return self._latest

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for a pending query; return whether none is pending."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _poll_once(self) -> None:
        start = clock.monotonic()
        try:
            with explain_permission_errors():
                self._latest = self._fetch(), None
        except PermissionDenied as e:
            self._permission_error = e if self._latest[0] is None else None
            self._latest = self._latest[0], e.message
        except ClusterTrainError as e:
            self._latest = self._latest[0], e.message
        except Exception as e:  # the thread's edge: files may be corrupt in any way
            self._latest = self._latest[0], f"{type(e).__name__}: {e}"
        elapsed_s = clock.monotonic() - start
        self._next_poll = clock.monotonic() + max(STATUS_INTERVAL_S, elapsed_s / MAX_STATUS_SHARE)


class _AttemptFiles:
    """The files of one attempt."""

    def __init__(self, attempt: AttemptDir, find_metrics_file: Callable[[], Path]) -> None:
        self.dir = attempt
        self._find_metrics_file = find_metrics_file
        self._snapshots = LatestReader(attempt.telemetry)
        self._nodes: list[NodeStatus] = []
        self._gpu_rows: list[GpuRow] = []
        self._rates: dict[int, tuple[float | None, float | None]] = {}
        self._last_samples: dict[str, tuple[float, Mapping[str, float]]] = {}
        self._next_node_read = float("-inf")
        self._results_stamp: tuple[int, int] | None = None
        self._last_steps: dict[int, int] = {}
        self._event_tails: dict[Path, tuple[tuple[int, int], list[Event]]] = {}
        self._metrics_stamp: tuple[Path, int, int] | None = None
        self._metric_rows: list[dict[str, Any]] = []
        self._busy, self._losses = BusyHistory(attempt.telemetry), LossHistory()

    def history(self) -> History:
        return History(busy=self._busy.values(), is_cpu=self._busy.is_cpu, losses=self._losses.values())

    def extend_view(self, frame: RunView, now: float, is_running: bool) -> RunView:
        """Return ``frame`` with the attempt's nodes, rows, events and speed."""
        self._read_metrics()
        self._read_nodes()
        events_log = self._read_events()
        silent_nodes = _expected_nodes(self.dir) if not self._nodes else ()
        steps = [r.step for r in self._gpu_rows if r.step is not None]
        recent_rows = eta.recent_rows(self._metric_rows)
        step = (
            max([*steps, *(int(r["step"]) for r in self._metric_rows[-1:])], default=frame.step)
            if is_running
            else frame.step
        )
        deadline = json_files.poll_document(self.dir.deadline).get("end_time") if is_running else None
        return msgspec.structs.replace(
            frame,
            attempt=self.dir.n,
            step=step,
            nodes=[_node_view(n, now, is_running) for n in self._nodes]
            + [_silent_node_view(n, frame) for n in silent_nodes],
            rows=self._gpu_rows if is_running else self._ended_rows(),
            events=_event_views(events_log),
            allocation_end=deadline if json_files.is_number(deadline) else None,
            **eta.estimate(recent_rows, events_log, step, frame.total_steps, now if is_running else None),
        )

    def _read_nodes(self) -> None:
        if clock.monotonic() < self._next_node_read:
            return
        nodes = self._snapshots.read()
        self._next_node_read = clock.monotonic() + len(nodes) / MAX_NODES_PER_S
        if len(nodes) == len(self._nodes) and all(map(operator.is_, nodes, self._nodes)):
            return
        self._nodes = nodes
        for node in self._nodes:
            if node.snapshot is not None:
                previous = self._last_samples.get(node.node)
                if previous is None or previous[0] < node.snapshot.t:
                    self._last_samples[node.node] = node.snapshot.t, node.snapshot.values
                    if previous is not None:
                        self._update_rates(node.snapshot.ranks, previous, (node.snapshot.t, node.snapshot.values))
        rows = [row for node in self._nodes for row in self._node_rows(node)]
        sampled = {n.node: n.snapshot.t for n in self._nodes if n.snapshot is not None}
        step_s = eta.estimate(eta.recent_rows(self._metric_rows), [], None, None, None).get("step_s")
        self._gpu_rows = _with_steps_behind(rows, sampled, step_s)
        self._busy.update(self._nodes)

    def _ended_rows(self) -> list[GpuRow]:
        """Return the rows with the steps that the ranks reported at their end: the last sample is older."""
        stamp = _file_stamp(self.dir.results)
        if stamp != self._results_stamp:
            self._results_stamp, self._last_steps = stamp, last_steps(load_node_results(self.dir.results))
        if not self._last_steps:
            return self._gpu_rows
        rows = [
            r if r.rank is None else msgspec.structs.replace(r, step=self._last_steps.get(r.rank, r.step))
            for r in self._gpu_rows
        ]
        return _with_steps_behind(rows, {}, None)

    def _update_rates(
        self, ranks: list[int], before: tuple[float, Mapping[str, float]], after: tuple[float, Mapping[str, float]]
    ) -> None:
        for rank in ranks:
            num_steps = _counter_delta(before[1], after[1], column_name(f"rank{rank}", "step"))
            wait_s = _counter_delta(before[1], after[1], column_name(f"rank{rank}", "data_wait_s"))
            seconds = after[0] - before[0]
            share = None if wait_s is None or not num_steps else min(1.0, wait_s / seconds)
            self._rates[rank] = (seconds / num_steps if num_steps else None), share

    def _read_metrics(self) -> None:
        path = self._find_metrics_file()
        stamp = (path, *_file_stamp(path))
        if stamp != self._metrics_stamp:
            self._metrics_stamp = stamp
            self._metric_rows = [
                r for r in metrics_file.read_last(path, METRICS_BYTES) if json_files.is_number(r.get("t"))
            ]
            self._losses.update(path, self._metric_rows)

    def _read_events(self) -> list[Event]:
        """Return the last events of all writers, by time."""
        try:
            files = sorted(self.dir.events.glob("*.jsonl"))
        except OSError:
            return []
        for path in files:
            stamp = _file_stamp(path)
            cached = self._event_tails.get(path)
            if cached is None or cached[0] != stamp:
                self._event_tails[path] = stamp, events.filter_valid(fsio.read_jsonl_tail(path, EVENTS_BYTES))
        return sorted((e for _, tail in self._event_tails.values() for e in tail), key=lambda e: float(e["t"]))

    def _node_rows(self, node: NodeStatus) -> list[GpuRow]:
        if node.snapshot is None:
            return []
        values, ranks_with_gpu, rows = node.snapshot.values, set(), []
        for index, facts in enumerate(node.snapshot.gpus):
            rank = facts.ranks[0] if facts.ranks else None
            ranks_with_gpu.add(rank)
            rows.append(GpuRow(**_gpu_fields(node, index, facts), **self._rank_fields(values, rank)))
        cpu_ranks = [r for r in node.snapshot.ranks if r not in ranks_with_gpu]
        return rows + [GpuRow(node=node.node, **self._rank_fields(values, r)) for r in cpu_ranks]

    def _rank_fields(self, values: Mapping[str, float], rank: int | None) -> dict[str, Any]:
        if rank is None:
            return {}
        phase, step = _value(values, f"rank{rank}", "phase"), _value(values, f"rank{rank}", "step")
        step_s, share = self._rates.get(rank, (None, None))
        is_known_phase = phase is not None and 0 <= phase < len(heartbeat.PHASES)
        return {
            "rank": rank,
            "phase": heartbeat.PHASES[int(phase)] if is_known_phase and phase is not None else None,
            "step": None if step is None else int(step),
            "step_s": step_s,
            "data_wait_share": share,
        }


def _expected_nodes(attempt: AttemptDir) -> list[str]:
    nodes = json_files.poll_document(attempt.record).get("nodes")
    return [node for node in nodes if isinstance(node, str)] if isinstance(nodes, list) else []


def _file_stamp(path: Path) -> tuple[int, int]:
    try:
        info = path.stat()
    except OSError:
        return -1, -1
    return info.st_size, info.st_mtime_ns


def _value(values: Mapping[str, float], device: str, field: str, scale: float = 1.0) -> float | None:
    value = values.get(column_name(device, field), math.nan)
    return value / scale if math.isfinite(value) else None


def _counter_delta(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float | None:
    delta = after.get(name, math.nan) - before.get(name, math.nan)
    return delta if math.isfinite(delta) and delta >= 0 else None


def _gpu_fields(node: NodeStatus, index: int, facts: GpuFacts) -> dict[str, Any]:
    values = node.snapshot.values if node.snapshot is not None else {}
    device = f"gpu{index}"
    utilization, total = _value(values, device, "utilization"), facts.memory_total_bytes
    return {
        "node": node.node,
        "gpu": facts.index if facts.index is not None else index,
        "uuid": facts.uuid,
        "name": facts.name,
        "utilization": utilization,
        "sm_activity": _value(values, device, "sm_activity"),
        "tensor_activity": _value(values, device, "tensor_activity"),
        "memory_used_gib": _value(values, device, "memory_used_bytes", GIB),
        "memory_total_gib": None if not total else total / GIB,
        "power_w": _value(values, device, "power_w"),
        "temperature_c": _value(values, device, "temperature_c"),
        "sm_clock_mhz": _value(values, device, "sm_clock_mhz"),
        "throttled": [c for c in ("power", "thermal", "hardware") if _value(values, device, f"throttle_{c}")],
        "reason": None
        if utilization is not None
        else node.reasons.get(column_name(device, "utilization")) or facts.reason,
    }


def _with_steps_behind(rows: list[GpuRow], sampled: Mapping[str, float], step_s: float | None) -> list[GpuRow]:
    """Compare steps as of one time: nodes write their samples up to 10 s apart, which may be many steps.

    Args:
        sampled: when the newest sample of each node was taken, UTC epoch s.
        step_s: the run's time per step; None if it is unknown.
    """
    newest = max(sampled.values(), default=0.0)
    steps = [
        r.step + int((newest - sampled[r.node]) / step_s)
        if r.step is not None and r.phase == _TRAIN and step_s
        else r.step
        for r in rows
    ]
    max_step = max((step for step in steps if step is not None), default=0)
    return [
        r if step is None else msgspec.structs.replace(r, behind=max_step - step)
        for r, step in zip(rows, steps, strict=True)
    ]


def _node_view(record: NodeStatus, now: float, is_running: bool) -> NodeView:
    header, snapshot = record.header, record.snapshot
    values = snapshot.values if snapshot is not None else {}
    age = None if snapshot is None else max(0.0, now - snapshot.t)
    problem = record.read_error or record.failure or header.nvml_error
    if is_running and problem is None and record.end is None and age is not None and age > 60:
        problem = f"no new samples for {age:.0f} s: its agent is gone or hangs, or its clock differs"
    total = header.memory_total_bytes
    return NodeView(
        node=record.node,
        age_s=age,
        cpu=_value(values, "host", "cpu"),
        memory_used_gib=_value(values, "host", "memory_used_bytes", GIB),
        memory_total_gib=None if not total else total / GIB,
        ended=record.end is not None,
        problem=problem,
    )


def _silent_node_view(node: str, frame: RunView) -> NodeView:
    return NodeView(node=node, problem="has recorded nothing yet" if frame.telemetry else "telemetry is off")


def _event_views(log: list[Event]) -> list[EventView]:
    views = []
    for event in log[-4 * MAX_EVENTS :]:
        text = format_event(event)
        if text:
            views.append(EventView(float(event["t"]), str(event["event"]), text, event.get("severity")))
    return views[-MAX_EVENTS:]
