from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from clustertrain import fsio
from clustertrain.errors import NotFound, UsageError
from clustertrain.run.run_dir import RunDir
from clustertrain.run.usage.goodput import Goodput
from clustertrain.telemetry.analysis.curves import build_curves
from clustertrain.telemetry.analysis.summarize import WHOLE_RUN, SummaryRequest, summarize
from clustertrain.telemetry.report_schema import Summary
from tests.unit.telemetry.runs import GIB, T0, Reason, Row, busy, event, gpu, new_attempt, new_run, record


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return new_run(tmp_path)


def codes(summary: Summary) -> list[str]:
    return [n.code for n in summary.insights if n.code != "energy"]


def test_one_entry_per_allocated_gpu(run: RunDir) -> None:
    first, second = new_attempt(run, 1, "10", ["n1", "n2"]), new_attempt(run, 2, "11", ["n1", "n3"])
    for attempt, nodes, start in ((first, ("n1", "n2"), T0), (second, ("n1", "n3"), T0 + 500)):
        for node in nodes:
            record(attempt, [(gpu(i, node=node), busy(0.0 if i else 0.8)) for i in range(2)], node=node, start=start)
    summary = summarize(run)
    assert [(g.node, g.index, g.attempts) for g in summary.gpus] == [
        ("n1", 0, [1, 2]),
        ("n1", 1, [1, 2]),
        ("n2", 0, [1]),
        ("n2", 1, [1]),
        ("n3", 0, [2]),
        ("n3", 1, [2]),
    ]
    assert [h.node for h in summary.hosts] == ["n1", "n2", "n3"]
    assert summary.job_id == "11"
    assert [(a.n, a.job_id, a.nodes) for a in summary.attempts] == [(1, "10", ["n1", "n2"]), (2, "11", ["n1", "n3"])]
    assert (summary.window.start, summary.window.end) == (T0, T0 + 599)
    assert summary.coverage == 1.0
    second_only = summarize(run, SummaryRequest(attempt=2))
    assert {g.node for g in second_only.gpus} == {"n1", "n3"}
    assert second_only.window.start == T0 + 500


def test_values_and_units(run: RunDir) -> None:
    record(new_attempt(run), [(gpu(0), lambda s: [s / 100, s * GIB / 2, 100.0 + s, 40, 1500, 2619, 7.0 * s])])
    (entry,) = summarize(run).gpus
    assert entry.utilization is not None
    assert entry.memory_used_gib is not None
    use = entry.utilization
    assert (use.mean, use.max) == (0.495, 0.99)
    # From a histogram with 2 % bins.
    assert (use.p5, use.p50, use.p95) == pytest.approx((0.04, 0.49, 0.94), rel=0.02)
    assert entry.memory_used_gib.max == 49.5
    assert entry.memory_total_gib == 80.0
    assert (entry.energy_j, entry.energy_source) == (7.0 * 99, "counter")
    assert entry.missing == {}
    assert entry.timeline.step_s == 1.0
    assert len(entry.timeline.utilization) == 100
    (host,) = summarize(run).hosts
    assert host.cpu is not None
    assert host.processes is not None
    assert (host.cpu.mean, host.cpu_count, host.memory_total_gib) == (0.25, 96, 1024.0)
    assert (host.processes.rss_gib.max, host.processes.count_max) == (108.0, 51)


def test_json_has_documented_keys(run: RunDir) -> None:
    record(new_attempt(run), [(gpu(0), busy(0.0))])
    summary = msgspec.json.decode(msgspec.json.encode(summarize(run)))
    assert set(summary) >= {"run", "job_id", "window", "coverage", "attempts", "gpus", "hosts", "insights"}
    assert set(summary["window"]) == {"start", "end"}
    stats = {"mean", "p5", "p50", "p95", "max"}
    (entry,) = summary["gpus"]
    for key in ("utilization", "memory_used_gib", "power_w", "temperature_c", "sm_clock_mhz", "memory_clock_mhz"):
        assert set(entry[key]) == stats
    assert set(entry) >= {"node", "uuid", "index", "name", "ranks", "memory_total_gib", "energy_j", "missing"}
    assert set(summary["insights"][0]) == {"severity", "code", "text", "fix", "node", "uuid", "rank", "gpu_hours"}


