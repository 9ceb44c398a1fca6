from __future__ import annotations

import pytest

from clustertrain.telemetry.insights.context import outliers
from clustertrain.telemetry.report_schema import Stats, Summary, ThrottleShares
from tests.unit.telemetry.summaries import (
    broken,
    codes,
    healthy,
    idle,
    in_training,
    noted,
    replace,
    slow,
    stats,
    throttling,
    with_gpu,
    with_gpus,
    with_rank,
)


def named(summary: Summary) -> list[tuple[str, str | None, str | None, int | None]]:
    return [(n.code, n.node, n.uuid, n.rank) for n in noted(summary) if n.severity != "info"]


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 2), (1, 8), (4, 2), (128, 8)])
def test_a_healthy_job_gets_no_warning(nodes: int, gpus: int) -> None:
    assert [n for n in noted(healthy(nodes, gpus)) if n.severity != "info"] == []
    assert codes(healthy(nodes, gpus), info=True) == ["energy", "power_limited"]


def test_the_idle_the_throttling_and_the_slow_gpu_are_named_and_nothing_else() -> None:
    assert named(broken()) == [
        ("gpu_unused", "n2", "GPU-n2-1-5b1c9f0e", 3),
        ("slow_gpu", "n4", "GPU-n4-1-5b1c9f0e", 7),
        ("throttled", "n3", "GPU-n3-0-5b1c9f0e", 4),
    ]
    texts = {n.code: n.text for n in broken().notes}
    assert texts["gpu_unused"] == "GPU 1 of n2 was not used: its utilization stayed at 0"
    assert (
        "heat held its clock down for 40% of the training, to 1,410 MHz where the others run at 1,905"
        in (texts["throttled"])
    )
    assert "it ran at 1,681 MHz, 12% below the 1,905 of the others" in texts["slow_gpu"]
    assert all(n.fix for n in broken().notes if n.severity != "info")
    assert {n.code for n in broken().notes if n.uuid is not None} == {"gpu_unused", "slow_gpu", "throttled"}


def test_it_holds_without_what_the_ranks_tell() -> None:
    """No phases, no goodput, no training: a script that does not use the session."""
    found = with_gpus(broken(), phases={})
    found = with_gpu(found, "n3", 0, sm_clock_mhz=stats(1410.0))
    found = with_gpu(found, "n4", 1, sm_clock_mhz=stats(1680.0))
    found = replace(found, ranks=[], training=None, goodput=None, waste=None, layout=None)
    assert [(code, node) for code, node, *_ in named(found)] == [
        ("gpu_unused", "n2"),
        ("slow_gpu", "n4"),
        ("throttled", "n3"),
    ]


def test_several_unused_gpus_are_counted_and_named() -> None:
    found = idle(idle(healthy(), "n2", 1), "n4", 0)
    assert [(code, rank) for code, _, _, rank in named(found)] == [
        ("gpu_unused", 3),
        ("gpu_unused", 6),
        ("gpus_unused", None),
    ]
    assert "did not use 2 of 8 allocated GPUs" in noted(found)[2].text


def test_an_unused_gpu_that_holds_memory() -> None:
    found = with_gpu(idle(healthy(), "n2", 1), "n2", 1, memory_used_gib=stats(40.0))
    assert "though 41.2 GiB of its memory were taken" in noted(found)[0].text


def test_before_training_begins_an_idle_gpu_is_no_failure() -> None:
    early = idle(replace(healthy(1, 1), training=None, goodput=None, waste=None), "n1", 0)
    early = with_gpu(early, "n1", 0, samples=20, phases={})
    assert [(n.severity, n.code) for n in noted(early)] == [("info", "energy"), ("info", "gpu_unused_yet")]


def test_a_mig_slice_is_judged_by_its_multiprocessors() -> None:
    found = with_gpus(healthy(1, 2), utilization=None, parent="GPU-whole", phases={})
    assert codes(found) == []
    assert codes(with_gpu(found, "n1", 1, sm_activity=Stats(0.0, 0.0, 0.0, 0.0, 0.0))) == ["gpu_unused"]


def test_a_slow_gpu_at_its_power_limit_is_not_said_to_be_without_reason() -> None:
    found = in_training(healthy(), "n1", 0, sm_clock_mhz=1600.0)
    assert noted(found)[0].text.endswith("of the others, at its power limit, as they are")


@pytest.mark.parametrize("by", [0.02, 0.04])
def test_chips_that_differ_a_little_are_not_slow(by: float) -> None:
    assert codes(slow(healthy(), "n1", 0, by)) == []


def test_of_two_gpus_one_must_differ_more() -> None:
    assert codes(slow(healthy(1, 2), "n1", 0, 0.06)) == []
    assert codes(slow(healthy(1, 2), "n1", 0, 0.2)) == ["slow_gpu"]


