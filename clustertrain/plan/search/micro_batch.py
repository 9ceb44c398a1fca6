"""The search for a micro-batch by trial: which ones to try, on which layout, what a trial says, which one to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.plan import batch as batches
from clustertrain.plan import non_decoder, pipeline_schedules
from clustertrain.plan.cost.memory import GIB, SAFE_FRACTION
from clustertrain.plan.layout import Batch, Layout, pluralize
from clustertrain.plan.planner import Plan

MAX_FREE_MICRO_BATCH = 256  # sequences a rank, where the recipe names no global batch that would end the search
# Micro-batches of a trial's step, at most: from the second one on gradients are there while the next is at work, and
# more of them only take time. A pipeline gets all, since what it holds follows from their number.
MAX_TRIAL_GRAD_ACCUM = 4

TrialOutcome = Literal["fits", "over the margin", "out of memory"]


class TrialMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank saw of one trial. On a GPU ``peak_bytes`` is the most that torch has reserved and what the device
    holds besides (context, NCCL), on the CPU the growth of resident memory since before the model was built.
    ``allocated_bytes`` and ``capacity_bytes`` (of the device) are None on the CPU."""

    peak_bytes: int
    allocated_bytes: int | None = None
    capacity_bytes: int | None = None
    step_s: float  # the median of the steps that count


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table, of the rank that needs most. ``is_usable``: it divides a rank's share of the global batch,
    and the pipeline's schedule runs it. Figures are None where it ran out of memory; of images there are no tokens."""

    micro_batch: int
    outcome: TrialOutcome
    usable: bool
    capacity_gib: float | None = None  # of the device; on the CPU what is assumed for a rank
    peak_gib: float | None = None
    allocated_gib: float | None = None
    step_s: float | None = None
    samples_per_s_per_gpu: float | None = None
    tokens_per_s_per_gpu: float | None = None

    @property
    def fits(self) -> bool:
        return self.outcome == "fits"


