"""Planning of models other than the decoder: valid layouts, batch splits and memory."""

from __future__ import annotations

from clustertrain.config.model import ModelSpec
from clustertrain.config.optimizers import OPTIMIZERS
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.plan.batch import nearest_multiples
from clustertrain.plan.cost.memory import GIB, GRAD_BYTES, WEIGHT_BYTES, MemoryEstimate
from clustertrain.plan.cost.optimizer_state import state_bytes
from clustertrain.plan.layout import Layout

FP32_BYTES = 4
MAX_UNESTIMATED_MICRO_BATCH = 32  # samples, if memory is not estimated


def check_not_split(model: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError if ``layout`` splits a built-in model; entries are checked when the run starts."""
    splits = [f"{n} {d}" for n, d in (("tp", layout.tp), ("cp", layout.cp), ("pp", layout.pp)) if d > 1]
    if splits and not model.entry:
        raise ConfigError(
            f"{' x '.join(splits)}: a {model.kind} cannot be split over ranks",
            fix="remove these options; --layout fsdp shards its parameters",
        )


def check_comparable(recipe: Recipe, layout: Layout) -> None:
    """Raise ConfigError if the loss compares the whole global batch and ``layout`` splits the model."""
    splits = [f"{n} {d}" for n, d in (("tp", layout.tp), ("cp", layout.cp), ("pp", layout.pp)) if d > 1]
    if splits and recipe.compares_batch:
        raise ConfigError(
            f"{' x '.join(splits)}: objective.kind = 'nt-xent' compares the whole global batch, which supports data "
            "parallelism only",
            fix="remove these options; --layout fsdp shards the parameters. Or set objective.group, to compare inside "
            "a micro-batch",
        )


def group_size(recipe: Recipe) -> int:
    """Return the number of neighboring samples that must share a micro-batch."""
    return max(1, recipe.objective.group) if recipe.objective_kind == "nt-xent" else 1


def check_groups(recipe: Recipe, global_batch: int, micro_batch: int, data_parallel: int) -> None:
    """Raise ConfigError, with the arithmetic, if a group would span two micro-batches or ranks."""
    size = group_size(recipe)
    samples_per_pass = size * data_parallel
    for value, unit, setting in (
        (micro_batch, size, f"train.micro_batch = {micro_batch}"),
        (
            global_batch,
            samples_per_pass,
            f"train.global_batch = {global_batch} over {data_parallel} data-parallel ranks",
        ),
    ):
        if value % unit:
            raise ConfigError(
                f"{setting} does not divide into groups of {size} (objective.group): {value} / {unit} = "
                f"{value / unit:g}",
                fix=f"use {nearest_multiples(value, unit)}, or objective.group = 0 to compare the whole global batch",
            )


def similarities_bytes(model: ModelSpec, rows: int, columns: int) -> int:
    """Return the bytes of the fp32 similarities of ``rows`` samples of a rank to the ``columns`` of the global batch.

    A two-tower model compares in two directions. With two views per sample, each view is compared with both views of
    every sample. The loss keeps their softmax for the backward pass, as large again.
    """
    return 2 * (2 if model.kind == "two-tower" else 4) * rows * columns * FP32_BYTES


def embeddings_bytes(model: ModelSpec, samples: int) -> int:
    """Return the bytes of both fp32 embeddings of ``samples``; 0 if their width is unknown."""
    return 2 * samples * model.two_tower.embedding * FP32_BYTES if model.kind == "two-tower" else 0


def estimate_states(recipe: Recipe, layout: Layout, capacity_gib: float | None) -> MemoryEstimate:
    """Return the memory of the model states of a rank, without activations and thus without a peak.

    Nothing is estimated for entries, and no optimizer state that depends on the shapes of the parameters.
    """
    model = recipe.model
    if model.entry:
        return MemoryEstimate(capacity_gib=capacity_gib)
    local_params = model.parameters() / (layout.dp_shard if layout.is_sharded else 1)
    updated_params = local_params / (layout.dp_replicate if layout.zero1 else 1)
    is_shape_independent = not OPTIMIZERS[recipe.optim.name].has_shape_dependent_state
    return MemoryEstimate(
        params_gib=local_params * WEIGHT_BYTES / GIB,
        grads_gib=local_params * GRAD_BYTES / GIB,
        optimizer_gib=updated_params * state_bytes(recipe.optim, (1,), is_hidden_matrix=True) / GIB
        if is_shape_independent
        else None,
        capacity_gib=capacity_gib,
    )
