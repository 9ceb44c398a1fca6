"""Memory of a model entry, from the statistics of :mod:`clustertrain.train.tools.model_stats`."""

from __future__ import annotations

import msgspec

from clustertrain.plan.cost.activations import PassConfig
from clustertrain.plan.cost.memory import GIB, GRAD_BYTES, MemoryEstimate, overhead_bytes
from clustertrain.plan.layout import Layout, pluralize


class ModuleStats(msgspec.Struct, frozen=True):
    """A module and its number of parameters."""

    name: str
    """Dotted name of the module in the model."""
    parameters: int
    """Number of its parameters."""


class MemoryTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Trace of one step of the whole model on one process with fake tensors."""

    micro_batch: int
    """Samples of the traced step."""
    activations_bytes: int
    """Peak of the bytes in addition to parameters, buffers and gradients."""
    peak_bytes: dict[str, int]
    """Bytes by category at the peak of the step; frozen parameters count as buffers."""


class ModelStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a model. Shared parameters count once."""

    parameters: int
    """Number of parameters."""
    parameter_bytes: int
    """Size of all parameters, bytes."""
    trainable: int
    """Number of parameters that are trained."""
    trainable_bytes: int
    """Size of the trained parameters, bytes."""
    state_bytes: int
    """Bytes of state of the recipe's optimizer."""
    buffers: int
    """Number of buffers (tensors that are no parameters)."""
    buffer_bytes: int
    """Size of all buffers, bytes."""
    dtypes: dict[str, int]
    """Number of parameters by type."""
    largest: ModuleStats
    """Module with the most direct parameters."""
    units: tuple[ModuleStats, ...] = ()
    """Layers that are sharded one by one."""
    built_on: str = "meta"
    """Device on which it was built: ``meta``, or ``cpu`` if the constructor needs values."""
    fills_meta: bool = False
    """The module has ``init_parameter``, so that the ranks build it on the meta device, without memory."""
    memory_trace: MemoryTrace | None = None
    """Trace of a step; null if none was requested or it failed."""
    trace_error: str = ""
    """Why the trace failed."""


def estimate_user_model(
    model: ModelStats, layout: Layout, config: PassConfig, capacity_gib: float | None
) -> MemoryEstimate:
    """Return the memory of one rank.

    Parameters (including the buffers, which every rank has whole), gradients and optimizer state follow from statistics
    and layout, assuming an even split over tp and pp. Activations, and thus the peak, are those of the trace, or None.
    """
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
    if model.memory_trace is None:
        return states
    allocated = params + model.buffer_bytes + grads + optimizer + model.memory_trace.activations_bytes
    overhead = overhead_bytes(allocated, layout, config)
    peak = allocated + overhead
    return msgspec.structs.replace(
        states,
        activations_gib=model.memory_trace.activations_bytes / GIB,
        overhead_gib=overhead / GIB,
        peak_gib=peak / GIB,
        fits=None if capacity_gib is None else peak / GIB <= capacity_gib,
    )


def _gathered_bytes(model: ModelStats, layout: Layout, config: PassConfig) -> tuple[float, float]:
    """Return the bytes of gathered parameters and unsharded gradients at the peak of a sharded rank.

    As :mod:`clustertrain.plan.cost.memory` counts them for the decoder: parameters outside units, and the running and
    the prefetched unit, or all units that stay gathered. A model without units is gathered as a whole.
    """
    in_units = sum(u.parameters for u in model.units)
    largest = max((u.parameters for u in model.units), default=0)
    ends = model.parameters - in_units
    gathered = min(in_units, 2 * largest) if layout.reshard_after_forward else in_units
    reduce_buffer = max(ends, largest) * GRAD_BYTES
    if config.grad_accum > 1 and config.parallel.defer_reduction:
        return (ends + gathered) * config.compute_bytes, model.parameters * GRAD_BYTES + reduce_buffer
    return (ends + gathered) * config.compute_bytes, (ends + largest) * config.compute_bytes + reduce_buffer


def describe_stats(model: ModelStats, name: str, layout: Layout, micro_batch: int) -> str:
    """Return a description of the statistics for the reasons of the plan."""
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
    if model.memory_trace is not None:
        parts.append(f"activations from a trace of micro_batch {micro_batch} with the CPU's kernels")
    return "counted: " + "; ".join(parts)


def memory_warning(model: ModelStats, estimate: MemoryEstimate, limit_gib: float, layout: Layout) -> str | None:
    """Return a warning if the model states alone exceed the limit or a requested trace failed; otherwise None."""
    states = sum(g or 0.0 for g in (estimate.params_gib, estimate.grads_gib, estimate.optimizer_gib))
    if states > limit_gib:
        fix = "more ranks" if layout.is_fully_sharded else "--layout fsdp shards them"
        return (
            f"may not fit: parameters, gradients and optimizer state alone are {states:.1f} GiB per rank, more than "
            f"{limit_gib:.1f} GiB; {fix}"
        )
    return f"activations are unknown: {model.trace_error}" if model.trace_error else None


_HOST_GIB = 32.0  # per node, below which nobody needs a warning


def construction_warnings(model: ModelStats, layout: Layout, ranks_per_node: int, limit_gib: float) -> list[str]:
    """Return warnings about the memory in which each rank builds the whole model before it is split."""
    if model.fills_meta:
        return []
    fix = "give the module init_parameter(name, tensor, generator), and it is built without memory"
    whole_gib = (model.parameter_bytes + model.buffer_bytes) / GIB
    warnings = []
    if ranks_per_node * whole_gib > _HOST_GIB:
        warnings.append(
            f"each rank builds the whole model in host memory, which takes {ranks_per_node} x {whole_gib:.1f} GiB per "
            f"node at the start; {fix}"
        )
    if layout.tp > 1 and whole_gib > limit_gib:
        warnings.append(
            f"tp {layout.tp} splits the model on the GPU, where all {whole_gib:.1f} GiB must fit first; {fix}, or use "
            "fsdp, which moves one layer at a time"
        )
    return warnings
