"""What is true of a running job now, for ``clustertrain top``: reads the ends of the files of its run directory.

However long the run, a look costs the same: of metrics and events the last kilobytes are read, of the telemetry the
newest segment's newest sums. What takes a question to the scheduler, or all of a run's files (its goodput), is asked in
a thread and rarely.
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
from clustertrain.errors import ClusterTrainError, NotReadable
from clustertrain.report.event_text import in_words
from clustertrain.report.top import eta
from clustertrain.run import events, heartbeat, json_files
from clustertrain.run import metrics_file as rows
from clustertrain.run.events import Event
from clustertrain.run.run_dir import AttemptDir, RunDir, readable
from clustertrain.run.run_spec import load_spec
from clustertrain.scheduler.run_status import Look, look
from clustertrain.telemetry.fields import column
from clustertrain.telemetry.store.latest import Newest, NodeNow
from clustertrain.telemetry.store.writer import GpuFacts

GIB = 1 << 30
LOOK_S, LOOK_SHARE = 15.0, 1 / 200  # how often the scheduler is asked at most, and the share of time that it may take
CLOSE_S = 1.0  # a look takes a tenth of that, where the scheduler answers
METRICS_BYTES, EVENTS_BYTES = 16384, 32768
MOST_EVENTS = 50
NODES_A_SECOND = 16  # of which the files are looked at: a run of a thousand nodes must not load the filesystem


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU and its rank; a rank without a GPU has no ``uuid``, a GPU without a rank no ``rank``. None: not known, for
    the GPU's figures with the ``reason``. ``throttled``: power, thermal, hardware. ``behind``: steps that the rank is
    behind the one farthest on. ``step_s``, ``data_wait_share``: since the look before."""

    node: str
    gpu: int | None = None
    uuid: str | None = None
    name: str | None = None
    rank: int | None = None
    utilization: float | None = None
    sm_activity: float | None = None
    tensor_activity: float | None = None
    memory_used_gib: float | None = None
    memory_total_gib: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    throttled: list[str] = []
    reason: str | None = None
    phase: str | None = None
    step: int | None = None
    behind: int | None = None
    step_s: float | None = None
    data_wait_share: float | None = None


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """``age_s``: of its newest sample. ``trouble``: why there is nothing, or no GPU figures, or nothing new."""

    node: str
    age_s: float | None = None
    cpu: float | None = None
    memory_used_gib: float | None = None
    memory_total_gib: float | None = None
    ended: bool = False
    trouble: str | None = None


