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
from clustertrain.plan.layout import Batch, Layout, counted
from clustertrain.plan.planner import Plan

LARGEST_FREE = 256  # sequences a rank, where the recipe names no global batch that would end the search
# Micro-batches of a trial's step, at most: from the second one on gradients are there while the next is at work, and
# more of them only take time. A pipeline gets all, since what it holds follows from their number.
MOST_ACCUMULATED = 4

Outcome = Literal["fits", "over the margin", "out of memory"]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank saw of one trial. On a GPU ``peak_bytes`` is the most that torch has reserved and what the device
    holds besides (context, NCCL), on the CPU the growth of resident memory since before the model was built.
    ``allocated_bytes`` and ``capacity_bytes`` (of the device) are None on the CPU."""

    peak_bytes: int
    allocated_bytes: int | None = None
    capacity_bytes: int | None = None
    step_s: float  # the median of the steps that count


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table, of the rank that needs most. ``usable``: it divides a rank's share of the global batch, and
    the pipeline's schedule runs it. Figures are None where it ran out of memory; of images there are no tokens."""

    micro_batch: int
    outcome: Outcome
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
class Search:
    """What there is to try. ``layout`` is the one that is tried, ``share`` a data-parallel rank's sequences a step (0:
    the recipe names no global batch, so any micro-batch is usable), ``unit`` what a micro-batch must be a multiple of.
    """

    layout: Layout
    share: int
    unit: int

    @property
    def largest(self) -> int:
        return self.share or LARGEST_FREE // self.unit * self.unit

    def usable(self, micro_batch: int) -> bool:
        if micro_batch % self.unit:
            return False
        if not self.share:
            return True
        return self.share % micro_batch == 0 and not pipeline_schedules.why_not(self.layout, self.share // micro_batch)

    def following(self, tried: Sequence[Trial]) -> int | None:
        """Twice the last one until one does not fit, then the usable ones between, halving the gap; None: found.

        A pipeline's schedule runs the usable ones only.
        """
        good = max((t.micro_batch for t in tried if t.fits), default=0)
        bad = min((t.micro_batch for t in tried if not t.fits), default=None)
        if bad is None:
            return self._larger(good)
        # Without a global batch every number is usable, and finer steps than quarters are not worth a trial.
        step = self.unit if self.share else max(self.unit, good // 4 // self.unit * self.unit)
        gap = [m for m in range(good + step, bad, step) if self.usable(m)] if good else []
        return gap[len(gap) // 2] if gap else None

    def _larger(self, good: int) -> int | None:
        runnable = [
            m
            for m in range(good + self.unit, self.largest + 1, self.unit)
            if self.layout.pp == 1 or self.usable(m)
        ]  # fmt: skip
        upto = [m for m in runnable if m <= max(self.unit, 2 * good)]
        return upto[-1] if upto else next(iter(runnable), None)

    def batch(self, micro_batch: int, tokens_per_sample: int) -> Batch:
        """The split of a trial's step."""
        data_parallel = self.layout.data_parallel
        if self.share:
            accum = max(1, -(-self.share // micro_batch))
        else:
            unit = data_parallel * micro_batch
            accum = batches.default_global_batch(unit * self.layout.pp) // unit
        if self.layout.pp == 1:
            accum = min(accum, MOST_ACCUMULATED)
        whole = micro_batch * accum * data_parallel
        return Batch(
            micro_batch=micro_batch,
            grad_accum=accum,
            global_batch=whole,
            tokens_per_step=whole * tokens_per_sample,
        )


def search(chosen: Plan, recipe: Recipe, ranks: int) -> tuple[Search, str]:
    """What to try on ``ranks`` ranks, and in words what the result stands for.

    Raises:
        ConfigError: a rank of so few would not hold what a rank of the plan does.
    """
    layout, words = on_ranks(chosen.layout, ranks)
    named = recipe.train.global_batch
    share = batches.per_rank(named, chosen.layout.data_parallel) if named else 0
    return Search(layout, share, non_decoder.group(recipe.model)), words


def on_ranks(layout: Layout, ranks: int) -> tuple[Layout, str]:
    """``layout`` with as many replicas as ``ranks`` ranks have room for: replicas are alike, so the memory of each is
    the same. Returns it with what it stands for, in words.

    Raises:
        ConfigError: fewer ranks share what the replicas do not repeat.
    """
    world = layout.world_size
    if ranks == world:
        return layout, f"the plan's {counted(world, 'rank')}"
    replica = world // layout.dp_replicate
    if layout.zero1 or ranks % replica:
        shared = "the optimizer state" if layout.zero1 else f"what {counted(replica, 'rank')} share"
        raise ConfigError(
            f"{layout.words()} is for {counted(world, 'rank')}, and {ranks} can be started here: {shared} would be "
            f"split over fewer, and each would need more memory than in the plan",
            fix="look for it with --nodes 1: a rank needs at least as much there, so what fits there fits on more "
            "nodes; or go by the estimate of plan",
        )
    smaller = msgspec.structs.replace(layout, dp_replicate=ranks // replica)
    return smaller, (
        f"{ranks} of the plan's {world} ranks, with {counted(smaller.dp_replicate, 'replica')} instead of "
        f"{layout.dp_replicate}: a rank's memory is the same, the all-reduce across nodes is not in the time"
    )


def judged(measured: Sequence[Measured], found: Search, split: Batch, assumed_gib: float) -> Trial:
    """The verdict on a trial that ran. ``assumed_gib`` is the memory of a rank where the device does not say."""
    worst = max(measured, key=lambda m: m.peak_bytes)
    capacity = (worst.capacity_bytes or assumed_gib * GIB) / GIB
    step_s = max(m.step_s for m in measured)
    ranks = found.layout.world_size
    allocated = worst.allocated_bytes
    return Trial(
        micro_batch=split.micro_batch,
        outcome="fits" if worst.peak_bytes / GIB <= SAFE_FRACTION * capacity else "over the margin",
        usable=found.usable(split.micro_batch),
        capacity_gib=capacity,
        peak_gib=worst.peak_bytes / GIB,
        allocated_gib=None if allocated is None else allocated / GIB,
        step_s=step_s,
        samples_per_s_per_gpu=split.global_batch / step_s / ranks,
        tokens_per_s_per_gpu=split.tokens_per_step / step_s / ranks if split.tokens_per_step else None,
    )


def advised(tried: Sequence[Trial]) -> Trial | None:
    """The fastest of the usable ones that leave the margin; None where there is none."""
    fitting = [t for t in tried if t.fits and t.usable]
    return max(fitting, key=lambda t: t.samples_per_s_per_gpu or 0.0, default=None)
