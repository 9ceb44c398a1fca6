"""The words for a search's result: why this layout, what the others would have cost, what would make it fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from clustertrain.plan.batch import nearest
from clustertrain.plan.cost.memory import GIB
from clustertrain.plan.layout import amount, counted, gib
from clustertrain.plan.search import layouts
from clustertrain.plan.search.layouts import (
    FAMILIES,
    HOPELESS,
    LARGEST_GROUP,
    SIMPLER,
    Candidate,
    Found,
    Problem,
    family,
    tensor_excluded,
)

MUCH_HOST_GIB = 1500.0  # of a node with two terabytes
_SHOWN = 0.0005  # what is not 0.0%
LARGEST_CLUSTER = 16_384  # GPUs, of the largest published runs: where the search for a number that fits ends


def chosen(best: Candidate, found: Found, gpu: str, asked: str) -> list[str]:
    """Sentences on the best candidate: the first says what it is and how fast."""
    what = asked or best.layout.words()
    said = [f"{what}: {amount(best.step_s)} s a step predicted, {gib(best.peak_gib)} a rank on {gpu}"]
    fastest = min(found.fitting, key=lambda c: c.step_s)
    gain = best.step_s / fastest.step_s - 1
    if gain >= _SHOWN and layouts.kinds(fastest.layout) != layouts.kinds(best.layout):
        said.append(
            f"{brief(fastest)} would be {gain:.1%} faster; each further kind of parallelism has to earn {SIMPLER:.0%}, "
            "since the prediction is not better than that and the simpler layout is easier to run"
        )
    said.append("a step goes into " + shares(best))
    if best.layout.activation_checkpointing != "none":
        said.append(
            f"activation checkpointing {best.layout.activation_checkpointing}: costs "
            f"{best.step.recompute_s / best.step_s:.0%} of the step, for the memory that it saves"
        )
    return said


def brief(candidate: Candidate) -> str:
    """``fsdp 16, tp 2 + sp, micro_batch 1, full checkpointing``."""
    layout = candidate.layout
    parts = [layout.words(), f"micro_batch {candidate.run.micro_batch}"]
    if layout.virtual_stages > 1:
        parts.append(f"{layout.virtual_stages} stages a rank")
    if layout.activation_checkpointing != "none":
        parts.append(f"{layout.activation_checkpointing} checkpointing")
    return ", ".join(parts)


def shares(candidate: Candidate) -> str:
    """Where the step's time goes, the largest first; what is below one percent is left out."""
    step = candidate.step
    parts = {
        "computing": step.compute_s,
        "recomputing": step.recompute_s,
        "waiting in the pipeline and for its slowest stage": step.bubble_s,
        "tensor-parallel communication": step.tensor_s,
        "context-parallel communication": step.context_s,
        "sends between stages": step.pipeline_s,
        "data-parallel communication": step.data_s,
        "the optimizer": step.optimizer_s,
    }
    shown = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {seconds / step.step_s:.0%}" for name, seconds in shown if seconds >= 0.01 * step.step_s)


def rejected(problem: Problem, found: Found) -> Iterator[tuple[str, str]]:
    """(family, the number that spoke against it) of each family but the chosen one's."""
    taken = family(found.best.layout) if found.best else ""
    for kind in FAMILIES:
        if kind == taken or (kind == "single") != (problem.world == 1):
            continue
        fits = [c for c in found.fitting if c.family == kind]
        if fits and found.best is not None:
            yield kind, _slower(min(fits, key=lambda c: c.step_s), found.best)
            continue
        small = next((c for c in found.smallest if c.family == kind), None)
        if small is not None and small.peak_gib > problem.limit_gib:
            yield kind, f"{brief(small)} needs {small.peak_gib:.1f} GiB a rank, more than {problem.limit_gib:.1f} GiB"
        elif kind in found.tried:
            yield kind, f"nothing of it that fits takes less than {HOPELESS:g} times as long as the fastest"
        elif why := excluded(problem, kind):
            yield kind, why


def narrowed(problem: Problem, best: Candidate) -> list[str]:
    """A warning where nothing but an odd global batch has kept a layout from being data-parallel alone."""
    wanted, world, whole = problem.wanted, problem.world, problem.global_batch
    if wanted.strategy or wanted.tp or whole <= world or not whole % world or not best.layout.model_parallel:
        return []
    return [
        f"{excluded(problem, 'ddp')}; so only layouts were looked at that split the model, too, and a global batch of "
        f"{nearest(whole, world)} may be faster"
    ]


def _slower(other: Candidate, best: Candidate) -> str:
    more = other.step_s / best.step_s - 1
    if more < 0:
        return f"{brief(other)}: {amount(other.step_s)} s a step, {-more:.1%} faster, which is within the error"
    return f"{brief(other)}: {amount(other.step_s)} s a step, {more:.1%} slower"


