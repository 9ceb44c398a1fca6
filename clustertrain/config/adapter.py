"""The ``[adapter]`` table: small trained matrices beside a frozen model."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from clustertrain.config.checks.ranges import check_positive, check_range
from clustertrain.config.low_bit import BasePrecision

AdapterKind = Literal["none", "lora", "dora"]


class AdapterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[adapter]`` table: low-rank adapters beside Linear layers. Only they are trained; the base is frozen.

    An adapted layer of weight W computes ``W x + scaling * B (A x)``. A has ``rank`` rows and B has ``rank`` columns. B
    starts at zero, so the model starts as the base.
    """

    kind: AdapterKind = "none"
    """``"lora"``: low-rank matrices (Hu et al., arXiv 2106.09685). ``"dora"``: in addition, a trained magnitude for
    each output (Liu et al., arXiv 2402.09353). ``"none"``: no adapters, all weights are trained."""
    rank: int = 16
    """Rows of A and columns of B. At most the smaller side of each adapted matrix."""
    alpha: float = 32.0
    """Numerator of the scaling, which is ``alpha / rank``."""
    rank_stabilized: bool = False
    """Scale by ``alpha / sqrt(rank)`` instead, so that higher ranks learn as fast (Kalajdzievski, arXiv 2312.03732)."""
    dropout: float = 0.0
    """Dropout probability on the input of the adapters. 0: none."""
    target_modules: tuple[str, ...] = ("*.attention", "*.ffn")
    """Patterns of module names: each Linear layer that matches, or is inside a module that matches, gets an adapter.
    The default fits the built-in transformers."""
    base_precision: BasePrecision = "unchanged"
    """Format of the frozen matrices of the repeated layers. ``"unchanged"``: the model's own; fp32 in built-in
    models. ``"bf16"``: 2 bytes per weight. ``"int8"``: 8 bits per weight, and ``"nf4"``: 4 bits (QLoRA, Dettmers et
    al., arXiv 2305.14314), both with a scale of 4 bytes for every 64 weights of a row. Unless ``"unchanged"``,
    embedding and head are in bf16."""
    init: str = ""
    """Folder of an adapter to start from, in the format of PEFT, as ``checkpoint export`` writes it. Its kind, rank,
    alpha and layers must match this table. Empty: new adapters."""

    def __post_init__(self) -> None:
        check_positive("rank", self.rank)
        check_positive("alpha", self.alpha)
        check_range("dropout", self.dropout, 0.0, 0.9)
        if not self.target_modules or "" in self.target_modules:
            raise ValueError("target_modules: must name at least one module, and no name may be empty")

    @property
    def is_enabled(self) -> bool:
        return self.kind != "none"

    @property
    def scaling(self) -> float:
        """Factor of the low-rank product."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)
