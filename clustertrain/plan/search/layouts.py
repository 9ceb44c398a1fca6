"""Search over all layouts, with predicted step time and memory of each, for the best one.

The global batch stays fixed, since the result of training must not depend on the layout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from clustertrain.plan import pipeline_schedules
from clustertrain.plan.batch import divisors
from clustertrain.plan.cost import memory, step_time
from clustertrain.plan.cost.activations import PassConfig
from clustertrain.plan.cost.memory import MemoryEstimate
from clustertrain.plan.cost.step_time import ComputeTime, StepEstimate, StepWithoutDP
from clustertrain.plan.cost.trainer_memory import LowerBounds, PassCache
from clustertrain.plan.layout import Layout
from clustertrain.plan.search.degrees import data_parallel_options, micro_batches, parallel_degrees
from clustertrain.plan.search.problem import SearchProblem

# Differences below the model's error mean little (docs/explanation/planner.md): another kind of parallelism must gain
# SIMPLICITY_MARGIN, another degree or way to shard TIE_MARGIN.
SIMPLICITY_MARGIN, TIE_MARGIN = 0.05, 0.03
CHECKPOINTING_MODES = ("none", "selective", "full")
MAX_SLOWDOWN = 2.0  # times the fastest; slower layouts are skipped
FAMILIES = ("single", "ddp", "zero1", "fsdp", "hybrid-shard", "tensor parallel", "pipeline", "context parallel")


@dataclass(frozen=True)
class Candidate:
    """A layout and pass configuration with predictions."""

    layout: Layout
    config: PassConfig
    step: StepEstimate
    memory: MemoryEstimate

    @property
    def step_s(self) -> float:
        return self.step.step_s

    @property
    def peak_gib(self) -> float:
        return self.memory.peak_gib or 0.0

    @property
    def family(self) -> str:
        return classify_layout(self.layout)


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of a search."""

    fitting: tuple[Candidate, ...]
    """One candidate per layout (its fastest micro-batch and recomputation), best first."""
    smallest: tuple[Candidate, ...]
    """For each family that does not fit, the candidate that needs the least memory."""
    considered: int
    """Number of combinations examined."""
    families_tried: frozenset[str]
    """Families of these combinations."""

    @property
    def best(self) -> Candidate | None:
        return self.fitting[0] if self.fitting else None


def classify_layout(layout: Layout) -> str:
    """Return the family of a layout: the most elaborate parallelism that it uses."""
    return _classify(layout, layout.strategy)


def _classify(degrees: Layout, strategy: str) -> str:
    if degrees.cp > 1:
        return "context parallel"
    if degrees.pp > 1:
        return "pipeline"
    if degrees.tp > 1:
        return "tensor parallel"
    return "fsdp" if strategy == "fsdp-grad-op" else strategy


def _tie_key(layout: Layout, strategy: str) -> tuple[object, ...]:
    """Return the key of layouts among which only time decides."""
    return strategy, layout.tp > 1, layout.pp > 1, layout.cp > 1, layout.virtual_stages > 1


def count_parallelisms(layout: Layout) -> int:
    """Return the number of kinds of parallelism in addition to data parallelism.

    Context parallelism counts twice, since it is rare except for very long sequences.
    """
    return (layout.tp > 1) + (layout.pp > 1) + 2 * (layout.cp > 1)


def penalized_step_s(candidate: Candidate) -> float:
    """Return the step time with a penalty for each kind of parallelism."""
    return candidate.step_s * (1 + SIMPLICITY_MARGIN) ** count_parallelisms(candidate.layout)


def complexity_key(layout: Layout) -> tuple[int, ...]:
    """Return the sort key among layouts of similar cost: simpler kinds, smaller degrees, less recomputation."""
    strategy_order = ("single", "ddp", "zero1", "fsdp", "fsdp-grad-op", "hybrid-shard")
    # A request for every Nth layer is a constraint, so that all candidates have it.
    mode = layout.activation_checkpointing
    checkpointing_index = CHECKPOINTING_MODES.index(mode) if mode in CHECKPOINTING_MODES else len(CHECKPOINTING_MODES)
    family_index = FAMILIES.index(classify_layout(layout))
    return (
        count_parallelisms(layout),
        family_index,
        strategy_order.index(layout.strategy),
        layout.tp * layout.pp * layout.cp,
        checkpointing_index,
    )


