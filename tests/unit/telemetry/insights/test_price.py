"""What insights cost."""

from __future__ import annotations

import pytest

from clustertrain.telemetry.report_schema import Summary
from tests.unit.telemetry.summaries import broken, build_insights, healthy, idle, replace, with_gpu, with_rank


def costs(summary: Summary) -> dict[str, float | None]:
    return {n.code: n.gpu_hours for n in build_insights(summary)}


def waste(summary: Summary, **causes: float) -> Summary:
    assert summary.waste is not None
    total = sum(causes.values())
    return replace(summary, waste=replace(summary.waste, gpu_hours=100.0, wasted_gpu_hours=total, by_cause=causes))


def test_an_idle_gpu_costs_its_own_hours() -> None:
    summary = waste(idle(idle(healthy(), "n1", 0), "n2", 1), idle_gpus=25.0)
    found = [n for n in build_insights(summary) if n.code == "gpu_unused"]
    assert [n.gpu_hours for n in found] == [12.5, 12.5]
    assert costs(summary)["gpus_unused"] == 25.0


def test_all_gpus_wait_for_a_slow_clock() -> None:
    summary = waste(broken(), idle_gpus=12.5)
    assert summary.goodput is not None
    share = summary.goodput.productive_s / (summary.goodput.wall_s - summary.goodput.queue_s)
    assert costs(summary)["throttled"] == pytest.approx(100 * share * (1 - 1410 / 1905), rel=0.01)


def test_all_ranks_wait_for_a_late_one() -> None:
    summary = waste(healthy(), evaluation=1.0)
    late = with_rank(summary, 3, forward_s=0.9)
    peer = next(r.forward_s for r in summary.ranks if r.rank == 0)
    assert late.goodput is not None and late.training is not None and late.training.step_s is not None
    assert peer is not None
    share = late.goodput.productive_s / (late.goodput.wall_s - late.goodput.queue_s)
    expected = 100 * share * min(1.0, (0.9 - peer) / late.training.step_s.p50)
    assert costs(late)["straggler"] == pytest.approx(expected, rel=0.01)


def test_cost_is_unknown_without_gpu_hours() -> None:
    assert set(costs(replace(broken(), waste=None)).values()) == {None}
    assert costs(replace(broken(), goodput=None))["throttled"] is None


def test_the_most_expensive_comes_first_and_is_critical_from_a_tenth_of_the_gpu_hours() -> None:
    summary = waste(broken(), idle_gpus=2.0)
    first, *others = (n for n in build_insights(summary) if n.gpu_hours is not None and n.severity == "critical")
    assert (first.code, first.severity) == ("throttled", "critical") and first.gpu_hours is not None
    assert first.gpu_hours > 10 and {n.code for n in others} >= {"gpu_unused"}
    late = with_rank(waste(healthy(), evaluation=1.0), 3, forward_s=0.27)
    (straggler,) = (n for n in build_insights(late) if n.code == "straggler")
    assert straggler.severity == "warning" and straggler.gpu_hours is not None and 0 < straggler.gpu_hours < 10


def test_a_critical_finding_without_a_price_comes_before_those_with_one() -> None:
    summary = waste(broken(), idle_gpus=2.0)
    lost = with_gpu(summary, "n1", 0, missing={"power_w": "GPU_IS_LOST: gone (100 of 3600 samples)"})
    first, second, *_ = build_insights(lost)
    assert (first.code, first.gpu_hours, second.code) == ("gpu_lost", None, "throttled")


def test_findings_without_a_price_have_none() -> None:
    assert costs(healthy())["energy"] is None
