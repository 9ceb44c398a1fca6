"""The rule that takes more than one node: a GPU, a rank or a whole node that is slower than those of the other nodes.

The agent of the first node reads the newest figures of all nodes from the run directory once a minute, in a thread of
its own (:mod:`.watch`): a shared filesystem may take its time.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from clustertrain.config.telemetry import AlertsSpec
from clustertrain.run import heartbeat
from clustertrain.telemetry.alerts import straggler
from clustertrain.telemetry.alerts.gate import Alert, Gate, Verdict
from clustertrain.telemetry.alerts.rules import COMPARABLE
from clustertrain.telemetry.alerts.straggler import Who
from clustertrain.telemetry.alerts.window import finite
from clustertrain.telemetry.fields import column
from clustertrain.telemetry.snapshot import Snapshot

KEPT = 6  # looks, a minute apart: five minutes
ENOUGH = 4
# Half of a node's GPUs or ranks: then it is the node that is slow.
MOST = 0.5


@dataclass(frozen=True, slots=True)
class _Mark:
    t: float
    step: float | None
    training: bool
    figures: tuple[float | None, float | None]  # data_wait_s, forward_s
    clock: float | None


@dataclass(frozen=True, slots=True)
class _Subject:
    """A rank, with its GPU where it has one."""

    who: Who
    model: str | None
    clock: float | None
    step_s: float | None
    data_wait_s: float | None
    forward_s: float | None


class Across:
    """Compares the nodes of a run. Of nodes with three comparable GPUs or ranks their own agents name the slow ones; a
    node that is slow as a whole, and the slow ones of smaller nodes, are named here."""

    def __init__(self, spec: AlertsSpec, node: str) -> None:
        self._spec = spec
        self._gate = Gate(node)
        self._marks: dict[tuple[str, int], deque[_Mark]] = {}
        self.steps: dict[int, int] = {}  # by rank, for Alerts.elsewhere

    def observe(self, snapshots: Sequence[Snapshot], t: float, mono: float) -> list[Alert]:
        """Once a minute, with the newest of each node. An alert's ``node`` is the one that it is about."""
        steps: dict[int, int] = {}
        subjects = [s for snapshot in snapshots for s in self._read(snapshot, steps)]
        self.steps = steps
        if not self._spec.straggler or len(snapshots) < 2:
            return []
        found = []
        for node, key, verdict in self._verdicts(subjects):
            alert = self._gate.judge((key, node), verdict, t, mono)
            if alert is not None:
                found.append(msgspec.structs.replace(alert, node=node))
        return found

    def _read(self, s: Snapshot, steps: dict[int, int]) -> Iterator[_Subject]:
        gpus = {rank: (i, facts) for i, facts in enumerate(s.gpus) for rank in facts.ranks}
        for rank in s.ranks:
            number, facts = gpus.get(rank, (None, None))
            mark = _mark(s, rank, number)
            if mark.step is not None:
                steps[rank] = int(mark.step)
            marks = self._marks.setdefault((s.node, rank), deque(maxlen=KEPT))
            if marks and mark.t <= marks[-1].t:
                continue  # nothing new of this node
            if not mark.training or (marks and (mark.step or 0) < (marks[-1].step or 0)):
                marks.clear()
            if not mark.training:
                continue
            marks.append(mark)
            if len(marks) < ENOUGH:
                continue
            name = f"rank {rank} on {s.node}"
            if facts is not None:
                name = f"GPU {facts.uuid if facts.index is None else facts.index} of {s.node} (rank {rank})"
            who = Who(name, s.node, facts.uuid if facts is not None else None, rank)
            yield _subject(who, facts.name if facts is not None else None, list(marks))

    def _verdicts(self, subjects: list[_Subject]) -> Iterator[tuple[str, str, Verdict]]:
        share = self._spec.straggler
        models: dict[str | None, list[_Subject]] = {}
        for s in subjects:
            models.setdefault(s.model, []).append(s)
        for alike in models.values():
            clocks = [(s, s.clock) for s in alike if s.clock is not None]
            yield from _judged("clock", clocks, lambda who, _, v, usual: straggler.of_clock(who, v, usual, share))
        for figure, rule in (("data_wait_s", straggler.of_data_wait), ("forward_s", straggler.of_forward)):
            times = [(s, v) for s in subjects if (v := getattr(s, figure)) is not None and s.step_s is not None]
            yield from _judged(figure, times, _with_step(rule, share))


Judge = Callable[[Who, _Subject, float, float], Verdict]


def _with_step(rule: straggler.OfRank, share: float) -> Judge:
    return lambda who, s, value, usual: rule(who, value, usual, s.step_s or 0.0, share)


def _judged(figure: str, known: Sequence[tuple[_Subject, float]], judge: Judge) -> Iterator[tuple[str, str, Verdict]]:
    by_node: dict[str, list[tuple[_Subject, float]]] = {}
    for s, value in known:
        by_node.setdefault(s.who.node, []).append((s, value))
    if len(known) < COMPARABLE or len(by_node) < 2:
        return
    usual = statistics.median(value for _, value in known)
    for node, members in by_node.items():
        verdicts = [judge(s.who, s, value, usual) for s, value in members]
        slow = sum(1 for v in verdicts if v)
        whole = len(members) > 1 and slow > MOST * len(members)
        if len(members) > 1:
            middle, value = sorted(members, key=lambda m: m[1])[len(members) // 2]
            who = Who(f"node {node} (the middle one of its {len(members)})", node, None, None)
            yield node, figure, judge(who, middle, value, usual) if whole else _not_holding(verdicts)
        if len(members) < COMPARABLE:
            for (s, _), verdict in zip(members, verdicts, strict=True):
                yield node, f"{figure} of {s.who.rank}", False if whole else verdict


def _not_holding(verdicts: Sequence[Verdict]) -> Verdict:
    """Of a node with some slow members the node itself is well."""
    return False if any(v is False for v in verdicts) else None


def _mark(s: Snapshot, rank: int, gpu: int | None) -> _Mark:
    device = f"rank{rank}"

    def value(field: str) -> float | None:
        return finite(s.values.get(column(device, field)))

    clock = None if gpu is None else finite(s.values.get(column(f"gpu{gpu}", "sm_clock_mhz")))
    phase = value("phase")
    return _Mark(s.t, value("step"), phase == heartbeat.TRAIN, (value("data_wait_s"), value("forward_s")), clock)


def _subject(who: Who, model: str | None, marks: list[_Mark]) -> _Subject:
    first, last = marks[0], marks[-1]
    steps = (last.step or 0.0) - (first.step or 0.0)
    clocks = [m.clock for m in marks if m.clock is not None]

    def per_step(index: int) -> float | None:
        a, b = first.figures[index], last.figures[index]
        return None if a is None or b is None or b < a or steps <= 0 else (b - a) / steps

    return _Subject(
        who=who,
        model=model,
        clock=sum(clocks) / len(clocks) if len(clocks) >= ENOUGH else None,
        step_s=(last.t - first.t) / steps if steps > 0 else None,
        data_wait_s=per_step(0),
        forward_s=per_step(1),
    )
