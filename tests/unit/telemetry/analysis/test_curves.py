from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest

from clustertrain.run.run_dir import RunDir
from clustertrain.telemetry import fields
from clustertrain.telemetry.analysis.curves import Curves, build_curves
from clustertrain.telemetry.report_schema import (
    AttemptSummary,
    GpuSummary,
    HostSummary,
    Insight,
    Stats,
    Summary,
    Timeline,
    TimeWindow,
)
from clustertrain.telemetry.store.writer import GpuFacts, Header, Writer

T0 = 1_790_000_000.0


def record(run: RunDir, node: str, uuids: list[str], seconds: int, *, start: float = T0, attempt: int = 1) -> None:
    """Record a node: GPU i has a utilization of (i + 1) / 10, uses 100 (i + 1) W and sends 5 MB/s over PCIe."""
    fast, slow = fields.column_names(len(uuids), [], fields.FAST), fields.column_names(len(uuids), [], fields.SLOW)
    folder = run.attempt(attempt).telemetry / node
    gpus = [GpuFacts(uuid) for uuid in uuids]
    writer = Writer(folder)
    writer.begin(Header(node=node, t=start, mono=5.0, interval_s=1.0, gpus=gpus, fast=fast, slow=slow))
    for d in range(seconds):
        values = {"host.cpu": 0.25, "host.network_rx_bytes": 1e6 * d, "host.network_tx_bytes": 2e6 * d}
        for i in range(len(uuids)):
            values |= {f"gpu{i}.utilization": (i + 1) / 10, f"gpu{i}.power_w": 100.0 * (i + 1)}
            values |= {f"gpu{i}.pcie_tx_bytes": 5e6 * d, f"gpu{i}.pcie_rx_bytes": 7.0}
        writer.fast(float(d), np.array([values.get(c, np.nan) for c in fast]))
        if d % 10 == 0:
            writer.slow(float(d), np.array([values.get(c, np.nan) for c in slow]))
    writer.end(float(seconds))
    writer.close()


def gpu(node: str, uuid: str, mean: float | None = 0.5) -> GpuSummary:
    return GpuSummary(
        node=node,
        uuid=uuid,
        index=0,
        name=None,
        ranks=[],
        attempts=[1],
        samples=1,
        samples_expected=1,
        utilization=None if mean is None else Stats(mean, mean, mean, mean, mean),
        memory_used_gib=None,
        memory_total_gib=None,
        power_w=None,
        energy_j=None,
        energy_source=None,
        temperature_c=None,
        sm_clock_mhz=None,
        memory_clock_mhz=None,
        timeline=Timeline(1.0, []),
        missing={},
    )


def host(node: str) -> HostSummary:
    return HostSummary(
        node=node,
        attempts=[1],
        samples=1,
        samples_expected=1,
        nvml_error=None,
        driver=None,
        allocation_source=None,
        cpu=None,
        cpu_count=None,
        memory_used_gib=None,
        memory_total_gib=None,
        load1=None,
        processes=None,
        missing={},
    )


