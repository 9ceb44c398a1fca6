"""The ``[train]`` table: steps, batch sizes, precision."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from clustertrain.config.checks.invalid_value import InvalidValue
from clustertrain.config.checks.ranges import check_positive, check_range

UNRESOLVED = -1  # steps that follow from train.epochs, before the samples are counted
DEFAULT_STEPS = 200

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"]
AttentionBackend = Literal["auto", "math", "flash", "efficient", "cudnn"]


class TrainSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[train]`` table: steps, batch sizes, precision, logging."""

    steps: int = UNRESOLVED
    """Optimizer steps of the whole run, over all attempts. -1: those of ``epochs``, otherwise 200."""
    epochs: float = 0.0
    """Passes over the training data, instead of ``steps``. The steps follow from the number of samples and the global
    batch before the run, and stay the same when it resumes. 0: none."""
    global_batch: int = 0
    """Samples per optimizer step, over all ranks and micro-batches. 0: chosen by the plan."""
    micro_batch: int = 0
    """Samples per rank and forward pass. 0: chosen by the plan."""
    seed: int = 1
    """Seed of the initial weights, of the sample order, and of dropout and augmentation."""
    precision: Precision = "auto"
    """Format of the computation: ``"bf16"`` and ``"fp16"`` under autocast, ``"tf32"``, ``"fp32"``, or ``"fp8"`` matrix
    products. ``"auto"``: bf16 on GPUs that support it, otherwise fp32. Weights and optimizer state are always fp32."""
    log_every: int = 10
    """Steps between metric rows that are printed and that include memory figures."""
    deterministic: bool = False
    """Use deterministic, slower algorithms, which give the same bits in every run. For debugging."""
    attention_backend: AttentionBackend = "auto"
    """The only kernel that torch's scaled-dot-product attention may use: ``"math"`` (plain matrix products),
    ``"flash"``, ``"efficient"`` or ``"cudnn"``. ``"auto"``: torch's choice. For debugging; one that cannot run is
    refused."""
    profile: str = ""
    """Steps to profile on rank 0, as ``"first:end"``: ``"10:20"`` profiles steps 10 to 19. Empty: none."""

    def __post_init__(self) -> None:
        if self.epochs < 0:
            raise ValueError(f"epochs = {self.epochs}: must be greater than 0, or 0 (none)")
        if self.steps == UNRESOLVED and not self.epochs:
            msgspec.structs.force_setattr(self, "steps", DEFAULT_STEPS)
        if self.steps != UNRESOLVED and self.steps < 1:
            raise InvalidValue(
                f"steps = {self.steps}: must be greater than 0",
                fix=f"change train.steps, or remove it to use the default, {DEFAULT_STEPS}",
            )
        check_positive("log_every", self.log_every)
        for name in ("global_batch", "micro_batch"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 0 (chosen by the plan) or more")
        check_range("seed", self.seed, 0, 2**63 - 1)
        if self.profile:
            match = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", self.profile)
            if match is None or int(match[1]) >= int(match[2]):
                raise ValueError(
                    f'profile = {self.profile!r}: must be "first:end" with first < end; "10:20" are steps 10 to 19'
                )