@dataclass(frozen=True)
class TrialSearch:
    """What there is to try. ``layout`` is the one that is tried, ``rank_batch`` a data-parallel rank's sequences a
    step (0:
    the recipe names no global batch, so any micro-batch is usable), ``unit`` what a micro-batch must be a multiple of.
    """

    layout: Layout
    rank_batch: int
    unit: int

    @property
    def max_micro_batch(self) -> int:
        return self.rank_batch or MAX_FREE_MICRO_BATCH // self.unit * self.unit

    def is_usable(self, micro_batch: int) -> bool:
        if micro_batch % self.unit:
            return False
        if not self.rank_batch:
            return True
        return self.rank_batch % micro_batch == 0 and not pipeline_schedules.unsupported_reason(
            self.layout, self.rank_batch // micro_batch
        )

    def next_micro_batch(self, tried: Sequence[Trial]) -> int | None:
        """Twice the last one until one does not fit, then the usable ones between, halving the gap; None: found.

        A pipeline's schedule runs the usable ones only.
        """
        largest_fitting = max((t.micro_batch for t in tried if t.fits), default=0)
        smallest_failing = min((t.micro_batch for t in tried if not t.fits), default=None)
        if smallest_failing is None:
            return self._grow(largest_fitting)
        # Without a global batch every number is usable, and finer steps than quarters are not worth a trial.
        step = self.unit if self.rank_batch else max(self.unit, largest_fitting // 4 // self.unit * self.unit)
        candidates = (
            [m for m in range(largest_fitting + step, smallest_failing, step) if self.is_usable(m)]
            if largest_fitting
            else []
        )
        return candidates[len(candidates) // 2] if candidates else None

    def _grow(self, largest_fitting: int) -> int | None:
        runnable = [
            m
            for m in range(largest_fitting + self.unit, self.max_micro_batch + 1, self.unit)
            if self.layout.pp == 1 or self.is_usable(m)
        ]  # fmt: skip
        within_double = [m for m in runnable if m <= max(self.unit, 2 * largest_fitting)]
        return within_double[-1] if within_double else next(iter(runnable), None)

    def build_batch(self, micro_batch: int, tokens_per_sample: int) -> Batch:
        """The split of a trial's step."""
        data_parallel = self.layout.data_parallel
        if self.rank_batch:
            grad_accum = max(1, -(-self.rank_batch // micro_batch))
        else:
            samples_per_pass = data_parallel * micro_batch
            grad_accum = batches.default_global_batch(samples_per_pass * self.layout.pp) // samples_per_pass
        if self.layout.pp == 1:
            grad_accum = min(grad_accum, MAX_TRIAL_GRAD_ACCUM)
        global_batch = micro_batch * grad_accum * data_parallel
        return Batch(
            micro_batch=micro_batch,
            grad_accum=grad_accum,
            global_batch=global_batch,
            tokens_per_step=global_batch * tokens_per_sample,
        )


def build_trial_search(plan: Plan, recipe: Recipe, ranks: int) -> tuple[TrialSearch, str]:
    """What to try on ``ranks`` ranks, and in words what the result stands for.

    Raises:
        ConfigError: a rank of so few would not hold what a rank of the plan does.
    """
    layout, description = fit_to_ranks(plan.layout, ranks)
    global_batch = recipe.train.global_batch
    rank_batch = batches.samples_per_rank(global_batch, plan.layout.data_parallel) if global_batch else 0
    return TrialSearch(layout, rank_batch, non_decoder.group_size(recipe.model)), description


def fit_to_ranks(layout: Layout, ranks: int) -> tuple[Layout, str]:
    """``layout`` with as many replicas as ``ranks`` ranks have room for: replicas are alike, so the memory of each is
    the same. Returns it with what it stands for, in words.

    Raises:
        ConfigError: fewer ranks share what the replicas do not repeat.
    """
    world_size = layout.world_size
    if ranks == world_size:
        return layout, f"the plan's {pluralize(world_size, 'rank')}"
    replica_ranks = world_size // layout.dp_replicate
    if layout.zero1 or ranks % replica_ranks:
        shared = "the optimizer state" if layout.zero1 else f"what {pluralize(replica_ranks, 'rank')} share"
        raise ConfigError(
            f"{layout.describe()} is for {pluralize(world_size, 'rank')}, and {ranks} can be started here: {shared}"
            " would be split over fewer, and each would need more memory than in the plan",
            fix=(
                "look for it with --nodes 1: a rank needs at least as much there, so what fits there fits on more "
                "nodes; or go by the estimate of plan"
            ),
        )
    scaled = msgspec.structs.replace(layout, dp_replicate=ranks // replica_ranks)
    return (
        scaled,
        (
            f"{ranks} of the plan's {world_size} ranks, with {pluralize(scaled.dp_replicate, 'replica')} instead of "
            f"{layout.dp_replicate}: a rank's memory is the same, the all-reduce across nodes is not in the time"
        ),
    )


def evaluate_trial(
    measurements: Sequence[TrialMeasurement], search: TrialSearch, batch: Batch, assumed_gib: float
) -> Trial:
    """The verdict on a trial that ran. ``assumed_gib`` is the memory of a rank where the device does not say."""
    worst = max(measurements, key=lambda m: m.peak_bytes)
    capacity = (worst.capacity_bytes or assumed_gib * GIB) / GIB
    step_s = max(m.step_s for m in measurements)
    ranks = search.layout.world_size
    allocated = worst.allocated_bytes
    return Trial(
        micro_batch=batch.micro_batch,
        outcome="fits" if worst.peak_bytes / GIB <= SAFE_FRACTION * capacity else "over the margin",
        usable=search.is_usable(batch.micro_batch),
        capacity_gib=capacity,
        peak_gib=worst.peak_bytes / GIB,
        allocated_gib=None if allocated is None else allocated / GIB,
        step_s=step_s,
        samples_per_s_per_gpu=batch.global_batch / step_s / ranks,
        tokens_per_s_per_gpu=batch.tokens_per_step / step_s / ranks if batch.tokens_per_step else None,
    )


def best_trial(tried: Sequence[Trial]) -> Trial | None:
    """The fastest of the usable ones that leave the margin; None where there is none."""
    fitting = [t for t in tried if t.fits and t.usable]
    return max(fitting, key=lambda t: t.samples_per_s_per_gpu or 0.0, default=None)
