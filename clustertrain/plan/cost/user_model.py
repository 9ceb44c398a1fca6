"""The memory of a model of the user's own, from what :mod:`clustertrain.train.tools.model_stats` has counted of it."""

from __future__ import annotations

import msgspec

from clustertrain.plan.cost.activations import Pass
from clustertrain.plan.cost.memory import GIB, GRAD_BYTES, Memory, overhead_bytes
from clustertrain.plan.layout import Layout, counted


class Unit(msgspec.Struct, frozen=True):
    """A module of the model by its name, and how many parameters it has."""

    name: str
    parameters: int


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the whole model on one process, without memory behind its tensors. ``peak_bytes`` by category at the
    step's peak, in which parameters that are not trained are with the buffers; ``activations_bytes`` what forward and
    backward pass hold besides parameters, buffers and gradients where they hold most."""

    micro_batch: int
    activations_bytes: int
    peak_bytes: dict[str, int]


class Counted(msgspec.Struct, frozen=True, kw_only=True):
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
    largest: Unit
    units: tuple[Unit, ...] = ()
    built_on: str = "meta"
    traced: Traced | None = None
    untraced: str = ""


def memory(model: Counted, layout: Layout, run: Pass, capacity_gib: float | None) -> Memory:
    """Of one rank. Parameters (with the buffers, which every rank has whole), gradients and optimizer state follow from
    the count and the layout, with tensor and pipeline parallel taken as an even split; activations, and so the peak,
    are those of the trace, else None."""
    even = layout.tp * layout.pp
    shards = layout.dp_shard * layout.cp if layout.sharded else 1
    held = 0 if layout.offload else 1 / (even * shards)
    params, grads = model.parameter_bytes * held, model.trainable_bytes * held
    optimizer = model.state_bytes * held / (layout.dp_replicate if layout.zero1 else 1)
    if layout.fully_sharded:
        whole_params, whole_grads = _gathered_bytes(model, layout, run)
        params, grads = params + whole_params / even, grads + whole_grads / even
    states = Memory(
        params_gib=(params + model.buffer_bytes) / GIB,
        grads_gib=grads / GIB,
        optimizer_gib=optimizer / GIB,
        capacity_gib=capacity_gib,
    )
    if model.traced is None:
        return states
    allocated = params + model.buffer_bytes + grads + optimizer + model.traced.activations_bytes
    overhead = overhead_bytes(allocated, layout, run)
    peak = allocated + overhead
    return msgspec.structs.replace(
        states,
        activations_gib=model.traced.activations_bytes / GIB,
        overhead_gib=overhead / GIB,
        peak_gib=peak / GIB,
        fits=None if capacity_gib is None else peak / GIB <= capacity_gib,
    )


def _gathered_bytes(model: Counted, layout: Layout, run: Pass) -> tuple[float, float]:
    """Whole parameters and gradients at the peak of a sharded rank, as :mod:`clustertrain.plan.cost.memory` counts
    those of the decoder: what is in no unit, and the running and the prefetched unit, or all that stay gathered. A
    model without units is gathered as one."""
    in_units = sum(u.parameters for u in model.units)
    largest = max((u.parameters for u in model.units), default=0)
    ends = model.parameters - in_units
    gathered = min(in_units, 2 * largest) if layout.reshard_after_forward else in_units
    reduced = max(ends, largest) * GRAD_BYTES
    if run.grad_accum > 1 and run.parallel.defer_reduction:
        return (ends + gathered) * run.compute_bytes, model.parameters * GRAD_BYTES + reduced
    return (ends + gathered) * run.compute_bytes, (ends + largest) * run.compute_bytes + reduced


def words(model: Counted, name: str, layout: Layout, micro_batch: int) -> str:
    """What was counted, for the reasons of the plan."""
    types = ", ".join(model.dtypes)
    parts = [f"{name} has {model.parameters:,} parameters ({types})"]
    if model.trainable != model.parameters:
        parts.append(f"{model.trainable:,} of them trained")
    if model.buffers:
        parts.append(f"{model.buffer_bytes:,} bytes of buffers")
    parts.append(f"most of them, {model.largest.parameters:,}, in {model.largest.name}")
    parts.append(f"{counted(len(model.units), 'layer')} to shard one by one" if model.units else "no list of layers")
    if layout.tp * layout.pp > 1:
        parts.append("tp and pp taken as an even split")
    if model.traced is not None:
        parts.append(f"activations from a trace of micro_batch {micro_batch} with the CPU's kernels")
    return "counted: " + "; ".join(parts)


def warning(model: Counted, memory: Memory, limit_gib: float, layout: Layout) -> str | None:
    """Where the model states alone are too much, or a trace was asked for and there is none."""
    states = sum(g or 0.0 for g in (memory.params_gib, memory.grads_gib, memory.optimizer_gib))
    if states > limit_gib:
        way_out = "more ranks" if layout.fully_sharded else "--layout fsdp shards them"
        return (
            f"may not fit: parameters, gradients and optimizer state alone are {states:.1f} GiB a rank, more than "
            f"{limit_gib:.1f} GiB; {way_out}"
        )
    return f"activations are not known: {model.untraced}" if model.untraced else None
