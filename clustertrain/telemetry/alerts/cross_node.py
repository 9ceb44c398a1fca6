"""Rules that compare nodes: a GPU, a rank or a whole node that is slower than those of the other nodes.

The agent of the first node reads the newest samples of all nodes from the run directory once per minute, in a separate
thread (:mod:`.monitor`) because a shared filesystem may be slow.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from clustertrain.config.telemetry import AlertsSpec
from clustertrain.run import heartbeat
from clustertrain.telemetry import findings
from clustertrain.telemetry.alerts import straggler
from clustertrain.telemetry.alerts.gate import Alert, AlertGate, RuleResult
from clustertrain.telemetry.alerts.rules import MIN_COMPARABLE
from clustertrain.telemetry.alerts.straggler import Suspect
from clustertrain.telemetry.alerts.window import finite_or_none
from clustertrain.telemetry.fields import column_name
from clustertrain.telemetry.snapshot import Snapshot

MAX_SAMPLES = 6  # one per minute, spanning five minutes
MIN_SAMPLES = 4
SLOW_NODE_SHARE = 0.5  # with more slow GPUs or ranks than this share, the node itself is slow


@dataclass(frozen=True, slots=True)
class _RankSample:
    t: float
    step: float | None
    training: bool
    counters: tuple[float | None, float | None]  # data_wait_s, forward_s
    sm_clock_mhz: float | None


@dataclass(frozen=True, slots=True)
class _RankRates:
    """Rates of a rank, and of its GPU if it has one."""

    suspect: Suspect
    model: str | None
    sm_clock_mhz: float | None
    step_s: float | None
    data_wait_s: float | None
    forward_s: float | None


class CrossNodeRules:
    """Comparison of the nodes of a run.

    It reports slow nodes, and slow GPUs and ranks of nodes with fewer than three. On larger nodes, the node's agent
    reports slow GPUs and ranks.
    """

    def __init__(self, spec: AlertsSpec, node: str) -> None:
        self._spec = spec
        self._gate = AlertGate(node)
        self._samples: dict[tuple[str, int], deque[_RankSample]] = {}
        self.steps: dict[int, int] = {}  # by rank, for AlertRules.remote_steps

    def observe(self, snapshots: Sequence[Snapshot], t: float, mono: float) -> list[Alert]:
        """Compare the newest snapshots of all nodes, once per minute; an alert's ``node`` is the slow one."""
        steps: dict[int, int] = {}
        rank_rates = [s for snapshot in snapshots for s in self._rank_rates(snapshot, steps)]
        self.steps = steps
        if not self._spec.straggler or len(snapshots) < 2:
            return []
        alerts = []
        for node, key, verdict in self._evaluate_rules(rank_rates):
            alert = self._gate.update((key, node), verdict, t, mono)
            if alert is not None:
                alerts.append(msgspec.structs.replace(alert, node=node))
        return alerts

    def _rank_rates(self, snapshot: Snapshot, steps: dict[int, int]) -> Iterator[_RankRates]:
        gpus = {rank: (i, facts) for i, facts in enumerate(snapshot.gpus) for rank in facts.ranks}
        for rank in snapshot.ranks:
            gpu_index, facts = gpus.get(rank, (None, None))
            sample = _sample_rank(snapshot, rank, gpu_index)
            if sample.step is not None:
                steps[rank] = int(sample.step)
            samples = self._samples.setdefault((snapshot.node, rank), deque(maxlen=MAX_SAMPLES))
            if samples and sample.t <= samples[-1].t:
                continue  # no new snapshot of this node
            if not sample.training or (samples and (sample.step or 0) < (samples[-1].step or 0)):
                samples.clear()
            if not sample.training:
                continue
            samples.append(sample)
            if len(samples) < MIN_SAMPLES:
                continue
            label = f"rank {rank} on {snapshot.node}"
            if facts is not None:
                label = f"{findings.gpu_label(facts.index, facts.uuid)} of {snapshot.node} (rank {rank})"
            suspect = Suspect(label, snapshot.node, facts.uuid if facts is not None else None, rank)
            yield _build_rates(suspect, facts.name if facts is not None else None, list(samples))

    def _evaluate_rules(self, ranks: list[_RankRates]) -> Iterator[tuple[str, str, RuleResult]]:
        share = self._spec.straggler
        models: dict[str | None, list[_RankRates]] = {}
        for rank in ranks:
            models.setdefault(rank.model, []).append(rank)
        for peers in models.values():
            clocks = [(s, s.sm_clock_mhz) for s in peers if s.sm_clock_mhz is not None]
            yield from _compare_nodes(
                "clock", clocks, lambda who, _, v, usual: straggler.evaluate_clock(who, v, usual, share)
            )
        for metric, rule in (("data_wait_s", straggler.evaluate_data_wait), ("forward_s", straggler.evaluate_forward)):
            times = [(s, v) for s in ranks if (v := getattr(s, metric)) is not None and s.step_s is not None]
            yield from _compare_nodes(metric, times, _bind_step_time(rule, share))


