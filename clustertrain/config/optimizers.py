"""The optimizers of ``[optim]``: where their classes are, and what the planner and the trainer need to know of each.

This imports no torch, so ``plan`` and ``submit`` can read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

OptimizerName = Literal[
    "adamw", "adam", "sgd", "adafactor", "lion", "lamb", "lars", "muon", "soap", "shampoo", "adamw8bit"
]


@dataclass(frozen=True)
class OptimizerEntry:
    """Import path and properties of an optimizer."""

    module: str
    class_name: str
    package: str = ""
    """Package with the optimizer (``extras.EXTRAS``). Empty: torch has it."""
    usual_lr: tuple[float, float] = (1e-4, 1e-3)
    """Range of the peak learning rates in common use."""
    reads_betas: bool = True
    reads_eps: bool = True
    """Whether the optimizer, or the AdamW beside it, uses ``optim.eps``."""
    default_betas: tuple[float, float] | None = None
    """Betas of its authors, if they differ from Adam's."""
    reads_momentum: bool = False
    default_momentum: float = 0.9
    can_change_momentum: bool = True
    """Whether its momentum, or its first beta, can change from step to step."""
    needs_unsharded: bool = False
    """Whether its update needs full parameters rather than shards."""
    matrices_only: bool = False
    """Whether it applies only to hidden matrices; AdamW trains the rest."""
    has_shape_dependent_state: bool = False
    """Whether the bytes of state per parameter depend on the parameter's shape."""
    has_coupled_decay: bool = False
    """Whether weight decay is added to the gradient (L2), not subtracted from the weights."""
    scales_lr_linearly: bool = False
    """Whether k times the batch needs k times the learning rate (arXiv 1706.02677), not sqrt(k) times."""


OPTIMIZERS: Mapping[OptimizerName, OptimizerEntry] = {
    "adamw": OptimizerEntry("torch.optim", "AdamW"),
    "adam": OptimizerEntry("torch.optim", "Adam", has_coupled_decay=True),
    "sgd": OptimizerEntry(
        "torch.optim", "SGD", usual_lr=(0.01, 0.5), reads_betas=False, reads_eps=False, reads_momentum=True,
        has_coupled_decay=True, scales_lr_linearly=True,
    ),
    "adafactor": OptimizerEntry(
        "torch.optim", "Adafactor", usual_lr=(1e-3, 1e-2), reads_betas=False, reads_eps=False,
        can_change_momentum=False, needs_unsharded=True, has_shape_dependent_state=True,
    ),
    "lion": OptimizerEntry(
        "pytorch_optimizer", "Lion", "pytorch_optimizer", usual_lr=(3e-5, 3e-4), reads_eps=False,
        default_betas=(0.9, 0.99),
    ),
    "lamb": OptimizerEntry(
        "pytorch_optimizer", "Lamb", "pytorch_optimizer", usual_lr=(1e-3, 1e-2), needs_unsharded=True
    ),
    "lars": OptimizerEntry(
        "pytorch_optimizer", "LARS", "pytorch_optimizer", usual_lr=(0.1, 30.0), reads_betas=False, reads_eps=False,
        reads_momentum=True, needs_unsharded=True, has_coupled_decay=True, scales_lr_linearly=True,
    ),
    "muon": OptimizerEntry(
        "torch.optim", "Muon", reads_momentum=True, default_momentum=0.95, needs_unsharded=True, matrices_only=True,
        has_shape_dependent_state=True,
    ),
    "soap": OptimizerEntry(
        "pytorch_optimizer", "SOAP", "pytorch_optimizer", usual_lr=(3e-4, 3e-3), default_betas=(0.95, 0.95),
        needs_unsharded=True, has_shape_dependent_state=True,
    ),
    "shampoo": OptimizerEntry(
        "pytorch_optimizer", "Shampoo", "pytorch_optimizer", usual_lr=(1e-4, 1e-2), needs_unsharded=True,
        matrices_only=True, has_shape_dependent_state=True, has_coupled_decay=True,
    ),
    "adamw8bit": OptimizerEntry(
        "clustertrain.train.optim.adamw8bit", "AdamW8bit", "torchao", needs_unsharded=True,
        has_shape_dependent_state=True,
        can_change_momentum=False,  # torchao compiles the update, and would compile it again for each beta
    ),
}  # fmt: skip
