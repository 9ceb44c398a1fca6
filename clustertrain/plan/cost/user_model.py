"""The memory of a model of the user's own, from what :mod:`clustertrain.train.tools.model_stats` has counted of it."""

from __future__ import annotations

import msgspec

from clustertrain.plan.cost.activations import PassConfig
from clustertrain.plan.cost.memory import GIB, GRAD_BYTES, MemoryEstimate, overhead_bytes
from clustertrain.plan.layout import Layout, pluralize


class ModuleStats(msgspec.Struct, frozen=True):
    """A module of the model by its name, and how many parameters it has."""

    name: str
    parameters: int


class MemoryTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the whole model on one process, without memory behind its tensors. ``peak_bytes`` by category at the
    step's peak, in which parameters that are not trained are with the buffers; ``activations_bytes`` what forward and
    backward pass hold besides parameters, buffers and gradients where they hold most."""

    micro_batch: int
    activations_bytes: int
    peak_bytes: dict[str, int]


class ModelStats(msgspec.Struct, frozen=True, kw_only=True):
    """Shared parameters count once. ``units`` are the layers that are sharded one by one, ``largest`` the module with
    most parameters of its own. ``built_on``: cpu where the model's constructor needs values. ``traced`` is None where
    no trace was asked for, or it failed, as ``untraced`` says."""

    parameters: int
    parameter_bytes: int
    trainable: int
    trainable_bytes: int
    state_bytes: int  # of the recipe's optimizer
    buffers: int
    buffer_bytes: int
    dtypes: dict[str, int]  # parameters by type
    largest: ModuleStats
    units: tuple[ModuleStats, ...] = ()
    built_on: str = "meta"
    traced: MemoryTrace | None = None
    untraced: str = ""


def estimate_user_model(
    model: ModelStats, layout: Layout, config: PassConfig, capacity_gib: float | None
) -> MemoryEstimate:
    """Of one rank. Parameters (with the buffers, which every rank has whole), gradients and optimizer state follow from
    the count and the layout, with tensor and pipeline parallel taken as an even split; activations, and so the peak,
    are those of the trace, else None."""
    model_split = layout.tp * layout.pp
    shards = layout.dp_shard * layout.cp if layout.is_sharded else 1
    shard_fraction = 0 if layout.offload else 1 / (model_split * shards)
    params, grads = model.parameter_bytes * shard_fraction, model.trainable_bytes * shard_fraction
    optimizer = model.state_bytes * shard_fraction / (layout.dp_replicate if layout.zero1 else 1)
    if layout.is_fully_sharded:
        gathered_params, gathered_grads = _gathered_bytes(model, layout, config)
        params, grads = params + gathered_params / model_split, grads + gathered_grads / model_split
    states = MemoryEstimate(
        params_gib=(params + model.buffer_bytes) / GIB,
        grads_gib=grads / GIB,
        optimizer_gib=optimizer / GIB,
        capacity_gib=capacity_gib,
    )
    if model.traced is None:
        return states
    allocated = params + model.buffer_bytes + grads + optimizer + model.traced.activations_bytes
    overhead = overhead_bytes(allocated, layout, config)
    peak = allocated + overhead
    return msgspec.structs.replace(
        states,
        activations_gib=model.traced.activations_bytes / GIB,
        overhead_gib=overhead / GIB,
        peak_gib=peak / GIB,
        fits=None if capacity_gib is None else peak / GIB <= capacity_gib,
    )


def _gathered_bytes(model: ModelStats, layout: Layout, config: PassConfig) -> tuple[float, float]:
    """Whole parameters and gradients at the peak of a sharded rank, as
    :mod:`clustertrain.plan.cost.estimate_user_model` counts
    those of the decoder: what is in no unit, and the running and the prefetched unit, or all that stay gathered. A
    model without units is gathered as one."""
    in_units = sum(u.parameters for u in model.units)
    largest = max((u.parameters for u in model.units), default=0)
    ends = model.parameters - in_units
    gathered = min(in_units, 2 * largest) if layout.reshard_after_forward else in_units
    reduce_buffer = max(ends, largest) * GRAD_BYTES
    if config.grad_accum > 1 and config.parallel.defer_reduction:
        return (ends + gathered) * config.compute_bytes, model.parameters * GRAD_BYTES + reduce_buffer
    return (ends + gathered) * config.compute_bytes, (ends + largest) * config.compute_bytes + reduce_buffer


def describe_stats(model: ModelStats, name: str, layout: Layout, micro_batch: int) -> str:
    """What was counted, for the reasons of the plan."""
    types = ", ".join(model.dtypes)
    parts = [f"{name} has {model.parameters:,} parameters ({types})"]
    if model.trainable != model.parameters:
        parts.append(f"{model.trainable:,} of them trained")
    if model.buffers:
        parts.append(f"{model.buffer_bytes:,} bytes of buffers")
    parts.append(f"most of them, {model.largest.parameters:,}, in {model.largest.name}")
    parts.append(f"{pluralize(len(model.units), 'layer')} to shard one by one" if model.units else "no list of layers")
    if layout.tp * layout.pp > 1:
        parts.append("tp and pp taken as an even split")
    if model.traced is not None:
        parts.append(f"activations from a trace of micro_batch {micro_batch} with the CPU's kernels")
    return "counted: " + "; ".join(parts)


def memory_warning(model: ModelStats, estimate: MemoryEstimate, limit_gib: float, layout: Layout) -> str | None:
    """Where the model states alone are too much, or a trace was asked for and there is none."""
    states = sum(g or 0.0 for g in (estimate.params_gib, estimate.grads_gib, estimate.optimizer_gib))
    if states > limit_gib:
        fix = "more ranks" if layout.is_fully_sharded else "--layout fsdp shards them"
        return (
            f"may not fit: parameters, gradients and optimizer state alone are {states:.1f} GiB a rank, more than "
            f"{limit_gib:.1f} GiB; {fix}"
        )
    return f"activations are not known: {model.untraced}" if model.untraced else None