def test_failed_field_is_null_with_reason(run: RunDir) -> None:
    def no_power(s: int) -> Row:
        return [0.0, GIB, None, 40, None if s < 25 else 300, 2619, None]

    reasons = [Reason(0.0, 0, f, "NOT_SUPPORTED: no") for f in ("power_w", "energy_j")]
    record(new_attempt(run), [(gpu(0), no_power)], reasons=[*reasons, Reason(0.0, 0, "sm_clock_mhz", "TIMEOUT: slow")])
    summary = summarize(run)
    (entry,) = summary.gpus
    assert (entry.power_w, entry.energy_j, entry.energy_source) == (None, None, None)
    assert entry.missing == {
        "power_w": "NOT_SUPPORTED: no",
        "energy_j": "NOT_SUPPORTED: no",
        "sm_clock_mhz": "TIMEOUT: slow (25 of 100 samples)",
    }
    assert codes(summary) == ["gpu_unused", "gpu_hours_wasted", "field_missing"]


def test_energy_from_power_without_counter(run: RunDir) -> None:
    def no_counter(s: int) -> Row:
        return [0.8, GIB, 200.0, 40, 1500, 2619, None]

    # The energy in a gap of 40 s in the middle is unknown and not interpolated.
    record(new_attempt(run), [(gpu(0), no_counter)], skip=lambda s: 30 <= s < 70)
    (entry,) = summarize(run).gpus
    assert (entry.energy_j, entry.energy_source) == (200.0 * (30 + 30), "power")


def test_energy_counter_reset(run: RunDir) -> None:
    record(new_attempt(run), [(gpu(0), lambda s: [0.8, GIB, 10.0, 40, 1, 1, 1e6 + 10 * s if s < 50 else 10.0 * s])])
    (entry,) = summarize(run).gpus
    assert entry.energy_j == 10.0 * (49 + 49)


def test_energy_adds_up_per_attempt(run: RunDir) -> None:
    for n in (1, 2):
        record(new_attempt(run, n), [(gpu(0), busy())], start=T0 + 1000 * n)
    (entry,) = summarize(run).gpus
    assert entry.energy_j == 2 * 99 * 400.0


def test_coverage_counts_agent_uptime(run: RunDir) -> None:
    record(new_attempt(run), [(gpu(0), busy())], seconds=80, skip=lambda s: s >= 40 and s < 60, ended=99.5)
    summary = summarize(run)
    assert summary.coverage == 0.6
    (entry,) = summary.gpus
    assert (entry.samples, entry.samples_expected) == (60, 100)
    assert codes(summary) == ["low_coverage"]
    assert "60% of its samples (60 of 100)" in summary.insights[0].text


def test_lost_gpu_lowers_coverage(run: RunDir) -> None:
    attempt = new_attempt(run)
    reason = "GPU_IS_LOST: gone"
    reasons = [Reason(50.0, 1, f, reason) for f in ("utilization", "power_w")]
    record(attempt, [(gpu(0), busy()), (gpu(1), lambda s: busy()(s) if s < 50 else None)], reasons=reasons, ended=99.0)
    event(attempt, "gpu_lost", "n1", T0 + 50, uuid="GPU-n1-1", index=1, reason=reason)
    summary = summarize(run)
    assert summary.coverage == 0.75
    (insight,) = (n for n in summary.insights if n.code == "gpu_lost")
    assert (insight.severity, insight.node, insight.uuid, insight.rank) == ("critical", "n1", "GPU-n1-1", 1)
    assert insight.text == "GPU 1 of n1 was lost (GPU_IS_LOST: gone)"
    event(attempt, "gpu_back", "n1", T0 + 80, uuid="GPU-n1-1", index=1)
    assert "lost for a while" in next(n.text for n in summarize(run).insights if n.code == "gpu_lost")


