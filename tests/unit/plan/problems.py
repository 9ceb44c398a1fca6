"""Problems for the layout search, and all candidates of a small one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec

from clustertrain.config import hardware
from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.model import ModelSpec
from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.parsing.presets import PRESETS
from clustertrain.plan import pipeline_schedules
from clustertrain.plan.cost import memory, step_time
from clustertrain.plan.cost.activations import PassConfig
from clustertrain.plan.cost.frameworks import CLUSTERTRAIN
from clustertrain.plan.cost.hardware_rates import build_machine
from clustertrain.plan.cost.model_shape import DecoderShape, DecoderSizes
from clustertrain.plan.layout import Layout
from clustertrain.plan.search.degrees import VIRTUAL_STAGES
from clustertrain.plan.search.layouts import Candidate
from clustertrain.plan.search.problem import SearchConstraints, SearchProblem

LLAMA_8B = ModelSpec(**PRESETS["llama3.1-8b"])
LLAMA_405B = ModelSpec(**PRESETS["llama3.1-405b"])
GPT_125M = ModelSpec(**PRESETS["125m"])
SHALLOW = DecoderSizes(vocab_size=32_000, dim=4096, layers=6, heads=32, kv_heads=8, hidden=14_336)


def problem(
    model: DecoderShape, gpu: str = "h100", *, world: int = 16, gpus_per_node: int = 8, **changes: Any
) -> SearchProblem:
    """Return a problem; ``changes`` are fields of it or of its constraints. The memory limit is 80 % by default."""
    gpu_type = hardware.find_gpu_type(gpu)
    assert gpu_type is not None
    constraint_names = {f.name for f in dataclasses.fields(SearchConstraints)}
    problem_fields: dict[str, Any] = {
        "seq_len": 2048,
        "global_batch": 64,
        "precision": "bf16",
        "parallel": ParallelSpec(),
        "limit_gib": memory.SAFE_FRACTION * gpu_type.capacity_gib,
        **{name: value for name, value in changes.items() if name not in constraint_names},
    }
    return SearchProblem(
        model=model,
        world_size=world,
        gpus_per_node=gpus_per_node,
        machine=build_machine(gpu_type, gpus_per_node, problem_fields["precision"], ClusterProfile()),
        framework=CLUSTERTRAIN,
        constraints=SearchConstraints(**{name: value for name, value in changes.items() if name in constraint_names}),
        **problem_fields,
    )


def all_candidates(search_problem: SearchProblem) -> Iterator[Candidate]:
    """Yield every candidate of a problem without constraints, whether it fits or not, without pruning."""
    for tp in _divisors(search_problem.gpus_per_node):
        for cp in (1, 2, 4, 8, 16):
            if search_problem.world_size % (tp * cp) or not _divides(search_problem, tp, cp):
                continue
            for pp in _divisors(search_problem.world_size // (tp * cp)):
                if pp <= search_problem.model.layers + 2:
                    yield from _candidates_of_degrees(search_problem, tp, cp, pp)


def _divisors(value: int) -> list[int]:
    return [n for n in range(1, value + 1) if value % n == 0]


def _divides(search_problem: SearchProblem, tp: int, cp: int) -> bool:
    model = search_problem.model
    sizes = (model.heads, model.kv_heads, model.hidden, model.vocab_size)
    return not any(size % tp for size in sizes) and search_problem.seq_len % (tp * cp) == 0


def _candidates_of_degrees(search_problem: SearchProblem, tp: int, cp: int, pp: int) -> Iterator[Candidate]:
    data = search_problem.world_size // (tp * cp * pp)
    schedules: list[tuple[str | None, int]] = [(None, 1)]
    if pp > 1:
        possible = [v for v in VIRTUAL_STAGES if pp * v <= search_problem.model.layers + 2]
        schedules = [("1f1b", 1), *(("interleaved", v) for v in possible)]
    for strategy, replicate, shard in _data_strategies(search_problem, data, tp, cp, pp):
        for schedule, virtual in schedules:
            for recompute in ("none", "selective", "full"):
                layout = Layout(
                    strategy=strategy, dp_replicate=replicate, dp_shard=shard, zero1=strategy == "zero1", tp=tp,
                    sequence_parallel=tp > 1, cp=cp, pp=pp, schedule=schedule, virtual_stages=virtual,
                    activation_checkpointing=recompute,
                    reshard_after_forward=strategy != "fsdp-grad-op" and pp == 1,
                )  # fmt: skip
                yield from _candidates_of_layout(search_problem, layout)


def _data_strategies(
    search_problem: SearchProblem, data: int, tp: int, cp: int, pp: int
) -> Iterator[tuple[Any, int, int]]:
    if data == 1:
        yield "single", 1, 1
        if cp > 1:
            yield "fsdp", 1, 1
        return
    yield "ddp", data, 1
    yield "fsdp", 1, data
    if pp == 1:
        yield "fsdp-grad-op", 1, data
    if tp * cp * pp == 1:
        yield "zero1", data, 1
    node = max(1, search_problem.gpus_per_node // (tp * cp))
    for shard in _divisors(data):
        if (
            1 < shard < data
            and search_problem.world_size > search_problem.gpus_per_node
            and (shard % node == 0 or node % shard == 0)
        ):
            yield "hybrid-shard", data // shard, shard


def _candidates_of_layout(search_problem: SearchProblem, layout: Layout) -> Iterator[Candidate]:
    if search_problem.global_batch % layout.data_parallel:
        return
    share = search_problem.global_batch // layout.data_parallel
    for micro in _divisors(share):
        if micro > 64 or pipeline_schedules.unsupported_reason(layout, share // micro):
            continue
        run = PassConfig(
            seq_len=search_problem.seq_len, micro_batch=micro, grad_accum=share // micro,
            precision=search_problem.precision,
            autocast=not layout.is_fully_sharded, device="cuda", parallel=search_problem.parallel,
        )  # fmt: skip
        both_reductions = layout.is_fully_sharded and run.grad_accum > 1 and layout.pp == 1
        for defer in (True, False) if both_reductions else (True,):
            candidate_layout = msgspec.structs.replace(layout, defer_reduction=defer)
            step = step_time.estimate_step(
                search_problem.model, candidate_layout, run, search_problem.framework, search_problem.machine
            )
            yield Candidate(
                candidate_layout,
                run,
                step,
                memory.estimate_memory(search_problem.model, candidate_layout, run, None, search_problem.framework),
            )
