"""Which keys of a recipe a script of the user's own goes by: those that its session reads."""

from __future__ import annotations

# Tables and keys that are the built-in trainer's alone. A script brings all that by itself; its session reads the rest.
TRAINER_KEYS = (
    "model",
    "data",
    "objective",
    "optim",
    "schedule",
    "evaluation",
    "train.steps",
    "train.global_batch",
    "train.micro_batch",
    "checkpoint.every",
    "contract.slices",
)


def is_trainer_key(key: str) -> bool:
    """Whether a script does not go by ``key``, as ``optim.lr``."""
    return f"{key}.".startswith(tuple(f"{name}." for name in TRAINER_KEYS))
