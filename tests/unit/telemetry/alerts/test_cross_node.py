"""Comparison of nodes, and the monitor as an observer of the sampler."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustertrain import clock
from clustertrain.config.telemetry import AlertsSpec
from clustertrain.run import heartbeat
from clustertrain.telemetry import fields
from clustertrain.telemetry.alerts import monitor
from clustertrain.telemetry.alerts.cross_node import CrossNodeRules
from clustertrain.telemetry.alerts.gate import Alert
from clustertrain.telemetry.alerts.monitor import AlertMonitor
from clustertrain.telemetry.fields import FAST, SLOW
from clustertrain.telemetry.snapshot import Snapshot
from clustertrain.telemetry.store.writer import GpuFacts, Header, Writer

T0 = 1_790_000_000.0
Change = Callable[[str, dict[str, float]], None]


def snapshots(minute: int, nodes: int, gpus: int, change: Change = lambda node, v: None) -> list[Snapshot]:
    """Return snapshots of all nodes after ``minute`` minutes of half-second steps."""
    found, steps = [], minute * 120
    for n in range(nodes):
        ranks = [n * gpus + i for i in range(gpus)]
        facts = [GpuFacts(f"GPU-n{n}-{i}", i, i, "H100", 80 << 30, ranks=[r]) for i, r in enumerate(ranks)]
        values = {f"gpu{i}.sm_clock_mhz": 1900.0 + (n * 7 + i * 3 + minute) % 20 for i in range(gpus)}
        for r in ranks:
            values |= {
                f"rank{r}.step": float(steps), f"rank{r}.phase": float(heartbeat.TRAIN),
                f"rank{r}.data_wait_s": steps * 0.004, f"rank{r}.forward_s": steps * 0.15,
            }  # fmt: skip
        change(f"n{n}", values)
        found.append(Snapshot(T0 + 60 * minute, 60.0 * minute, f"n{n}", facts, ranks, values))
    return found


def observe_minutes(nodes: int, gpus: int, change: Change = lambda node, v: None, minutes: int = 12) -> list[Alert]:
    across, found = CrossNodeRules(AlertsSpec(), "n0"), []
    for minute in range(1, minutes + 1):
        found += across.observe(snapshots(minute, nodes, gpus, change), T0 + 60 * minute, 60.0 * minute)
    return found


def test_similar_nodes_raise_nothing() -> None:
    assert observe_minutes(4, 8, minutes=60) == []


def test_single_gpus_are_compared_across_nodes() -> None:
    found = observe_minutes(4, 1, lambda node, v: v.update({"gpu0.sm_clock_mhz": 1400.0}) if node == "n2" else None)
    assert [(a.code, a.node, a.uuid, a.rank) for a in found] == [("slow_gpu", "n2", "GPU-n2-0", 2)]


def test_slow_node_is_one_alert() -> None:
    def slow(node: str, v: dict[str, float]) -> None:
        if node == "n1":
            v |= {f"gpu{i}.sm_clock_mhz": 1400.0 for i in range(8)}

    found = observe_minutes(4, 8, slow)
    assert [(a.node, a.uuid, a.rank) for a in found] == [("n1", None, None)]
    assert "node n1" in found[0].text


def test_single_slow_gpu_is_left_to_its_agent() -> None:
    assert (
        observe_minutes(4, 8, lambda node, v: v.update({"gpu3.sm_clock_mhz": 1400.0}) if node == "n2" else None) == []
    )


def test_node_waiting_for_data() -> None:
    def waiting(node: str, v: dict[str, float]) -> None:
        if node == "n3":
            v |= {k: x * 30 for k, x in v.items() if k.endswith("data_wait_s")}

    found = observe_minutes(4, 2, waiting)
    assert {(a.code, a.node) for a in found} == {("straggler_data", "n3")}
    assert "data" in found[0].text and len(found) == 1


def test_alert_clears_when_node_recovers() -> None:
    across, found = CrossNodeRules(AlertsSpec(), "n0"), []
    for minute in range(1, 31):
        values = {"gpu0.sm_clock_mhz": 1400.0 if minute < 12 else 1900.0}
        now = snapshots(minute, 4, 1, lambda node, v, values=values: v.update(values) if node == "n2" else None)
        found += across.observe(now, T0 + 60 * minute, 60.0 * minute)
    assert [(a.state, a.node) for a in found] == [("raised", "n2"), ("cleared", "n2")]


def test_silent_or_idle_nodes_are_no_stragglers() -> None:
    def odd(node: str, v: dict[str, float]) -> None:
        if node == "n1":
            v.clear()
        if node == "n2":
            v |= dict.fromkeys(v, math.nan)
        if node == "n3":
            v |= {k: float(heartbeat.EVALUATION) for k in v if k.endswith("phase")} | {"gpu0.sm_clock_mhz": 300.0}

    assert observe_minutes(6, 1, odd) == []
    across = CrossNodeRules(AlertsSpec(), "n0")
    old = snapshots(1, 4, 1, lambda node, v: v.update({"gpu0.sm_clock_mhz": 300.0}) if node == "n2" else None)
    assert [a for i in range(30) for a in across.observe(old, T0 + i, 60.0 * i)] == []


class Events(list[dict[str, Any]]):
    def __call__(self, name: str, **fields: Any) -> None:
        self.append({"event": name, **fields})


@pytest.fixture
def events() -> Events:
    return Events()


def test_monitor_raises_alert_of_snapshot(events: Events) -> None:
    it = AlertMonitor(AlertsSpec(), "n0", events, run="r")
    it.start()
    for s in range(30):
        values = {"gpu0.memory_used_bytes": float(80 << 30)}
        it.observe(
            Snapshot(T0 + s, float(s), "n0", [GpuFacts("GPU-0", 0, 0, "H100", 80 << 30, ranks=[0])], [0], values)
        )
    it.record_error("xid", "GPU-0", xid=79)
    assert it.stop()
    assert [(e["event"], e["code"]) for e in events] == [("alert", "memory_nearly_full"), ("alert", "xid")]


def test_failing_rule_is_reported_once(events: Events) -> None:
    it = AlertMonitor(AlertsSpec(), "n0", events, run="r")
    for _ in range(5):
        it.observe(None)  # type: ignore[arg-type]
    assert [e["event"] for e in events] == ["telemetry_failed"]
    assert it.stop()


def test_first_node_reads_others_from_run_dir(events: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "COMPARE_INTERVAL_S", 0.01)
    for n in range(3):
        writer = Writer(tmp_path / f"n{n}")
        one = snapshots(1, 3, 1)[n]
        fast, slow = fields.column_names(1, one.ranks, FAST), fields.column_names(1, one.ranks, SLOW)
        head = Header(
            node=one.node, t=T0, mono=0.0, interval_s=1.0, gpus=one.gpus, ranks=one.ranks, fast=fast, slow=slow
        )
        writer.begin(head)
        writer.fast(1.0, np.array([one.values.get(c, math.nan) for c in fast]))
        writer.close()
    it = AlertMonitor(AlertsSpec(), "n0", events, run="r", telemetry=tmp_path)
    it.start()
    assert clock.wait_until(lambda: len(it._rules.remote_steps) == 3, 20, 0.01)
    assert it._rules.remote_steps == {0: 120, 1: 120, 2: 120}
    it.quiet()
    assert it.stop()
    assert events == []
    assert not [t for t in threading.enumerate() if t.name.startswith("alerts")]
