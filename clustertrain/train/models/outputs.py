"""Hugging Face transformers models as entries: use their logits, and turn their generation caches off."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def prepare_entry(model: nn.Module) -> None:
    """Prepare the module of an entry for the recipe's objective and for activation checkpointing, in place.

    An output with ``logits`` is replaced by these. ``config.use_cache`` becomes false: keys and values that are kept
    for generation cost memory in training, and a recomputed layer would append to them twice.
    """
    model.register_forward_hook(_take_logits)
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", None) is True:
        config.use_cache = False  # type: ignore[union-attr]


def _take_logits(_: nn.Module, __: Any, output: Any) -> Any:
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, torch.Tensor) else output