def summary(gpus: list[GpuSummary], seconds: float, attempts: int = 1, start: float = T0) -> Summary:
    nodes = list(dict.fromkeys(g.node for g in gpus))
    window = TimeWindow(start, start + seconds)
    return Summary(
        run="r",
        job_id=None,
        window=window,
        coverage=None,
        attempts=[AttemptSummary(n + 1, None, window, nodes) for n in range(attempts)],
        gpus=gpus,
        hosts=[host(n) for n in nodes],
        insights=[],
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def finite_values(matrix: np.ndarray) -> np.ndarray:
    finite: np.ndarray = matrix[np.isfinite(matrix)]
    return finite


def test_samples_of_two_nodes_on_one_grid(run: RunDir) -> None:
    record(run, "a", ["U0", "U1"], 200)
    record(run, "b", ["U2"], 100, start=T0 + 50)
    curves = build_curves(run, summary([gpu("a", "U0"), gpu("a", "U1"), gpu("b", "U2")], 200))
    use = curves.gpus.values["utilization"]
    assert use.shape == (3, curves.gpus.points) and curves.gpus.start == T0
    assert finite_values(use[0]) == pytest.approx(0.1) and finite_values(use[1]) == pytest.approx(0.2)
    covered = np.isfinite(use[2])
    assert covered.sum() * curves.gpus.step_s == pytest.approx(100, abs=2 * curves.gpus.step_s)
    assert not covered[: int(48 / curves.gpus.step_s)].any(), "before its first sample"
    assert finite_values(curves.gpus.values["pcie_bytes_per_s"]) == pytest.approx(5e6, rel=1e-3), (
        "counters are rates, both ways summed"
    )
    assert "temperature_c" not in curves.gpus.values, "a curve without samples is left out"
    assert finite_values(curves.hosts.values["network_bytes_per_s"]) == pytest.approx(3e6, rel=1e-3)
    assert "2 s" in curves.source and curves.choice is None


def test_pooled_curves_ignore_missing_gpus(run: RunDir) -> None:
    record(run, "a", ["U0", "U1"], 200)
    record(run, "b", ["U2", "U3", "U4"], 100)
    gpus = [gpu("a", "U0"), gpu("a", "U1"), *(gpu("b", f"U{i}") for i in (2, 3, 4))]
    curves = build_curves(run, summary(gpus, 200))
    mean, low, high = curves.overall.values["power_w"]
    early, late = 10, int(150 / curves.overall.step_s)
    assert (mean[early], low[early], high[early]) == pytest.approx((180, 100, 300))
    assert (mean[late], low[late], high[late]) == pytest.approx((150, 100, 200))
    assert curves.node_names == ["a", "b"]
    assert curves.nodes.values["power_w"][:, early] == pytest.approx([150, 200])
    assert np.isnan(curves.nodes.values["power_w"][1, late])


@pytest.mark.long
def test_long_run_uses_rollup(run: RunDir) -> None:
    record(run, "a", ["U0"], 4 * 3600 + 600)
    curves = build_curves(run, summary([gpu("a", "U0")], 4 * 3600 + 600))
    assert curves.gpus.step_s == 60 and curves.source == "Each point is the mean of 1 min."
    use = curves.gpus.values["utilization"][0]
    assert np.isfinite(use[:250]).all(), "gap between two buckets"
    assert finite_values(use) == pytest.approx(0.1, rel=1e-3)


def test_two_attempts_with_pause(run: RunDir) -> None:
    record(run, "a", ["U0"], 100)
    record(run, "a", ["U0"], 100, start=T0 + 300, attempt=2)
    curves = build_curves(run, summary([gpu("a", "U0")], 400, attempts=2))
    covered = np.isfinite(curves.gpus.values["utilization"][0])
    pause = slice(int(110 / curves.gpus.step_s), int(290 / curves.gpus.step_s))
    assert covered[5] and covered[-5] and not covered[pause].any()


def test_curves_cover_only_the_summary(run: RunDir) -> None:
    record(run, "a", ["U0", "U1"], 200)
    record(run, "b", ["U2"], 200)
    curves = build_curves(run, summary([gpu("a", "U1")], 50, start=T0 + 100))
    assert curves.gpus.values["power_w"].shape == (1, curves.gpus.points)
    assert finite_values(curves.gpus.values["power_w"]) == pytest.approx(200)
    assert curves.gpus.points * curves.gpus.step_s <= 60 and curves.node_names == ["a"]


def test_training_curves(run: RunDir) -> None:
    record(run, "a", ["U0"], 100)
    rows = [{"step": i, "t": T0 + 10 * i, "step_s": 10.0, "loss": 3.0 - i / 10, "lr": 1e-4} for i in range(10)]
    rows[3]["validation_loss"] = 2.0
    rows += [{"step": 10, "t": T0 + 99, "step_s": "broken", "loss": None}, {"step": 11, "t": None, "loss": 1.0}]
    run.metrics.mkdir()
    run.metrics_path(1).write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 12, "t": 17900')
    curves = build_curves(run, summary([gpu("a", "U0")], 100)).training
    assert finite_values(curves.values["step_s"]) == pytest.approx(10.0)
    loss = curves.values["loss"][0]
    assert np.isfinite(loss[:-1]).all(), "steps longer than a point leave no gaps"
    assert loss[0] > loss[-2] and finite_values(curves.values["lr"]) == pytest.approx(1e-4)
    validation = curves.values["validation_loss"][0]
    assert np.isnan(validation[0]) and finite_values(validation) == pytest.approx(2.0) and np.isfinite(validation[-2])
    assert "validation_accuracy" not in curves.values


def many_gpus(nodes: int, each: int) -> list[GpuSummary]:
    return [gpu(f"n{n:03d}", f"U{n}-{i}", 0.9 if n else 0.2) for n in range(nodes) for i in range(each)]


def test_worst_of_many_gpus_have_curves(run: RunDir) -> None:
    gpus = many_gpus(20, 8)
    gpus[100] = msgspec.structs.replace(gpus[100], utilization=None)
    whole = summary(gpus, 7 * 86400)
    named = Insight(severity="warning", code="hot", text="hot", uuid="U9-3")
    curves: Curves = build_curves(run, msgspec.structs.replace(whole, insights=[named]))
    assert len(curves.chosen) == 64 and curves.chosen == sorted(curves.chosen)
    assert 9 * 8 + 3 in curves.chosen, "an insight names it"
    assert set(range(8)) <= set(curves.chosen), "the least used"
    assert 100 in curves.chosen, "its utilization is unknown"
    assert curves.choice is not None and "64 of 160 GPUs" in curves.choice and "named in insights" in curves.choice


@pytest.mark.long
def test_heat_map_has_every_gpu(run: RunDir) -> None:
    for n in range(70):
        record(run, f"n{n:03d}", [f"U{n}-0"], 70)
    curves = build_curves(run, summary(many_gpus(70, 1), 600))
    assert len(curves.gpus.values["power_w"]) == 64 == len(curves.node_names)
    assert curves.heat.values["utilization"].shape == (70, curves.heat.points)
    assert np.isfinite(curves.heat.values["utilization"]).any(axis=1).all()
    assert curves.choice is not None and "64 of 70 GPUs" in curves.choice and "64 of 70 nodes" in curves.choice


def test_missing_and_damaged_samples(run: RunDir) -> None:
    empty = msgspec.structs.replace(summary([], 0), window=TimeWindow(None, None))
    assert build_curves(run, empty).overall.values == {}
    record(run, "a", ["U0"], 60)
    record(run, "b", ["U1"], 60)
    (run.attempt(1).telemetry / "b" / "0" / "header.json").write_text("{")
    curves = build_curves(run, summary([gpu("a", "U0"), gpu("b", "U1")], 60))
    assert np.isfinite(curves.gpus.values["power_w"][0]).any()
    assert not np.isfinite(curves.gpus.values["power_w"][1]).any()


@pytest.mark.long
def test_million_steps_take_bounded_memory(run: RunDir) -> None:
    """Memory does not grow with the number of logged rows."""
    row = '{"step":%d,"t":%f,"step_s":1.0,"loss":2.5,' + ",".join(f'"layer{i}":0.125' for i in range(10)) + "}\n"
    steps = 50_000
    path = run.metrics_path(1)
    path.parent.mkdir(parents=True)
    path.write_text("".join(row % (i, T0 + i) for i in range(steps)))
    tracemalloc.start()
    try:
        curves = build_curves(run, summary([], steps))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.nanmean(curves.training.values["loss"]) == pytest.approx(2.5)
    assert peak < 500 * steps
