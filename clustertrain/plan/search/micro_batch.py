"""Search for a micro-batch by trial: sizes to try, layout of a trial, evaluation, choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.plan import non_decoder, pipeline_schedules
from clustertrain.plan.batch import default_global_batch, samples_per_rank
from clustertrain.plan.cost.memory import GIB, SAFE_FRACTION
from clustertrain.plan.layout import Batch, Layout, pluralize
from clustertrain.plan.planner import Plan

MAX_FREE_MICRO_BATCH = 256  # sequences per rank, if the recipe has no global batch to end the search
# Most micro-batches in a trial's step: from the second one on gradients exist during the next pass, and more only take
# time. A pipeline gets all, since its memory depends on their number.
MAX_TRIAL_GRAD_ACCUM = 4

TrialOutcome = Literal["fits", "over_margin", "out_of_memory"]


class TrialMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """Measurement of one rank in one trial."""

    peak_bytes: int
    """On a GPU the peak that torch reserved plus other memory in use (context, NCCL); on the CPU the growth of resident
    memory since before the model was built."""
    allocated_bytes: int | None = None
    """None on the CPU."""
    capacity_bytes: int | None = None
    """Memory of the device; None on the CPU."""
    step_s: float
    """Median of the measured steps."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table, for the rank that needs the most memory. Figures are null if it ran out of memory."""

    micro_batch: int
    """Samples per rank and forward pass that were tried."""
    outcome: TrialOutcome
    """``fits``; ``over_margin`` if it ran, but used more of the memory than is safe; ``out_of_memory``."""
    divides_batch: bool
    """The micro-batch divides a rank's share of the global batch, and the pipeline's schedule supports it."""
    capacity_gib: float | None = None
    """Memory of the device; on the CPU the amount assumed for a rank."""
    peak_gib: float | None = None
    """Peak memory, GiB: on a GPU, what torch reserved and others used; on the CPU, the growth of resident memory."""
    allocated_gib: float | None = None
    """Peak of what torch allocated, GiB; null on the CPU."""
    step_s: float | None = None
    """Time per step of the slowest rank, seconds: median over the measured steps."""
    samples_per_s_per_gpu: float | None = None
    """Samples per second and GPU."""
    tokens_per_s_per_gpu: float | None = None
    """Tokens per second and GPU; null for images."""

    @property
    def fits(self) -> bool:
        return self.outcome == "fits"