@pytest.mark.parametrize(
    ("utilization", "seconds", "severity"),
    [(0.1, 100, "critical"), (0.4, 100, "warning"), (0.1, 30, "info"), (0.65, 100, "warning"), (0.75, 100, None)],
)
def test_low_utilization(run: RunDir, utilization: float, seconds: int, severity: str | None) -> None:
    record(new_attempt(run), [(gpu(0), busy(utilization))], seconds=seconds)
    assert [n.severity for n in summarize(run).insights if n.code == "low_utilization"] == [severity] * bool(severity)


def test_nearly_full_memory(run: RunDir) -> None:
    record(new_attempt(run), [(gpu(0), busy(used_gib=78))])
    summary = summarize(run)
    assert codes(summary) == ["memory_nearly_full"]
    assert "78.0 of 80.0 GiB" in summary.insights[0].text


def test_missing_nvml_gives_reason_and_keeps_host(run: RunDir) -> None:
    reason = "LIBRARY_NOT_FOUND: libnvidia-ml.so.1 not found: no NVIDIA driver on this machine"
    record(new_attempt(run), [], nvml=reason)
    summary = summarize(run)
    assert summary.gpus == []
    assert summary.hosts[0].nvml_error == reason
    assert summary.coverage == 1.0
    assert codes(summary) == ["no_nvml"]
    assert reason in summary.insights[0].text


def test_node_without_file_counts_its_gpus(run: RunDir) -> None:
    attempt = new_attempt(run)
    event(attempt, "agent_started", "n1", T0, gpus=[msgspec.to_builtins(gpu(0))])
    event(attempt, "ranks_ended", "n1", T0 + 59.5, ending="failed", exit_code=1)
    summary = summarize(run)
    (entry,) = summary.gpus
    assert (entry.uuid, entry.samples, entry.samples_expected, entry.utilization) == ("GPU-n1-0", 0, 60, None)
    assert entry.missing["utilization"] == "no sample was recorded"
    assert summary.coverage == 0.0
    assert codes(summary) == ["no_telemetry"]


def test_allocated_gpu_missing_in_nvml(run: RunDir) -> None:
    reason = "NOT_FOUND: NVML lists no device with minor 2"
    missing = msgspec.structs.replace(gpu(2), uuid="missing-minor-2", index=None, name=None, reason=reason)
    missing = msgspec.structs.replace(missing, memory_total_bytes=None)
    record(new_attempt(run), [(gpu(0), busy()), (missing, lambda s: None)])
    summary = summarize(run)
    assert [g.uuid for g in summary.gpus] == ["GPU-n1-0", "missing-minor-2"]
    assert summary.gpus[1].missing["memory_total_gib"] == reason
    assert "gpu_missing" in codes(summary)


def test_run_without_telemetry(run: RunDir) -> None:
    summary = summarize(run)
    assert (summary.gpus, summary.hosts, summary.coverage, summary.window.start) == ([], [], None, None)
    assert codes(summary) == ["no_telemetry"]
    new_attempt(run)
    assert [a.n for a in summarize(run).attempts] == [1]


@pytest.mark.parametrize(
    ("selector", "uuids"),
    [("1", ["GPU-n1-1", "GPU-n2-1"]), ("n2:1", ["GPU-n2-1"]), ("gpu-N1", ["GPU-n1-0", "GPU-n1-1"])],
    ids=["index", "node-and-index", "uuid-prefix"],
)
def test_select_gpus(run: RunDir, selector: str, uuids: list[str]) -> None:
    attempt = new_attempt(run)
    for node in ("n1", "n2"):
        record(attempt, [(gpu(i, node=node), busy()) for i in range(2)], node=node)
    summary = summarize(run, SummaryRequest(gpu=selector))
    assert [g.uuid for g in summary.gpus] == uuids
    assert {h.node for h in summary.hosts} == {g.node for g in summary.gpus}


