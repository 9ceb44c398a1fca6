"""The ``[train]`` table: steps, batch sizes, precision."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from clustertrain.config.checks.ranges import check_positive, check_range

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"]


class TrainSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    steps: int = 200
    global_batch: int = 0  # sequences an optimizer step, whatever the number of ranks; 0: chosen by the plan
    micro_batch: int = 0  # sequences a rank and forward pass; 0: chosen by the plan
    seed: int = 1
    precision: Precision = "auto"  # auto: bf16 on GPUs that have it, else fp32; weights and optimizer are always fp32
    log_every: int = 10
    deterministic: bool = False  # algorithms that give the same bits each time, slower: for debugging
    profile: str = ""  # "10:20": steps 10 to 19 of the run are profiled, on rank 0

    def __post_init__(self) -> None:
        for name in ("steps", "log_every"):
            check_positive(name, getattr(self, name))
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
