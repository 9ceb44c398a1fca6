from __future__ import annotations

import pytest

from clustertrain.telemetry.report_schema import (
    AttemptSummary,
    GpuSummary,
    PhaseStats,
    Stats,
    Summary,
    TimeWindow,
    TrainingSummary,
)
from tests.unit.telemetry.summaries import (
    T0,
    build_insights,
    codes,
    healthy,
    host,
    idle,
    in_training,
    replace,
    stats,
    throttling,
    with_gpu,
    with_gpus,
)


def low(mean: float = 0.35, in_train: float = 0.36) -> Summary:
    """Return a job with low utilization and no recorded cause."""
    summary = with_gpus(healthy(), utilization=Stats(mean, 0.0, mean, 0.9, 1.0), nvlink_bytes_per_s=None)
    for g in summary.gpus:
        summary = in_training(summary, g.node, g.index or 0, utilization=in_train)
    return summary


def training(summary: Summary, **changes: object) -> Summary:
    assert summary.training is not None
    return replace(summary, training=replace(summary.training, **changes))


def goodput(summary: Summary, **changes: float) -> Summary:
    assert summary.goodput is not None
    return replace(summary, goodput=replace(summary.goodput, **changes))


def test_waiting_for_data() -> None:
    (insight,) = (n for n in build_insights(training(low(), data_wait_share=0.42)) if n.severity != "info")
    assert (insight.code, insight.severity, insight.uuid) == ("waiting_on_data", "warning", None)
    assert insight.text == "the GPUs were busy 35% of the time: training waits for data during 42% of a step"
    assert insight.fix is not None
    assert "workers" in insight.fix


def test_waiting_for_data_reported_by_ranks() -> None:
    summary = low()
    summary = replace(summary, ranks=[replace(r, data_wait_s=0.3) for r in summary.ranks])
    assert codes(summary) == ["waiting_on_data"]


def test_waiting_for_data_with_busy_cores_requests_cores() -> None:
    summary = training(low(), data_wait_share=0.42)
    summary = replace(summary, hosts=[replace(h, cpu_allocated=12) for h in summary.hosts])
    (insight,) = (n for n in build_insights(summary) if n.code == "waiting_on_data")
    assert "100% of the allocated cores busy" in insight.text
    assert insight.fix is not None
    assert "--cpus-per-gpu" in insight.fix


def test_data_wait_is_reported_with_busy_gpus() -> None:
    assert codes(training(healthy(), data_wait_share=0.25)) == ["waiting_on_data"]
    assert codes(training(healthy(), data_wait_share=0.15)) == []


@pytest.mark.parametrize(
    ("part", "code", "word"),
    [
        ("evaluation_s", "evaluation_often", "evaluation took 42%"),
        ("checkpoint_stall_s", "checkpoint_often", "stalled for 42% of the job's time over 4 checkpoints"),
        ("startup_s", "startup_dominated", "start-up and restore took 42%"),
        ("restore_s", "startup_dominated", "took 45%"),
    ],
)
def test_time_outside_training(part: str, code: str, word: str) -> None:
    summary = goodput(low(), **{part: 3000.0})
    (insight,) = (n for n in build_insights(summary) if n.code == code)
    assert insight.severity == "warning"
    assert word in insight.text
    assert codes(summary) == [code]
    assert codes(goodput(healthy(), **{part: 3000.0})) == [code], "also reported with busy GPUs"


def test_short_job_is_not_blamed_for_startup() -> None:
    summary = low()
    assert summary.goodput is not None
    short = replace(summary.goodput, wall_s=180.0, queue_s=20.0, startup_s=80.0, productive_s=60.0, ratio=0.3)
    insights = build_insights(replace(summary, goodput=short))
    assert [(n.severity, n.code) for n in insights if n.code == "startup_dominated"] == [("info", "startup_dominated")]
    assert [n for n in insights if n.severity != "info" and n.code == "low_utilization"] == []


@pytest.mark.parametrize(
    ("part", "code"), [("evaluation_s", "evaluation_often"), ("checkpoint_stall_s", "checkpoint_often")]
)
def test_short_job_is_not_blamed_for_checkpoints(part: str, code: str) -> None:
    summary = healthy()
    assert summary.goodput is not None
    short = replace(summary.goodput, wall_s=180.0, queue_s=20.0, **{part: 100.0})
    (insight,) = (n for n in build_insights(replace(summary, goodput=short)) if n.code == code)
    assert insight.severity == "info"


def test_millisecond_wait_is_ignored() -> None:
    summary = training(healthy(), data_wait_share=0.25, step_s=stats(0.004))
    summary = replace(summary, ranks=[replace(r, data_wait_s=0.001) for r in summary.ranks])
    assert "waiting_on_data" not in codes(summary)


def test_communication_from_traffic() -> None:
    summary = low()
    summary = replace(summary, hosts=[replace(h, infiniband_bytes_per_s=stats(40e9)) for h in summary.hosts])
    (insight,) = (n for n in build_insights(summary) if n.code == "communication_bound")
    assert insight.text.endswith("waiting for communication, with InfiniBand at 20.0 GB/s per GPU")
    assert codes(summary) == ["communication_bound"]