def test_invalid_selection_raises(run: RunDir) -> None:
    record(new_attempt(run), [(gpu(0), busy())])
    with pytest.raises(UsageError, match="no allocated GPU") as e:
        summarize(run, SummaryRequest(gpu="n1:7"))
    assert e.value.fix == "give one of n1:0 (GPU-n1-0)"
    with pytest.raises(NotFound, match="no attempt 3") as missing:
        summarize(run, SummaryRequest(attempt=3))
    assert missing.value.fix == "attempts so far: 1"


def test_since_counts_from_newest_sample(run: RunDir) -> None:
    record(new_attempt(run, 1), [(gpu(0), busy(0.1))])
    record(new_attempt(run, 2), [(gpu(0), lambda s: busy(0.2 if s < 89.5 else 0.9)(s))], start=T0 + 1000)
    (entry,) = summarize(run, SummaryRequest(since_s=9.5)).gpus
    assert entry.utilization is not None
    assert (entry.samples, entry.samples_expected, entry.utilization.mean, entry.attempts) == (10, 10, 0.9, [2])


def test_two_samplers_in_one_attempt(run: RunDir) -> None:
    attempt = new_attempt(run)
    record(attempt, [(gpu(0), busy(0.2))], seconds=50)
    record(attempt, [(gpu(0), busy(0.6))], start=T0 + 200, seconds=50)
    (entry,) = summarize(run).gpus
    assert entry.utilization is not None
    assert (entry.samples, entry.samples_expected, entry.utilization.mean) == (100, 100, 0.4)


def test_sampler_failure_is_note(run: RunDir) -> None:
    attempt = new_attempt(run)
    record(attempt, [(gpu(0), busy())], ended=400)
    event(attempt, "telemetry_failed", "n1", T0 + 100, reason="ValueError: a bug")
    assert codes(summarize(run)) == ["low_coverage", "telemetry_failed"]


def test_clock_step_keeps_coverage(run: RunDir) -> None:
    attempt = new_attempt(run)
    record(attempt, [(gpu(0), busy())], seconds=600)
    # An hour forward, between the last sample and the end.
    event(attempt, "ranks_ended", "n1", T0 + 599.5 + 3600, monotonic_s=599.5, ending="completed", exit_code=0)
    summary = summarize(run)
    assert summary.coverage == 1.0
    assert summary.waste is not None and summary.waste.gpu_hours == pytest.approx(600 / 3600, abs=0.001)


def test_clock_step_makes_no_second_agent(run: RunDir) -> None:
    attempt = new_attempt(run)
    record(attempt, [], nvml="DRIVER_NOT_LOADED: not yet", seconds=30)
    record(attempt, [(gpu(0), busy())], start=T0 + 28.0, mono=31.0, seconds=500)
    summary = summarize(run)
    assert summary.gpus[0].samples == 500
    assert "two_agents" not in codes(summary)


def test_longer_recording_of_two_agents_counts(run: RunDir) -> None:
    attempt = new_attempt(run)
    record(attempt, [(gpu(0), busy(0.1))], seconds=60)
    record(attempt, [(gpu(0), busy(0.7))], start=T0 + 1, seconds=500)
    record(attempt, [(gpu(0), busy(0.7))], start=T0 + 502, seconds=100)  # the driver returned
    summary = summarize(run)
    assert summary.gpus[0].samples == summary.gpus[0].samples_expected == 600
    assert summary.gpus[0].utilization is not None and summary.gpus[0].utilization.mean == pytest.approx(0.7)
    assert "two_agents" in codes(summary)
    curve = build_curves(run, summary).gpus.values["utilization"]
    assert curve[np.isfinite(curve)] == pytest.approx(0.7)


