from __future__ import annotations

from typing import Any

import pytest

from clustertrain.telemetry.report_schema import (
    AttemptSummary,
    ErrorCounts,
    ProcessSummary,
    Stats,
    Summary,
    TimeWindow,
    Waste,
    XidRecord,
)
from tests.unit.telemetry.summaries import (
    T0,
    build_insights,
    codes,
    healthy,
    replace,
    stats,
    with_gpu,
    with_gpus,
)


def single_note(summary: Summary, code: str) -> Any:
    (insight,) = (n for n in build_insights(summary) if n.code == code)
    return insight


@pytest.mark.parametrize(
    ("errors", "severity", "code"),
    [
        (ErrorCounts(ecc_uncorrected=2), "critical", "ecc_uncorrected"),
        (ErrorCounts(ecc_corrected=5000), "info", "ecc_corrected"),
        (ErrorCounts(remap_failed=True), "critical", "row_remap_failed"),
        (ErrorCounts(remap_pending=True, remapped_rows=1), "warning", "row_remap_pending"),
        (ErrorCounts(remapped_rows=1), "info", "rows_remapped"),
        (ErrorCounts(nvlink_errors=1000), "warning", "nvlink_errors"),
        (ErrorCounts(pcie_replays=1000), "warning", "pcie_replays"),
    ],
    ids=["uncorrected", "corrected", "remap-failed", "remap-pending", "remapped", "nvlink", "pcie"],
)
def test_gpu_errors(errors: ErrorCounts, severity: str, code: str) -> None:
    insight = single_note(with_gpu(healthy(), "n2", 0, errors=errors), code)
    assert (insight.severity, insight.node, insight.uuid, insight.rank) == (severity, "n2", "GPU-n2-0-5b1c9f0e", 2)


def test_usual_errors_are_ignored() -> None:
    usual = ErrorCounts(ecc_corrected=3, ecc_uncorrected=0, remapped_rows=0, nvlink_errors=5, pcie_replays=12)
    assert codes(with_gpus(healthy(), errors=usual), info=True) == ["energy", "power_limited"]


def test_one_note_per_xid_and_gpu() -> None:
    summary = with_gpu(
        healthy(), "n2", 0, errors=ErrorCounts(xids=[XidRecord(T0, 79), XidRecord(T0 + 1, 79), XidRecord(T0 + 2, 63)])
    )
    insights = [n for n in build_insights(summary) if n.code == "xid"]
    assert sorted(n.text.partition(":")[0] for n in insights) == [
        "GPU 0 of n2 reported XID 63",
        "GPU 0 of n2 reported XID 79 2 times",
    ]
    assert all((n.node, n.rank) == ("n2", 2) and n.fix for n in insights)


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        (ErrorCounts(ecc_uncorrected=1, xids=[XidRecord(T0, 48)]), "ecc_uncorrected"),
        (ErrorCounts(remap_pending=True, xids=[XidRecord(T0, 63)]), "row_remap_pending"),
    ],
    ids=["xid48", "xid63"],
)
def test_xid_and_its_counter_give_one_note(errors: ErrorCounts, code: str) -> None:
    assert codes(with_gpu(healthy(), "n2", 0, errors=errors)) == [code]


def test_nvlinks_down() -> None:
    assert (
        "2 of 18 NVLinks of GPU 0 of n2 went down"
        in single_note(with_gpu(healthy(), "n2", 0, nvlinks_active_min=16), "nvlink_down").text
    )
    fewer = with_gpu(healthy(), "n2", 0, nvlinks_active_min=12, nvlinks_active_max=12)
    assert "has 12 NVLinks up, the others of its model have 18" in single_note(fewer, "nvlink_down").text


def test_lost_gpu_is_reported_once() -> None:
    gone = "GPU_IS_LOST: the GPU has fallen off the bus"
    summary = with_gpu(healthy(), "n2", 0, utilization=stats(0.2), missing={"power_w": gone, "sm_clock_mhz": gone})
    assert codes(summary) == ["gpu_lost"]
    assert "submit --exclude n2" in single_note(summary, "gpu_lost").fix


