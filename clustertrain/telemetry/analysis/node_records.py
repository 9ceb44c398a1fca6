"""Telemetry recorded by each node in an attempt, and the time for which it is expected."""

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
from clustertrain.telemetry.report_schema import TimeWindow
from clustertrain.telemetry.store.reader import RecordedSegment, drop_overlapping, open_node
from clustertrain.telemetry.store.totals import Total, TotalsAccumulator, totals_by_column
from clustertrain.telemetry.store.writer import GpuFacts

GAP_INTERVALS = 5  # sampling intervals; longer pauses are gaps
SLACK_S = 15.0  # delay of a network filesystem or a busy node
FULL_COVERAGE = 0.99  # share of the samples that counts as all


@dataclass(frozen=True)
class NodeRecord:
    """One segment of a node in one attempt."""

    attempt: int
    node: str
    gpus: list[GpuFacts]
    """GPUs of the node; for a segment without NVML, those of the node's other segments."""
    start: float
    until: float
    """Time at which the agent was last known to be up."""
    interval_s: float = 1.0
    segment: RecordedSegment | None = None
    """None if the agent started but wrote no file."""
    since: float | None = None
    """Only samples from this time on count (see :func:`limit_to_last`)."""
    samplers: int = 1  # samplers of the node that wrote at the same time; the others do not count
    agent_lost_s: float = 0.0  # seconds at the end without an agent while the attempt continued

    @property
    def nvml_error(self) -> str | None:
        """Reason why GPUs were not sampled; None if they were."""
        return None if self.segment is None else self.segment.header.nvml_error

    @property
    def held_s(self) -> float:
        return max(0.0, self.until - self.start)

    @property
    def read_error(self) -> str | None:
        """Part that could not be read, with the reason; known only after reading."""
        return None if self.segment is None else self.segment.read_error

    @property
    def expected(self) -> int:
        full = int((self.until - self.start) / self.interval_s + 1e-6) + 1
        # A limited record starts and ends between two samples.
        return full if self.since is None else max(full - 1, min(self.received, full))

    @property
    def received(self) -> int:
        return self.rows(FAST)

    @cached_property
    def sample_s(self) -> float:
        """Seconds that a sample stands for: the interval, or more if a slow driver caused missed ticks.

        Gaps of more than ``GAP_INTERVALS`` intervals do not count.
        """
        n, step_s = self.received, self.interval_s
        if self.segment is None or n < 2:
            return step_s
        span_s = (self.segment.newest_t or self.start) - self.start + step_s
        if n * step_s >= FULL_COVERAGE * span_s:  # the usual case, without reading samples
            return step_s
        intervals = np.diff(self.segment.samples(FAST, (), self.since).t)
        return float(np.where(intervals > GAP_INTERVALS * step_s, step_s, intervals).sum() + step_s) / n

    @cached_property
    def totals(self) -> Mapping[str, Total]:
        """Totals by column."""
        if self.segment is None:
            return {}
        return self.segment.totals() if self.since is None else self._totals_since(self.segment, self.since)

    def _totals_since(self, segment: RecordedSegment, since: float) -> Mapping[str, Total]:
        adder = TotalsAccumulator(segment.header)
        for pace, columns in segment.header.paces().items():
            frame = segment.samples(pace, since=since)
            rows = np.column_stack([frame.values[c] for c in columns]) if columns else np.empty((len(frame.t), 0))
            adder.add(pace, frame.t - segment.header.t, rows)
        return totals_by_column(adder.build_totals(0.0, {}))

    @cached_property
    def _rows(self) -> dict[Pace, int]:
        if self.segment is None:
            return {FAST: 0, SLOW: 0}
        slow_rows = max((self.totals[c].count for c in self.segment.header.slow if c in self.totals), default=0)
        if self.since is None:
            return {FAST: self.segment.sample_count, SLOW: slow_rows}
        return {FAST: len(self.segment.samples(FAST, columns=(), since=self.since).t), SLOW: slow_rows}

    def rows(self, pace: Pace) -> int:
        """Return the number of samples of the pace."""
        return self._rows[pace]