def test_late_nvml_is_reported(run: RunDir) -> None:
    attempt = new_attempt(run)
    record(attempt, [], nvml="DRIVER_NOT_LOADED: not yet", seconds=500)
    record(attempt, [(gpu(0), busy()), (gpu(1), busy())], start=T0 + 500, seconds=100)
    summary = summarize(run)
    assert summary.coverage == pytest.approx(1 / 6, abs=0.001)
    assert [(g.samples, g.samples_expected) for g in summary.gpus] == [(100, 600)] * 2
    assert summary.gpus[0].missing["power_w"] == "no NVML: DRIVER_NOT_LOADED: not yet (500 of 600 samples)"
    assert summary.waste is not None and summary.waste.gpu_hours == pytest.approx(2 * 598 / 3600, abs=0.001)
    (insight,) = (n for n in summary.insights if n.code == "no_nvml")
    assert (insight.severity, insight.node) == ("warning", "n1")
    assert insight.text == "n1 had no GPU samples for 499 s: DRIVER_NOT_LOADED: not yet"
    assert [v is not None for v in summary.gpus[0].timeline.utilization].count(True) < 40
    assert build_curves(run, summary).gpus.values["utilization"].shape[0] == 2


def test_xids_before_window_are_not_counted(run: RunDir) -> None:
    attempt = new_attempt(run)
    record(attempt, [(gpu(0), busy())], seconds=300)
    event(attempt, "gpu_event", "n1", T0 + 10, uuid="GPU-n1-0", kind="xid", xid=94, count=1)
    event(attempt, "gpu_lost", "n1", T0 + 20, uuid="GPU-n1-0", index=0, reason="GPU_IS_LOST: gone")
    event(attempt, "gpu_back", "n1", T0 + 30, uuid="GPU-n1-0", index=0)
    event(attempt, "gpu_event", "n1", T0 + 280, uuid="GPU-n1-0", kind="xid", xid=13, count=7)
    summary = summarize(run)
    assert [(x.xid, x.count) for x in summary.gpus[0].errors.xids] == [(94, 1), (13, 7)]
    assert "XID 13 7 times" in next(n.text for n in summary.insights if "XID 13" in n.text)
    assert "gpu_lost" in codes(summary)
    late = summarize(run, SummaryRequest(since_s=60))
    assert [(x.xid, x.count) for x in late.gpus[0].errors.xids] == [(13, 7)]
    assert "gpu_lost" not in codes(late)


def test_gpu_listed_by_two_nodes_counts_once(run: RunDir) -> None:
    attempt = new_attempt(run, nodes=("n1", "n2"))
    for node in ("n1", "n2"):
        record(attempt, [(gpu(0, node="same"), busy())], node=node, seconds=101)
    summary = summarize(run)
    assert [g.energy_j for g in summary.gpus] == [400.0 * 100, None]
    assert summary.gpus[1].missing["energy_j"] == "counted for another node that has the same GPU"
    assert summary.waste is not None and summary.waste.gpu_hours == pytest.approx(100 / 3600, abs=0.0001)
    assert not any("of 2 GPUs measured" in n.text for n in summary.insights)
    assert summarize(run, SummaryRequest(gpu="n2:0")).gpus[0].energy_j == 400.0 * 100


def test_energy_from_power_with_missed_ticks(run: RunDir) -> None:
    def no_counter(s: int) -> Row:
        return [0.8, GIB, 200.0, 40, 1500, 2619, None]

    # The driver responds every third second, and not at all for 100 s.
    record(new_attempt(run), [(gpu(0), no_counter)], seconds=400, skip=lambda s: s % 3 != 0 or 201 <= s < 300)
    (entry,) = summarize(run).gpus
    assert entry.energy_j == pytest.approx(200.0 * 300, rel=0.02)


