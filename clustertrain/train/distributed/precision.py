"""Numeric precision of the forward and backward pass. Weights and optimizer state are always fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from clustertrain.train.core.context import RankContext

MAX_HALVINGS = 16  # from the initial loss scale, 2**16 for a mean, to the floor

# fp8 applies only to matmuls; everything else is bf16.
_COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def parameter_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype to which a sharded layout casts gathered parameters; None for no cast."""
    return _COMPUTE_DTYPES.get(precision)


def apply_matmul_precision(context: RankContext) -> None:
    """Enable tf32 only if the recipe asks for it: torch's defaults are fp32 matmuls and tf32 convolutions.

    These are settings of the process, so each session applies them again.
    """
    tf32 = context.precision == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


def autocast(context: RankContext) -> AbstractContextManager[object]:
    """Return the autocast context of the forward pass; a null context for ``fully_shard``, which does its own casts."""
    dtype = _COMPUTE_DTYPES.get(context.precision)
    if dtype is None or context.layout.is_fully_sharded:
        return nullcontext()
    return torch.autocast(context.device.type, dtype=dtype)


class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al., arXiv 1710.03740).

    The loss is multiplied by a scale so that small gradients do not underflow. A step with an overflow is skipped and
    the scale is halved; after ``growth_interval`` steps without an overflow it doubles.

    An overflow is detected from the global gradient norm, which all ranks share in every layout. torch's GradScaler
    checks each rank's gradients separately and does not support pipeline stages and meshes.
    """

    def __init__(self, loss_terms: int = 1, growth_interval: int = 2000) -> None:
        """Choose the initial scale: 2**16 for a mean, less for a loss that sums about ``loss_terms`` terms per
        micro-batch."""
        self._initial_scale: float = 2.0 ** (16 - max(0, loss_terms - 1).bit_length())
        self.floor: float = self._initial_scale / 2**MAX_HALVINGS
        self.growth_interval = growth_interval
        self.init_fresh_state()

    def init_fresh_state(self) -> None:
        self.scale = self._initial_scale
        self.good_steps = 0

    def update(self, *, overflow: bool) -> bool:
        """Record a step; return whether the scale was already at its floor: an overflow then has another cause."""
        at_floor = self.scale <= self.floor
        if overflow:
            self.scale = max(self.scale / 2, self.floor)
            self.good_steps = 0
            return at_floor
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= 2
            self.good_steps = 0
        return at_floor

    def state_dict(self) -> dict[str, float | int]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
