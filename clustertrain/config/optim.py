"""The ``[optim]`` table: which optimizer, on which parameters, how the gradient is clipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from clustertrain.config.ranges import positive, within

OptimizerName = Literal[
    "adamw", "adam", "sgd", "adafactor", "lion", "lamb", "lars", "muon", "soap", "shampoo", "adamw8bit"
]
Clip = Literal["norm", "value", "adaptive"]


class UnfreezeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of ``[[optim.unfreeze]]``: from ``step`` on what ``modules`` name is trained; until then it is frozen."""

    step: int
    modules: tuple[str, ...]  # patterns of module names, as "encoder.layers.*"

    def __post_init__(self) -> None:
        positive("step", self.step)
        if not self.modules or "" in self.modules:
            raise ValueError("modules: name at least one module")


class OptimSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """No weight decay on norms, biases and embeddings, by the type of their module. What does not belong to the
    optimizer in use is refused."""

    name: OptimizerName = "adamw"
    lr: float = 3e-4
    lr_batch: int = 0  # the global batch that lr was found for; 0: not said. The plan tells what another one asks for
    betas: tuple[float, float] | None = None  # None: see betas_for
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float | None = None  # sgd, lars: None is 0.9; muon: None is 0.95
    nesterov: bool = False  # sgd
    layer_decay: float = 1.0  # lr of a layer is that of the one above it times this; 1: the same for all
    lr_scale: dict[str, float] = {}  # by pattern of module names what their lr is multiplied by
    freeze: tuple[str, ...] = ()  # patterns of module names that are never trained
    unfreeze: tuple[UnfreezeSpec, ...] = ()
    clip: Clip = "norm"
    clip_norm: float = 1.0  # of clip = "norm"; 0: no clipping
    clip_value: float = 1.0  # of clip = "value": each element lies between plus and minus this
    clip_quantile: float = 0.95  # of clip = "adaptive": the limit is this quantile of the last norms

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "clip_value"):
            positive(name, getattr(self, name))
        for beta in self.betas or ():
            within("betas", beta, 0.0, 0.999999)
        within("momentum", self.momentum_in_use, 0.0, 0.999999)
        if self.nesterov and not self.momentum_in_use:
            raise ValueError("nesterov needs a momentum greater than 0")
        positive("layer_decay", self.layer_decay)
        within("layer_decay", self.layer_decay, 0.0, 1.0)
        within("clip_quantile", self.clip_quantile, 0.5, 1.0)
        for pattern, factor in self.lr_scale.items():
            positive(f"lr_scale.{pattern}", factor)
        if self.lr_batch < 0:
            raise ValueError(f"lr_batch = {self.lr_batch}: must be 0 (not said) or more")
        begins: dict[str, int] = {}
        for entry in self.unfreeze:
            for pattern in entry.modules:
                if pattern in begins:
                    raise ValueError(
                        f"unfreeze: {pattern!r} is named twice, for steps {begins[pattern]} and {entry.step}"
                    )
                begins[pattern] = entry.step
        if self.weight_decay < 0 or self.clip_norm < 0:
            raise ValueError("weight_decay and clip_norm must be 0 or more")

    def betas_for(self, *, text: bool) -> tuple[float, float]:
        """The betas in use. (0.9, 0.95) is what language models take since GPT-3 (arXiv 2005.14165, appendix B); 0.999
        is that of Adam (arXiv 1412.6980). Lion (arXiv 2302.06675) and SOAP (arXiv 2409.11321) have their authors'."""
        return self.betas or _BETAS.get(self.name) or ((0.9, 0.95) if text else (0.9, 0.999))

    @property
    def momentum_in_use(self) -> float:
        """0.95 is that of Muon's author (kellerjordan.github.io/posts/muon)."""
        return self.momentum if self.momentum is not None else 0.95 if self.name == "muon" else 0.9


_BETAS: Mapping[str, tuple[float, float]] = {"lion": (0.9, 0.99), "soap": (0.95, 0.95)}
