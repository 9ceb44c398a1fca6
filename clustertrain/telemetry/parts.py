"""Which nodes recorded telemetry in an attempt, and while which time they should have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from clustertrain.run import events
from clustertrain.run.folder import AttemptDir
from clustertrain.telemetry.series import Series, load
from clustertrain.telemetry.store import GpuFacts
from clustertrain.telemetry.summary import Window


@dataclass
class Part:
    """One node in one attempt, from one start of its sampler. ``until`` is when its agent was last known to be up."""

    attempt: int
    node: str
    gpus: list[GpuFacts]
    start: float
    until: float
    interval_s: float = 1.0
    series: Series | None = None  # None: the agent came up, but no file is there

    @property
    def expected(self) -> int:
        return int((self.until - self.start) / self.interval_s + 1e-6) + 1

    @property
    def received(self) -> int:
        return 0 if self.series is None else len(self.series.t)


def of_attempt(attempt: AttemptDir, log: list[events.Event]) -> list[Part]:
    """All parts of an attempt, given its events; also of nodes whose agent came up and left no file."""
    found = []
    last_word = max((float(e["t"]) for e in log), default=0.0)
    agents = {str(e["node"]): e for e in events.named(log, "agent_started") if "node" in e}
    ended = {str(e["node"]): float(e["t"]) for e in events.named(log, "ranks_ended") if "node" in e}
    on_disk = {p.name for p in attempt.telemetry.iterdir() if p.is_dir()} if attempt.telemetry.is_dir() else set()
    for node in sorted(on_disk | agents.keys()):
        series = load(attempt.telemetry / node)
        for i, one in enumerate(series):
            until = float(one.t[-1]) if len(one.t) else one.header.t
            if i == len(series) - 1:
                until = max(until, ended.get(node, 0.0))
            found.append(Part(attempt.n, node, one.header.gpus, one.header.t, until, one.header.interval_s, one))
        if not series and node in agents:
            start = float(agents[node]["t"])
            found.append(
                Part(attempt.n, node, _from_event(agents[node]), start, max(start, ended.get(node, last_word)))
            )
    return found


def _from_event(event: events.Event) -> list[GpuFacts]:
    try:
        return msgspec.convert(event.get("gpus") or [], list[GpuFacts])
    except msgspec.ValidationError:
        return []


def since(parts: list[Part], since_s: float) -> list[Part]:
    """Only the last ``since_s`` seconds before the newest sample."""
    cut = max((p.until for p in parts), default=0.0) - since_s
    kept = []
    for p in parts:
        if p.until >= cut:
            series = None if p.series is None else p.series.after(cut)
            kept.append(Part(p.attempt, p.node, p.gpus, max(p.start, cut), p.until, p.interval_s, series))
    return kept


def window_of(parts: Sequence[Part]) -> Window:
    return Window(min((p.start for p in parts), default=None), max((p.until for p in parts), default=None))
