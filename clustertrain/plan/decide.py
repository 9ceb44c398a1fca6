"""Choose the layout and the batch split of a request: as asked for, by memory alone, or by a search."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import msgspec

from clustertrain.plan import attention, checks
from clustertrain.plan.batch import check_divides
from clustertrain.plan.cost.memory import MemoryEstimate
from clustertrain.plan.decision import Explanation, PlanDecision, RejectedLayout
from clustertrain.plan.explain import search_result, warnings
from clustertrain.plan.explain.decision import (
    explain_batch,
    explain_layout,
    explain_memory,
    explain_model_stats,
    explain_single,
    fsdp_traffic_note,
    gpu_warnings,
)
from clustertrain.plan.layout import Batch, Layout, Strategy, format_gib
from clustertrain.plan.request import PlanRequest
from clustertrain.plan.search import layouts
from clustertrain.plan.search.layouts import Candidate, SearchResult
from clustertrain.plan.search.problem import SearchProblem


@dataclass(frozen=True)
class ModelSplit:
    """How a model is trained whose memory the planner cannot estimate: what counting it needs to know."""

    layout: Layout
    batch: Batch
    precision: str


def split_model(request: PlanRequest) -> ModelSplit:
    """Return the split of a model that is not the built-in decoder. Counting the model does not change it.

    Raises:
        ConfigError: the layout, the batch or the device is refused.
    """
    assert request.decoder is None
    strategy, _ = request.requested_strategy()
    layout = request.build_layout(strategy or "ddp")
    batch, _ = request.split_and_estimate(layout)
    checks.check_device(request.precision, request.spec.recipe.parallel, layout, request.device, request.gpu)
    attention.check_attention(request.spec.recipe, request.precision, layout, request.device, request.gpu)
    return ModelSplit(layout, batch, request.precision)


def decide(request: PlanRequest) -> PlanDecision:
    """Return the decision for the built-in trainer.

    Raises:
        ConfigError: the degrees, the batch or the model do not divide, or the device lacks what they need.
    """
    strategy, reason = request.requested_strategy()
    problem = request.build_search_problem(strategy)
    if problem is not None:
        decision = _decide_by_search(request, problem, strategy, reason)
    elif strategy is not None or request.decoder is None:
        layout = request.build_layout(strategy or "ddp")
        default_reason = reason or "ddp: the memory of this model is not estimated; --layout fsdp shards it"
        decision = _choose(
            request,
            layout,
            default_reason if layout.strategy == (strategy or "ddp") else explain_single(request),
        )
    else:
        decision = _decide_by_memory(request)
    bubble_warnings: list[str] = []
    if problem is None or request.pp > 1:  # a pipeline that the search has taken by itself is worth its bubble
        fastest = problem is not None and not request.spec.recipe.train.micro_batch
        bubble_warnings = warnings.bubble_warnings(decision.layout, decision.batch, is_fastest=fastest)
    decision = decision.explained(
        explain_batch(decision),
        explain_layout(decision),
        Explanation(warnings=tuple(bubble_warnings)),
        explain_model_stats(decision),
        explain_memory(decision),
    )
    return dataclasses.replace(decision, warnings=(*gpu_warnings(request), *decision.warnings))


def decide_for_script(request: PlanRequest) -> PlanDecision:
    """Return the decision for a script, whose model and batch are not known."""
    strategy, reason = request.requested_strategy()
    layout = request.build_layout(strategy or "ddp")
    script = request.spec.script
    if script is not None and script.command:
        reason = ""  # it decides by itself how its ranks share the work
    elif layout.strategy == "single":
        reason = explain_single(request)
    elif strategy is None:
        reason = (
            "layout ddp is the default: clustertrain cannot see a script's model before it runs (--layout fsdp shards)"
        )
    decision = PlanDecision(
        request=request,
        layout=layout,
        batch=Batch(micro_batch=0, grad_accum=0, global_batch=0, tokens_per_step=0),
        memory=MemoryEstimate(capacity_gib=request.capacity_gib),
        reasons=(reason,) if reason else (),
    )
    return decision.explained(explain_layout(decision))


def _choose(request: PlanRequest, layout: Layout, reason: str, *rejected: RejectedLayout) -> PlanDecision:
    batch, _ = request.split_and_estimate(layout)
    memory = request.estimate_memory(layout, batch.micro_batch)
    return PlanDecision(
        request=request, layout=layout, batch=batch, memory=memory, reasons=(reason,), rejected=rejected
    )


# -- by memory alone: no rates are known


def _decide_by_memory(request: PlanRequest) -> PlanDecision:
    replicated = request.build_layout("ddp")
    if replicated.gradient_ranks == 1:
        return _choose(request, replicated, explain_single(request))
    batch, need_gib = request.split_and_estimate(replicated)
    limit_text = request.format_limit()
    name = replicated.strategy
    if need_gib <= request.limit_gib:
        return _choose(
            request,
            replicated,
            f"{name}: {format_gib(need_gib)} per rank fits in {limit_text}, and it communicates least",
            RejectedLayout(
                "fsdp", f"not needed: a replica needs {format_gib(need_gib)}{fsdp_traffic_note(replicated)}"
            ),
        )
    reason = (
        f"a replica needs {format_gib(need_gib)} per rank at micro_batch {batch.micro_batch}, more than {limit_text}"
    )
    shard_ranks = replicated.gradient_ranks
    return _choose(
        request,
        request.build_layout("fsdp"),
        f"fsdp: {reason}; shards parameters, gradients and optimizer over {shard_ranks} ranks",
        RejectedLayout(name, reason),
    )


# -- by search


def _decide_by_search(
    request: PlanRequest, problem: SearchProblem, strategy: Strategy | None, reason: str
) -> PlanDecision:
    """Take the fastest layout that fits, among those that the user leaves open."""
    if strategy is not None or request.has_degrees():
        checked = request.build_layout(strategy or "fsdp")  # refuses what cannot be
        check_divides(problem.global_batch, checked.data_parallel, request.spec.recipe.train.micro_batch)
    result = layouts.search(problem)
    # Otherwise nearer to the border than is safe.
    whole = dataclasses.replace(problem, limit_gib=request.capacity_gib or request.limit_gib)
    if result.best is None and layouts.fits_any(whole):
        result = layouts.search(whole)
    if result.best is None:
        return _choose_smallest(request, problem, result, strategy, reason)
    is_single = result.best.layout.strategy == "single" and (request.world_size == 1 or request.has_degrees())
    reasons = search_result.explain_chosen(
        result.best, result, request.gpu_name, explain_single(request) if is_single else reason
    )
    return dataclasses.replace(
        _choose_candidate(request, result.best),
        result=result,
        step=result.best.step,
        reasons=tuple(reasons),
        rejected=_list_rejected(problem, result),
        warnings=tuple(search_result.batch_warnings(problem, result.best)),
    )


def _choose_smallest(
    request: PlanRequest, problem: SearchProblem, result: SearchResult, strategy: Strategy | None, reason: str
) -> PlanDecision:
    """Take the layout that needs least where nothing fits. Its step time stays None: it does not matter."""
    smallest = min(result.smallest, key=lambda c: c.peak_gib, default=None)
    if smallest is None:
        return _choose(request, request.build_layout(strategy or "ddp"), reason or "ddp")
    return dataclasses.replace(
        _choose_candidate(request, smallest),
        reasons=(f"{reason or smallest.layout.describe()}: nothing fits; this needs least",),
        rejected=_list_rejected(problem, result),
        suggestion=search_result.suggest_changes(problem, request.gpu_name),
    )


def _list_rejected(problem: SearchProblem, result: SearchResult) -> tuple[RejectedLayout, ...]:
    return tuple(
        RejectedLayout(family, explanation) for family, explanation in search_result.explain_rejected(problem, result)
    )


def _choose_candidate(request: PlanRequest, candidate: Candidate) -> PlanDecision:
    config = candidate.config
    global_batch = config.micro_batch * config.grad_accum * candidate.layout.data_parallel
    batch = Batch(
        micro_batch=config.micro_batch,
        grad_accum=config.grad_accum,
        global_batch=global_batch,
        tokens_per_step=global_batch * request.sample_tokens,
    )
    capacity = request.capacity_gib
    fits = None if capacity is None else candidate.peak_gib <= capacity
    memory = msgspec.structs.replace(candidate.memory, capacity_gib=capacity, fits=fits)
    return PlanDecision(request=request, layout=candidate.layout, batch=batch, memory=memory)
