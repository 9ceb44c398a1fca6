"""What differs in the plan of a model that is not the decoder: which layouts there are, how its batch may be cut."""

from __future__ import annotations

from clustertrain.config.recipe import ModelSpec, Recipe
from clustertrain.errors import ConfigError
from clustertrain.plan.batch import nearest
from clustertrain.plan.cost.memory import GIB, GRAD_BYTES, WEIGHT_BYTES, Memory
from clustertrain.plan.cost.optimizer_state import BY_SHAPE, state_bytes
from clustertrain.plan.layout import Layout

LARGEST_MICRO_BATCH = 32  # samples, where it is not known what a larger one needs


def whole(model: ModelSpec, layout: Layout) -> None:
    """Raises ConfigError where ``layout`` splits a model that says nothing of how; an entry may say it when it runs."""
    used = [f"{n} {d}" for n, d in (("tp", layout.tp), ("cp", layout.cp), ("pp", layout.pp)) if d > 1]
    if used and not model.entry:
        raise ConfigError(
            f"{' x '.join(used)}: there is no plan of how a {model.kind} would be split over ranks",
            fix="leave the options out; --layout fsdp shards its parameters",
        )


def group(model: ModelSpec) -> int:
    """So many neighbouring samples belong into one micro-batch."""
    return model.two_tower.group if model.kind == "two-tower" else 1


def check_groups(model: ModelSpec, global_batch: int, micro_batch: int, data_parallel: int) -> None:
    """Raises ConfigError, with the arithmetic, where a group would lie in two micro-batches or on two ranks."""
    size = group(model)
    over = size * data_parallel
    for value, unit, what in (
        (micro_batch, size, f"train.micro_batch = {micro_batch}"),
        (global_batch, over, f"train.global_batch = {global_batch} over {data_parallel} data-parallel ranks"),
    ):
        if value % unit:
            raise ConfigError(
                f"{what} does not divide into groups of {size} (model.two_tower.group): "
                f"{value} / {unit} = {value / unit:g}",
                fix=f"use {nearest(value, unit)}",
            )


def states(recipe: Recipe, layout: Layout, capacity_gib: float | None) -> Memory:
    """The model states that a rank keeps; activations, and so the peak, are not estimated. Of an entry nothing is, and
    no optimizer state where it depends on shapes that are not counted here."""
    model = recipe.model
    if model.entry:
        return Memory(capacity_gib=capacity_gib)
    held = model.parameters() / (layout.dp_shard if layout.sharded else 1)
    updated = held / (layout.dp_replicate if layout.zero1 else 1)
    known = recipe.optim.name not in BY_SHAPE
    return Memory(
        params_gib=held * WEIGHT_BYTES / GIB,
        grads_gib=held * GRAD_BYTES / GIB,
        optimizer_gib=updated * state_bytes(recipe.optim, (1,), hidden=True) / GIB if known else None,
        capacity_gib=capacity_gib,
    )
