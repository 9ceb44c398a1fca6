"""Problems for the search, and every answer to a small one."""

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
from clustertrain.plan.search.layouts import VIRTUAL_STAGES, Candidate, SearchConstraints, SearchProblem

LLAMA_8B = ModelSpec(**PRESETS["llama3.1-8b"])
LLAMA_405B = ModelSpec(**PRESETS["llama3.1-405b"])
GPT_125M = ModelSpec(**PRESETS["125m"])
SHALLOW = DecoderSizes(vocab_size=32_000, dim=4096, layers=6, heads=32, kv_heads=8, hidden=14_336)


def problem(
    model: DecoderShape, gpu: str = "h100", *, world: int = 16, gpus_per_node: int = 8, **changes: Any
) -> SearchProblem:
    """``changes``: fields of the Problem, and of what is wanted; ``limit_gib`` is the usual 80 % of the memory."""
    found = hardware.find_gpu_type(gpu)
    assert found is not None
    of_wanted = {f.name for f in dataclasses.fields(SearchConstraints)}
    given: dict[str, Any] = {
        "seq_len": 2048,
        "global_batch": 64,
        "precision": "bf16",
        "parallel": ParallelSpec(),
        "limit_gib": memory.SAFE_FRACTION * found.capacity_gib,
        **{name: value for name, value in changes.items() if name not in of_wanted},
    }
    return SearchProblem(
        model=model,
        world_size=world,
        gpus_per_node=gpus_per_node,
        machine=build_machine(found, gpus_per_node, given["precision"], ClusterProfile()),
        framework=CLUSTERTRAIN,
        constraints=SearchConstraints(**{name: value for name, value in changes.items() if name in of_wanted}),
        **given,
    )


def every(of: SearchProblem) -> Iterator[Candidate]:
    """Each answer to a problem that leaves all open, whether it fits or not: no pruning, nothing shared."""
    for tp in _dividing(of.gpus_per_node):
        for cp in (1, 2, 4, 8, 16):
            if of.world_size % (tp * cp) or not _divides(of, tp, cp):
                continue
            for pp in _dividing(of.world_size // (tp * cp)):
                if pp <= of.model.layers + 2:
                    yield from _of_degrees(of, tp, cp, pp)


def _dividing(value: int) -> list[int]:
    return [n for n in range(1, value + 1) if value % n == 0]


def _divides(of: SearchProblem, tp: int, cp: int) -> bool:
    model = of.model
    sizes = (model.heads, model.kv_heads, model.hidden, model.vocab_size)
    return not any(size % tp for size in sizes) and of.seq_len % (tp * cp) == 0


def _of_degrees(of: SearchProblem, tp: int, cp: int, pp: int) -> Iterator[Candidate]:
    data = of.world_size // (tp * cp * pp)
    schedules: list[tuple[str | None, int]] = [(None, 1)]
    if pp > 1:
        possible = [v for v in VIRTUAL_STAGES if pp * v <= of.model.layers + 2]
        schedules = [("1f1b", 1), *(("interleaved", v) for v in possible)]
    for strategy, replicate, shard in _data_kinds(of, data, tp, cp, pp):
        for schedule, virtual in schedules:
            for recompute in ("none", "selective", "full"):
                layout = Layout(
                    strategy=strategy, dp_replicate=replicate, dp_shard=shard, zero1=strategy == "zero1", tp=tp,
                    sequence_parallel=tp > 1, cp=cp, pp=pp, schedule=schedule, virtual_stages=virtual,
                    activation_checkpointing=recompute,
                    reshard_after_forward=strategy != "fsdp-grad-op" and pp == 1,
                )  # fmt: skip
                yield from _of_layout(of, layout)


def _data_kinds(of: SearchProblem, data: int, tp: int, cp: int, pp: int) -> Iterator[tuple[Any, int, int]]:
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
    node = max(1, of.gpus_per_node // (tp * cp))
    for shard in _dividing(data):
        if 1 < shard < data and of.world_size > of.gpus_per_node and (shard % node == 0 or node % shard == 0):
            yield "hybrid-shard", data // shard, shard


def _of_layout(of: SearchProblem, layout: Layout) -> Iterator[Candidate]:
    if of.global_batch % layout.data_parallel:
        return
    share = of.global_batch // layout.data_parallel
    for micro in _dividing(share):
        if micro > 64 or pipeline_schedules.unsupported_reason(layout, share // micro):
            continue
        run = PassConfig(
            seq_len=of.seq_len, micro_batch=micro, grad_accum=share // micro, precision=of.precision,
            autocast=not layout.is_fully_sharded, device="cuda", parallel=of.parallel,
        )  # fmt: skip
        free = layout.is_fully_sharded and run.grad_accum > 1 and layout.pp == 1
        for defer in (True, False) if free else (True,):
            tried = msgspec.structs.replace(layout, defer_reduction=defer)
            step = step_time.estimate_step(of.model, tried, run, of.framework, of.machine)
            yield Candidate(tried, run, step, memory.estimate_memory(of.model, tried, run, None, of.framework))