class EventView(msgspec.Struct, frozen=True):
    t: float
    event: str
    text: str
    severity: str | None = None


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One frame. Times are UTC epoch s. ``eta_s`` counts the steps left at the recent rate, with the share of time that
    checkpoints and evaluations took (``overhead``, of the steps' time; None while there was none of them yet)."""

    t: float
    run: str
    job_id: str | None = None
    backend: str | None = None
    state: str | None = None
    attempt: int | None = None
    step: int | None = None
    total_steps: int | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    loss: float | None = None
    since_step_s: float | None = None
    eta_s: float | None = None
    overhead: float | None = None
    allocation_ends: float | None = None
    goodput: float | None = None
    wall_s: float | None = None
    pending_reason: str | None = None
    start_estimate: float | None = None
    scheduler_silent: str | None = None
    ending: str | None = None
    telemetry: bool = True
    nodes: list[NodeView] = []
    rows: list[Row] = []
    events: list[EventView] = []


class Live:
    """Looks at one run again and again."""

    def __init__(self, run: RunDir, *, now: Callable[[], float] = clock.now) -> None:
        """Raises ConfigError when the run's spec.toml does not read."""
        self._run, self._now = run, now
        self._telemetry = load_spec(run).recipe.telemetry.enabled
        self._slow = _Slowly(lambda: look(run))
        self._attempt: _Attempt | None = None

    def view(self, *, wait: bool = False) -> View:
        """``wait``: for the scheduler's answer, where it would otherwise be in a later frame."""
        seen, trouble = self._slow.get(wait)
        newest = _newest_attempt(self._run)
        if newest is not None and (self._attempt is None or self._attempt.dir.n != newest.n):
            self._attempt = _Attempt(newest, lambda: self._run.metrics_files(newest.n)[-1])
        now = self._now()
        frame = View(t=now, run=self._run.id, telemetry=self._telemetry, scheduler_silent=trouble)
        if seen is not None:
            frame = _with_look(frame, seen, trouble)
        running = seen is None or seen.state == "running"
        return frame if self._attempt is None else self._attempt.added(frame, now, running)

    def close(self) -> bool:
        """Whether the question to the scheduler that was under way, if any, is over: waits :data:`CLOSE_S` at most."""
        return self._slow.over(CLOSE_S)


def _newest_attempt(run: RunDir) -> AttemptDir | None:
    found = run.attempts()
    return found[-1] if found else None


def _with_look(frame: View, seen: Look, trouble: str | None) -> View:
    view = seen.view
    waits = view if view is not None and view.state == "PENDING" else None
    last = seen.history[-1] if seen.history else None
    return msgspec.structs.replace(
        frame,
        job_id=seen.job_id,
        backend=seen.backend,
        state=seen.state,
        step=seen.step,
        total_steps=seen.total_steps,
        goodput=seen.goodput.ratio,
        wall_s=seen.goodput.wall_s,
        pending_reason=waits.reason or None if waits is not None else None,
        start_estimate=waits.start_time if waits is not None else None,
        scheduler_silent=trouble or seen.silence,
        ending=last.ending if last is not None else None,
    )


class _Slowly:
    """What is too dear for every frame: asked in a thread, at most every :data:`LOOK_S`, and more rarely where it takes
    long."""

    def __init__(self, ask: Callable[[], Look]) -> None:
        self._ask = ask
        self._found: tuple[Look | None, str | None] = None, None
        self._refused: NotReadable | None = None
        self._due = float("-inf")
        self._thread: threading.Thread | None = None

    def get(self, wait: bool) -> tuple[Look | None, str | None]:
        """The newest answer, and why there is none newer. Raises NotReadable where there will be none."""
        if (self._thread is None or not self._thread.is_alive()) and clock.monotonic() >= self._due:
            self._thread = threading.Thread(target=self._once, name="look", daemon=True)
            self._thread.start()
        if wait and self._thread is not None:
            self._thread.join()
        if self._refused is not None:
            raise self._refused
        return self._found

    def over(self, timeout_s: float) -> bool:
        """Whether nothing is being asked, after waiting so long for it."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _once(self) -> None:
        begin = clock.monotonic()
        try:
            with readable():
                self._found = self._ask(), None
        except NotReadable as e:
            self._refused = e if self._found[0] is None else None
            self._found = self._found[0], e.message
        except ClusterTrainError as e:
            self._found = self._found[0], e.message
        except Exception as e:  # the thread's edge: files that are not what was written
            self._found = self._found[0], f"{type(e).__name__}: {e}"
        took = clock.monotonic() - begin
        self._due = clock.monotonic() + max(LOOK_S, took / LOOK_SHARE)


class _Attempt:
    """The files of one attempt."""

    def __init__(self, attempt: AttemptDir, metrics_file: Callable[[], Path]) -> None:
        self.dir = attempt
        self._metrics = metrics_file
        self._newest = Newest(attempt.telemetry)
        self._nodes: list[NodeNow] = []
        self._table: list[Row] = []
        self._rates: dict[int, tuple[float | None, float | None]] = {}
        self._samples: dict[str, tuple[float, Mapping[str, float]]] = {}
        self._look_again = float("-inf")
        self._ends: dict[Path, tuple[tuple[int, int], list[Event]]] = {}
        self._rows_mark: tuple[Path, int, int] | None = None
        self._rows: list[dict[str, Any]] = []

    def added(self, frame: View, now: float, running: bool) -> View:
        self._read_nodes()
        self._read_metrics()
        log = self._read_events()
        expected = _nodes_of(self.dir) if not self._nodes else ()
        steps = [r.step for r in self._table if r.step is not None]
        recent = eta.recent(self._rows)
        step = max([*steps, *(int(r["step"]) for r in self._rows[-1:])], default=frame.step) if running else frame.step
        deadline = json_files.peek(self.dir.deadline).get("end_time") if running else None
        return msgspec.structs.replace(
            frame,
            attempt=self.dir.n,
            step=step,
            nodes=[_node(n, now, running) for n in self._nodes] + [_silent(n, frame) for n in expected],
            rows=self._table,
            events=_told(log),
            allocation_ends=deadline if json_files.is_number(deadline) else None,
            **eta.of(recent, log, step, frame.total_steps, now if running else None),
        )

    def _read_nodes(self) -> None:
        if clock.monotonic() < self._look_again:
            return
        nodes = self._newest.read()
        self._look_again = clock.monotonic() + len(nodes) / NODES_A_SECOND
        if len(nodes) == len(self._nodes) and all(map(operator.is_, nodes, self._nodes)):
            return
        self._nodes = nodes
        for node in self._nodes:
            if node.snapshot is not None:
                before = self._samples.get(node.node)
                if before is None or before[0] < node.snapshot.t:
                    self._samples[node.node] = node.snapshot.t, node.snapshot.values
                    if before is not None:
                        self._rate(node.snapshot.ranks, before, (node.snapshot.t, node.snapshot.values))
        rows = [row for node in self._nodes for row in self._rows_of(node)]
        self._table = _behind(rows, max((r.step for r in rows if r.step is not None), default=0))

    def _rate(
        self, ranks: list[int], before: tuple[float, Mapping[str, float]], after: tuple[float, Mapping[str, float]]
    ) -> None:
        for rank in ranks:
            steps = _difference(before[1], after[1], column(f"rank{rank}", "step"))
            waited = _difference(before[1], after[1], column(f"rank{rank}", "data_wait_s"))
            seconds = after[0] - before[0]
            share = None if waited is None or not steps else min(1.0, waited / seconds)
            self._rates[rank] = (seconds / steps if steps else None), share

    def _read_metrics(self) -> None:
        path = self._metrics()
        mark = (path, *_mark(path))
        if mark != self._rows_mark:
            self._rows_mark = mark
            self._rows = [r for r in rows.last(path, METRICS_BYTES) if json_files.is_number(r.get("t"))]

    def _read_events(self) -> list[Event]:
        """The ends of all writers' files, by time."""
        try:
            files = sorted(self.dir.events.glob("*.jsonl"))
        except OSError:
            return []
        for path in files:
            mark = _mark(path)
            known = self._ends.get(path)
            if known is None or known[0] != mark:
                self._ends[path] = mark, events.sound(fsio.last_lines(path, EVENTS_BYTES))
        return sorted((e for _, found in self._ends.values() for e in found), key=lambda e: float(e["t"]))

    def _rows_of(self, node: NodeNow) -> list[Row]:
        if node.snapshot is None:
            return []
        values, with_gpu, rows = node.snapshot.values, set(), []
        for number, facts in enumerate(node.snapshot.gpus):
            rank = facts.ranks[0] if facts.ranks else None
            with_gpu.add(rank)
            rows.append(Row(**_gpu(node, number, facts), **self._rank(values, rank)))
        others = [r for r in node.snapshot.ranks if r not in with_gpu]
        return rows + [Row(node=node.node, **self._rank(values, r)) for r in others]

    def _rank(self, values: Mapping[str, float], rank: int | None) -> dict[str, Any]:
        if rank is None:
            return {}
        phase, step = _value(values, f"rank{rank}", "phase"), _value(values, f"rank{rank}", "step")
        step_s, share = self._rates.get(rank, (None, None))
        known = phase is not None and 0 <= phase < len(heartbeat.PHASES)
        return {
            "rank": rank,
            "phase": heartbeat.PHASES[int(phase)] if known and phase is not None else None,
            "step": None if step is None else int(step),
            "step_s": step_s,
            "data_wait_share": share,
        }


def _nodes_of(attempt: AttemptDir) -> list[str]:
    nodes = json_files.peek(attempt.record).get("nodes")
    return [node for node in nodes if isinstance(node, str)] if isinstance(nodes, list) else []


def _mark(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def _value(values: Mapping[str, float], device: str, field: str, scale: float = 1.0) -> float | None:
    value = values.get(column(device, field), math.nan)
    return value / scale if math.isfinite(value) else None


def _difference(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float | None:
    change = after.get(name, math.nan) - before.get(name, math.nan)
    return change if math.isfinite(change) and change >= 0 else None


def _gpu(node: NodeNow, number: int, facts: GpuFacts) -> dict[str, Any]:
    values = node.snapshot.values if node.snapshot is not None else {}
    device = f"gpu{number}"
    use, total = _value(values, device, "utilization"), facts.memory_total_bytes
    return {
        "node": node.node,
        "gpu": facts.index if facts.index is not None else number,
        "uuid": facts.uuid,
        "name": facts.name,
        "utilization": use,
        "sm_activity": _value(values, device, "sm_activity"),
        "tensor_activity": _value(values, device, "tensor_activity"),
        "memory_used_gib": _value(values, device, "memory_used_bytes", GIB),
        "memory_total_gib": None if not total else total / GIB,
        "power_w": _value(values, device, "power_w"),
        "temperature_c": _value(values, device, "temperature_c"),
        "sm_clock_mhz": _value(values, device, "sm_clock_mhz"),
        "throttled": [w for w in ("power", "thermal", "hardware") if _value(values, device, f"throttle_{w}")],
        "reason": None if use is not None else node.reasons.get(column(device, "utilization")) or facts.reason,
    }


def _behind(rows: list[Row], newest: int) -> list[Row]:
    return [r if r.step is None else msgspec.structs.replace(r, behind=newest - r.step) for r in rows]


def _node(now_of: NodeNow, now: float, running: bool) -> NodeView:
    header, snapshot = now_of.header, now_of.snapshot
    values = snapshot.values if snapshot is not None else {}
    age = None if snapshot is None else max(0.0, now - snapshot.t)
    trouble = now_of.trouble or now_of.failure or header.nvml
    if running and trouble is None and now_of.end is None and age is not None and age > 60:
        trouble = f"nothing new for {age:.0f} s: its agent is gone, hangs, or its clock differs"
    total = header.memory_total_bytes
    return NodeView(
        node=now_of.node,
        age_s=age,
        cpu=_value(values, "host", "cpu"),
        memory_used_gib=_value(values, "host", "memory_used_bytes", GIB),
        memory_total_gib=None if not total else total / GIB,
        ended=now_of.end is not None,
        trouble=trouble,
    )


def _silent(node: str, frame: View) -> NodeView:
    return NodeView(node=node, trouble="has recorded nothing yet" if frame.telemetry else "telemetry is off")


def _told(log: list[Event]) -> list[EventView]:
    found = []
    for event in log[-4 * MOST_EVENTS :]:
        words = in_words(event)
        if words:
            found.append(EventView(float(event["t"]), str(event["event"]), words, event.get("severity")))
    return found[-MOST_EVENTS:]