def test_communication_from_waiting_kernels() -> None:
    summary = with_gpus(healthy(), sm_activity=stats(0.12), tensor_activity=stats(0.03))
    for g in summary.gpus:
        summary = in_training(summary, g.node, g.index or 0, sm_activity=0.12, tensor_activity=0.03)
    (insight,) = (n for n in build_insights(summary) if n.severity != "info")
    assert insight.code == "communication_bound"
    assert "utilization 97%, 12% of the multiprocessors active, tensor cores active 3%" in insight.text
    single_gpu = with_gpus(healthy(1, 1), sm_activity=stats(0.12), phases={})
    assert codes(single_gpu) == ["small_kernels"]


def test_single_measured_gpu_is_not_working_alone() -> None:
    three = with_gpus(healthy(1, 3), sm_activity=None, tensor_activity=None, utilization=None, phases={})
    one_measured = with_gpu(three, "n1", 0, sm_activity=stats(0.12), utilization=stats(0.97))
    (insight,) = (n for n in build_insights(one_measured) if n.severity == "warning")
    assert insight.code == "communication_bound"
    assert "do little (1 of 3 measured)" in insight.text
    others_idle = idle(idle(with_gpu(one_measured, "n1", 0, phases={}), "n1", 1), "n1", 2)
    assert "small_kernels" in codes(others_idle)


def test_power_is_used_without_gpm() -> None:
    summary = with_gpus(healthy(), sm_activity=None, tensor_activity=None, phases={}, power_w=stats(230.0))
    assert codes(summary) == ["communication_bound"]
    assert codes(with_gpus(summary, power_w=stats(500.0))) == []
    assert codes(with_gpus(summary, power_limit_w=None)) == [], "unknown without the limit"


def hung(gpu: GpuSummary) -> GpuSummary:
    """Return the summary of a GPU that spins in a collective from the first step on."""
    return replace(
        gpu,
        utilization=Stats(0.99, 0.97, 1.0, 1.0, 1.0),
        power_w=stats(130.0),
        sm_activity=None,
        tensor_activity=stats(0.0),
        phases={"train": PhaseStats(0.97, 1.0, 130.0, 1980.0)},
    )


def without_steps(summary: Summary) -> Summary:
    assert summary.training is not None
    none: dict[str, None] = dict.fromkeys(
        f for f in TrainingSummary.__struct_fields__ if f not in ("steps", "energy_j")
    )
    return replace(summary, training=replace(summary.training, steps=0, **none), goodput=None, waste=None)


def test_hung() -> None:
    summary = without_steps(replace(healthy(), gpus=[hung(g) for g in healthy().gpus]))
    (insight,) = (n for n in build_insights(summary) if n.severity != "info")
    assert (insight.severity, insight.code) == ("critical", "hung")
    assert insight.text == (
        "8 GPUs hung: no step was done, and utilization 100%, tensor cores active 0%, power at 19% of the limit"
    )
    early = replace(summary, gpus=[replace(g, samples=100) for g in summary.gpus])
    assert codes(early) == [], "a compilation looks the same at first"


def test_attempt_ended_by_hang() -> None:
    summary = replace(healthy(), attempts=[AttemptSummary(2, "4711", TimeWindow(T0, T0 + 9), ["n1"], ending="hang")])
    assert [(n.severity, n.text) for n in build_insights(summary) if n.code == "hung"] == [
        ("critical", "attempt 2 ended because steps stopped")
    ]


def test_unknown_cause_lists_excluded_ones() -> None:
    (insight,) = (n for n in build_insights(low()) if n.severity != "info")
    assert insight.code == "low_utilization"
    assert "data, checkpoints, evaluation and start-up are not the cause" in insight.text
    # The time of a program that reports no steps is not split up.
    goodput = low().goodput
    assert goodput is not None
    no_steps = replace(low(), goodput=replace(goodput, ratio=None))
    (insight,) = (n for n in build_insights(no_steps) if n.severity != "info")
    assert "data is not the cause" in insight.text
    bare = replace(with_gpus(low(), phases={}), training=None, goodput=None, waste=None, ranks=[])
    (insight,) = (n for n in build_insights(bare) if n.severity != "info")
    assert insight.text.endswith("the recorded data does not show the cause")


def test_few_low_gpus_are_named() -> None:
    summary = healthy()
    summary = replace(
        summary,
        gpus=[replace(g, utilization=stats(0.1), phases={}) if g.node == "n1" else g for g in summary.gpus],
    )
    assert [(n.node, n.rank) for n in build_insights(summary) if n.severity == "warning"] == [("n1", 0), ("n1", 1)]


def test_explained_gpu_gets_no_second_insight_for_its_low_utilization() -> None:
    summary = throttling(healthy(), "n3", 0)
    low_gpu = with_gpu(summary, "n3", 0, utilization=stats(0.5))
    assert [n.code for n in build_insights(low_gpu) if n.severity != "info"] == ["throttled"]


def test_rules_are_independent() -> None:
    """A missing value affects only its insights, and nothing raises."""
    full = training(low(), data_wait_share=0.42)
    for name in ("memory_used_gib", "power_w", "temperature_c", "sm_clock_mhz", "sm_activity", "energy_j", "name"):
        assert "waiting_on_data" in codes(with_gpus(full, **{name: None})), name
    for name in ("goodput", "waste", "coverage", "job_id", "layout"):
        assert "waiting_on_data" in codes(replace(full, **{name: None})), name
    assert "waiting_on_data" in codes(replace(full, hosts=[host("n1", processes=None, cpu=None)]))
