"""Compare the outputs of a model with new adapters with those of its base: B is zero, so they must be equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from clustertrain.diagnose.child_output import ProgressCallback
from clustertrain.diagnose.registry import Finding
from clustertrain.diagnose.subject import Subject, collect_tensors, disable_dropout, load_batch, model_output
from clustertrain.train.distributed.adapted_linear import AdaptedLayer, iter_adapted

# Of the largest output. DoRA divides by norms that it computes in another order than those that it starts with.
TOLERANCE, HALF_TOLERANCE = 1e-4, 3e-2


def check(subject: Subject, on_progress: ProgressCallback) -> Finding:
    """Compare the outputs of one batch."""
    spec = subject.recipe.adapter
    if not spec.is_enabled:
        return Finding(check="adapter", verdict="skipped", text="adapter.kind is not set")
    if spec.init:
        text = "adapter.init is set: the model starts with the changes of that adapter"
        return Finding(check="adapter", verdict="skipped", text=text)
    with subject.with_overrides(data={"workers": 0}).trainer() as trainer, torch.no_grad():
        disable_dropout(trainer.model)
        batch = load_batch(trainer, subject.recipe, subject.batch.micro_batch)
        adapted = _float_outputs(model_output(trainer, batch))
        layers = sum(1 for _ in iter_adapted(trainer.model))
        with without_adapters():
            base = _float_outputs(model_output(trainer, batch))
        on_progress(1, 1)
    if not any(t.any() for t in base):
        text = "the model returns no floating-point values other than 0, so a difference could not show"
        return Finding(check="adapter", verdict="skipped", text=text)
    largest = _largest(base)
    difference = _largest([a - b for a, b in zip(adapted, base, strict=True)])
    tolerance = (HALF_TOLERANCE if subject.recipe.train.precision in ("bf16", "fp16") else TOLERANCE) * largest
    evidence = {"layers": layers, "largest_output": largest, "largest_difference": difference, "tolerance": tolerance}
    rows = [("layers", str(layers)), ("difference", f"{difference:.2g} of outputs up to {largest:.3g}")]
    if difference <= tolerance:
        text = "the outputs with new adapters are those of the base"
        return Finding(check="adapter", verdict="pass", text=text, evidence=evidence, rows=rows)
    return Finding(
        check="adapter",
        verdict="fail",
        text=f"the outputs with new adapters differ from those of the base by {difference:.2g}",
        fix="do not change lora_B, which starts at zero, and check what the model does with its layers' weights",
        evidence=evidence,
        rows=rows,
    )


@contextmanager
def without_adapters() -> Iterator[None]:
    """Skip the adapters of all layers inside the block."""

    def forward(self: AdaptedLayer, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super(AdaptedLayer, self).forward(x)
        return result

    original = AdaptedLayer.forward
    AdaptedLayer.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        AdaptedLayer.forward = original  # type: ignore[method-assign]


def _largest(tensors: list[torch.Tensor]) -> float:
    """Return the largest absolute value; NaN if there is one."""
    return float(torch.stack([t.abs().max() for t in tensors if t.numel()]).max())


def _float_outputs(output: Any) -> list[torch.Tensor]:
    tensors = [output] if isinstance(output, torch.Tensor) else collect_tensors(output)
    return [t.float() for t in tensors if t.is_floating_point()]