RankRule = Callable[[Suspect, _RankRates, float, float], RuleResult]


def _bind_step_time(rule: straggler.StragglerRule, share: float) -> RankRule:
    return lambda who, s, value, usual: rule(who, value, usual, s.step_s or 0.0, share)


def _compare_nodes(
    metric: str, values: Sequence[tuple[_RankRates, float]], rule: RankRule
) -> Iterator[tuple[str, str, RuleResult]]:
    by_node: dict[str, list[tuple[_RankRates, float]]] = {}
    for rank, value in values:
        by_node.setdefault(rank.suspect.node, []).append((rank, value))
    if len(values) < MIN_COMPARABLE or len(by_node) < 2:
        return
    median = statistics.median(value for _, value in values)
    for node, members in by_node.items():
        results = [rule(s.suspect, s, value, median) for s, value in members]
        num_slow = sum(1 for v in results if v)
        node_is_slow = len(members) > 1 and num_slow > SLOW_NODE_SHARE * len(members)
        if len(members) > 1:
            middle, value = sorted(members, key=lambda m: m[1])[len(members) // 2]
            node_suspect = Suspect(f"node {node} (median of {len(members)})", node, None, None)
            yield node, metric, rule(node_suspect, middle, value, median) if node_is_slow else _node_result(results)
        if len(members) < MIN_COMPARABLE:
            for (rank, _), verdict in zip(members, results, strict=True):
                yield node, f"{metric} of {rank.suspect.rank}", False if node_is_slow else verdict


def _node_result(results: Sequence[RuleResult]) -> RuleResult:
    """Return the result of a node that is not slow as a whole: healthy if any member is."""
    return False if any(v is False for v in results) else None


def _sample_rank(snapshot: Snapshot, rank: int, gpu: int | None) -> _RankSample:
    device = f"rank{rank}"

    def value(field: str) -> float | None:
        return finite_or_none(snapshot.values.get(column_name(device, field)))

    clock = None if gpu is None else finite_or_none(snapshot.values.get(column_name(f"gpu{gpu}", "sm_clock_mhz")))
    phase = value("phase")
    return _RankSample(
        snapshot.t, value("step"), phase == heartbeat.TRAIN, (value("data_wait_s"), value("forward_s")), clock
    )


def _build_rates(suspect: Suspect, model: str | None, samples: list[_RankSample]) -> _RankRates:
    first, last = samples[0], samples[-1]
    num_steps = (last.step or 0.0) - (first.step or 0.0)
    clocks = [m.sm_clock_mhz for m in samples if m.sm_clock_mhz is not None]

    def per_step(index: int) -> float | None:
        start, end = first.counters[index], last.counters[index]
        return None if start is None or end is None or end < start or num_steps <= 0 else (end - start) / num_steps

    return _RankRates(
        suspect=suspect,
        model=model,
        sm_clock_mhz=sum(clocks) / len(clocks) if len(clocks) >= MIN_SAMPLES else None,
        step_s=(last.t - first.t) / num_steps if num_steps > 0 else None,
        data_wait_s=per_step(0),
        forward_s=per_step(1),
    )
