"""The plan's categories of memory and those of the tracker, without torch."""

from __future__ import annotations

from collections.abc import Mapping

# Values of tracker.Category by the plan's category.
COMPARED: Mapping[str, tuple[str, ...]] = {
    "params": ("parameters", "gathered"),
    "grads": ("gradients", "reduced"),
    "optimizer": ("optimizer", "update"),
    "activations": ("forward", "backward", "batch"),
    "logits": ("logits",),
}


def category_errors(predicted: Mapping[str, float], traced: Mapping[str, float]) -> dict[str, float]:
    """Return prediction minus trace by the plan's categories, as fractions of the traced peak."""
    peak = sum(traced.values())
    return {
        category: (predicted[category] - sum(traced.get(name, 0.0) for name in names)) / peak
        for category, names in COMPARED.items()
    }
