"""The search for a micro-batch by trials, with simulated trials."""

from __future__ import annotations

import pytest

from clustertrain.errors import ConfigError
from clustertrain.plan.cost.memory import GIB
from clustertrain.plan.layout import Layout
from clustertrain.plan.search import micro_batch
from clustertrain.plan.search.micro_batch import Trial, TrialMeasurement, TrialSearch, fit_to_ranks

DDP = Layout(strategy="ddp", dp_replicate=2)


def trial_order(search: TrialSearch, largest: int) -> list[int]:
    """Return the micro-batches in the order of their trials if those up to ``largest`` fit."""
    trials: list[Trial] = []
    while (m := search.next_micro_batch(trials)) is not None:
        trials.append(
            Trial(micro_batch=m, outcome="fits" if m <= largest else "out_of_memory", divides_batch=search.is_usable(m))
        )
    return [t.micro_batch for t in trials]


@pytest.mark.parametrize(
    ("share", "unit", "largest", "order"),
    [
        (64, 1, 99, [1, 2, 4, 8, 16, 32, 64]),
        (64, 1, 20, [1, 2, 4, 8, 16, 32]),  # 64 has no divisor between
        (24, 1, 99, [1, 2, 4, 8, 16, 24]),
        (24, 1, 13, [1, 2, 4, 8, 16, 12]),
        (60, 1, 13, [1, 2, 4, 8, 16, 12, 15]),
        (60, 1, 9, [1, 2, 4, 8, 16, 12, 10]),
        (7, 1, 3, [1, 2, 4]),
        (24, 3, 99, [3, 6, 12, 24]),
        (8, 1, 0, [1]),
        (0, 1, 20, [1, 2, 4, 8, 16, 32, 24, 20]),  # no global batch: bisects in quarters
        (0, 1, 999, [1, 2, 4, 8, 16, 32, 64, 128, 256]),
        (0, 8, 999, [8, 16, 32, 64, 128, 256]),
    ],
)
def test_search_doubles_then_bisects(share: int, unit: int, largest: int, order: list[int]) -> None:
    assert trial_order(TrialSearch(DDP, share, unit), largest) == order


def test_pipeline_tries_supported_sizes() -> None:
    search = TrialSearch(Layout(pp=4, schedule="1f1b"), 24, 1)
    assert [m for m in range(1, 25) if search.is_usable(m)] == [1, 2, 3, 4, 6]  # at least four micro-batches
    assert trial_order(search, 99) == [1, 2, 4, 6]
    assert search.build_batch(3, 1).grad_accum == 8  # all of them, because a stage's memory depends on their number


def test_trial_batch_accumulates_briefly() -> None:
    split = TrialSearch(DDP, 64, 1).build_batch(2, 10)
    assert (split.micro_batch, split.grad_accum, split.global_batch, split.tokens_per_step) == (2, 4, 16, 160)
    assert TrialSearch(DDP, 64, 1).build_batch(32, 10).grad_accum == 2
    assert TrialSearch(DDP, 64, 1).build_batch(64, 10).grad_accum == 1
    assert TrialSearch(DDP, 64, 1, compares_batch=True).build_batch(2, 10).grad_accum == 32
    assert TrialSearch(DDP, 0, 1).build_batch(8, 10).grad_accum == 2  # the plan's own global batch would be 32
    assert TrialSearch(DDP, 0, 1).build_batch(64, 10).grad_accum == 1


def test_fewer_replicas_represent_all() -> None:
    assert fit_to_ranks(DDP, 2) == (DDP, "the plan's 2 ranks")
    smaller, note = fit_to_ranks(Layout(strategy="ddp", dp_replicate=16), 4)
    assert smaller == Layout(strategy="ddp", dp_replicate=4)
    assert "4 of the plan's 16 ranks" in note and "the time excludes" in note
    hybrid, _ = fit_to_ranks(Layout(strategy="hybrid-shard", dp_replicate=4, dp_shard=8), 8)
    assert (hybrid.dp_replicate, hybrid.dp_shard) == (1, 8)
    product, _ = fit_to_ranks(Layout(strategy="ddp", dp_replicate=4, tp=2), 4)
    assert (product.dp_replicate, product.tp) == (2, 2)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(strategy="fsdp", dp_shard=16), "what 16 ranks share would be split over fewer"),
        (Layout(strategy="zero1", dp_replicate=16, zero1=True), "the optimizer state"),
        (Layout(strategy="ddp", dp_replicate=2, pp=8, schedule="1f1b"), "what 8 ranks share"),
    ],
    ids=["fsdp", "zero1", "pipeline"],
)
def test_fewer_shards_are_refused(layout: Layout, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as e:
        fit_to_ranks(layout, 4)
    assert "--nodes 1" in str(e.value)


def test_trial_uses_largest_peak_and_slowest_rank() -> None:
    search = TrialSearch(DDP, 16, 1)
    measurements = [TrialMeasurement(peak_bytes=GIB, step_s=2.0), TrialMeasurement(peak_bytes=3 * GIB, step_s=1.0)]
    trial = micro_batch.evaluate_trial(measurements, search, search.build_batch(4, 100), 4.0)
    assert trial.fits and trial.divides_batch and (trial.peak_gib, trial.capacity_gib, trial.step_s) == (3.0, 4.0, 2.0)
    # 4 x 4 x 2 samples in two seconds on two ranks
    assert (trial.samples_per_s_per_gpu, trial.tokens_per_s_per_gpu) == (8.0, 800.0)
    measurements = [
        TrialMeasurement(peak_bytes=65 * GIB, allocated_bytes=60 * GIB, capacity_bytes=80 * GIB, step_s=1.0)
    ]
    trial = micro_batch.evaluate_trial(measurements, search, search.build_batch(3, 0), 4.0)
    assert (trial.outcome, trial.divides_batch, trial.allocated_gib) == ("over_margin", False, 60.0)
    assert trial.tokens_per_s_per_gpu is None  # images


def test_fastest_usable_fitting_trial_is_best() -> None:
    def row(
        m: int, speed: float | None, *, outcome: micro_batch.TrialOutcome = "fits", divides_batch: bool = True
    ) -> Trial:
        return Trial(micro_batch=m, outcome=outcome, divides_batch=divides_batch, samples_per_s_per_gpu=speed)

    rows = [
        row(1, 5.0),
        row(2, 9.0),
        row(4, 8.0),
        row(6, 20.0, divides_batch=False),
        row(8, 30.0, outcome="over_margin"),
    ]
    best = micro_batch.best_trial(rows)
    assert best is not None and best.micro_batch == 2
    assert micro_batch.best_trial([row(1, None, outcome="out_of_memory")]) is None