def test_gpus_of_another_kind_are_not_compared() -> None:
    found = healthy(2, 4)
    for number in range(4):
        found = with_gpu(found, "n2", number, name="NVIDIA A100-SXM4-80GB")
        found = in_training(found, "n2", number, sm_clock_mhz=1410.0)
    assert codes(found) == []


def test_a_lower_power_limit_than_the_others() -> None:
    found = healthy()
    for g in found.gpus:
        found = in_training(found, g.node, g.index or 0, throttled=ThrottleShares(0.05, 0.0, 0.0))
    found = in_training(found, "n1", 1, sm_clock_mhz=1500.0, throttled=ThrottleShares(0.98, 0.0, 0.0))
    assert named(found) == [("power_capped", "n1", "GPU-n1-1-5b1c9f0e", 1)]


@pytest.mark.parametrize(("cause", "word"), [("thermal", "heat"), ("hardware", "hardware slowdown")])
def test_all_throttle(cause: str, word: str) -> None:
    found = healthy(1, 4)
    for number in range(4):
        found = in_training(found, "n1", number, throttled=ThrottleShares(**{cause: 0.5}))
    assert codes(found) == ["throttled"] * 4
    assert word in noted(found)[0].text


def test_throttling_of_the_whole_job_counts_as_of_the_training() -> None:
    found = with_gpu(healthy(1, 2), "n1", 0, throttled=ThrottleShares(0.0, 0.3, 0.0))
    found = in_training(found, "n1", 0, share=0.5, throttled=ThrottleShares())
    assert "for 60% of the training" in noted(found)[0].text


@pytest.mark.parametrize(
    ("figure", "value", "code"), [("forward_s", 0.3, "straggler"), ("data_wait_s", 0.2, "straggler_data")]
)
def test_a_rank_that_is_late(figure: str, value: float, code: str) -> None:
    assert named(with_rank(healthy(), 5, **{figure: value})) == [(code, "n3", "GPU-n3-1-5b1c9f0e", 5)]


def test_a_wait_that_delays_nobody_is_no_straggler() -> None:
    assert codes(with_rank(healthy(), 5, data_wait_s=0.02)) == []


def test_ranks_on_processors() -> None:
    found = replace(healthy(2, 4), gpus=[])
    found = replace(found, ranks=[replace(r, uuid=None) for r in found.ranks])
    assert codes(found) == []
    assert named(with_rank(found, 6, forward_s=0.4)) == [("straggler", "n2", None, 6)]


def test_uneven_work() -> None:
    found = in_training(healthy(), "n2", 0, utilization=0.55)
    assert named(found) == [("imbalance", "n2", "GPU-n2-0-5b1c9f0e", 2)]


def test_a_throttling_gpu_is_late_and_less_busy_and_named_once() -> None:
    found = in_training(throttling(healthy(), "n3", 0), "n3", 0, utilization=0.5)
    found = with_rank(found, 4, forward_s=0.5, data_wait_s=0.4)
    assert [code for code, *_ in named(found)] == ["throttled"]


def test_outliers_are_measured_against_the_others_alone() -> None:
    figures = dict.fromkeys(range(9), 100.0)
    assert outliers({**figures, 9: 60.0}, 0.1, above=False) == {9: (60.0, 100.0)}
    assert outliers({**figures, 9: 60.0}, 0.1, above=True) == {}
    assert outliers({0: 1.0}, 0.1, above=True) == {}
    wide = {n: 100.0 + 10 * (n % 5) for n in range(20)}
    assert outliers({**wide, 20: 150.0}, 0.05, above=True) == {}, "within what is usual among them"


def test_of_two_gpus_the_other_ones_clock_is_named() -> None:
    (note,) = (n for n in noted(throttling(healthy(1, 2), "n1", 0)) if n.code == "throttled")
    others = in_clock(healthy(1, 2))
    assert f"where the others run at {others:,.0f}" in note.text


def in_clock(summary: Summary) -> float:
    clock = summary.gpus[1].phases["train"].sm_clock_mhz
    assert clock is not None
    return clock


def test_heat_is_told_of_a_gpu_that_was_lost_later() -> None:
    hot = throttling(healthy(4, 2), "n3", 0)
    nulls = {"power_w": "GPU_IS_LOST: gone (100 of 3600 samples)"}
    assert {"throttled", "gpu_lost"} <= set(codes(with_gpu(hot, "n3", 0, nulls=nulls)))


def test_a_figure_that_fails_throughout_is_told_whatever_the_reason() -> None:
    odd = with_gpu(healthy(1, 2), "n1", 1, utilization=None, nulls={"utilization": "UNKNOWN: an unknown error"})
    (note,) = (n for n in noted(odd) if n.code == "field_missing")
    assert "utilization is missing on GPU 1 of n1 (UNKNOWN: an unknown error)" in note.text
    partly = with_gpu(healthy(1, 2), "n1", 1, nulls={"power_w": "UNKNOWN: once (1 of 3600 samples)"})
    assert "field_missing" not in codes(partly, info=True)
