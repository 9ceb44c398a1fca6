"""All the ways to share the work among the ranks, each with its predicted step time and memory; the best of them.

A search holds the global batch fixed: what is learned must not depend on how it is computed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.recipe import Precision
from clustertrain.plan import pipeline_schedules
from clustertrain.plan.batch import divisors
from clustertrain.plan.cost import memory, step_time
from clustertrain.plan.cost.activations import Pass, activation_bytes, logits_bytes
from clustertrain.plan.cost.frameworks import Stack
from clustertrain.plan.cost.memory import Memory
from clustertrain.plan.cost.model_shape import Decoder
from clustertrain.plan.cost.step_time import Core, Machine, Step, Work
from clustertrain.plan.layout import Layout, Strategy

# What two predictions differ by means little below the model's own error (docs/planner.md): another kind of parallelism
# has to earn SIMPLER, another degree or way to shard TIE.
SIMPLER, TIE = 0.05, 0.03
LARGEST_MICRO_BATCH = 64
RECOMPUTES = ("none", "selective", "full")
HOPELESS = 2.0  # times the fastest: not looked at any more
# Ranks that share parameters: the most for which there is a published run that went well (arXiv 2304.11277, section
# 5.4); ZeRO-3 over 1536 lost two thirds of its speed (SC21, arXiv 2104.04473, table 2).
LARGEST_GROUP = 512
VIRTUAL_STAGES = (2, 3, 4, 5, 6, 8)
FAMILIES = ("single", "ddp", "zero1", "fsdp", "hybrid-shard", "tensor parallel", "pipeline", "context parallel")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the user has fixed; 0 and empty are free."""

    strategy: Strategy | None = None
    tp: int = 0
    cp: int = 0
    pp: int = 0
    dp_replicate: int = 0
    dp_shard: int = 0
    micro_batch: int = 0
    recompute: str = ""
    schedule: str = ""
    virtual_stages: int = 0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """``limit_gib``: what a rank may need, the safety margin taken off."""

    model: Decoder
    world: int
    gpus_per_node: int
    seq_len: int
    global_batch: int
    compute: Precision
    parallel: ParallelSpec
    machine: Machine
    stack: Stack
    limit_gib: float
    wanted: Wanted = field(default_factory=Wanted)


@dataclass(frozen=True)
class Candidate:
    layout: Layout
    run: Pass
    step: Step
    need: Memory

    @property
    def step_s(self) -> float:
        return self.step.step_s

    @property
    def peak_gib(self) -> float:
        return self.need.peak_gib or 0.0

    @property
    def family(self) -> str:
        return family(self.layout)


@dataclass(frozen=True, kw_only=True)
class Found:
    """``fitting``: one candidate a layout (its fastest micro-batch and recomputation), the best first; ``smallest``: of
    each family that fits nowhere the candidate that needs least; ``considered``: combinations looked at, and ``tried``
    their families."""

    fitting: tuple[Candidate, ...]
    smallest: tuple[Candidate, ...]
    considered: int
    tried: frozenset[str]

    @property
    def best(self) -> Candidate | None:
        return self.fitting[0] if self.fitting else None


def family(layout: Layout) -> str:
    """The most elaborate thing that a layout uses."""
    return _family(layout, layout.strategy)


def _family(degrees: Layout, strategy: str) -> str:
    if degrees.cp > 1:
        return "context parallel"
    if degrees.pp > 1:
        return "pipeline"
    if degrees.tp > 1:
        return "tensor parallel"
    return "fsdp" if strategy == "fsdp-grad-op" else strategy


def _alike(layout: Layout, strategy: str) -> tuple[object, ...]:
    """What two layouts have in common between which only time decides."""
    return strategy, layout.tp > 1, layout.pp > 1, layout.cp > 1, layout.virtual_stages > 1


def kinds(layout: Layout) -> int:
    """How many kinds of parallelism there are besides the data-parallel one. Split sequences count twice: they are the
    rarest, and below very long sequences nobody else runs them."""
    return (layout.tp > 1) + (layout.pp > 1) + 2 * (layout.cp > 1)


def cost(candidate: Candidate) -> float:
    """Seconds, with what each kind of parallelism has to earn."""
    return candidate.step_s * (1 + SIMPLER) ** kinds(candidate.layout)


def machinery(layout: Layout) -> tuple[int, ...]:
    """What decides between layouts that cost about the same: the fewer and simpler kinds, the smaller degrees, then
    less recomputation."""
    order = ("single", "ddp", "zero1", "fsdp", "fsdp-grad-op", "hybrid-shard")
    redone = RECOMPUTES.index(layout.activation_checkpointing)
    kind = FAMILIES.index(family(layout))
    return kinds(layout), kind, order.index(layout.strategy), layout.tp * layout.pp * layout.cp, redone


