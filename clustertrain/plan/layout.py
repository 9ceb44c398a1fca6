"""How the ranks share the work: the one description that planner, trainer and checkpoint use."""

from __future__ import annotations

from typing import Literal

import msgspec

Strategy = Literal["single", "ddp", "fsdp"]


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Degrees of parallelism; their product is the world size.

    ``ddp`` replicates over ``dp_replicate`` ranks, ``fsdp`` shards parameters, gradients and optimizer state over
    ``dp_shard`` ranks. The keys are those of ``plan --json``; what the trainer cannot do yet stays neutral.
    """

    strategy: Strategy = "single"
    dp_replicate: int = 1
    dp_shard: int = 1
    zero1: bool = False
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    pp: int = 1
    schedule: str | None = None
    virtual_stages: int = 1
    activation_checkpointing: str = "none"
    reshard_after_forward: bool = True
    offload: bool = False

    @property
    def data_parallel(self) -> int:
        """How many ranks (or groups of ranks) see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """global_batch = micro_batch x grad_accum x data_parallel, in sequences."""

    micro_batch: int = 1
    grad_accum: int = 1
    global_batch: int = 1
    tokens_per_step: int = 0
