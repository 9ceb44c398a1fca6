"""The ``[optim]`` table: optimizer, trained parameters, gradient clipping."""

from __future__ import annotations

from typing import Literal

import msgspec

from clustertrain.config.checks.ranges import check_positive, check_range
from clustertrain.config.optimizers import OPTIMIZERS, OptimizerName

ClipMethod = Literal["norm", "value", "adaptive"]


class UnfreezeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An item of ``[[optim.unfreeze]]``: modules that are frozen until a step."""

    step: int
    """First step in which the modules are trained."""
    modules: tuple[str, ...]
    """Patterns of module names, for example ``"encoder.layers.*"``."""

    def __post_init__(self) -> None:
        check_positive("step", self.step)
        if not self.modules or "" in self.modules:
            raise ValueError("modules: must name at least one module")


class OptimSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[optim]`` table. A key that does not belong to the optimizer in use is refused.

    Weight decay excludes norms, biases and embeddings, identified by the type of their module.
    """

    name: OptimizerName = "adamw"
    """Optimizer."""
    lr: float = 3e-4
    """Peak learning rate; ``[schedule]`` scales it."""
    lr_reference_batch: int = 0
    """Global batch for which ``lr`` was tuned; ``plan`` then suggests a rate for the actual one. 0: unknown."""
    betas: tuple[float, float] | None = None
    """Decay rates of the moment estimates. Unset: (0.9, 0.99) for lion, (0.95, 0.95) for soap; for all others (0.9,
    0.95) on text and (0.9, 0.999) otherwise. Unused by adafactor, sgd and lars."""
    eps: float = 1e-8
    """Value added to the denominator of Adam-type optimizers. Unused by sgd, lars, lion and adafactor."""
    weight_decay: float = 0.1
    """Weight decay. 0: none."""
    weight_decay_scale: dict[str, float] = {}
    """Multipliers of the weight decay by pattern of module names. 0: none there."""
    momentum: float | None = None
    """Momentum of sgd, lars and muon. Unset: 0.95 for muon, otherwise 0.9. Unused by the others."""
    nesterov: bool = False
    """Use Nesterov momentum. SGD only."""
    layer_decay: float = 1.0
    """Ratio of a layer's learning rate to that of the layer above it. 1: the same rate for all layers."""
    lr_scale: dict[str, float] = {}
    """Multipliers of the learning rate by pattern of module names."""
    freeze: tuple[str, ...] = ()
    """Patterns of the names of modules that are never trained."""
    unfreeze: tuple[UnfreezeSpec, ...] = ()
    """Modules that are frozen until a given step."""
    clip: ClipMethod = "norm"
    """Gradient clipping. ``"norm"``: by global norm. ``"value"``: by element. ``"adaptive"``: by global norm, at a
    quantile of recent norms."""
    clip_norm: float = 1.0
    """Largest global gradient norm; with ``clip = "adaptive"`` only until enough norms are known. 0: no clipping."""
    clip_value: float = 1.0
    """Largest absolute value of a gradient element. Only with ``clip = "value"``."""
    clip_quantile: float = 0.95
    """Quantile of recent gradient norms that is the limit. Only with ``clip = "adaptive"``."""

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
        for pattern, factor in self.weight_decay_scale.items():
            if factor < 0:
                raise ValueError(f"weight_decay_scale.{pattern} = {factor}: must be 0 (no weight decay) or more")
        if self.lr_reference_batch < 0:
            raise ValueError(f"lr_reference_batch = {self.lr_reference_batch}: must be 0 (unknown) or more")
        start_steps: dict[str, int] = {}
        for entry in self.unfreeze:
            for pattern in entry.modules:
                if pattern in start_steps:
                    raise ValueError(
                        f"unfreeze: {pattern!r} is listed twice, for steps {start_steps[pattern]} and {entry.step}"
                    )
                start_steps[pattern] = entry.step
        if self.weight_decay < 0 or self.clip_norm < 0:
            raise ValueError("weight_decay and clip_norm must be 0 or more")

    def resolve_betas(self, *, is_text: bool) -> tuple[float, float]:
        """Return the betas to use.

        Defaults: (0.9, 0.95) for language models since GPT-3 (arXiv 2005.14165, appendix B), (0.9, 0.999) from Adam
        (arXiv 1412.6980); Lion (arXiv 2302.06675) and SOAP (arXiv 2409.11321) use their authors' values.
        """
        return self.betas or OPTIMIZERS[self.name].default_betas or ((0.9, 0.95) if is_text else (0.9, 0.999))

    @property
    def effective_momentum(self) -> float:
        """The momentum to use; Muon's default is its author's (kellerjordan.github.io/posts/muon)."""
        return self.momentum if self.momentum is not None else OPTIMIZERS[self.name].default_momentum
