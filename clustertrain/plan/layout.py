"""Parallel layout of the ranks: the single description that planner, trainer and checkpoints use."""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

import msgspec

from clustertrain.errors import ConfigError

Strategy = Literal["single", "ddp", "zero1", "fsdp", "fsdp-grad-op", "hybrid-shard"]
SHARDED_STRATEGIES = frozenset({"fsdp", "fsdp-grad-op", "hybrid-shard"})


def pluralize(count: int, noun: str) -> str:
    """Return the count with its noun: ``1 rank``, ``2 ranks``, ``2 batches``, ``2 processes``."""
    suffix = "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{count} {noun}" + ("" if count == 1 else suffix)


def format_number(value: float) -> str:
    """Return ``value`` with three significant digits, or as an integer from 1000 on."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def format_gib(value: float) -> str:
    """Return ``value`` GiB as text: ``31.53 GiB``, ``24.4 MiB``."""
    return f"{value:.2f} GiB" if value >= 0.1 else f"{1024 * value:.3g} MiB"


class Coordinates(NamedTuple):
    """Coordinates of a rank in the layout, outermost dimension first.

    Neighboring ranks share a node, so the dimension that communicates most is innermost.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


_EVERY_NTH = re.compile(r"full/([1-9][0-9]{0,5})")  # "full/3": every third layer


def format_checkpointing(mode: str | int) -> str:
    """Return the name that layouts use for a value of ``parallel.activation_checkpointing``."""
    return f"full/{mode}" if isinstance(mode, int) else mode


def recompute_interval(mode: str) -> int:
    """Return N if every Nth layer is recomputed whole, 1 for all layers, and 0 for other modes."""
    if mode == "full":
        return 1
    match = _EVERY_NTH.fullmatch(mode)
    return int(match[1]) if match else 0


