"""Recipe keys that a user's training script ignores."""

from __future__ import annotations

# Tables and keys that only the built-in trainer reads. A key that the session reads too does not belong here.
TRAINER_KEYS = (
    "model",
    "data",
    "objective",
    "adapter",
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
    """Return whether only the built-in trainer reads ``key``, for example ``optim.lr``."""
    return f"{key}.".startswith(tuple(f"{name}." for name in TRAINER_KEYS))