def search(problem: SearchProblem) -> SearchResult:
    """Search all valid layouts. Pure arithmetic: a thousand layouts take some hundredths of a second."""
    return _Search(problem).run()


def fits_any(problem: SearchProblem) -> bool:
    """Return whether any valid layout fits."""
    # Full recomputation needs least.
    mode = problem.constraints.activation_checkpointing or "full"
    constraints = dataclasses.replace(problem.constraints, activation_checkpointing=mode)
    search = _Search(dataclasses.replace(problem, constraints=constraints), bounds_first=True)
    for partial in search.sorted_partials():
        search.try_sharding(partial)
        if search.fitting:
            return True
    return False


@dataclass(frozen=True)
class _PartialCandidate:
    """Degrees, micro-batch and recomputation, with the time that does not depend on how parameters are sharded."""

    layout: Layout  # its data-parallel part is not chosen yet
    config: PassConfig
    without_dp: StepWithoutDP


class _Search:
    def __init__(self, problem: SearchProblem, *, bounds_first: bool = False) -> None:
        """``bounds_first`` is faster if few layouts fit, and does not keep those that do not."""
        self.problem, self.bounds_first = problem, bounds_first
        self.compute_times: dict[tuple[int, int, int, bool], ComputeTime] = {}
        self.pass_cache: PassCache = {}
        self.fastest_by_family: dict[str, float] = {}  # seconds
        self.fastest_by_tie_key: dict[tuple[object, ...], float] = {}  # seconds
        self.fitting: dict[tuple[object, ...], Candidate] = {}
        self.not_fitting: dict[tuple[object, ...], Candidate] = {}  # the first one per layout
        # Lower bounds, without activations, of layouts that did not fit.
        self.state_bounds: dict[tuple[object, ...], LowerBounds] = {}
        self.considered = 0
        self.families_tried: set[str] = set()

    def run(self) -> SearchResult:
        """Run the search in the order of the best possible time, which rules out most of the rest."""
        for partial in self.sorted_partials():
            if partial.without_dp.total_s > MAX_SLOWDOWN * min(self.fastest_by_family.values(), default=math.inf):
                break
            self.try_sharding(partial)
        return self.build_result()

    def sorted_partials(self) -> list[_PartialCandidate]:
        """Return all of them, by the best possible time."""
        partials = [
            partial for degrees in parallel_degrees(self.problem) for partial in self._partial_candidates(*degrees)
        ]
        return sorted(partials, key=lambda partial: partial.without_dp.total_s)

    def _partial_candidates(
        self, tp: int, cp: int, pp: int, schedule: str | None, virtual_stages: int
    ) -> Iterator[_PartialCandidate]:
        problem, constraints = self.problem, self.problem.constraints
        dp_ranks = problem.world_size // (tp * cp * pp)
        if problem.global_batch % dp_ranks:
            return
        rank_batch = problem.global_batch // dp_ranks
        layouts = [
            Layout(
                dp_replicate=dp_ranks, tp=tp, sequence_parallel=problem.parallel.sequence_parallel and tp > 1,
                cp=cp, pp=pp,
                schedule=schedule, virtual_stages=virtual_stages, activation_checkpointing=mode,
            )
            for mode in (
                [constraints.activation_checkpointing] if constraints.activation_checkpointing else CHECKPOINTING_MODES
            )
            if mode != "selective" or schedule not in pipeline_schedules.SPLIT_BACKWARD_SCHEDULES
        ]  # fmt: skip
        if not layouts:
            return
        for micro_batch in [constraints.micro_batch] if constraints.micro_batch else micro_batches(rank_batch):
            if rank_batch % micro_batch or pipeline_schedules.unsupported_reason(layouts[0], rank_batch // micro_batch):
                continue
            config = self._build_pass_config(layouts[0], micro_batch, rank_batch // micro_batch)
            compute_time = self._compute_time(layouts[0], config)
            for layout in layouts:
                without_dp = step_time.estimate_without_dp(
                    problem.model, layout, config, problem.framework, problem.machine, compute_time
                )
                yield _PartialCandidate(layout, config, without_dp)

    def try_sharding(self, partial: _PartialCandidate) -> None:
        """Try each kind of data parallelism that could win."""
        open_layout, pass_bounds = partial.layout, self._bound_pass(partial)
        for strategy, replicate, shard in data_parallel_options(
            self.problem, open_layout.dp_replicate, open_layout.tp, open_layout.cp, open_layout.pp
        ):
            self.considered += 1
            family = _classify(open_layout, strategy)
            self.families_tried.add(family)
            if partial.without_dp.total_s > (1 + TIE_MARGIN) * self.fastest_by_tie_key.get(
                _tie_key(open_layout, strategy), math.inf
            ):
                continue
            layout_key = (strategy, shard, open_layout.tp, open_layout.cp, open_layout.pp, open_layout.virtual_stages)
            if layout_key in self.state_bounds and self._exceeds_limit(self.state_bounds[layout_key], pass_bounds):
                continue
            layout = msgspec.structs.replace(
                open_layout, strategy=strategy, dp_replicate=replicate, dp_shard=shard, zero1=strategy == "zero1",
                reshard_after_forward=strategy != "fsdp-grad-op" and open_layout.pp == 1,
            )  # fmt: skip
            if self.problem.parallel.offload and layout.is_fully_sharded:
                layout = msgspec.structs.replace(layout, offload=True)
            if self.bounds_first and layout_key not in self.state_bounds:
                self.state_bounds[layout_key] = self._bound_state(partial, layout)
                if self._exceeds_limit(self.state_bounds[layout_key], pass_bounds):
                    continue
            self._keep_fastest(partial, layout, family, layout_key)

    def _bound_pass(self, partial: _PartialCandidate) -> LowerBounds:
        """Return lower bounds of activations and logits, which sharding does not reduce; 0 in a pipeline.

        There, the stage with the most parameters need not be the one with the logits.
        """
        if partial.layout.pp > 1:
            return LowerBounds(0.0, 0.0)
        config = dataclasses.replace(partial.config, autocast=False)
        return memory.bound_pass(self.problem.model, partial.layout, config, self.problem.framework)

    def _bound_state(self, partial: _PartialCandidate, layout: Layout) -> LowerBounds:
        config = _final_config(partial, layout)
        return memory.bound_state(self.problem.model, layout, config, self.problem.framework)

    def _exceeds_limit(self, state: LowerBounds, passes: LowerBounds) -> bool:
        return max(map(sum, zip(state, passes, strict=True))) > self.problem.limit_gib * memory.GIB

    def _keep_fastest(
        self, partial: _PartialCandidate, layout: Layout, family: str, layout_key: tuple[object, ...]
    ) -> None:
        """Keep the fastest candidate that fits; memory is more expensive to estimate than time, so it comes last."""
        problem, incumbent = self.problem, self.fitting.get(layout_key)
        config = _final_config(partial, layout)
        for defer in self._defer_options(layout, config):
            variant = msgspec.structs.replace(layout, defer_reduction=defer)
            step = step_time.add_data_parallel(
                partial.without_dp, problem.model, variant, config, problem.framework, problem.machine
            )
            tie_key = _tie_key(layout, layout.strategy)
            threshold_s = min(
                (1 + TIE_MARGIN) * self.fastest_by_tie_key.get(tie_key, math.inf),
                incumbent.step_s if incumbent else math.inf,
            )
            if step.step_s >= threshold_s:
                return
            estimate = memory.estimate_memory(problem.model, variant, config, None, problem.framework, self.pass_cache)
            candidate = Candidate(variant, config, step, estimate)
            if candidate.peak_gib <= problem.limit_gib:
                self.fitting[layout_key] = candidate
                self.fastest_by_family[family] = min(step.step_s, self.fastest_by_family.get(family, step.step_s))
                self.fastest_by_tie_key[tie_key] = min(step.step_s, self.fastest_by_tie_key.get(tie_key, step.step_s))
                return
        if layout_key not in self.state_bounds:
            self.state_bounds[layout_key] = self._bound_state(partial, layout)
            self.not_fitting[layout_key] = candidate

    def _defer_options(self, layout: Layout, config: PassConfig) -> tuple[bool, ...]:
        setting = self.problem.parallel.defer_reduction
        if layout.pp > 1:  # torch's stages keep gradients whole until the schedule's end
            return (True,)
        if setting != "auto":
            return (setting,)
        return (True, False) if layout.is_fully_sharded and config.grad_accum > 1 else (True,)

    def _smallest_variant(self, candidate: Candidate) -> Candidate:
        """Return the same layout with the least memory: recomputation, and the micro-batch that needs least.

        The smallest micro-batch may need more than a whole batch, since gradients are kept between micro-batches.
        """
        constraints, layout = self.problem.constraints, candidate.layout
        rank_batch = candidate.config.micro_batch * candidate.config.grad_accum
        micro_batches = [constraints.micro_batch] if constraints.micro_batch else divisors(rank_batch)
        layout = msgspec.structs.replace(
            layout, activation_checkpointing=constraints.activation_checkpointing or "full"
        )
        variants = [
            self._with_micro_batch(layout, candidate, micro_batch, rank_batch // micro_batch)
            for micro_batch in micro_batches
            if not pipeline_schedules.unsupported_reason(layout, rank_batch // micro_batch)
        ]
        return min(variants, key=lambda variant: variant.peak_gib)

    def _with_micro_batch(self, layout: Layout, candidate: Candidate, micro_batch: int, grad_accum: int) -> Candidate:
        config = dataclasses.replace(candidate.config, micro_batch=micro_batch, grad_accum=grad_accum)
        layout = msgspec.structs.replace(layout, defer_reduction=self._defer_options(layout, config)[-1])
        estimate = memory.estimate_memory(self.problem.model, layout, config, None, self.problem.framework)
        return Candidate(layout, config, candidate.step, estimate)

    def _build_pass_config(self, layout: Layout, micro_batch: int, grad_accum: int) -> PassConfig:
        problem = self.problem
        return PassConfig(
            seq_len=problem.seq_len,
            micro_batch=micro_batch,
            grad_accum=grad_accum,
            precision=problem.precision,
            # For the time of pipeline sends; _keep_fastest turns it off for fully sharded layouts.
            autocast=problem.precision in ("bf16", "fp16", "fp8") and not layout.is_fully_sharded,
            device="cuda",
            parallel=problem.parallel,
            has_document_mask=problem.attention.has_dense_mask(layout, "cuda"),
            is_attention_plain=problem.attention.backend == "math",
        )

    def _compute_time(self, layout: Layout, config: PassConfig) -> ComputeTime:
        key = (layout.tp, layout.cp, config.micro_batch, config.has_document_mask)
        if key not in self.compute_times:
            problem = self.problem
            self.compute_times[key] = step_time.estimate_compute(
                problem.model, layout, config, problem.framework, problem.machine.rates
            )
        return self.compute_times[key]

    def _find_smallest(self) -> list[Candidate]:
        """Return the candidate that needs least of each family in which nothing fits.

        Those with the least state come first, so that most of the others need more for their state alone.
        """
        by_bound = sorted(
            (max(self.state_bounds[key]) / memory.GIB, i, candidate)
            for i, (key, candidate) in enumerate(self.not_fitting.items())
            if candidate.family not in self.fastest_by_family
        )
        smallest: dict[str, tuple[float, int, Candidate]] = {}  # with the memory, GiB, and the order of the search
        for bound_gib, i, candidate in by_bound:
            family = candidate.family
            if family in smallest and bound_gib > smallest[family][0]:
                continue
            variant = self._smallest_variant(candidate)
            found = (variant.peak_gib, i, variant)
            smallest[family] = min(smallest.get(family, found), found)
        return [variant for _, _, variant in sorted(smallest.values())]

    def build_result(self) -> SearchResult:
        """Return the result of the search so far."""
        # One that would fit is slower than MAX_SLOWDOWN allows.
        unfit = [c for c in self._find_smallest() if c.peak_gib > self.problem.limit_gib]
        return SearchResult(
            fitting=tuple(rank_candidates(list(self.fitting.values()))),
            smallest=tuple(unfit),
            considered=self.considered,
            families_tried=frozenset(self.families_tried),
        )


def _final_config(partial: _PartialCandidate, layout: Layout) -> PassConfig:
    return dataclasses.replace(partial.config, autocast=False) if layout.is_fully_sharded else partial.config


def rank_candidates(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates by time, after the simplest of those that cost about as little as the cheapest."""
    by_time = sorted(candidates, key=lambda c: c.step_s)
    if not by_time:
        return []
    lowest_cost = min(map(penalized_step_s, by_time))
    simplest = min(
        (c for c in by_time if penalized_step_s(c) <= (1 + TIE_MARGIN) * lowest_cost),
        key=lambda c: complexity_key(c.layout),
    )
    return [simplest, *(c for c in by_time if c is not simplest)]