@dataclass(frozen=True)
class TrialSearch:
    """The sizes to try."""

    layout: Layout
    """Layout of the trials."""
    rank_batch: int
    """Sequences per data-parallel rank and step; 0: the recipe sets no global batch, so any micro-batch is usable."""
    unit: int
    """A micro-batch must be a multiple of this."""
    compares_batch: bool = False
    """The loss compares all samples of a step, so that a trial needs all its micro-batches."""

    @property
    def max_micro_batch(self) -> int:
        return self.rank_batch or MAX_FREE_MICRO_BATCH // self.unit * self.unit

    def is_usable(self, micro_batch: int) -> bool:
        """Return whether a run could use ``micro_batch``."""
        if micro_batch % self.unit:
            return False
        if not self.rank_batch:
            return True
        return self.rank_batch % micro_batch == 0 and not pipeline_schedules.unsupported_reason(
            self.layout, self.rank_batch // micro_batch
        )

    def next_micro_batch(self, tried: Sequence[Trial]) -> int | None:
        """Return the next size to try; None at the end of the search.

        Sizes double until one does not fit; then the gap is bisected over the usable ones. A pipeline tries usable ones
        only.
        """
        largest_fitting = max((t.micro_batch for t in tried if t.fits), default=0)
        smallest_failing = min((t.micro_batch for t in tried if not t.fits), default=None)
        if smallest_failing is None:
            return self._grow(largest_fitting)
        # Without a global batch every size is usable; steps finer than a quarter are not worth a trial.
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
        """Return the batch split of a trial's step."""
        data_parallel = self.layout.data_parallel
        if self.rank_batch:
            grad_accum = max(1, -(-self.rank_batch // micro_batch))
        else:
            samples_per_pass = data_parallel * micro_batch
            grad_accum = default_global_batch(samples_per_pass * self.layout.pp) // samples_per_pass
        if self.layout.pp == 1 and not self.compares_batch:
            grad_accum = min(grad_accum, MAX_TRIAL_GRAD_ACCUM)
        global_batch = micro_batch * grad_accum * data_parallel
        return Batch(
            micro_batch=micro_batch,
            grad_accum=grad_accum,
            global_batch=global_batch,
            tokens_per_step=global_batch * tokens_per_sample,
        )


def build_trial_search(plan: Plan, recipe: Recipe, ranks: int) -> tuple[TrialSearch, str]:
    """Return the search on ``ranks`` ranks, and a description of what its result applies to.

    Raises:
        ConfigError: with so few ranks, a rank would need more memory than in the plan.
    """
    layout, description = fit_to_ranks(plan.layout, ranks)
    global_batch = recipe.train.global_batch
    rank_batch = samples_per_rank(global_batch, plan.layout.data_parallel) if global_batch else 0
    return TrialSearch(layout, rank_batch, non_decoder.group_size(recipe), recipe.compares_batch), description


def fit_to_ranks(layout: Layout, ranks: int) -> tuple[Layout, str]:
    """Return ``layout`` with as many replicas as ``ranks`` ranks can hold, and a description.

    Replicas are alike, so the memory of a rank is the same.

    Raises:
        ConfigError: fewer ranks would share the sharded state.
    """
    world_size = layout.world_size
    if ranks == world_size:
        return layout, f"the plan's {pluralize(world_size, 'rank')}"
    replica_ranks = world_size // layout.dp_replicate
    if layout.zero1 or ranks % replica_ranks:
        shared = "the optimizer state" if layout.zero1 else f"what {pluralize(replica_ranks, 'rank')} share"
        raise ConfigError(
            f"{layout.describe()} is for {pluralize(world_size, 'rank')}, but only {ranks} can start here: {shared}"
            " would be split over fewer ranks, and each would need more memory than in the plan",
            fix=(
                "search with --nodes 1: a rank needs at least as much memory there, so what fits there fits on more "
                "nodes; or use the estimate of plan"
            ),
        )
    scaled = msgspec.structs.replace(layout, dp_replicate=ranks // replica_ranks)
    return (
        scaled,
        (
            f"{ranks} of the plan's {world_size} ranks, with {pluralize(scaled.dp_replicate, 'replica')} instead of "
            f"{layout.dp_replicate}: a rank's memory is the same, but the time excludes the all-reduce across nodes"
        ),
    )


def evaluate_trial(
    measurements: Sequence[TrialMeasurement], search: TrialSearch, batch: Batch, assumed_gib: float
) -> Trial:
    """Return the result of a completed trial.

    Args:
        assumed_gib: memory of a rank if the device does not report it.
    """
    worst = max(measurements, key=lambda m: m.peak_bytes)
    capacity = (worst.capacity_bytes or assumed_gib * GIB) / GIB
    step_s = max(m.step_s for m in measurements)
    ranks = search.layout.world_size
    allocated = worst.allocated_bytes
    return Trial(
        micro_batch=batch.micro_batch,
        outcome="fits" if worst.peak_bytes / GIB <= SAFE_FRACTION * capacity else "over_margin",
        divides_batch=search.is_usable(batch.micro_batch),
        capacity_gib=capacity,
        peak_gib=worst.peak_bytes / GIB,
        allocated_gib=None if allocated is None else allocated / GIB,
        step_s=step_s,
        samples_per_s_per_gpu=batch.global_batch / step_s / ranks,
        tokens_per_s_per_gpu=batch.tokens_per_step / step_s / ranks if batch.tokens_per_step else None,
    )


def best_trial(tried: Sequence[Trial]) -> Trial | None:
    """Return the fastest usable trial within the margin; None if there is none."""
    fitting = [t for t in tried if t.fits and t.divides_batch]
    return max(fitting, key=lambda t: t.samples_per_s_per_gpu or 0.0, default=None)
