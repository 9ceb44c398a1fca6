"""Which nodes recorded telemetry in an attempt, and while which time they should have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np

from clustertrain import schema
from clustertrain.run import events
from clustertrain.run.run_dir import AttemptDir
from clustertrain.telemetry.fields import FAST, SLOW, Pace
from clustertrain.telemetry.report_schema import Window
from clustertrain.telemetry.store.reader import Segment, one_at_a_time, open_node
from clustertrain.telemetry.store.totals import Adder, Total, totals_of
from clustertrain.telemetry.store.writer import GpuFacts

GAP = 5  # intervals
SLACK_S = 15.0  # of a network filesystem, and of a node that is busy
ALL = 0.99  # of the samples: what is less than that away from all makes no difference


@dataclass(frozen=True)
class Part:
    """One node in one attempt, from one start of its sampler. ``until`` is when its agent was last known to be up.

    ``gpus`` are those that the node held; a segment without NVML has none of its own, then those of the node's others.
    ``segment`` is None where the agent came up and no file is there. ``since``: only what was sampled from there on.
    """

    attempt: int
    node: str
    gpus: list[GpuFacts]
    start: float
    until: float
    interval_s: float = 1.0
    segment: Segment | None = None
    since: float | None = None
    agents: int = 1  # samplers of the node that wrote at the same time; the others are not counted
    silent_s: float = 0.0  # at its end, while the attempt went on: its agent is gone

    @property
    def no_nvml(self) -> str | None:
        """Why there are no GPU figures; None where there are."""
        return None if self.segment is None else self.segment.header.nvml

    @property
    def held_s(self) -> float:
        return max(0.0, self.until - self.start)

    @property
    def trouble(self) -> str | None:
        """What of it could not be read, and why; known once it was tried."""
        return None if self.segment is None else self.segment.trouble

    @property
    def expected(self) -> int:
        whole = int((self.until - self.start) / self.interval_s + 1e-6) + 1
        # A part that was cut begins and ends between two samples.
        return whole if self.since is None else max(whole - 1, min(self.received, whole))

    @property
    def received(self) -> int:
        return self.rows(FAST)

    @cached_property
    def sample_s(self) -> float:
        """How many seconds a sample stands for: the interval, more where a slow driver made ticks be missed. What lies
        in gaps of more than ``GAP`` intervals is not known, and not counted."""
        n, step_s = self.received, self.interval_s
        if self.segment is None or n < 2:
            return step_s
        span_s = (self.segment.newest_t or self.start) - self.start + step_s
        if n * step_s >= ALL * span_s:  # as a rule, and then no sample need be read
            return step_s
        apart = np.diff(self.segment.samples(FAST, (), self.since).t)
        return float(np.where(apart > GAP * step_s, step_s, apart).sum() + step_s) / n

    @cached_property
    def totals(self) -> Mapping[str, Total]:
        """By column."""
        if self.segment is None:
            return {}
        return self.segment.totals() if self.since is None else self._totals_since(self.segment, self.since)

    def _totals_since(self, segment: Segment, since: float) -> Mapping[str, Total]:
        adder = Adder(segment.header)
        for pace, columns in segment.header.paces().items():
            frame = segment.samples(pace, since=since)
            rows = np.column_stack([frame.values[c] for c in columns]) if columns else np.empty((len(frame.t), 0))
            adder.add(pace, frame.t - segment.header.t, rows)
        return totals_of(adder.sums(0.0, {}))

    @cached_property
    def _rows(self) -> dict[Pace, int]:
        if self.segment is None:
            return {FAST: 0, SLOW: 0}
        slow = max((self.totals[c].count for c in self.segment.header.slow if c in self.totals), default=0)
        if self.since is None:
            return {FAST: self.segment.n, SLOW: slow}
        return {FAST: len(self.segment.samples(FAST, columns=(), since=self.since).t), SLOW: slow}

    def rows(self, pace: Pace) -> int:
        """How many samples there are of the pace."""
        return self._rows[pace]


def of_attempt(attempt: AttemptDir, log: list[events.Event], flush_s: float = 10.0) -> list[Part]:
    """All parts of an attempt, given its events; also of nodes whose agent came up and left no file.

    Args:
        flush_s: between two writes of a sampler: a node that is silent for longer has lost its agent.
    """
    found = _found(attempt, log)
    last_sign = max([_last_word(log), *(p.until for p in found)])
    ended = {str(e["node"]) for e in events.named(log, "ranks_ended") if "node" in e}
    newest = {p.node: p for p in found if p.segment is not None}
    for node, part in newest.items():
        silent_s = last_sign - part.until
        if node not in ended and part.segment and part.segment.end is None and silent_s > 3 * flush_s + SLACK_S:
            found[found.index(part)] = replace(part, until=last_sign, silent_s=silent_s)
    return found


def _last_word(log: list[events.Event]) -> float:
    """The attempt's own. One that died without a word is closed by the next, which says when it was seen last."""
    return max((float(e["at"] if e.get("at") is not None else e["t"]) for e in log), default=0.0)


