"""Choice of layout and batch split for a request, with the reasons for it and against the alternatives."""

from __future__ import annotations

import dataclasses

import msgspec

from clustertrain.plan import batch as batches
from clustertrain.plan.cost.memory import MemoryEstimate
from clustertrain.plan.cost.step_time import StepEstimate
from clustertrain.plan.explain import decision, search_result, warnings
from clustertrain.plan.layout import Batch, Layout, Strategy, format_gib
from clustertrain.plan.request import PlanRequest
from clustertrain.plan.search import layouts
from clustertrain.plan.search.layouts import Candidate, SearchProblem, SearchResult


class RejectedLayout(msgspec.Struct, frozen=True):
    """A layout family that was not chosen, and why."""

    strategy: str
    why: str


class PlanDecision:
    """A decision under construction: the ``decide`` methods fill its attributes."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.result: SearchResult | None = None  # if a search was done
        self.step: StepEstimate | None = None
        self.suggestion = ""
        self.layout = Layout()
        self.batch = Batch(micro_batch=0, grad_accum=0, global_batch=0, tokens_per_step=0)
        self.memory = MemoryEstimate(capacity_gib=request.capacity_gib)
        self.reasons: list[str] = []
        self.warnings: list[str] = []
        self.rejected: list[RejectedLayout] = []

    def decide(self) -> None:
        """Decide for the built-in trainer, whose model is known."""
        request = self.request
        strategy, reason = request.requested_strategy()
        self.warnings += decision.gpu_warnings(request)
        problem = request.build_search_problem(strategy)
        if problem is not None:
            self._decide_by_search(problem, strategy, reason)
        elif strategy is not None or request.decoder is None:
            layout = request.build_layout(strategy or "ddp")
            default_reason = reason or "ddp: the memory of this model is not estimated; --layout fsdp shards it"
            self._choose(
                layout, default_reason if layout.strategy == (strategy or "ddp") else decision.explain_single(request)
            )
        else:
            self._decide_by_memory()
        decision.explain_batch(self)
        decision.explain_layout(self)
        if problem is None or request.pp > 1:  # a pipeline that the search chose is worth its bubble
            fastest = problem is not None and not request.spec.recipe.train.micro_batch
            self.warnings += warnings.bubble_warnings(self.layout, self.batch, is_fastest=fastest)
        decision.explain_model_stats(self)
        decision.explain_memory(self)

    def decide_for_script(self) -> None:
        """Decide for a user's script, whose model is unknown."""
        strategy, reason = self.request.requested_strategy()
        self.layout = self.request.build_layout(strategy or "ddp")
        if self.layout.strategy == "single":
            reason = decision.explain_single(self.request)
        elif strategy is None:
            reason = "ddp: the model of a script is unknown before it runs; --layout fsdp shards it"
        self.reasons.append(reason)
        decision.explain_layout(self)

    # -- by memory alone, if the GPU's rates are unknown

    def _decide_by_memory(self) -> None:
        replicated = self.request.build_layout("ddp")
        if replicated.gradient_ranks == 1:
            self._choose(replicated, decision.explain_single(self.request))
            return
        batch, need_gib = self.request.split_and_estimate(replicated)
        limit_text = self.request.format_limit()
        name = replicated.strategy
        if need_gib <= self.request.limit_gib:
            self._choose(
                replicated, f"{name}: {format_gib(need_gib)} per rank is within {limit_text}, and it communicates least"
            )
            self.rejected.append(
                RejectedLayout(
                    "fsdp",
                    f"not needed: a replica needs {format_gib(need_gib)}{decision.fsdp_traffic_note(replicated)}",
                )
            )
            return
        need_text = f"{format_gib(need_gib)} per rank at micro_batch {batch.micro_batch}"
        reason = f"a replica needs {need_text}, more than {limit_text}"
        self.rejected.append(RejectedLayout(name, reason))
        shard_ranks = replicated.gradient_ranks
        self._choose(
            self.request.build_layout("fsdp"),
            f"fsdp: {reason}; shards parameters, gradients and optimizer over {shard_ranks} ranks",
        )

    def _choose(self, layout: Layout, reason: str) -> None:
        self.layout = layout
        self.batch, _ = self.request.split_and_estimate(layout)
        self.memory = self.request.estimate_memory(layout, self.batch.micro_batch)
        self.reasons.append(reason)

    # -- by search

    def _decide_by_search(self, problem: SearchProblem, strategy: Strategy | None, reason: str) -> None:
        """Take the fastest layout that fits, among those that the user leaves open."""
        request = self.request
        if strategy is not None or request.has_degrees():
            checked = request.build_layout(strategy or "fsdp")  # raises if impossible
            batches.check_divides(problem.global_batch, checked.data_parallel, request.spec.recipe.train.micro_batch)
        result = layouts.search(problem)
        if result.best is None:  # then without the safety margin
            result = layouts.search(dataclasses.replace(problem, limit_gib=request.capacity_gib or request.limit_gib))
        if result.best is None:
            self._choose_smallest(problem, result, strategy, reason)
            return
        self.result = result
        self._choose_candidate(result.best)
        is_single = result.best.layout.strategy == "single" and (request.world_size == 1 or request.has_degrees())
        self.reasons += search_result.explain_chosen(
            result.best, result, request.gpu_name, decision.explain_single(request) if is_single else reason
        )
        self.rejected += [
            RejectedLayout(family, explanation)
            for family, explanation in search_result.explain_rejected(problem, result)
        ]
        self.warnings += search_result.batch_warnings(problem, result.best)

    def _choose_smallest(
        self, problem: SearchProblem, result: SearchResult, strategy: Strategy | None, reason: str
    ) -> None:
        smallest = min(result.smallest, key=lambda c: c.peak_gib, default=None)
        if smallest is None:
            self._choose(self.request.build_layout(strategy or "ddp"), reason or "ddp")
            return
        self._choose_candidate(smallest)
        self.step = None  # irrelevant, because it does not fit
        self.reasons.append(f"{reason or smallest.layout.describe()}: nothing fits; this needs the least")
        self.rejected += [
            RejectedLayout(family, explanation)
            for family, explanation in search_result.explain_rejected(problem, result)
        ]
        self.suggestion = search_result.suggest_changes(problem, self.request.gpu_name)

    def _choose_candidate(self, candidate: Candidate) -> None:
        self.layout, self.step = candidate.layout, candidate.step
        global_batch = candidate.config.micro_batch * candidate.config.grad_accum * candidate.layout.data_parallel
        self.batch = Batch(
            micro_batch=candidate.config.micro_batch,
            grad_accum=candidate.config.grad_accum,
            global_batch=global_batch,
            tokens_per_step=global_batch * self.request.spec.recipe.data.seq_len,
        )
        capacity = self.request.capacity_gib
        fits = None if capacity is None else candidate.peak_gib <= capacity
        self.memory = msgspec.structs.replace(candidate.memory, capacity_gib=capacity, fits=fits)
