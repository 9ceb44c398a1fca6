"""The layout and the batch split of a request, with what spoke for them and against others."""

from __future__ import annotations

import dataclasses

import msgspec

from clustertrain.plan import batch as batches
from clustertrain.plan.cost.memory import Memory
from clustertrain.plan.cost.step_time import Step
from clustertrain.plan.explain import decision, search_result, warnings
from clustertrain.plan.layout import Batch, Layout, Strategy, gib
from clustertrain.plan.request import Given
from clustertrain.plan.search import layouts
from clustertrain.plan.search.layouts import Candidate, Found, Problem


class Rejected(msgspec.Struct, frozen=True):
    strategy: str
    why: str


class Choice:
    """One decision in the making."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.found: Found | None = None  # of a search
        self.step: Step | None = None
        self.way_out = ""
        self.layout = Layout()
        self.batch = Batch(micro_batch=0, grad_accum=0, global_batch=0, tokens_per_step=0)
        self.memory = Memory(capacity_gib=given.capacity)
        self.reasons: list[str] = []
        self.warnings: list[str] = []
        self.rejected: list[Rejected] = []

    def decide(self) -> None:
        """For the built-in trainer, whose model is known."""
        given = self.given
        wanted, why = given.wanted()
        self.warnings += decision.gpu(given)
        problem = given.problem(wanted)
        if problem is not None:
            self._by_search(problem, wanted, why)
        elif wanted is not None or given.decoder is None:
            layout = given.layout_of(wanted or "ddp")
            named = why or "ddp: the memory of this model is not estimated; --layout fsdp shards it"
            self._take(layout, named if layout.strategy == (wanted or "ddp") else decision.single(given))
        else:
            self._by_memory()
        decision.batch(self)
        decision.layout(self)
        if problem is None or given.pp > 1:  # a pipeline that the search has taken by itself is worth its bubble
            fastest = problem is not None and not given.spec.recipe.train.micro_batch
            self.warnings += warnings.of_bubble(self.layout, self.batch, fastest=fastest)
        decision.count(self)
        decision.memory(self)

    def decide_for_script(self) -> None:
        wanted, why = self.given.wanted()
        self.layout = self.given.layout_of(wanted or "ddp")
        if self.layout.strategy == "single":
            why = decision.single(self.given)
        elif wanted is None:
            why = "ddp: the model of a script is not known before it runs; --layout fsdp shards it"
        self.reasons.append(why)
        decision.layout(self)

    # -- by memory alone: no rates are known

    def _by_memory(self) -> None:
        replicas = self.given.layout_of("ddp")
        if replicas.gradient_ranks == 1:
            self._take(replicas, decision.single(self.given))
            return
        split, need = self.given.split_and_need(replicas)
        limit = self.given.limit_in_words()
        name = replicas.strategy
        if need <= self.given.limit:
            self._take(replicas, f"{name}: {gib(need)} a rank is within {limit}, and it communicates least")
            self.rejected.append(
                Rejected("fsdp", f"not needed: a replica needs {gib(need)}{decision.fsdp_sends(replicas)}")
            )
            return
        why = f"a replica needs {gib(need)} a rank at micro_batch {split.micro_batch}, more than {limit}"
        self.rejected.append(Rejected(name, why))
        over = replicas.gradient_ranks
        self._take(
            self.given.layout_of("fsdp"), f"fsdp: {why}; shards parameters, gradients and optimizer over {over} ranks"
        )

    def _take(self, layout: Layout, reason: str) -> None:
        self.layout = layout
        self.batch, _ = self.given.split_and_need(layout)
        self.memory = self.given.memory(layout, self.batch.micro_batch)
        self.reasons.append(reason)

    # -- by search

    def _by_search(self, problem: Problem, strategy: Strategy | None, why: str) -> None:
        """Take the fastest layout that fits, among those that the user leaves open."""
        given = self.given
        if strategy is not None or given.degrees_given():
            checked = given.layout_of(strategy or "fsdp")  # refuses what cannot be
            batches.check_divides(problem.global_batch, checked.data_parallel, given.spec.recipe.train.micro_batch)
        found = layouts.search(problem)
        if found.best is None:  # then nearer to the border than one should go
            found = layouts.search(dataclasses.replace(problem, limit_gib=given.capacity or given.limit))
        if found.best is None:
            self._nothing_fits(problem, found, strategy, why)
            return
        self.found = found
        self._take_candidate(found.best)
        single = found.best.layout.strategy == "single" and (given.world == 1 or given.degrees_given())
        self.reasons += search_result.chosen(
            found.best, found, given.gpu_name, decision.single(given) if single else why
        )
        self.rejected += [Rejected(kind, said) for kind, said in search_result.rejected(problem, found)]
        self.warnings += search_result.narrowed(problem, found.best)

    def _nothing_fits(self, problem: Problem, found: Found, strategy: Strategy | None, why: str) -> None:
        least = min(found.smallest, key=lambda c: c.peak_gib, default=None)
        if least is None:
            self._take(self.given.layout_of(strategy or "ddp"), why or "ddp")
            return
        self._take_candidate(least)
        self.step = None  # how fast it would be does not matter
        self.reasons.append(f"{why or least.layout.words()}: nothing fits; this needs least")
        self.rejected += [Rejected(kind, said) for kind, said in search_result.rejected(problem, found)]
        self.way_out = search_result.way_out(problem, self.given.gpu_name)

    def _take_candidate(self, best: Candidate) -> None:
        self.layout, self.step = best.layout, best.step
        whole = best.run.micro_batch * best.run.grad_accum * best.layout.data_parallel
        self.batch = Batch(
            micro_batch=best.run.micro_batch,
            grad_accum=best.run.grad_accum,
            global_batch=whole,
            tokens_per_step=whole * self.given.spec.recipe.data.seq_len,
        )
        capacity = self.given.capacity
        fits = None if capacity is None else best.peak_gib <= capacity
        self.memory = msgspec.structs.replace(best.need, capacity_gib=capacity, fits=fits)
