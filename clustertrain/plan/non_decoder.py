"""What differs in the plan of a model that is not the decoder: which layouts there are, how its batch may be cut."""

from __future__ import annotations

from clustertrain.config.model import ModelSpec
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.plan.batch import nearest_multiples
from clustertrain.plan.cost.memory import GIB, GRAD_BYTES, WEIGHT_BYTES, MemoryEstimate
from clustertrain.plan.cost.optimizer_state import SHAPE_DEPENDENT_STATE, state_bytes
from clustertrain.plan.layout import Layout

MAX_UNESTIMATED_MICRO_BATCH = 32  # samples, where it is not known what a larger one needs


def check_not_split(model: ModelSpec, layout: Layout) -> None:
    """Raises ConfigError where ``layout`` splits a model that says nothing of how; an entry may say it when it runs."""
    splits = [f"{n} {d}" for n, d in (("tp", layout.tp), ("cp", layout.cp), ("pp", layout.pp)) if d > 1]
    if splits and not model.entry:
        raise ConfigError(
            f"{' x '.join(splits)}: there is no plan of how a {model.kind} would be split over ranks",
            fix="leave the options out; --layout fsdp shards its parameters",
        )


def group_size(model: ModelSpec) -> int:
    """So many neighbouring samples belong into one micro-batch."""
    return model.two_tower.group if model.kind == "two-tower" else 1


def check_groups(model: ModelSpec, global_batch: int, micro_batch: int, data_parallel: int) -> None:
    """Raises ConfigError, with the arithmetic, where a group would lie in two micro-batches or on two ranks."""
    size = group_size(model)
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
                f"{setting} does not divide into groups of {size} (model.two_tower.group): "
                f"{value} / {unit} = {value / unit:g}",
                fix=f"use {nearest_multiples(value, unit)}",
            )


def estimate_states(recipe: Recipe, layout: Layout, capacity_gib: float | None) -> MemoryEstimate:
    """The model states that a rank keeps; activations, and so the peak, are not estimated. Of an entry nothing is, and
    no optimizer state where it depends on shapes that are not counted here."""
    model = recipe.model
    if model.entry:
        return MemoryEstimate(capacity_gib=capacity_gib)
    local_params = model.parameters() / (layout.dp_shard if layout.is_sharded else 1)
    updated_params = local_params / (layout.dp_replicate if layout.zero1 else 1)
    is_shape_independent = recipe.optim.name not in SHAPE_DEPENDENT_STATE
    return MemoryEstimate(
        params_gib=local_params * WEIGHT_BYTES / GIB,
        grads_gib=local_params * GRAD_BYTES / GIB,
        optimizer_gib=updated_params * state_bytes(recipe.optim, (1,), is_hidden_matrix=True) / GIB
        if is_shape_independent
        else None,
        capacity_gib=capacity_gib,
    )
