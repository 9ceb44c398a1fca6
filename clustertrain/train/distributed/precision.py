"""In which number format the forward and backward pass compute. Weights and optimizer state are fp32 throughout."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from clustertrain.train.core.context import RankContext

MAX_HALVINGS = 16  # from the first loss scale, 2**16 for a mean, to the least

# fp8 is for the matmuls alone; everything around them is bf16.
_COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def parameter_dtype(precision: str) -> torch.dtype | None:
    """To what a sharded layout casts the gathered parameters; None: it does not."""
    return _COMPUTE_DTYPES.get(precision)


def apply_matmul_precision(context: RankContext) -> None:
    """tf32 where the recipe wants it and nowhere else: torch by itself has fp32 for matmuls and tf32 for convolutions.
    Settings of the process, so made anew by each session."""
    tf32 = context.precision == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


def autocast(context: RankContext) -> AbstractContextManager[object]:
    """Around the forward pass, where the layout itself does not cast (``fully_shard`` does)."""
    dtype = _COMPUTE_DTYPES.get(context.precision)
    if dtype is None or context.layout.is_fully_sharded:
        return nullcontext()
    return torch.autocast(context.device.type, dtype=dtype)


class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al., arXiv 1710.03740): the loss is multiplied so that small
    gradients do not vanish; a step whose gradients overflow is skipped and the scale halved, and after ``interval``
    steps without an overflow it is doubled.

    That a step overflowed is read off the global gradient norm, which all ranks of every layout have in common; torch's
    GradScaler looks at each rank's gradients by themselves and must be told about stages and meshes.
    """

    def __init__(self, loss_terms: int = 1, growth_interval: int = 2000) -> None:
        """``loss_terms`` is about how many terms the loss of a micro-batch is the sum of; the usual 2**16 is for a
        mean."""
        self._initial_scale: float = 2.0 ** (16 - max(0, loss_terms - 1).bit_length())
        self.floor: float = self._initial_scale / 2**MAX_HALVINGS
        self.growth_interval = growth_interval
        self.init_fresh_state()

    def init_fresh_state(self) -> None:
        self.scale = self._initial_scale
        self.good_steps = 0

    def update(self, *, overflow: bool) -> bool:
        """Returns whether the scale was at its floor before: an overflow there is none of the scale's."""
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
