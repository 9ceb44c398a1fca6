"""Explanations of a search result: the chosen layout, the rejected ones, and changes that would make it fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from clustertrain.plan.batch import nearest_multiples
from clustertrain.plan.cost.memory import GIB
from clustertrain.plan.layout import format_gib, format_number, pluralize
from clustertrain.plan.search import layouts
from clustertrain.plan.search.degrees import MAX_SHARD_GROUP, indivisible_sizes
from clustertrain.plan.search.layouts import (
    FAMILIES,
    MAX_SLOWDOWN,
    SIMPLICITY_MARGIN,
    Candidate,
    SearchResult,
    classify_layout,
)
from clustertrain.plan.search.problem import SearchProblem

MAX_HOST_GIB = 1500.0  # available on a node with two terabytes
_MIN_SHOWN_GAIN = 0.0005  # shown as 0.1% or more
_SIMPLICITY_RULE = f"each further kind of parallelism must gain {SIMPLICITY_MARGIN:.0%}"
MAX_CLUSTER_GPUS = 16_384  # of the largest published runs; end of the search for a number that fits


def explain_chosen(best: Candidate, result: SearchResult, gpu: str, reason: str) -> list[str]:
    """Return sentences on the best candidate; the first has its layout and speed."""
    subject = reason or best.layout.describe()
    sentences = [
        f"{subject}: {format_number(best.step_s)} s per step predicted, {format_gib(best.peak_gib)} per rank on {gpu}"
    ]
    fastest = min(result.fitting, key=lambda c: c.step_s)
    gain = _compute_gain(fastest, best)
    if gain >= _MIN_SHOWN_GAIN and _is_simpler(best, fastest):
        sentences.append(
            f"{describe_candidate(fastest)} would be {gain:.1%} faster, but {_SIMPLICITY_RULE}, because the prediction "
            "is no more accurate and a simple layout is easier to run"
        )
    sentences.append("time of a step: " + format_time_shares(best))
    if best.layout.activation_checkpointing != "none":
        sentences.append(
            f"activation checkpointing {best.layout.activation_checkpointing}: costs "
            f"{best.step.recompute_s / best.step_s:.0%} of the step, for the memory that it saves"
        )
    return sentences


def describe_candidate(candidate: Candidate) -> str:
    """Return a short description: ``fsdp 16, tp 2 + sp, micro_batch 1, full checkpointing``."""
    layout = candidate.layout
    parts = [layout.describe(), f"micro_batch {candidate.config.micro_batch}"]
    if layout.virtual_stages > 1:
        parts.append(f"{layout.virtual_stages} stages per rank")
    if layout.activation_checkpointing != "none":
        parts.append(f"{layout.activation_checkpointing} checkpointing")
    return ", ".join(parts)


def format_time_shares(candidate: Candidate) -> str:
    """Return the shares of the step time, largest first, without those below one percent."""
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
        "moving activations to the host and back": step.offload_s,
    }
    by_time = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{name} {seconds / step.step_s:.0%}" for name, seconds in by_time if seconds >= 0.01 * step.step_s
    )


def explain_rejected(problem: SearchProblem, result: SearchResult) -> Iterator[tuple[str, str]]:
    """Yield (family, reason for rejection) for each family except the chosen one."""
    chosen_family = classify_layout(result.best.layout) if result.best else ""
    for name in FAMILIES:
        if name == chosen_family or (name == "single") != (problem.world_size == 1):
            continue
        fitting = [c for c in result.fitting if c.family == name]
        if fitting and result.best is not None:
            yield name, _compare_speed(min(fitting, key=lambda c: c.step_s), result.best)
            continue
        smallest = next((c for c in result.smallest if c.family == name), None)
        if smallest is not None and smallest.peak_gib > problem.limit_gib:
            yield (
                name,
                (
                    f"{describe_candidate(smallest)} needs {smallest.peak_gib:.1f} GiB per rank, more than"
                    f" {problem.limit_gib:.1f} GiB"
                ),
            )
        elif name in result.families_tried:
            yield name, f"no layout of it that fits takes less than {MAX_SLOWDOWN:g} times as long as the fastest"
        elif reason := exclusion_reason(problem, name):
            yield name, reason


def batch_warnings(problem: SearchProblem, best: Candidate) -> list[str]:
    """Return a warning if only an indivisible global batch prevented a purely data-parallel layout."""
    constraints, world_size, global_batch = problem.constraints, problem.world_size, problem.global_batch
    if (
        constraints.strategy
        or constraints.tp
        or global_batch <= world_size
        or not global_batch % world_size
        or not best.layout.is_model_parallel
    ):
        return []
    return [
        f"{exclusion_reason(problem, 'ddp')}; so only layouts that also split the model were considered, and a global"
        f" batch of {nearest_multiples(global_batch, world_size)} may be faster"
    ]


def _compute_gain(other: Candidate, best: Candidate) -> float:
    """Return by how much more steps ``other`` does in the same time, relative to ``best``; negative if fewer."""
    return best.step_s / other.step_s - 1


def _is_simpler(candidate: Candidate, other: Candidate) -> bool:
    return layouts.count_parallelisms(candidate.layout) < layouts.count_parallelisms(other.layout)


def _compare_speed(other: Candidate, best: Candidate) -> str:
    subject = f"{describe_candidate(other)}: {format_number(other.step_s)} s per step"
    if other.step_s >= best.step_s:
        return f"{subject}, {other.step_s / best.step_s - 1:.1%} slower"
    reason = f"but {_SIMPLICITY_RULE}" if _is_simpler(best, other) else "which is within the error"
    return f"{subject}, {_compute_gain(other, best):.1%} faster, {reason}"


def exclusion_reason(problem: SearchProblem, name: str) -> str:
    """Return which size excludes a family entirely; empty if the user's options exclude it."""
    constraints, world_size, global_batch = problem.constraints, problem.world_size, problem.global_batch
    if constraints.strategy or max(constraints.tp, constraints.cp, constraints.pp) > 1:
        return ""
    if name in ("tensor parallel", "context parallel", "pipeline"):
        if constraints.tp:  # excluded by options, for example --tp 1
            return ""
        reason = ""
        if name != "pipeline":
            reason = _tensor_exclusion(problem) if name == "tensor parallel" else _context_exclusion(problem)
        return reason or f"no degree of it leaves data-parallel ranks that divide train.global_batch = {global_batch}"
    if global_batch % world_size:
        return (
            f"train.global_batch = {global_batch} does not divide over {world_size} ranks: {global_batch} /"
            f" {world_size} = {global_batch / world_size:g}"
        )
    if name == "hybrid-shard":
        if world_size <= problem.gpus_per_node:
            return f"one node of {problem.gpus_per_node} cannot replicate"
        return f"no group of ranks inside a node of {problem.gpus_per_node} or of whole nodes divides {world_size}"
    return f"{world_size} ranks would share parameters, but no successful published run has more than {MAX_SHARD_GROUP}"