def _found(attempt: AttemptDir, log: list[events.Event]) -> list[Part]:
    found = []
    last_word = _last_word(log)
    agents = {str(e["node"]): e for e in events.named(log, "agent_started") if "node" in e}
    ended = {str(e["node"]): e for e in events.named(log, "ranks_ended") if "node" in e}
    for node in sorted(_on_disk(attempt) | agents.keys()):
        segments = open_node(attempt.telemetry / node)
        every = [s for s in segments if not math.isnan(s.header.t)]
        readable = one_at_a_time(every)
        at_once = 1 + (len(readable) < len(every))
        held = list({gpu.uuid: gpu for one in readable for gpu in one.header.gpus}.values())
        for one in readable:
            gpus = held if one.header.nvml is not None else one.header.gpus
            began, interval_s = one.header.t, one.header.interval_s
            until = one.newest_t or began
            if one is readable[-1] and node in ended:
                until = max(until, began + _elapsed(began, one.header.mono, ended[node]))
            found.append(Part(attempt.n, node, gpus, began, until, interval_s, one, agents=at_once))
        if not readable and node in agents:
            up = agents[node]
            start = float(up["t"])
            until = last_word if node not in ended else start + _elapsed(start, up.get("mono"), ended[node])
            until = max(start, until)
            found.append(Part(attempt.n, node, _from_event(up), start, until))
    return found


def _elapsed(t: float, mono: float | None, event: events.Event) -> float:
    """Seconds from a moment, by both clocks, to an event of the same node: by its monotonic clock, as the other one may
    have been set meanwhile."""
    if mono is None or event.get("mono") is None:
        return float(event["t"]) - t
    return float(event["mono"]) - mono


def unreadable(attempt: AttemptDir) -> list[str]:
    """Segments that cannot even be opened, each with the reason."""
    folders = [attempt.telemetry / node for node in sorted(_on_disk(attempt))]
    return [s.trouble for folder in folders for s in open_node(folder) if s.trouble and math.isnan(s.header.t)]


def _on_disk(attempt: AttemptDir) -> set[str]:
    try:
        return {p.name for p in attempt.telemetry.iterdir() if p.is_dir()}
    except FileNotFoundError:
        return set()


def _from_event(event: events.Event) -> list[GpuFacts]:
    try:
        return schema.convert(event.get("gpus") or [], list[GpuFacts])
    except msgspec.ValidationError:
        return []


def since(parts: list[Part], since_s: float) -> tuple[list[Part], float]:
    """Only the last ``since_s`` seconds before the newest sample, and when (UTC s) they begin."""
    cut = max((p.until for p in parts), default=0.0) - since_s
    return [replace(p, start=max(p.start, cut), since=cut) for p in parts if p.until >= cut], cut


def window_of(parts: Sequence[Part]) -> Window:
    return Window(min((p.start for p in parts), default=None), max((p.until for p in parts), default=None))
