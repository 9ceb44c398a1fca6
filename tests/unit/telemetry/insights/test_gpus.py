from __future__ import annotations

import pytest

from clustertrain.telemetry.insights.context import outliers
from clustertrain.telemetry.report_schema import Stats, Summary, ThrottleShares
from tests.unit.telemetry.summaries import (
    broken,
    build_insights,
    codes,
    healthy,
    idle,
    in_training,
    replace,
    slow,
    stats,
    throttling,
    with_gpu,
    with_gpus,
    with_rank,
)


def named(summary: Summary) -> list[tuple[str, str | None, str | None, int | None]]:
    return [(n.code, n.node, n.uuid, n.rank) for n in build_insights(summary) if n.severity != "info"]


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 2), (1, 8), (4, 2), (128, 8)])
def test_healthy_job_gets_no_warning(nodes: int, gpus: int) -> None:
    assert [n for n in build_insights(healthy(nodes, gpus)) if n.severity != "info"] == []
    assert codes(healthy(nodes, gpus), info=True) == ["energy", "power_limited"]


def test_idle_throttled_and_slow_gpu_are_named() -> None:
    assert named(broken()) == [
        ("throttled", "n3", "GPU-n3-0-5b1c9f0e", 4),
        ("gpu_unused", "n2", "GPU-n2-1-5b1c9f0e", 3),
        ("slow_gpu", "n4", "GPU-n4-1-5b1c9f0e", 7),
    ]
    texts = {n.code: n.text for n in broken().insights}
    assert texts["gpu_unused"] == "GPU 1 of n2 was not used: its utilization stayed at 0"
    assert (
        "heat lowered its clock for 40% of the training, to 1,410 MHz while the others run at 1,905"
        in (texts["throttled"])
    )
    assert "it ran at 1,681 MHz, 12% below the 1,905 of the others" in texts["slow_gpu"]
    assert all(n.fix for n in broken().insights if n.severity != "info")
    assert {n.code for n in broken().insights if n.uuid is not None} == {"gpu_unused", "slow_gpu", "throttled"}


def test_outliers_without_rank_data() -> None:
    """A script without the session has no phases, goodput or training summary."""
    summary = with_gpus(broken(), phases={})
    summary = with_gpu(summary, "n3", 0, sm_clock_mhz=stats(1410.0))
    summary = with_gpu(summary, "n4", 1, sm_clock_mhz=stats(1680.0))
    summary = replace(summary, ranks=[], training=None, goodput=None, waste=None, layout=None)
    assert [(code, node) for code, node, *_ in named(summary)] == [
        ("gpu_unused", "n2"),
        ("slow_gpu", "n4"),
        ("throttled", "n3"),
    ]


def test_several_unused_gpus() -> None:
    summary = idle(idle(healthy(), "n2", 1), "n4", 0)
    assert [(code, rank) for code, _, _, rank in named(summary)] == [
        ("gpu_unused", 3),
        ("gpu_unused", 6),
        ("gpus_unused", None),
    ]
    assert "did not use 2 of 8 allocated GPUs" in build_insights(summary)[2].text


def test_unused_gpu_holding_memory() -> None:
    summary = with_gpu(idle(healthy(), "n2", 1), "n2", 1, memory_used_gib=stats(40.0))
    assert "although 41.2 GiB of its memory were in use" in build_insights(summary)[0].text


def test_idle_gpu_before_training_is_no_failure() -> None:
    early = idle(replace(healthy(1, 1), training=None, goodput=None, waste=None), "n1", 0)
    early = with_gpu(early, "n1", 0, samples=20, phases={})
    assert [(n.severity, n.code) for n in build_insights(early)] == [("info", "energy"), ("info", "gpu_unused_yet")]


def test_mig_slice_is_judged_by_sm_activity() -> None:
    summary = with_gpus(healthy(1, 2), utilization=None, parent="GPU-whole", phases={})
    assert codes(summary) == []
    assert codes(with_gpu(summary, "n1", 1, sm_activity=Stats(0.0, 0.0, 0.0, 0.0, 0.0))) == ["gpu_unused"]


def test_slow_gpu_at_power_limit_has_reason() -> None:
    summary = in_training(healthy(), "n1", 0, sm_clock_mhz=1600.0)
    assert build_insights(summary)[0].text.endswith("of the others, at its power limit, like them")


@pytest.mark.parametrize("by", [0.02, 0.04])
def test_small_clock_difference_is_ignored(by: float) -> None:
    assert codes(slow(healthy(), "n1", 0, by)) == []


def test_two_gpus_need_larger_difference() -> None:
    assert codes(slow(healthy(1, 2), "n1", 0, 0.06)) == []
    assert codes(slow(healthy(1, 2), "n1", 0, 0.2)) == ["slow_gpu"]


def test_different_models_are_not_compared() -> None:
    summary = healthy(2, 4)
    for number in range(4):
        summary = with_gpu(summary, "n2", number, name="NVIDIA A100-SXM4-80GB")
        summary = in_training(summary, "n2", number, sm_clock_mhz=1410.0)
    assert codes(summary) == []


