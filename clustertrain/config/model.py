"""Kinds of the built-in models, the data each learns from, and the sizes of all but the decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from clustertrain.config.data import DataKind
from clustertrain.config.ranges import check_positive, check_range

ModelKind = Literal["decoder", "convnet", "two-tower"]
# "auto" is the first of them.
DATA_KINDS_BY_MODEL: Mapping[ModelKind, tuple[DataKind, ...]] = {
    "decoder": ("text", "tokens", "own"),
    "convnet": ("images", "own"),
    "two-tower": ("pairs", "own"),
}

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