def _tensor_exclusion(problem: SearchProblem) -> str:
    if problem.precision == "fp8":
        return "8-bit layers are not split over ranks"
    if problem.gpus_per_node == 1:
        return "tp stays inside a node, and these nodes have 1 GPU"
    for tp in (n for n in range(2, problem.gpus_per_node + 1) if problem.gpus_per_node % n == 0):
        if sizes := indivisible_sizes(problem.model, tp):
            return f"tp {tp} does not divide {sizes}"
        if problem.parallel.sequence_parallel and problem.sequence_len % tp:
            return f"tp {tp} with sequence parallel does not divide seq_len {problem.sequence_len}"
    return ""


def _context_exclusion(problem: SearchProblem) -> str:
    if problem.sequence_len % 2:
        return f"cp 2 does not divide seq_len {problem.sequence_len}"
    return f"cp 2 does not divide {problem.world_size} ranks" if problem.world_size % 2 else ""


def suggest_changes(problem: SearchProblem, gpu: str) -> str:
    """Return the cheapest change that fits on these GPUs, and the smallest number of GPUs that fits unchanged."""
    suggestions = list(islice(_iter_fitting_changes(problem), 1))
    nodes = -(-problem.world_size // problem.gpus_per_node)
    while nodes * problem.gpus_per_node < MAX_CLUSTER_GPUS:
        nodes *= 2
        if _fits_on(problem, nodes):
            min_nodes = _find_min_nodes(problem, nodes)
            cluster = (
                f"{pluralize(min_nodes, 'node')} of {problem.gpus_per_node} {gpu} ({min_nodes * problem.gpus_per_node}"
                " GPUs)"
            )
            suggestions.append(f"{cluster}, where it is within the safety margin")
            break
    return (
        ", or ".join(["use " + suggestions[0], *suggestions[1:]])
        if suggestions
        else "a smaller model or a GPU type with more memory"
    )


def _fits_on(problem: SearchProblem, nodes: int) -> bool:
    """Return whether the model fits on ``nodes`` nodes, with free data-parallel degrees and a batch that divides."""
    world_size = nodes * problem.gpus_per_node
    if not problem.parallel.offload and _states_gib(problem) / world_size > problem.limit_gib:
        return False  # no layout shards over more than all ranks
    constraints = dataclasses.replace(problem.constraints, dp_replicate=0, dp_shard=0)
    global_batch = -(-problem.global_batch // world_size) * world_size
    return layouts.fits_any(
        dataclasses.replace(problem, world_size=world_size, global_batch=global_batch, constraints=constraints)
    )


def _find_min_nodes(problem: SearchProblem, sufficient: int) -> int:
    """Return the smallest sufficient number of nodes; half of ``sufficient`` is known not to suffice."""
    low, high = sufficient // 2, sufficient
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits_on(problem, middle) else (middle, high)
    return high


def _states_gib(problem: SearchProblem) -> float:
    """Return the GiB of weights, gradients and optimizer state of the whole model."""
    framework = problem.framework
    return (
        problem.model.parameters() * (framework.weight_bytes + framework.grad_bytes + framework.optimizer_bytes) / GIB
    )


def _host_gib(problem: SearchProblem) -> float:
    """Return the GiB that a node holds of the model states."""
    return _states_gib(problem) / -(-problem.world_size // problem.gpus_per_node)


def _iter_fitting_changes(problem: SearchProblem) -> Iterator[str]:
    """Yield the changes that make it fit on the same GPUs, cheapest first."""
    constraints = problem.constraints
    unconstrained = dataclasses.replace(constraints, strategy=None, tp=0, cp=0, pp=0, dp_replicate=0, dp_shard=0)
    memory_options = "train.micro_batch = 0 and parallel.activation_checkpointing = 'full'"
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("train.micro_batch = 0 (the plan chooses)", {"constraints": dataclasses.replace(constraints, micro_batch=0)}),
        (
            "parallel.activation_checkpointing = 'full'",
            {"constraints": dataclasses.replace(constraints, activation_checkpointing="full")},
        ),
        (
            memory_options,
            {"constraints": dataclasses.replace(constraints, micro_batch=0, activation_checkpointing="full")},
        ),
        ("--layout auto and no degrees", {"constraints": unconstrained}),
        (
            f"{memory_options}, --layout auto and no degrees",
            {"constraints": dataclasses.replace(unconstrained, micro_batch=0, activation_checkpointing="full")},
        ),
        (
            f"parallel.offload = true (about {_host_gib(problem):,.0f} GiB of a host's memory)",
            (
                {"parallel": msgspec.structs.replace(problem.parallel, offload=True)}
                if _host_gib(problem) <= MAX_HOST_GIB
                else {}
            ),
        ),
        *((f"data.seq_len = {problem.seq_len // n}", {"seq_len": problem.seq_len // n}) for n in (2, 4, 8)),
    )
    for description, change in changes:
        modified = dataclasses.replace(problem, **change)
        if modified != problem and layouts.fits_any(modified):
            yield description