def test_lower_power_limit_than_others() -> None:
    summary = healthy()
    for g in summary.gpus:
        summary = in_training(summary, g.node, g.index or 0, throttle_ratio=ThrottleShares(0.05, 0.0, 0.0))
    summary = in_training(summary, "n1", 1, sm_clock_mhz=1500.0, throttle_ratio=ThrottleShares(0.98, 0.0, 0.0))
    assert named(summary) == [("power_capped", "n1", "GPU-n1-1-5b1c9f0e", 1)]


@pytest.mark.parametrize(("cause", "word"), [("thermal", "heat"), ("hardware", "hardware slowdown")])
def test_all_gpus_throttled(cause: str, word: str) -> None:
    summary = healthy(1, 4)
    for number in range(4):
        summary = in_training(summary, "n1", number, throttle_ratio=ThrottleShares(**{cause: 0.5}))
    assert codes(summary) == ["throttled"] * 4
    assert word in build_insights(summary)[0].text


def test_job_throttling_counts_as_training() -> None:
    summary = with_gpu(healthy(1, 2), "n1", 0, throttle_ratio=ThrottleShares(0.0, 0.3, 0.0))
    summary = in_training(summary, "n1", 0, share=0.5, throttle_ratio=ThrottleShares())
    assert "for 60% of the training" in build_insights(summary)[0].text


@pytest.mark.parametrize(
    ("figure", "value", "code"), [("forward_s", 0.3, "straggler"), ("data_wait_s", 0.2, "straggler_data")]
)
def test_late_rank(figure: str, value: float, code: str) -> None:
    assert named(with_rank(healthy(), 5, **{figure: value})) == [(code, "n3", "GPU-n3-1-5b1c9f0e", 5)]


def test_harmless_wait_is_no_straggler() -> None:
    assert codes(with_rank(healthy(), 5, data_wait_s=0.02)) == []


def test_cpu_ranks() -> None:
    summary = replace(healthy(2, 4), gpus=[])
    summary = replace(summary, ranks=[replace(r, uuid=None) for r in summary.ranks])
    assert codes(summary) == []
    assert named(with_rank(summary, 6, forward_s=0.4)) == [("straggler", "n2", None, 6)]


def test_uneven_work() -> None:
    summary = in_training(healthy(), "n2", 0, utilization=0.55)
    assert named(summary) == [("imbalance", "n2", "GPU-n2-0-5b1c9f0e", 2)]


def test_throttled_gpu_is_named_once() -> None:
    summary = in_training(throttling(healthy(), "n3", 0), "n3", 0, utilization=0.5)
    summary = with_rank(summary, 4, forward_s=0.5, data_wait_s=0.4)
    assert [code for code, *_ in named(summary)] == ["throttled"]


def test_outliers_exclude_themselves() -> None:
    figures = dict.fromkeys(range(9), 100.0)
    assert outliers({**figures, 9: 60.0}, 0.1, above=False) == {9: (60.0, 100.0)}
    assert outliers({**figures, 9: 60.0}, 0.1, above=True) == {}
    assert outliers({0: 1.0}, 0.1, above=True) == {}
    wide = {n: 100.0 + 10 * (n % 5) for n in range(20)}
    assert outliers({**wide, 20: 150.0}, 0.05, above=True) == {}, "within the usual spread"


def test_clock_of_other_gpu_is_named() -> None:
    (insight,) = (n for n in build_insights(throttling(healthy(1, 2), "n1", 0)) if n.code == "throttled")
    others = in_clock(healthy(1, 2))
    assert f"while the others run at {others:,.0f}" in insight.text


def in_clock(summary: Summary) -> float:
    clock = summary.gpus[1].phases["train"].sm_clock_mhz
    assert clock is not None
    return clock


def test_heat_of_later_lost_gpu_is_reported() -> None:
    hot = throttling(healthy(4, 2), "n3", 0)
    nulls = {"power_w": "GPU_IS_LOST: gone (100 of 3600 samples)"}
    assert {"throttled", "gpu_lost"} <= set(codes(with_gpu(hot, "n3", 0, missing=nulls)))


def test_field_missing_throughout_is_reported() -> None:
    odd = with_gpu(healthy(1, 2), "n1", 1, utilization=None, missing={"utilization": "UNKNOWN: an unknown error"})
    (insight,) = (n for n in build_insights(odd) if n.code == "field_missing")
    assert "not recorded on GPU 1 of n1: utilization (UNKNOWN: an unknown error)" in insight.text
    partly = with_gpu(healthy(1, 2), "n1", 1, missing={"power_w": "UNKNOWN: once (1 of 3600 samples)"})
    assert "field_missing" not in codes(partly, info=True)
    first_sample = with_gpus(healthy(), missing={"sm_activity": "NO_DATA: a mean needs two samples"})
    assert "field_missing" not in codes(first_sample, info=True)
