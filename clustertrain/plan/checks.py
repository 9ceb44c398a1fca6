"""Checks that refuse impossible layouts, with the arithmetic, before anything is created."""

from __future__ import annotations

import math
from itertools import pairwise

from clustertrain.config.hardware import GpuType
from clustertrain.config.model import ModelSpec
from clustertrain.config.objective import ObjectiveKind
from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.parsing.documents import did_you_mean
from clustertrain.config.stability import StabilitySpec
from clustertrain.config.train import Precision
from clustertrain.errors import ConfigError
from clustertrain.plan import pipeline_schedules
from clustertrain.plan.batch import divisors, nearest_multiples
from clustertrain.plan.layout import Layout


def check_zero1(tp: int, cp: int, pp: int) -> None:
    """Raise ConfigError if tp, cp or pp split the model, since ZeRO-1 replicates whole models."""
    splits = [f"{name} {degree}" for name, degree in (("tp", tp), ("cp", cp), ("pp", pp)) if degree > 1]
    if splits:
        raise ConfigError(
            f"zero1 replicates whole models, but {', '.join(splits)} splits them",
            fix="use --layout fsdp-grad-op or fsdp, which also split the optimizer state",
        )


def check_decoder_layout(model: ModelSpec, seq_len: int, parallel: ParallelSpec, layout: Layout) -> None:
    """Raise ConfigError if the built-in decoder cannot be split according to ``layout``."""
    _check_pipeline_stages(model, parallel, layout)
    if layout.tp > 1:
        _check_tensor_parallel(model, layout)
    _check_seq_len(seq_len, layout)


def check_objective(kind: ObjectiveKind, layout: Layout) -> None:
    """Raise ConfigError if the objective cannot be computed in ``layout``."""
    if kind == "dpo" and layout.cp > 1:
        raise ConfigError(
            f"objective.kind = 'dpo' sums over whole answers, and cp {layout.cp} splits them among the ranks",
            fix="remove --cp, and use tp, pp or fsdp",
        )


def _check_pipeline_stages(model: ModelSpec, parallel: ParallelSpec, layout: Layout) -> None:
    if layout.pp == 1:
        return
    stages, units = pipeline_schedules.num_stages(layout), model.layers + 2
    if stages > units:
        per_rank = f" x virtual_stages {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
        raise ConfigError(
            f"pp {layout.pp}{per_rank} = {stages} stages, but the model has only {units} parts: the "
            f"embedding, model.layers = {model.layers}, and norm with head",
            fix=_suggest_fewer_stages(units, layout),
        )
    if parallel.split:
        _check_split_points(parallel.split, model.layers, stages)