def with_steps(run: RunDir, attempt: int, start: float, steps: int, tokens: int = 1000) -> None:
    """Write metrics with one step per second."""
    log = fsio.JsonlAppender(run.metrics_path(attempt))
    log.append(*({"step": s, "t": start + s, "step_s": 1.0, "tokens_per_s": tokens} for s in range(1, steps + 1)))
    log.close()


def test_energy_per_token_uses_selected_time(run: RunDir) -> None:
    def joules(request: SummaryRequest = WHOLE_RUN) -> float | None:
        summary = summarize(run, request).training
        return None if summary is None else summary.joules_per_token

    for n in (1, 2):
        start = T0 + 1000 * n
        attempt = new_attempt(run, n)
        record(attempt, [(gpu(i), busy()) for i in range(2)], start=start, seconds=101)
        event(attempt, "started", "n1", start)
        with_steps(run, n, start, 100)
    expected = 2 * 400 / 1000
    assert joules(SummaryRequest(attempt=1)) == joules(SummaryRequest(attempt=2)) == pytest.approx(expected)
    assert joules(SummaryRequest(since_s=20)) == pytest.approx(expected, rel=0.06)
    assert joules(SummaryRequest(gpu="0")) is None
    summary = summarize(run, SummaryRequest(gpu="0")).training
    assert summary is not None and summary.energy_j == 2 * 100 * 400.0


def test_energy_per_token_needs_all_gpus(run: RunDir) -> None:
    def no_power(s: int) -> Row:
        return [0.8, GIB, None, 40, 1500, 2619, None]

    attempt = new_attempt(run)
    record(attempt, [(gpu(0), busy()), (gpu(1), no_power)], seconds=101)
    event(attempt, "started", "n1", T0)
    with_steps(run, 1, T0, 100)
    summary = summarize(run).training
    assert summary is not None and (summary.energy_j, summary.joules_per_token) == (400.0 * 100, None)


def test_attempt_without_recording_is_reported_and_hides_the_energy_per_token(run: RunDir) -> None:
    for n in (1, 2):
        start = T0 + 1000 * n
        attempt = new_attempt(run, n)
        event(attempt, "started", "n1", start)
        event(attempt, "first_step", "n1", start + 1, step=1, total=100)
        with_steps(run, n, start, 100)
    record(attempt, [(gpu(0), busy())], start=T0 + 2000, seconds=101)
    summary = summarize(run)
    assert summary.training is not None and summary.training.energy_j == 400.0 * 100
    assert summary.training.joules_per_token is None
    (note,) = (i for i in summary.insights if i.code == "no_telemetry")
    assert note.severity == "warning" and note.text.startswith("attempt 1 trained, but recorded nothing")
    only_recorded = summarize(run, SummaryRequest(attempt=2))
    assert only_recorded.training is not None and only_recorded.training.joules_per_token is not None
    assert "no_telemetry" not in codes(only_recorded)
    assert summary.unrecorded_attempts == [1] and only_recorded.unrecorded_attempts == []


def test_attempt_before_the_selected_time_is_not_called_unrecorded(run: RunDir) -> None:
    for n in (1, 2):
        start = T0 + 1000 * n
        attempt = new_attempt(run, n)
        event(attempt, "started", "n1", start)
        event(attempt, "first_step", "n1", start + 1, step=1, total=100)
        with_steps(run, n, start, 100)
        record(attempt, [(gpu(0), busy())], start=start, seconds=101)
        event(attempt, "ended", "n1", start + 101, ending="preempted")
    summary = summarize(run, SummaryRequest(since_s=20))
    assert summary.unrecorded_attempts == [] and "no_telemetry" not in codes(summary)
    assert summary.training is not None and summary.training.joules_per_token is not None


