"""The input of the search: a model, hardware, and what the user has fixed."""

from __future__ import annotations

from dataclasses import dataclass, field

from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.train import Precision
from clustertrain.plan.attention import AttentionChoice
from clustertrain.plan.cost.frameworks import Framework
from clustertrain.plan.cost.model_shape import DecoderShape
from clustertrain.plan.cost.step_time import Machine
from clustertrain.plan.layout import Strategy


@dataclass(frozen=True, kw_only=True)
class SearchConstraints:
    """Choices fixed by the user; 0 and empty are free."""

    strategy: Strategy | None = None
    tp: int = 0
    cp: int = 0
    pp: int = 0
    dp_replicate: int = 0
    dp_shard: int = 0
    micro_batch: int = 0
    activation_checkpointing: str = ""
    schedule: str = ""
    virtual_stages: int = 0


@dataclass(frozen=True, kw_only=True)
class SearchProblem:
    """Model, hardware and constraints of a search."""

    model: DecoderShape
    world_size: int
    gpus_per_node: int
    seq_len: int
    """Tokens of a sample."""
    global_batch: int
    precision: Precision
    parallel: ParallelSpec
    machine: Machine
    framework: Framework
    limit_gib: float
    """Memory that a rank may use, without the safety margin."""
    constraints: SearchConstraints = field(default_factory=SearchConstraints)
    attention: AttentionChoice = field(default_factory=AttentionChoice)
    sequences_per_sample: int = 1

    @property
    def sequence_len(self) -> int:
        """Tokens of each sequence, which sequence and context parallelism split."""
        return self.seq_len // self.sequences_per_sample