def load_node_records(attempt: AttemptDir, log: list[events.Event], flush_s: float = 10.0) -> list[NodeRecord]:
    """Load the records of an attempt, including nodes whose agent started but wrote no file.

    Args:
        log: events of the attempt.
        flush_s: flush interval of the sampler; a node that is silent for much longer has lost its agent.
    """
    records = _collect_records(attempt, log)
    last_seen = max([_last_event_time(log), *(p.until for p in records)])
    ended_nodes = {str(e["node"]) for e in events.filter_by_name(log, "ranks_ended") if "node" in e}
    newest_by_node = {p.node: p for p in records if p.segment is not None}
    for node, record in newest_by_node.items():
        agent_lost_s = last_seen - record.until
        if (
            node not in ended_nodes
            and record.segment
            and record.segment.end is None
            and agent_lost_s > 3 * flush_s + SLACK_S
        ):
            records[records.index(record)] = replace(record, until=last_seen, agent_lost_s=agent_lost_s)
    return records


def _last_event_time(log: list[events.Event]) -> float:
    """Return the time of the last event. The next attempt closes a killed one with an event that has its last time."""
    return max((float(e["ended_at"] if e.get("ended_at") is not None else e["t"]) for e in log), default=0.0)


def _collect_records(attempt: AttemptDir, log: list[events.Event]) -> list[NodeRecord]:
    records = []
    last_event_t = _last_event_time(log)
    agents = {str(e["node"]): e for e in events.filter_by_name(log, "agent_started") if "node" in e}
    ended = {str(e["node"]): e for e in events.filter_by_name(log, "ranks_ended") if "node" in e}
    for node in sorted(_list_nodes(attempt) | agents.keys()):
        segments = open_node(attempt.telemetry / node)
        with_header = [s for s in segments if not math.isnan(s.header.t)]
        readable = drop_overlapping(with_header)
        concurrent = 1 + (len(readable) < len(with_header))
        held_gpus = list({gpu.uuid: gpu for segment in readable for gpu in segment.header.gpus}.values())
        for segment in readable:
            gpus = held_gpus if segment.header.nvml_error is not None else segment.header.gpus
            segment_start, interval_s = segment.header.t, segment.header.interval_s
            until = segment.newest_t or segment_start
            if segment is readable[-1] and node in ended:
                until = max(until, segment_start + _elapsed(segment_start, segment.header.mono, ended[node]))
            records.append(
                NodeRecord(attempt.n, node, gpus, segment_start, until, interval_s, segment, samplers=concurrent)
            )
        if not readable and node in agents:
            agent_started = agents[node]
            start = float(agent_started["t"])
            until = (
                last_event_t
                if node not in ended
                else start + _elapsed(start, agent_started.get("monotonic_s"), ended[node])
            )
            until = max(start, until)
            records.append(NodeRecord(attempt.n, node, _gpus_from_event(agent_started), start, until))
    return records


def _elapsed(t: float, mono: float | None, event: events.Event) -> float:
    """Return the seconds from a time, given by both clocks, to an event of the same node.

    The monotonic clock is preferred because the wall clock may have been set in between.
    """
    if mono is None or event.get("monotonic_s") is None:
        return float(event["t"]) - t
    return float(event["monotonic_s"]) - mono


def list_unreadable(attempt: AttemptDir) -> list[str]:
    """List the segments that cannot be opened, each with the reason."""
    folders = [attempt.telemetry / node for node in sorted(_list_nodes(attempt))]
    return [s.read_error for folder in folders for s in open_node(folder) if s.read_error and math.isnan(s.header.t)]


def _list_nodes(attempt: AttemptDir) -> set[str]:
    try:
        return {p.name for p in attempt.telemetry.iterdir() if p.is_dir()}
    except FileNotFoundError:
        return set()


def _gpus_from_event(event: events.Event) -> list[GpuFacts]:
    try:
        return schema.convert(event.get("gpus") or [], list[GpuFacts])
    except msgspec.ValidationError:
        return []


def limit_to_last(records: list[NodeRecord], since_s: float) -> tuple[list[NodeRecord], float]:
    """Limit records to the last ``since_s`` seconds before the newest sample; also return their start (UTC s)."""
    cutoff = max((p.until for p in records), default=0.0) - since_s
    return [replace(p, start=max(p.start, cutoff), since=cutoff) for p in records if p.until >= cutoff], cutoff


def time_window(records: Sequence[NodeRecord]) -> TimeWindow:
    """Return the time covered by the records."""
    return TimeWindow(min((p.start for p in records), default=None), max((p.until for p in records), default=None))
