"""The ``[optim]`` table: which optimizer, on which parameters, how the gradient is clipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from clustertrain.config.checks.ranges import check_positive, check_range

OptimizerName = Literal[
    "adamw", "adam", "sgd", "adafactor", "lion", "lamb", "lars", "muon", "soap", "shampoo", "adamw8bit"
]
ClipMethod = Literal["norm", "value", "adaptive"]


class UnfreezeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of ``[[optim.unfreeze]]``: from ``step`` on what ``modules`` name is trained; until then it is frozen."""

    step: int
    modules: tuple[str, ...]  # patterns of module names, as "encoder.layers.*"

    def __post_init__(self) -> None:
        check_positive("step", self.step)
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
    clip: ClipMethod = "norm"
    clip_norm: float = 1.0  # of clip = "norm"; 0: no clipping
    clip_value: float = 1.0  # of clip = "value": each element lies between plus and minus this
    clip_quantile: float = 0.95  # of clip = "adaptive": the limit is this quantile of the last norms

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "clip_value"):
            check_positive(name, getattr(self, name))
        for beta in self.betas or ():
            check_range("betas", beta, 0.0, 0.999999)
        check_range("momentum", self.effective_momentum, 0.0, 0.999999)
        if self.nesterov and not self.effective_momentum:
            raise ValueError("nesterov needs a momentum greater than 0")
        check_positive("layer_decay", self.layer_decay)
        check_range("layer_decay", self.layer_decay, 0.0, 1.0)
        check_range("clip_quantile", self.clip_quantile, 0.5, 1.0)
        for pattern, factor in self.lr_scale.items():
            check_positive(f"lr_scale.{pattern}", factor)
        if self.lr_batch < 0:
            raise ValueError(f"lr_batch = {self.lr_batch}: must be 0 (not said) or more")
        start_steps: dict[str, int] = {}
        for entry in self.unfreeze:
            for pattern in entry.modules:
                if pattern in start_steps:
                    raise ValueError(
                        f"unfreeze: {pattern!r} is named twice, for steps {start_steps[pattern]} and {entry.step}"
                    )
                start_steps[pattern] = entry.step
        if self.weight_decay < 0 or self.clip_norm < 0:
            raise ValueError("weight_decay and clip_norm must be 0 or more")

    def resolve_betas(self, *, is_text: bool) -> tuple[float, float]:
        """The betas in use. (0.9, 0.95) is what language models take since GPT-3 (arXiv 2005.14165, appendix B); 0.999
        is that of Adam (arXiv 1412.6980). Lion (arXiv 2302.06675) and SOAP (arXiv 2409.11321) have their authors'."""
        return self.betas or _DEFAULT_BETAS.get(self.name) or ((0.9, 0.95) if is_text else (0.9, 0.999))

    @property
    def effective_momentum(self) -> float:
        """0.95 is that of Muon's author (kellerjordan.github.io/posts/muon)."""
        return self.momentum if self.momentum is not None else 0.95 if self.name == "muon" else 0.9


_DEFAULT_BETAS: Mapping[str, tuple[float, float]] = {"lion": (0.9, 0.99), "soap": (0.95, 0.95)}