def test_gpu_memory_over_requested() -> None:
    insight = single_note(with_gpus(healthy(), memory_used_gib=stats(12.0)), "memory_over_requested")
    assert insight.severity == "info"
    assert "12.4 of 80.0 GiB (15%) on the fullest of 8 GPUs" in insight.text
    assert "fewer GPUs" in insight.fix
    assert (
        "a MIG slice of 15 GiB"
        in single_note(with_gpus(healthy(1, 1), memory_used_gib=stats(12.0)), "memory_over_requested").fix
    )
    one = with_gpu(with_gpus(healthy(), memory_used_gib=stats(12.0)), "n1", 0, memory_used_gib=stats(70.0))
    assert codes(one, info=True) == ["energy", "power_limited"]


def test_host_memory_and_cores_over_requested() -> None:
    summary = healthy()
    small = ProcessSummary(stats(20.0), stats(2.0), 9)
    summary = replace(summary, hosts=[replace(h, processes=small) for h in summary.hosts])
    memory, cores = single_note(summary, "host_memory_over_requested"), single_note(summary, "cores_over_requested")
    assert memory.fix == "use --mem=25G, the peak plus 20 %"
    assert cores.fix == "use --cpus-per-gpu=2, the usage plus 20 %"
    assert "2.0 of 16 cores" in cores.text
    whole = replace(summary, hosts=[replace(h, cpu_allocated=96, memory_allocated_gib=1024.0) for h in summary.hosts])
    assert codes(whole, info=True) == ["energy", "power_limited"], "a whole node has no smaller size"


def test_host_memory_nearly_full() -> None:
    summary = healthy(1, 2)
    summary = replace(summary, hosts=[replace(summary.hosts[0], processes=ProcessSummary(stats(126.0), None, 9))])
    assert single_note(summary, "host_memory_nearly_full").node == "n1"


def test_gpu_hours() -> None:
    summary = healthy()
    waste = Waste(gpu_hours=16.0, wasted_gpu_hours=10.0, by_cause={"lost": 7.0, "startup": 3.0})
    insight = single_note(replace(summary, waste=waste), "gpu_hours_wasted")
    assert insight.severity == "warning"
    assert insight.text == "10.00 of 16.00 GPU-hours (62%) trained nothing: lost steps 7.00, start-up 3.00"
    idle = Waste(gpu_hours=16.0, wasted_gpu_hours=10.0, by_cause={"idle_gpus": 9.0, "startup": 1.0})
    assert single_note(replace(summary, waste=idle), "gpu_hours_wasted").severity == "info", (
        "each of them has an insight already"
    )


def test_lost_work() -> None:
    summary = healthy()
    assert summary.goodput is not None
    assert codes(replace(summary, goodput=replace(summary.goodput, repeated_s=700.0, lost_s=300.0))) == ["work_lost"]


def test_energy() -> None:
    assert single_note(healthy(), "energy").text == "the GPUs used 9.84 kWh, 7.9 mJ per token"
    partly_measured = with_gpu(healthy(), "n1", 0, energy_j=None)
    assert "(7 of 8 GPUs measured)" in single_note(partly_measured, "energy").text


def test_recording_problems() -> None:
    summary = healthy(1, 2)
    (host,) = summary.hosts
    assert single_note(replace(summary, hosts=[replace(host, samplers_max=2)]), "two_agents").node == "n1"
    stepped = single_note(replace(summary, hosts=[replace(host, clock_steps_s=[0.2, -37.5])]), "clock_stepped")
    assert (stepped.severity, "set 37.5 s back" in stepped.text) == ("info", True)
    assert codes(replace(summary, hosts=[replace(host, samples=100)])) == ["low_coverage"]
    unreadable = single_note(replace(summary, read_errors=[f"f{i}: permission denied" for i in range(9)]), "unreadable")
    assert "9 files could not be read" in unreadable.text
    assert "and 3 more" in unreadable.text


