"""The degrees, schedules and micro-batches that divide the ranks, the batch and the model of a search."""

from __future__ import annotations

from collections.abc import Iterator

from clustertrain.plan import pipeline_schedules
from clustertrain.plan.batch import divisors
from clustertrain.plan.cost.model_shape import DecoderShape
from clustertrain.plan.layout import Strategy
from clustertrain.plan.search.problem import SearchProblem

MAX_MICRO_BATCH = 64
# Most ranks that share parameters in a successful published run (arXiv 2304.11277, section 5.4); ZeRO-3 over 1536 ranks
# lost two thirds of its speed (SC21, arXiv 2104.04473, table 2).
MAX_SHARD_GROUP = 512
VIRTUAL_STAGES = (2, 3, 4, 5, 6, 8)


def micro_batches(rank_batch: int) -> list[int]:
    """Return the micro-batches that divide the batch of a rank."""
    return [m for m in divisors(rank_batch) if m <= MAX_MICRO_BATCH]


def parallel_degrees(problem: SearchProblem) -> Iterator[tuple[int, int, int, str | None, int]]:
    """Yield (tp, cp, pp, schedule, virtual stages) that divide the world size and the model."""
    model, constraints, world_size = problem.model, problem.constraints, problem.world_size
    for tp in [constraints.tp] if constraints.tp else _tensor_degrees(problem):
        for cp in [constraints.cp] if constraints.cp else _context_degrees(problem, tp):
            if world_size % (tp * cp):
                continue
            for pp in [constraints.pp] if constraints.pp else divisors(world_size // (tp * cp)):
                if pp > model.layers + 2 or world_size % (tp * cp * pp):
                    continue
                for schedule, virtual_stages in _schedules(problem, pp):
                    yield tp, cp, pp, schedule, virtual_stages


def indivisible_sizes(model: DecoderShape, tp: int) -> str:
    """Return the sizes of the model that ``tp`` does not divide; empty if it divides all."""
    sizes = {"heads": model.heads, "kv_heads": model.kv_heads, "ffn_dim": model.hidden, "vocab_size": model.vocab_size}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size % tp)


def _tensor_degrees(problem: SearchProblem) -> list[int]:
    """Return the tensor-parallel degrees: inside a node only; the trainer does not split 8-bit layers."""
    if problem.precision == "fp8":
        return [1]
    sequence_parallel, adapter = problem.parallel.sequence_parallel, problem.framework.adapter
    return [
        tp
        for tp in sorted(divisors(problem.gpus_per_node))
        if problem.world_size % tp == 0
        and not indivisible_sizes(problem.model, tp)
        and not (sequence_parallel and problem.sequence_len % tp)
        and (adapter is None or adapter.allows_tp(problem.model, tp))
    ]


def _context_degrees(problem: SearchProblem, tp: int) -> list[int]:
    sp_degree = tp if problem.parallel.sequence_parallel else 1
    return [
        cp
        for cp in (1, 2, 4, 8, 16, 32)
        if problem.world_size % (tp * cp) == 0 and problem.sequence_len % (cp * sp_degree) == 0
    ]


def _schedules(problem: SearchProblem, pp: int) -> list[tuple[str | None, int]]:
    constraints = problem.constraints
    if pp == 1:
        return [(None, 1)]
    layers, split = problem.model.layers, problem.parallel.split
    if constraints.schedule in pipeline_schedules.SPLIT_BACKWARD_SCHEDULES and problem.parallel.compile:
        return []  # reason: plan/checks.py
    if constraints.schedule:
        virtual_stages = constraints.virtual_stages or 1
        is_valid = pp * virtual_stages <= layers + 2 and (not split or pp * virtual_stages == len(split) + 1)
        return [(constraints.schedule, virtual_stages)] if is_valid else []
    return [("1f1b", 1), *(("interleaved", v) for v in VIRTUAL_STAGES if pp * v <= layers + 2)]


def data_parallel_options(
    problem: SearchProblem, dp_ranks: int, tp: int, cp: int, pp: int
) -> Iterator[tuple[Strategy, int, int]]:
    """Yield (strategy, dp_replicate, dp_shard) for ``dp_ranks`` data-parallel ranks."""
    constraints = problem.constraints
    options: list[tuple[Strategy, int, int]] = []
    if dp_ranks * cp == 1:
        options = [("single", 1, 1)]
    elif dp_ranks == 1:
        options = [("single", 1, 1), ("fsdp", 1, 1)]  # fsdp over the ranks that share a sequence
    else:
        options = [("ddp", dp_ranks, 1)]
        if constraints.strategy or dp_ranks * cp <= MAX_SHARD_GROUP:
            options += [("fsdp", 1, dp_ranks), ("fsdp-grad-op", 1, dp_ranks)]
        if tp * cp * pp == 1:
            options.append(("zero1", dp_ranks, 1))
        shard_sizes = _shard_groups(problem, dp_ranks, tp * cp)
        is_requested = constraints.strategy or constraints.dp_shard or constraints.dp_replicate
        options += [
            ("hybrid-shard", dp_ranks // s, s) for s in shard_sizes if is_requested or s * cp <= MAX_SHARD_GROUP
        ]
    for strategy, replicate, shard in options:
        if (
            constraints.strategy
            and strategy != constraints.strategy
            and not (strategy == "single" and options[1:] == [])
        ):
            continue
        if constraints.dp_replicate not in (0, replicate) or constraints.dp_shard not in (0, shard):
            continue
        if pp > 1 and strategy == "fsdp-grad-op" and constraints.strategy != "fsdp-grad-op":
            continue  # in a pipeline fsdp keeps its parameters gathered anyway
        yield strategy, replicate, shard


def _shard_groups(problem: SearchProblem, dp_ranks: int, inner_ranks: int) -> list[int]:
    """Return the sizes of shard groups: the user's, otherwise those inside a node or of whole nodes."""
    constraints = problem.constraints
    if constraints.dp_shard or constraints.dp_replicate:
        group = constraints.dp_shard or dp_ranks // constraints.dp_replicate
        return [group] if 1 < group < dp_ranks and dp_ranks % group == 0 else []
    if problem.world_size <= problem.gpus_per_node:
        return []
    dp_per_node = max(1, problem.gpus_per_node // inner_ranks)
    return [s for s in divisors(dp_ranks) if 1 < s < dp_ranks and (s % dp_per_node == 0 or dp_per_node % s == 0)]
