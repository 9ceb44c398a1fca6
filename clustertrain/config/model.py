"""Sizes of the built-in models besides the decoder."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from clustertrain.config.checks.ranges import check_entry, check_positive, check_range
from clustertrain.config.parsing.documents import did_you_mean
from clustertrain.config.parsing.presets import PRESETS

MAX_STAGES = 14  # they would halve 16,384 pixels to one


class ConvnetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[model.convnet]``: a residual network for images (He et al., arXiv 1512.03385) with group norms."""

    classes: int = 10
    channels: int = 3
    width: int = 32  # of the first stage; each further one has twice the width, half the height and breadth
    blocks: tuple[int, ...] = (2, 2, 2)  # in each stage
    groups: int = 8  # of channels that are normalised together

    def __post_init__(self) -> None:
        for name in ("classes", "channels", "width", "groups"):
            check_positive(name, getattr(self, name))
        if not self.blocks or min(self.blocks) < 1:
            raise ValueError(f"blocks = {list(self.blocks)}: each stage needs at least one")
        if len(self.blocks) > MAX_STAGES:
            raise ValueError(
                f"blocks: {len(self.blocks)} stages, at most {MAX_STAGES}; each has half the size of the one before, "
                "and twice its width"
            )
        if self.width % self.groups:
            raise ValueError(f"width = {self.width} is not divisible by groups = {self.groups}")

    def block_shapes(self) -> list[tuple[int, int, int]]:
        """(input channels, output channels, stride) of each block."""
        shapes: list[tuple[int, int, int]] = []
        in_channels = self.width
        for stage, count in enumerate(self.blocks):
            width = self.width << stage
            for i in range(count):
                shapes.append((in_channels, width, 2 if stage and i == 0 else 1))
                in_channels = width
        return shapes

    def parameters(self) -> int:
        """Number of parameters, counted from the shapes."""
        count = 9 * self.channels * self.width + 2 * self.width
        for in_channels, width, stride in self.block_shapes():
            count += 9 * (in_channels + width) * width + 4 * width
            if stride > 1 or in_channels != width:
                count += in_channels * width + 2 * width
        return count + (self.block_shapes()[-1][1] + 1) * self.classes


class TwoTowerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[model.two_tower]``: what two encoders have in common; each has the sizes in ``[model]``."""

    embedding: int = 64  # dimensions that the encoders share
    group: int = 8  # each text is told from the other group - 1 of its group, neighbours in the global batch
    temperature: float = 0.5  # at first, if it is learned
    learn_temperature: bool = True

    def __post_init__(self) -> None:
        check_positive("embedding", self.embedding)
        if self.group < 2:
            raise ValueError(f"group = {self.group}: a text needs at least one other to be told from")
        check_range("temperature", self.temperature, 0.01, 10.0)

    @property
    def log_scale(self) -> float:
        """Of what the similarities are multiplied by at first."""
        return -math.log(self.temperature)


ModelKind = Literal["decoder", "convnet", "two-tower"]


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[model]`` table. A decoder is Llama-style: RMSNorm, RoPE, SwiGLU, grouped-query attention; so is each
    encoder of a two-tower model, and has these sizes. What does not belong to the kind in use is refused.

    ``preset`` names sizes (:mod:`clustertrain.config.parsing.presets`) which ``submit`` has put under those of the
    recipe.
    """

    kind: ModelKind = "decoder"
    preset: str = ""
    entry: str = ""  # "package.module:function", which is called with args and returns the module to train
    args: dict[str, Any] = {}
    convnet: ConvnetSpec = ConvnetSpec()
    two_tower: TwoTowerSpec = TwoTowerSpec()
    vocab_size: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    ffn_dim: int = 0  # 0: 8/3 of dim, rounded up to a multiple of 64
    max_seq_len: int = 0  # longer samples are refused; 0: no limit, as of rotary embeddings; an entry has its own
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    dropout: float = 0.0  # on residual branches and embeddings

    def __post_init__(self) -> None:
        self._check_names()
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "rope_theta", "norm_eps"):
            check_positive(name, getattr(self, name))
        if self.dim % self.heads:
            raise ValueError(f"dim = {self.dim} is not divisible by heads = {self.heads}")
        if self.dim // self.heads % 2:
            raise ValueError(f"dim / heads = {self.dim // self.heads} is odd: rotary embeddings need an even head size")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} is not divisible by kv_heads = {self.kv_heads}")
        if self.ffn_dim < 0:
            raise ValueError(f"ffn_dim = {self.ffn_dim}: must be 0 (derived) or more")
        if self.max_seq_len < 0:
            raise ValueError(f"max_seq_len = {self.max_seq_len}: must be 0 (no limit) or more")
        check_range("dropout", self.dropout, 0.0, 0.9)

    def _check_names(self) -> None:
        if self.preset and self.preset not in PRESETS:
            raise ValueError(f"preset = {self.preset!r}: {did_you_mean(self.preset, list(PRESETS))}")
        if self.preset and (self.entry or self.kind == "convnet"):
            raise ValueError(f"preset = {self.preset!r} is one of the transformers: leave it out")
        if self.entry:
            check_entry(self.entry)
        if self.entry and self.kind != "decoder":
            raise ValueError(f"entry and kind = {self.kind!r}: the entry makes the model, leave the kind out")
        if self.args and not self.entry:
            raise ValueError("args are those of an entry, and there is none")

    @property
    def is_decoder(self) -> bool:
        return self.kind == "decoder" and not self.entry

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer."""
        return self.ffn_dim or -(-(8 * self.dim // 3) // 64) * 64

    @property
    def gated(self) -> bool:
        return True  # SwiGLU

    def block_parameters(self) -> int:
        """Of one layer: attention, feed-forward and two norms."""
        head_dim = self.dim // self.heads
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * head_dim
        return attention + 3 * self.dim * self.hidden + 2 * self.dim

    def parameters(self) -> int:
        """Number of parameters, counted from the shapes; an entry's are not known."""
        if self.kind == "convnet":
            return self.convnet.parameters()
        if self.kind == "two-tower":
            tower = self.vocab_size * self.dim + self.layers * self.block_parameters() + self.dim
            return 2 * (tower + self.dim * self.two_tower.embedding) + self.two_tower.learn_temperature
        embeddings = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return self.layers * self.block_parameters() + embeddings + self.dim