def test_unsupported_fields_give_one_note() -> None:
    nulls = dict.fromkeys(("power_w", "energy_j", "temperature_c"), "NOT_SUPPORTED: no")
    summary = with_gpus(healthy(), missing=nulls)
    assert single_note(summary, "field_missing").text == (
        "not recorded on 8 GPUs: power_w, energy_j, temperature_c (NOT_SUPPORTED: no)"
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "no attempt has started"),
        ({"attempts": [AttemptSummary(1, "7", TimeWindow(None, None), [])]}, "although 1 attempt began"),
        ({"enabled": False}, "the recipe disables telemetry"),
        ({"read_errors": ["attempts/1/telemetry: permission denied"]}, "no recording that this user may read"),
    ],
    ids=["not-started", "no-agent", "disabled", "unreadable"],
)
def test_run_without_samples_gives_reason(changes: dict[str, Any], text: str) -> None:
    empty: dict[str, Any] = dict.fromkeys(("coverage", "training", "goodput", "waste"))
    lists: dict[str, Any] = {name: [] for name in ("attempts", "gpus", "hosts", "ranks")}
    summary = replace(healthy(), window=TimeWindow(None, None), **{**empty, **lists, **changes})
    assert text in single_note(summary, "no_telemetry").text


def test_out_of_memory() -> None:
    ended = AttemptSummary(1, "7", TimeWindow(T0, T0 + 9), ["n1"], ending="out_of_memory")
    assert "attempt 1 ran out of memory" in single_note(replace(healthy(), attempts=[ended]), "out_of_memory").text
    assert "memory_nearly_full" in codes(with_gpu(healthy(), "n1", 0, memory_used_gib=Stats(60, 60, 60, 60, 79)))


def test_undelivered_alerts() -> None:
    failure = {"event": "alert_not_delivered", "channel": "webhook", "to": "https://chat/…", "reason": "404 Not Found"}
    log = [{"t": T0, "host": "n1", **failure}, {"t": T0 + 1, "host": "n2", **failure}]
    log.append({"t": T0 + 2, "host": "n2", **failure, "reason": "no answer in 10 s"})
    (insight,) = (n for n in build_insights(healthy(), log) if n.code == "alerts_not_delivered")
    assert insight.severity == "warning"
    assert insight.fix
    assert (
        insight.text
        == "alerts were not delivered by webhook https://chat/… on 2 nodes: 404 Not Found; no answer in 10 s"
    )


def test_failed_exporter() -> None:
    port = {"event": "exporter_failed", "reason": "127.0.0.1 port 9: Permission denied", "fix": "set port to 1024"}
    file = {"event": "exporter_failed", "reason": "/x/a.prom: No space left on device"}
    log = [{"t": T0, "host": "n1", **port}, {"t": T0, "host": "n2", **port}, {"t": T0 + 1, "host": "n1", **file}]
    log.append({"t": T0 + 1, "host": "n1", "event": "exporter_started", "textfile": "/x/b.prom"})
    summary = {n.text: n for n in build_insights(healthy(), log) if n.code == "exporter_failed"}
    ports = summary["the Prometheus exporter failed on 2 nodes: 127.0.0.1 port 9: Permission denied"]
    assert (ports.severity, ports.fix) == ("warning", "set port to 1024")
    assert summary["the Prometheus exporter failed on n1: /x/a.prom: No space left on device"].severity == "warning"
    log.append({"t": T0 + 9, "host": "n1", "event": "exporter_started", "textfile": "/x/a.prom"})
    again = [n for n in build_insights(healthy(), log) if "for a while on n1: /x/a.prom" in n.text]
    assert [n.severity for n in again] == ["info"]