def search(problem: Problem) -> Found:
    """Look at every valid layout. Pure arithmetic: a thousand layouts take some hundredths of a second."""
    return _Search(problem).run()


@dataclass(frozen=True)
class _Way:
    """Degrees, micro-batch and recomputation with the seconds that do not depend on how parameters are sharded."""

    layout: Layout  # its data-parallel part is open
    run: Pass
    core: Core


class _Search:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.work: dict[tuple[int, int, int], Work] = {}
        self.kept: memory.Kept = {}
        self.fastest: dict[str, float] = {}  # of each family, seconds
        self.alike: dict[tuple[object, ...], float] = {}  # of layouts of the same kinds and strategy
        self.fitting: dict[tuple[object, ...], Candidate] = {}
        self.missed: dict[tuple[object, ...], Candidate] = {}  # of each layout the first that did not fit
        self.states: dict[tuple[object, ...], float] = {}  # GiB of what did not fit, at least, without activations
        self.considered = 0
        self.tried: set[str] = set()

    def run(self) -> Found:
        """From the ways that are fast at best: the rest is mostly told from its best alone."""
        ways = [way for degrees in _degrees(self.problem) for way in self._ways(*degrees)]
        ways.sort(key=lambda way: way.core.seconds)
        for way in ways:
            if way.core.seconds > HOPELESS * min(self.fastest.values(), default=math.inf):
                break
            self._shard(way)
        return self.found()

    def _ways(self, tp: int, cp: int, pp: int, schedule: str | None, virtual: int) -> Iterator[_Way]:
        problem, wanted = self.problem, self.problem.wanted
        data = problem.world // (tp * cp * pp)
        if problem.global_batch % data:
            return
        share = problem.global_batch // data
        layouts = [
            Layout(
                dp_replicate=data, tp=tp, sequence_parallel=problem.parallel.sequence_parallel and tp > 1, cp=cp, pp=pp,
                schedule=schedule, virtual_stages=virtual, activation_checkpointing=mode,
            )
            for mode in ([wanted.recompute] if wanted.recompute else RECOMPUTES)
            if mode != "selective" or schedule not in pipeline_schedules.TWO_PART_BACKWARD
        ]  # fmt: skip
        if not layouts:
            return
        for micro in [wanted.micro_batch] if wanted.micro_batch else _micro_batches(share):
            if share % micro or pipeline_schedules.why_not(layouts[0], share // micro):
                continue
            run = self._pass(layouts[0], micro, share // micro)
            work = self._work(layouts[0], run)
            for layout in layouts:
                core = step_time.core_of(problem.model, layout, run, problem.stack, problem.machine, work)
                yield _Way(layout, run, core)

    def _shard(self, way: _Way) -> None:
        """The way with each kind of data parallelism, as far as it could win."""
        open_layout, room = way.layout, self.problem.limit_gib - self._least_gib(way)
        for strategy, replicate, shard in _data_kinds(
            self.problem, open_layout.dp_replicate, open_layout.tp, open_layout.cp, open_layout.pp
        ):
            self.considered += 1
            kind = _family(open_layout, strategy)
            self.tried.add(kind)
            if way.core.seconds > (1 + TIE) * self.alike.get(_alike(open_layout, strategy), math.inf):
                continue
            where = (strategy, shard, open_layout.tp, open_layout.cp, open_layout.pp, open_layout.virtual_stages)
            if where in self.states and room < self.states[where]:
                continue
            layout = msgspec.structs.replace(
                open_layout, strategy=strategy, dp_replicate=replicate, dp_shard=shard, zero1=strategy == "zero1",
                reshard_after_forward=strategy != "fsdp-grad-op" and open_layout.pp == 1,
            )  # fmt: skip
            if self.problem.parallel.offload and layout.fully_sharded:
                layout = msgspec.structs.replace(layout, offload=True)
            self._take(way, layout, kind, where)

    def _least_gib(self, way: _Way) -> float:
        """Of activations and logits, which no way to shard parameters makes less. Of a pipeline nothing: the stage that
        holds most parameters need not be the one with the logits."""
        if way.layout.pp > 1:
            return 0.0
        run, of = dataclasses.replace(way.run, autocast=False), self.problem
        kept = logits_bytes(of.model, run, way.layout, of.stack)
        kept += activation_bytes(of.model, run, way.layout, stack=of.stack)
        return kept / memory.GIB

    def _least_states(self, layout: Layout, run: Pass) -> float:
        """GiB of parameters, gradients and optimizer state, without what depends on recomputation and micro-batches:
        casts of the weights, whole gradients between micro-batches."""
        once = dataclasses.replace(run, autocast=False, grad_accum=1)
        need = memory.of_rank(self.problem.model, layout, once, None, self.problem.stack)
        return sum(part or 0.0 for part in (need.params_gib, need.grads_gib, need.optimizer_gib))

    def _take(self, way: _Way, layout: Layout, kind: str, where: tuple[object, ...]) -> None:
        """Keep the fastest that fits; memory is dearer to count than time, so it is asked for last."""
        problem, known = self.problem, self.fitting.get(where)
        run = dataclasses.replace(way.run, autocast=False) if layout.fully_sharded else way.run
        for defer in self._reductions(layout, run):
            tried = msgspec.structs.replace(layout, defer_reduction=defer)
            step = step_time.with_data(way.core, problem.model, tried, run, problem.stack, problem.machine)
            alike = _alike(layout, layout.strategy)
            better = min((1 + TIE) * self.alike.get(alike, math.inf), known.step_s if known else math.inf)
            if step.step_s >= better:
                return
            need = memory.of_rank(problem.model, tried, run, None, problem.stack, self.kept)
            candidate = Candidate(tried, run, step, need)
            if candidate.peak_gib <= problem.limit_gib:
                self.fitting[where] = candidate
                self.fastest[kind] = min(step.step_s, self.fastest.get(kind, step.step_s))
                self.alike[alike] = min(step.step_s, self.alike.get(alike, step.step_s))
                return
        if where not in self.states:
            self.states[where] = self._least_states(layout, run)
            self.missed[where] = candidate

    def _reductions(self, layout: Layout, run: Pass) -> tuple[bool, ...]:
        wanted = self.problem.parallel.defer_reduction
        if layout.pp > 1:  # torch's stages keep gradients whole until the schedule's end
            return (True,)
        if wanted != "auto":
            return (wanted,)
        return (True, False) if layout.fully_sharded and run.grad_accum > 1 else (True,)

    def _least(self, candidate: Candidate) -> Candidate:
        """The same layout with as little memory as recomputation and the smallest micro-batch make it need."""
        problem, wanted = self.problem, self.problem.wanted
        share = candidate.run.micro_batch * candidate.run.grad_accum
        micro = wanted.micro_batch or min(
            m for m in divisors(share) if not pipeline_schedules.why_not(candidate.layout, share // m)
        )
        run = dataclasses.replace(candidate.run, micro_batch=micro, grad_accum=share // micro)
        layout = msgspec.structs.replace(
            candidate.layout,
            activation_checkpointing=wanted.recompute or "full",
            defer_reduction=self._reductions(candidate.layout, run)[-1],
        )
        need = memory.of_rank(problem.model, layout, run, None, problem.stack)
        return Candidate(layout, run, candidate.step, need)

    def _pass(self, layout: Layout, micro: int, accumulate: int) -> Pass:
        problem = self.problem
        return Pass(
            seq_len=problem.seq_len,
            micro_batch=micro,
            grad_accum=accumulate,
            compute=problem.compute,
            # As the time of its sends needs it; of the data-parallel alone, where a sharded one has none, see _take.
            autocast=problem.compute in ("bf16", "fp16", "fp8") and not layout.fully_sharded,
            device="cuda",
            parallel=problem.parallel,
        )

    def _work(self, layout: Layout, run: Pass) -> Work:
        key = (layout.tp, layout.cp, run.micro_batch)
        if key not in self.work:
            problem = self.problem
            self.work[key] = step_time.work_of(problem.model, layout, run, problem.stack, problem.machine.rates)
        return self.work[key]

    def found(self) -> Found:
        least = [self._least(c) for c in self.missed.values() if c.family not in self.fastest]
        smallest: dict[str, Candidate] = {}
        for c in sorted(least, key=lambda c: c.peak_gib):
            smallest.setdefault(c.family, c)
        return Found(
            fitting=tuple(ranked(list(self.fitting.values()))),
            smallest=tuple(smallest.values()),
            considered=self.considered,
            tried=frozenset(self.tried),
        )


def ranked(candidates: list[Candidate]) -> list[Candidate]:
    """By time; but first the simplest of those that cost about as little as the cheapest."""
    order = sorted(candidates, key=lambda c: c.step_s)
    if not order:
        return []
    least = min(map(cost, order))
    first = min((c for c in order if cost(c) <= (1 + TIE) * least), key=lambda c: machinery(c.layout))
    return [first, *(c for c in order if c is not first)]


def _micro_batches(share: int) -> list[int]:
    return [m for m in divisors(share) if m <= LARGEST_MICRO_BATCH]


def _degrees(problem: Problem) -> Iterator[tuple[int, int, int, str | None, int]]:
    """(tp, cp, pp, schedule, virtual stages) that divide the world and the model."""
    model, wanted, world = problem.model, problem.wanted, problem.world
    for tp in [wanted.tp] if wanted.tp else _tensor_degrees(problem):
        for cp in [wanted.cp] if wanted.cp else _context_degrees(problem, tp):
            if world % (tp * cp):
                continue
            for pp in [wanted.pp] if wanted.pp else divisors(world // (tp * cp)):
                if pp > model.layers + 2 or world % (tp * cp * pp):
                    continue
                for schedule, virtual in _schedules(problem, pp):
                    yield tp, cp, pp, schedule, virtual


def tensor_excluded(model: Decoder, tp: int) -> str:
    """Which size of the model ``tp`` does not divide; empty: it divides all."""
    sizes = {"heads": model.heads, "kv_heads": model.kv_heads, "ffn_dim": model.hidden, "vocab_size": model.vocab_size}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size % tp)


def _tensor_degrees(problem: Problem) -> list[int]:
    """Inside a node only: the activations of every layer travel. The trainer does not split 8-bit layers."""
    if problem.compute == "fp8":
        return [1]
    along = problem.parallel.sequence_parallel
    return [
        tp
        for tp in sorted(divisors(problem.gpus_per_node))
        if problem.world % tp == 0 and not tensor_excluded(problem.model, tp) and not (along and problem.seq_len % tp)
    ]


def _context_degrees(problem: Problem, tp: int) -> list[int]:
    along = tp if problem.parallel.sequence_parallel else 1
    return [cp for cp in (1, 2, 4, 8, 16, 32) if problem.world % (tp * cp) == 0 and problem.seq_len % (cp * along) == 0]


def _schedules(problem: Problem, pp: int) -> list[tuple[str | None, int]]:
    wanted = problem.wanted
    if pp == 1:
        return [(None, 1)]
    layers, split = problem.model.layers, problem.parallel.split
    if wanted.schedule in pipeline_schedules.TWO_PART_BACKWARD and problem.parallel.compile:
        return []  # plan/checks.py says why
    if wanted.schedule:
        virtual = wanted.virtual_stages or 1
        runs = pp * virtual <= layers + 2 and (not split or pp * virtual == len(split) + 1)
        return [(wanted.schedule, virtual)] if runs else []
    return [("1f1b", 1), *(("interleaved", v) for v in VIRTUAL_STAGES if pp * v <= layers + 2)]


def _data_kinds(problem: Problem, data: int, tp: int, cp: int, pp: int) -> Iterator[tuple[Strategy, int, int]]:
    """(strategy, dp_replicate, dp_shard) of ``data`` data-parallel ranks."""
    wanted = problem.wanted
    found: list[tuple[Strategy, int, int]] = []
    if data * cp == 1:
        found = [("single", 1, 1)]
    elif data == 1:
        found = [("single", 1, 1), ("fsdp", 1, 1)]  # the latter over the ranks that share a sequence
    else:
        found = [("ddp", data, 1)]
        if wanted.strategy or data * cp <= LARGEST_GROUP:
            found += [("fsdp", 1, data), ("fsdp-grad-op", 1, data)]
        if tp * cp * pp == 1:
            found.append(("zero1", data, 1))
        groups = _shard_groups(problem, data, tp * cp)
        asked = wanted.strategy or wanted.dp_shard or wanted.dp_replicate
        found += [("hybrid-shard", data // s, s) for s in groups if asked or s * cp <= LARGEST_GROUP]
    for strategy, replicate, shard in found:
        if wanted.strategy and strategy != wanted.strategy and not (strategy == "single" and found[1:] == []):
            continue
        if wanted.dp_replicate not in (0, replicate) or wanted.dp_shard not in (0, shard):
            continue
        if pp > 1 and strategy == "fsdp-grad-op" and wanted.strategy != "fsdp-grad-op":
            continue  # in a pipeline fsdp keeps its parameters gathered anyway
        yield strategy, replicate, shard


def _shard_groups(problem: Problem, data: int, inner: int) -> list[int]:
    """What the user says; else inside a node, or of whole nodes: other groups would lie across the border of one."""
    wanted = problem.wanted
    if wanted.dp_shard or wanted.dp_replicate:
        group = wanted.dp_shard or data // wanted.dp_replicate
        return [group] if 1 < group < data and data % group == 0 else []
    if problem.world <= problem.gpus_per_node:
        return []
    node = max(1, problem.gpus_per_node // inner)
    return [s for s in divisors(data) if 1 < s < data and (s % node == 0 or node % s == 0)]