def test_gpu_is_judged_beside_all_others(run: RunDir) -> None:
    def hot(s: int) -> Row:
        return [0.9, GIB, 400.0, 90, 1200, 2619, 400.0 * s]

    record(new_attempt(run), [(gpu(i), busy(0.9)) for i in range(3)] + [(gpu(3), hot), (gpu(4), busy(0.0))])
    whole, only = summarize(run), summarize(run, SummaryRequest(gpu="4"))
    assert [g.index for g in only.gpus] == [4]
    assert only.insights == [i for i in whole.insights if i.uuid == only.gpus[0].uuid] != []


def test_waste_of_selected_part(run: RunDir) -> None:
    """Attempt 1 trains from its 20th second on; attempt 2 repeats its steps all the time."""
    for n in (1, 2):
        start = T0 + 1000 * n
        attempt = new_attempt(run, n)
        record(attempt, [(gpu(0), busy())], start=start, seconds=101)
        event(attempt, "started", "n1", start)
        with_steps(run, n, start + (20 if n == 1 else 0), 80 if n == 1 else 100)
        event(attempt, "ended", "n1", start + 100, ending="preempted")
    one, two = (summarize(run, SummaryRequest(attempt=n)) for n in (1, 2))
    assert one.waste is not None and one.waste.gpu_hours == pytest.approx(100 / 3600, abs=0.0001)
    assert one.waste.by_cause == {"startup": pytest.approx(20 / 3600, abs=0.0003)}
    assert two.waste is not None and two.waste.by_cause == {"repeated": pytest.approx(80 / 3600, abs=0.0003)}
    assert one.goodput is not None and one.goodput.startup_s == pytest.approx(20.0)
    early, late = (summarize(run, SummaryRequest(attempt=1, since_s=s)).waste for s in (90, 50))
    assert early is not None and early.by_cause == {"startup": pytest.approx(10 / 3600, abs=0.0003)}
    assert late is not None and late.gpu_hours == pytest.approx(50 / 3600, abs=0.0001)
    assert late.wasted_gpu_hours == 0.0


def test_waste_of_run_is_not_used_for_a_part(run: RunDir) -> None:
    for n in (1, 2):
        record(new_attempt(run, n), [(gpu(0), busy())], start=T0 + 1000 * n, seconds=101)
    whole = summarize(run)
    assert whole.waste is not None and whole.waste.gpu_hours == pytest.approx(200 / 3600, abs=0.0001)
    whole_goodput = Goodput(wall_s=500.0, lost_s=500.0)
    for request, hours in ((SummaryRequest(attempt=2), 100 / 3600), (SummaryRequest(since_s=50), 50 / 3600)):
        summary = summarize(run, request._replace(goodput=whole_goodput))
        assert summary.waste is not None and summary.waste.gpu_hours == pytest.approx(hours, abs=0.0001)
        assert summary.goodput is not None and summary.goodput != whole_goodput


def test_unexplained_time_is_no_waste(run: RunDir) -> None:
    record(new_attempt(run), [(gpu(0), busy())], seconds=101)
    goodput = Goodput(wall_s=100.0, queue_s=20.0, startup_s=8.0, other_s=72.0)
    waste = summarize(run, SummaryRequest(goodput=goodput)).waste
    assert waste is not None and waste.by_cause == {"startup": pytest.approx(0.1 * 100 / 3600, abs=0.0001)}


def test_reboot_is_no_clock_step(run: RunDir) -> None:
    for n, start in ((1, T0), (2, T0 + 1000)):
        attempt = new_attempt(run, n)
        record(attempt, [(gpu(0), busy())], start=start, mono=50.0)
        for d in (0.0, 100.0):
            event(attempt, "agent_started" if not d else "ranks_ended", "n1", start + d, monotonic_s=50.0 + d)
    assert summarize(run).hosts[0].clock_steps_s == []
    event(attempt, "gpu_event", "n1", T0 + 1200 + 30, monotonic_s=250.0)
    assert summarize(run).hosts[0].clock_steps_s == [30.0]
