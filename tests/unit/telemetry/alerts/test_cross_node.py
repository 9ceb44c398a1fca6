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
    result, steps = [], minute * 120
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
        result.append(Snapshot(T0 + 60 * minute, 60.0 * minute, f"n{n}", facts, ranks, values))
    return result


def observe_minutes(nodes: int, gpus: int, change: Change = lambda node, v: None, minutes: int = 12) -> list[Alert]:
    rules, raised = CrossNodeRules(AlertsSpec(), "n0"), []
    for minute in range(1, minutes + 1):
        raised += rules.observe(snapshots(minute, nodes, gpus, change), T0 + 60 * minute, 60.0 * minute)
    return raised


def test_similar_nodes_raise_nothing() -> None:
    assert observe_minutes(4, 8, minutes=60) == []


def test_single_gpus_are_compared_across_nodes() -> None:
    raised = observe_minutes(4, 1, lambda node, v: v.update({"gpu0.sm_clock_mhz": 1400.0}) if node == "n2" else None)
    assert [(a.code, a.node, a.uuid, a.rank) for a in raised] == [("slow_gpu", "n2", "GPU-n2-0", 2)]


def test_slow_node_is_one_alert() -> None:
    def slow(node: str, v: dict[str, float]) -> None:
        if node == "n1":
            v |= {f"gpu{i}.sm_clock_mhz": 1400.0 for i in range(8)}

    raised = observe_minutes(4, 8, slow)
    assert [(a.node, a.uuid, a.rank) for a in raised] == [("n1", None, None)]
    assert "node n1" in raised[0].text


def test_single_slow_gpu_is_left_to_its_agent() -> None:
    assert (
        observe_minutes(4, 8, lambda node, v: v.update({"gpu3.sm_clock_mhz": 1400.0}) if node == "n2" else None) == []
    )


def test_node_waiting_for_data() -> None:
    def waiting(node: str, v: dict[str, float]) -> None:
        if node == "n3":
            v |= {k: x * 30 for k, x in v.items() if k.endswith("data_wait_s")}

    raised = observe_minutes(4, 2, waiting)
    assert {(a.code, a.node) for a in raised} == {("straggler_data", "n3")}
    assert "data" in raised[0].text and len(raised) == 1


def test_alert_clears_when_node_recovers() -> None:
    rules, raised = CrossNodeRules(AlertsSpec(), "n0"), []
    for minute in range(1, 31):
        values = {"gpu0.sm_clock_mhz": 1400.0 if minute < 12 else 1900.0}
        now = snapshots(minute, 4, 1, lambda node, v, values=values: v.update(values) if node == "n2" else None)
        raised += rules.observe(now, T0 + 60 * minute, 60.0 * minute)
    assert [(a.state, a.node) for a in raised] == [("raised", "n2"), ("cleared", "n2")]


def test_silent_or_idle_nodes_are_no_stragglers() -> None:
    def odd(node: str, v: dict[str, float]) -> None:
        if node == "n1":
            v.clear()
        if node == "n2":
            v |= dict.fromkeys(v, math.nan)
        if node == "n3":
            v |= {k: float(heartbeat.EVALUATION) for k in v if k.endswith("phase")} | {"gpu0.sm_clock_mhz": 300.0}

    assert observe_minutes(6, 1, odd) == []
    rules = CrossNodeRules(AlertsSpec(), "n0")
    old = snapshots(1, 4, 1, lambda node, v: v.update({"gpu0.sm_clock_mhz": 300.0}) if node == "n2" else None)
    assert [a for i in range(30) for a in rules.observe(old, T0 + i, 60.0 * i)] == []


class Events(list[dict[str, Any]]):
    def __call__(self, name: str, **fields: Any) -> None:
        self.append({"event": name, **fields})


@pytest.fixture
def events() -> Events:
    return Events()


def test_monitor_raises_alert_of_snapshot(events: Events) -> None:
    alert_monitor = AlertMonitor(AlertsSpec(), "n0", events, run="r")
    alert_monitor.start()
    for s in range(30):
        values = {"gpu0.memory_used_bytes": float(80 << 30)}
        alert_monitor.observe(
            Snapshot(T0 + s, float(s), "n0", [GpuFacts("GPU-0", 0, 0, "H100", 80 << 30, ranks=[0])], [0], values)
        )
    alert_monitor.record_error("xid", "GPU-0", xid=79)
    assert alert_monitor.stop()
    assert [(e["event"], e["code"]) for e in events] == [("alert", "memory_nearly_full"), ("alert", "xid")]


def test_failing_rule_is_reported_once(events: Events) -> None:
    alert_monitor = AlertMonitor(AlertsSpec(), "n0", events, run="r")
    for _ in range(5):
        alert_monitor.observe(None)  # type: ignore[arg-type]
    assert [e["event"] for e in events] == ["telemetry_failed"]
    assert alert_monitor.stop()


def test_first_node_reads_others_from_run_folder(
    events: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "COMPARE_INTERVAL_S", 0.01)
    for n in range(3):
        writer = Writer(tmp_path / f"n{n}")
        node_snapshot = snapshots(1, 3, 1)[n]
        fast, slow = (
            fields.column_names(1, node_snapshot.ranks, FAST),
            fields.column_names(1, node_snapshot.ranks, SLOW),
        )
        header = Header(
            node=node_snapshot.node,
            t=T0,
            mono=0.0,
            interval_s=1.0,
            gpus=node_snapshot.gpus,
            ranks=node_snapshot.ranks,
            fast=fast,
            slow=slow,
        )
        writer.begin(header)
        writer.fast(1.0, np.array([node_snapshot.values.get(c, math.nan) for c in fast]))
        writer.close()
    alert_monitor = AlertMonitor(AlertsSpec(), "n0", events, run="r", telemetry=tmp_path)
    alert_monitor.start()
    assert clock.wait_until(lambda: len(alert_monitor._rules.remote_steps) == 3, 20, 0.01)
    assert alert_monitor._rules.remote_steps == {0: 120, 1: 120, 2: 120}
    alert_monitor.quiet()
    assert alert_monitor.stop()
    assert events == []
    assert not [t for t in threading.enumerate() if t.name.startswith("alerts")]