def recomputed_share(mode: str, layers: float) -> float:
    """Return the share of ``layers`` that are recomputed, whole or in part."""
    if mode == "none" or not layers:
        return 0.0
    interval = recompute_interval(mode)
    return min(1.0, math.ceil(layers / interval) / layers) if interval else 1.0


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Degrees of parallelism; their product is the world size. The keys are those of ``plan --json``."""

    strategy: Strategy = "single"
    """Data parallelism: ``ddp`` replicates; ``zero1`` replicates and splits the optimizer state; ``fsdp`` shards
    parameters, gradients and optimizer state (ZeRO-3); ``fsdp-grad-op`` also keeps the parameters gathered between
    forward and backward (ZeRO-2); ``hybrid-shard`` shards over ``dp_shard`` ranks and replicates over ``dp_replicate``
    such groups; ``single``: one data-parallel rank."""
    dp_replicate: int = 1
    """Number of data-parallel groups that each hold a whole copy of the model."""
    dp_shard: int = 1
    """Number of ranks over which a copy of the parameters is sharded."""
    zero1: bool = False
    """The strategy is ``zero1``."""
    tp: int = 1
    """Tensor-parallel degree: ranks that share each layer."""
    sequence_parallel: bool = False
    """Norms and the residual stream are split along the sequence over the tp ranks."""
    cp: int = 1
    """Context-parallel degree: ranks that share each sequence."""
    pp: int = 1
    """Pipeline-parallel degree: ranks that share the layers."""
    schedule: str | None = None
    """Pipeline schedule: ``gpipe``, ``1f1b``, ``interleaved``, ``zero-bubble`` or ``zbv``; null without a pipeline."""
    virtual_stages: int = 1
    """Pipeline stages per rank."""
    activation_checkpointing: str = "none"
    """Activations that the backward pass recomputes: ``none``, ``selective``, ``full`` (each layer), or ``full/N``
    (every Nth layer)."""
    reshard_after_forward: bool = True
    """Sharded parameters are freed after the forward pass and gathered again for the backward pass; no effect on
    layouts that do not shard."""
    defer_reduction: bool = True
    """Gradients are kept whole and reduced once per step, after the last micro-batch; no effect on layouts that do not
    shard."""
    offload: bool = False
    """Parameters, gradients and optimizer state are kept in host memory."""

    @property
    def data_parallel(self) -> int:
        """Number of ranks (or groups of ranks) that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def gradient_ranks(self) -> int:
        """Number of ranks over which a gradient is averaged, including those that share a sequence."""
        return self.data_parallel * self.cp

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp

    @property
    def is_model_parallel(self) -> bool:
        """A rank computes only a part of the forward pass of its samples."""
        return self.tp * self.cp * self.pp > 1

    @property
    def is_fully_sharded(self) -> bool:
        """``fully_shard`` handles the data-parallel ranks; DDP handles replicas of whole models."""
        return self.gradient_ranks > 1 and (self.is_sharded or self.is_model_parallel)

    @property
    def is_sharded(self) -> bool:
        return self.strategy in SHARDED_STRATEGIES

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of ``rank``."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        rest, dp_shard = divmod(rest, self.dp_shard)
        pp, dp_replicate = divmod(rest, self.dp_replicate)
        return Coordinates(pp, dp_replicate, dp_shard, cp, tp)

    def data_rank(self, rank: int) -> int:
        """Return the index, 0 to ``data_parallel`` - 1, of the part of the global batch that ``rank`` processes."""
        coords = self.coordinates(rank)
        return coords.dp_replicate * self.dp_shard + coords.dp_shard

    def format_degrees(self) -> str:
        """Return the degrees above one, outermost first: ``8 ranks = pp 2 x dp_shard 2 x tp 2``."""
        degrees = [f"{name} {n}" for name in Coordinates._fields if (n := getattr(self, name)) > 1]
        return f"{pluralize(self.world_size, 'rank')} = {' x '.join(degrees) or '1'}"

    def describe(self) -> str:
        """Return a short description: ``hybrid-shard 2 x 4, tp 2, pp 2 (1f1b)``."""
        strategy: str = self.strategy
        if self.strategy == "hybrid-shard":
            strategy += f" {self.dp_replicate} x {self.dp_shard}"
        elif self.is_model_parallel and self.data_parallel > 1:
            strategy += f" {self.data_parallel}"
        parts = [] if self.is_model_parallel and self.strategy == "single" else [strategy]
        if self.tp > 1:
            parts.append(f"tp {self.tp}" + (" + sp" if self.sequence_parallel else ""))
        if self.cp > 1:
            parts.append(f"cp {self.cp}")
        if self.pp > 1:
            parts.append(f"pp {self.pp} ({self.schedule})")
        return ", ".join(parts)


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Batch split: global_batch = micro_batch x grad_accum x data_parallel, in samples.

    ``submit`` refuses a batch that does not divide. After a loss of nodes it may not divide over the remaining ranks;
    the last micro-batches are then smaller.
    """

    micro_batch: int = 1
    """Samples per data-parallel rank in one forward pass."""
    grad_accum: int = 1
    """Micro-batches per step and rank, or per step of a pipeline."""
    global_batch: int = 1
    """Samples per optimizer step, over all ranks and micro-batches."""
    tokens_per_step: int = 0
    """Tokens per optimizer step, over all ranks; 0 for data without tokens."""


def resolve_dp_degrees(
    strategy: Strategy, world: int, gpus_per_node: int, *, tp: int, cp: int, pp: int, dp_replicate: int, dp_shard: int
) -> tuple[int, int]:
    """Return (dp_replicate, dp_shard) of ``world`` ranks under ``strategy``; a degree of 0 is inferred.

    Raises:
        ConfigError: the product of the degrees is not the world size, or the strategy does not use one of them.
    """
    model_ranks = tp * cp * pp
    product = f"tp {tp} x cp {cp} x pp {pp}"
    if world % model_ranks:
        raise ConfigError(
            f"{product} = {model_ranks} does not divide the {world} ranks: {world} / {model_ranks} ="
            f" {world / model_ranks:g}",
            fix="choose degrees whose product divides the world size, or other --nodes and --gpus",
        )
    dp_ranks = world // model_ranks
    if strategy in ("single", "ddp", "zero1"):
        replicate, shard = dp_replicate or dp_ranks, dp_shard or 1
    elif strategy == "hybrid-shard":
        # The largest group that lies inside a node wherever it starts.
        node_group = math.gcd(dp_ranks, max(1, gpus_per_node // (tp * cp)))
        shard = dp_shard or (max(1, dp_ranks // dp_replicate) if dp_replicate else node_group)
        replicate = dp_replicate or max(1, dp_ranks // shard)
    else:
        replicate, shard = dp_replicate or 1, dp_shard or max(1, dp_ranks // max(1, dp_replicate))
    _check_strategy_degrees(strategy, replicate, shard)
    if replicate * shard != dp_ranks:
        raise ConfigError(
            f"dp_replicate {replicate} x dp_shard {shard} x {product} = {replicate * shard * model_ranks}, but there"
            f" are {world} ranks",
            fix=f"dp_replicate x dp_shard must be {world} / {model_ranks} = {dp_ranks}",
        )
    if strategy == "hybrid-shard" and dp_ranks * cp > 1:
        _check_hybrid_shard(replicate, shard * cp, shard, world, gpus_per_node)
    return replicate, shard


def _check_strategy_degrees(strategy: Strategy, replicate: int, shard: int) -> None:
    if strategy in ("ddp", "zero1") and shard > 1:
        raise ConfigError(
            f"{strategy} does not shard parameters, but dp_shard is {shard}", fix="use --layout hybrid-shard"
        )
    if strategy in ("fsdp", "fsdp-grad-op") and replicate > 1:
        raise ConfigError(
            f"{strategy} shards over all data-parallel ranks, but dp_replicate is {replicate}",
            fix="use --layout hybrid-shard",
        )


def _check_hybrid_shard(replicate: int, group: int, shard: int, world: int, gpus_per_node: int) -> None:
    """Raise ConfigError if hybrid-shard degenerates. ``group``: ranks that share a replica's parameters, with cp."""
    if replicate == 1 and world <= gpus_per_node:
        raise ConfigError(
            f"hybrid-shard shards inside a node and replicates across nodes: one node of {gpus_per_node} cannot "
            "replicate",
            fix="use --layout fsdp, more --nodes, or --dp-replicate and --dp-shard",
        )
    if replicate == 1 or group == 1:
        equivalent = "fsdp" if replicate == 1 else "ddp"
        raise ConfigError(
            f"hybrid-shard with dp_replicate {replicate} x dp_shard {shard} equals {equivalent}",
            fix=f"use --layout {equivalent}, or two degrees above 1",
        )