def excluded(problem: Problem, kind: str) -> str:
    """Which size excludes a family altogether; empty where the user has."""
    wanted, world, whole = problem.wanted, problem.world, problem.global_batch
    if wanted.strategy or max(wanted.tp, wanted.cp, wanted.pp) > 1:
        return ""
    if kind in ("tensor parallel", "context parallel", "pipeline"):
        if wanted.tp:  # as the others, --tp 1 for one
            return ""
        why = ""
        if kind != "pipeline":
            why = _no_tensor(problem) if kind == "tensor parallel" else _no_context(problem)
        return why or f"no degree of it leaves data-parallel ranks that divide train.global_batch = {whole}"
    if whole % world:
        return f"train.global_batch = {whole} does not divide over {world} ranks: {whole} / {world} = {whole / world:g}"
    if kind == "hybrid-shard":
        if world <= problem.gpus_per_node:
            return f"one node of {problem.gpus_per_node} has nothing to replicate across"
        return f"no group of ranks inside a node of {problem.gpus_per_node}, or of whole nodes, divides {world}"
    return f"{world} ranks would share parameters, and no published run that went well has more than {LARGEST_GROUP}"


def _no_tensor(problem: Problem) -> str:
    if problem.compute == "fp8":
        return "8-bit layers are not split over ranks"
    if problem.gpus_per_node == 1:
        return "tp stays inside a node, and these have 1 GPU"
    for tp in (n for n in range(2, problem.gpus_per_node + 1) if problem.gpus_per_node % n == 0):
        if why := tensor_excluded(problem.model, tp):
            return f"tp {tp} does not divide {why}"
        if problem.parallel.sequence_parallel and problem.seq_len % tp:
            return f"tp {tp} with sequence parallel does not divide seq_len {problem.seq_len}"
    return ""


def _no_context(problem: Problem) -> str:
    if problem.seq_len % 2:
        return f"cp 2 does not divide seq_len {problem.seq_len}"
    return f"cp 2 does not divide {problem.world} ranks" if problem.world % 2 else ""


def way_out(problem: Problem, gpu: str) -> str:
    """The cheapest change that makes it fit on these GPUs, and the smallest number of them that would do as it is."""
    parts = list(islice(_changes(problem), 1))
    nodes = -(-problem.world // problem.gpus_per_node)
    while nodes * problem.gpus_per_node < LARGEST_CLUSTER:
        nodes *= 2
        if _fits_on(problem, nodes):
            least = _least_nodes(problem, nodes)
            those = f"{counted(least, 'node')} of {problem.gpus_per_node} {gpu} ({least * problem.gpus_per_node} GPUs)"
            parts.append(f"{those}, where it stays within the safety margin")
            break
    return ", or ".join(["use " + parts[0], *parts[1:]]) if parts else "a smaller model or a GPU type with more memory"


def _fits_on(problem: Problem, nodes: int) -> bool:
    """With the sequences that these GPUs need at least, and no degree that the number of ranks decides."""
    world = nodes * problem.gpus_per_node
    if not problem.parallel.offload and _states_gib(problem) / world > problem.limit_gib:
        return False  # nothing shards further than over all ranks
    wanted = dataclasses.replace(problem.wanted, dp_replicate=0, dp_shard=0)
    whole = -(-problem.global_batch // world) * world
    return layouts.search(dataclasses.replace(problem, world=world, global_batch=whole, wanted=wanted)).best is not None


def _least_nodes(problem: Problem, enough: int) -> int:
    """Between half of ``enough`` nodes, which do not do, and all of them."""
    low, high = enough // 2, enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits_on(problem, middle) else (middle, high)
    return high


def _states_gib(problem: Problem) -> float:
    """Weights, gradients and optimizer state of the whole model."""
    stack = problem.stack
    return problem.model.parameters() * (stack.weight_bytes + stack.grad_bytes + stack.optimizer_bytes) / GIB


def _host_gib(problem: Problem) -> float:
    """Of one node, for its share of the states."""
    return _states_gib(problem) / -(-problem.world // problem.gpus_per_node)


def _changes(problem: Problem) -> Iterator[str]:
    """What makes it fit on the same GPUs, the cheapest first."""
    wanted = problem.wanted
    free = dataclasses.replace(wanted, strategy=None, tp=0, cp=0, pp=0, dp_replicate=0, dp_shard=0)
    both = "train.micro_batch = 0 and parallel.activation_checkpointing = 'full'"
    tries: tuple[tuple[str, dict[str, Any]], ...] = (
        ("train.micro_batch = 0 (the plan chooses)", {"wanted": dataclasses.replace(wanted, micro_batch=0)}),
        (
            "parallel.activation_checkpointing = 'full'",
            {"wanted": dataclasses.replace(wanted, recompute="full")},
        ),
        (both, {"wanted": dataclasses.replace(wanted, micro_batch=0, recompute="full")}),
        ("--layout auto and no degrees", {"wanted": free}),
        (
            f"{both}, --layout auto and no degrees",
            {"wanted": dataclasses.replace(free, micro_batch=0, recompute="full")},
        ),
        (
            f"parallel.offload = true (about {_host_gib(problem):,.0f} GiB of a host's memory)",
            {"parallel": msgspec.structs.replace(problem.parallel, offload=True)}
            if _host_gib(problem) <= MUCH_HOST_GIB
            else {},
        ),
        *((f"data.seq_len = {problem.seq_len // n}", {"seq_len": problem.seq_len // n}) for n in (2, 4, 8)),
    )
    for words, change in tries:
        changed = dataclasses.replace(problem, **change)
        if changed != problem and layouts.search(changed).best:
            yield words