def _suggest_fewer_stages(units: int, layout: Layout) -> str:
    fixes = [f"model.layers of at least {pipeline_schedules.num_stages(layout) - 2}"]
    remaining_ranks = layout.world_size // (layout.tp * layout.cp)  # pipeline and data parallel
    pp = next(d for d in divisors(remaining_ranks) if d <= max(1, units // layout.virtual_stages))
    if pp > 1:
        fixes.insert(0, f"--pp {pp}")
    if layout.virtual_stages > 1 and layout.pp <= units:
        fixes.insert(0, "parallel.schedule = '1f1b' with one stage per rank")
    return "use " + ", or ".join(fixes)


def _check_split_points(split: tuple[str, ...], layers: int, stages: int) -> None:
    unit_index = {"embed": 0, **{f"layers.{i}": i + 1 for i in range(layers)}, "norm": layers + 1, "head": layers + 1}
    for name in split:
        if name not in unit_index:
            raise ConfigError(
                f"parallel.split: the model has no part {name!r}", fix=did_you_mean(name, list(unit_index))
            )
    if len(split) != stages - 1:
        raise ConfigError(
            f"parallel.split has {len(split)} parts, but {stages} stages need {stages - 1}",
            fix=f"give {stages - 1} parts, or remove parallel.split for a balanced split",
        )
    starts = [0, *(unit_index[name] for name in split)]
    if any(after <= before for before, after in pairwise(starts)):
        raise ConfigError(
            f"parallel.split = {list(split)}: a stage would start before the previous one",
            fix="list the parts in the order of execution: layers.0, layers.1, ..., norm",
        )


def _check_tensor_parallel(model: ModelSpec, layout: Layout) -> None:
    tp, remaining_ranks = layout.tp, layout.world_size // (layout.cp * layout.pp)
    widths = {
        "model.heads": model.heads,
        "model.kv_heads": model.kv_heads,
        "model.ffn_dim": model.hidden,
        "model.vocab_size": model.vocab_size,
    }
    indivisible = [
        f"{name} = {width} ({width} / {tp} = {width / tp:g})" for name, width in widths.items() if width % tp
    ]
    if indivisible:
        valid_degrees = sorted(d for d in divisors(math.gcd(remaining_ranks, *widths.values())) if d > 1)
        fix = f"use --tp {' or '.join(map(str, valid_degrees))}" if valid_degrees else "remove --tp"
        raise ConfigError(
            f"tp {tp} does not divide {', '.join(indivisible)}", fix=f"{fix}, or sizes that are multiples of {tp}"
        )


def _check_seq_len(seq_len: int, layout: Layout) -> None:
    sp_degree = layout.tp if layout.sequence_parallel else 1
    chunks = layout.cp * sp_degree
    if seq_len % chunks:
        factors = [f"cp {layout.cp}"] * (layout.cp > 1) + [f"tp {sp_degree} with sequence parallel"] * (sp_degree > 1)
        raise ConfigError(
            f"data.seq_len = {seq_len} does not divide into {chunks} parts ({' x '.join(factors)}): "
            f"{seq_len} / {chunks} = {seq_len / chunks:g}",
            fix=f"use a seq_len of {nearest_multiples(seq_len, chunks)}"
            + (", or parallel.sequence_parallel = false" if sp_degree > 1 and seq_len % layout.cp == 0 else ""),
        )


def check_device(
    precision: Precision, parallel: ParallelSpec, layout: Layout, device: str, gpu: GpuType | None
) -> list[str]:
    """Return notes on settings that run slowly or may fail.

    Raises:
        ConfigError: the device does not support the precision or layout, or torch does not support a combination.
    """
    _check_split_backward(parallel, layout)
    _check_activation_offload(parallel, layout, device)
    if device == "cpu":
        _check_cpu_support(precision, parallel, layout)
        if precision == "fp16":
            return ["precision fp16 on the CPU is for trials only: matmuls take many times as long as in fp32"]
        if precision == "tf32":
            return ["precision tf32 exists on GPUs only: on the CPU matmuls stay fp32"]
    elif precision in ("bf16", "tf32") and gpu is not None and not gpu.bf16:
        alternative = "train.precision = 'fp16' or 'fp32'" if precision == "bf16" else "matmuls stay fp32"
        return [f"precision {precision}: {gpu.name} lacks it in hardware (NVIDIA: Ampere or later); {alternative}"]
    elif precision == "fp8":
        if layout.tp > 1:
            raise ConfigError(
                f"precision fp8 with tp {layout.tp}: the 8-bit layers are not split over ranks",
                fix="use tp = 1, or train.precision = 'bf16'",
            )
        if gpu is None:
            return [
                "precision fp8 needs GPUs of compute capability 8.9 (Ada, Hopper) or later, or MI300; the GPU "
                "type is unknown"
            ]
        if not gpu.fp8:
            raise ConfigError(
                f"precision fp8: the matrix units of {gpu.name} have no 8-bit floating point (NVIDIA: compute "
                "capability 8.9 or later, AMD: MI300 or later)",
                fix="use train.precision = 'bf16', or another --gpu-type",
            )
    return []


def _check_activation_offload(parallel: ParallelSpec, layout: Layout, device: str) -> None:
    if not parallel.activation_offload:
        return
    checkpointed = layout.activation_checkpointing
    for applies, problem, fix in (
        (device == "cpu", "there is no GPU memory to relieve on device cpu", "remove it"),
        (
            checkpointed != "none",
            f"with activation checkpointing {checkpointed!r} a layer keeps nothing to move",
            "use parallel.activation_checkpointing = 'none', or remove it",
        ),
        (parallel.compile, "compiled layers hide the activations they keep", "use parallel.compile = false"),
        (
            layout.tp > 1 or layout.pp > 1,
            "activations of split layers and pipeline stages are not moved",
            "use tp = 1 and pp = 1, or parallel.activation_checkpointing = 'full'",
        ),
    ):
        if applies:
            raise ConfigError(f"parallel.activation_offload: {problem}", fix=fix)


def check_fp16(precision: Precision, device: str, requested_device: str) -> None:
    """Raise ConfigError for fp16 on a CPU that was not requested, where a matmul takes 60 times as long as in fp32."""
    if precision == "fp16" and device == "cpu" and requested_device != "cpu":
        raise ConfigError(
            "precision fp16: this machine has no GPU, and CPUs have no matrix units for it",
            fix="use train.precision = 'auto' or 'fp32', or set job.device = 'cpu' for a slow trial",
        )


def _check_split_backward(parallel: ParallelSpec, layout: Layout) -> None:
    """Raise ConfigError for options that cannot split the backward pass into its input and its weight half."""
    if layout.pp == 1 or layout.schedule not in pipeline_schedules.SPLIT_BACKWARD_SCHEDULES:
        return
    if parallel.compile:
        raise ConfigError(
            f"parallel.compile with schedule {layout.schedule}: torch cannot split a compiled backward pass into "
            "its input and its weight half",
            fix="remove one of them",
        )
    if layout.activation_checkpointing == "selective":
        raise ConfigError(
            f"selective activation checkpointing with schedule {layout.schedule}: it returns a kept tensor once, but "
            "the input and the weight half of the backward pass both need it",
            fix="use parallel.activation_checkpointing = 'full' or 'none', or parallel.schedule = 'interleaved'",
        )


def _check_cpu_support(precision: Precision, parallel: ParallelSpec, layout: Layout) -> None:
    for applies, problem, fix in (
        (precision == "fp8", "precision fp8: CPUs have no fp8 matmul", "use train.precision = 'bf16' or 'fp32'"),
        (
            parallel.async_tp and layout.tp > 1,
            "parallel.async_tp: it needs memory that GPUs share over NVLink",
            "remove it",
        ),
        (
            parallel.context_parallel_method == "ring" and layout.cp > 1,
            "parallel.context_parallel_method = 'ring': torch supports ring attention on GPUs only",
            "use parallel.context_parallel_method = 'all-gather'",
        ),
        (layout.offload, "parallel.offload: there is no GPU memory to relieve", "remove it"),
    ):
        if applies:
            raise ConfigError(f"{problem}, and the device is cpu", fix=fix)


def find_noise_problem(
    layout: Layout, parallel: ParallelSpec, micro_batches: int, *, compares_batch: bool = False
) -> str:
    """Return why the gradient noise scale cannot be measured in steps of ``micro_batches``; empty if it can.

    It compares the gradients of a small and a large batch, and ranks that split the model see no whole gradient.

    Args:
        compares_batch: the loss compares all samples of the global batch, so that a smaller batch would have a
            different loss.
    """
    if compares_batch:
        return "the loss compares all samples of the global batch, so a smaller batch would have a different loss"
    if layout.tp > 1 or layout.pp > 1 or layout.cp > 1:
        return f"{layout.describe()} splits the model or its sequences over the ranks"
    if micro_batches > 1:
        return ""
    if layout.gradient_ranks == 1 or layout.is_fully_sharded:
        return "each step has one micro-batch, so there is no gradient over a smaller batch"
    if parallel.find_unused_parameters or parallel.static_graph:
        return (
            "each step has one micro-batch, and parallel.find_unused_parameters and static_graph need its gradients to "
            "be reduced in the backward pass"
        )
    return ""


def check_noise_scale(
    stability: StabilitySpec,
    layout: Layout,
    parallel: ParallelSpec,
    micro_batches: int,
    *,
    compares_batch: bool = False,
) -> None:
    """Raise ConfigError if the recipe asks for a noise scale that :func:`find_noise_problem` excludes."""
    if not stability.noise_scale_every:
        return
    problem = find_noise_problem(layout, parallel, micro_batches, compares_batch=compares_batch)
    if problem:
        alternative = (
            "compare inside a micro-batch, with objective.group,"
            if compares_batch
            else "use a train.micro_batch of half a rank's samples per step or less under a data-parallel layout,"
        )
        raise ConfigError(
            f"stability.noise_scale_every = {stability.noise_scale_every}: {problem}",
            fix=f"{alternative} or set stability.noise_scale_every = 0",
        )
