"""Compare the loss before any training with its expected value.

An untrained model gives every class the same probability, so its loss is known. Another value means that the initial
outputs are too large, the number of classes is wrong, or the inputs contain the answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from clustertrain.config.recipe import Recipe
from clustertrain.diagnose.child_output import ProgressCallback
from clustertrain.diagnose.registry import Finding, Verdict
from clustertrain.diagnose.subject import Subject, infer_num_classes, load_batch, mean_loss, model_output

BATCHES = 8
TOLERANCE = 0.1  # of the expected loss
MIN_TOLERANCE = 0.25  # logits add half their variance to the loss, and a typical standard deviation is 0.6
FAIL_TOLERANCE = 0.5  # of the expected loss: only a bug explains a larger difference
MAX_SHOWN = 5


@dataclass(frozen=True)
class ExpectedLoss:
    """Loss of outputs that carry no information."""

    loss: float
    formula: str
    """The formula, for display."""


def check(subject: Subject, on_progress: ProgressCallback) -> Finding:
    """Measure the loss of a few batches without an optimizer step."""
    if subject.recipe.model.weight_files:
        text = "the model starts from pretrained weights; for a decoder, the check pretrained measures their loss"
        return Finding(check="init-loss", verdict="skipped", text=text)
    losses, outputs = [], []
    with subject.with_overrides(data={"workers": 0}).trainer() as trainer, torch.no_grad():
        for i in range(BATCHES):
            batch = load_batch(trainer, subject.recipe, subject.batch.micro_batch, i * subject.batch.micro_batch)
            losses.append(mean_loss(trainer, batch).item())
            outputs.append((model_output(trainer, batch), batch[1]))
            on_progress(i + 1, BATCHES)
    targets = [target for _, target in outputs if isinstance(target, torch.Tensor)]
    num_classes = infer_num_classes(*outputs[0])
    values = torch.cat([x.flatten() for x in targets]) if targets else None
    expected = initial_loss(subject.recipe, num_classes, values, subject.batch.micro_batch)
    evidence: dict[str, Any] = {
        "loss": sum(losses) / len(losses),
        "loss_min": min(losses),
        "loss_max": max(losses),
        "batches": BATCHES,
        "expected": expected.loss if expected else None,
        "formula": expected.formula if expected else None,
        "tolerance": _tolerance(expected.loss) if expected else None,
        "classes": num_classes,
    }
    rows = [("loss", f"{evidence['loss']:.4g} over {BATCHES} batches ({min(losses):.4g} to {max(losses):.4g})")]
    if expected is not None:
        rows.append(("expected", f"{expected.loss:.4g} = {expected.formula}, ± {evidence['tolerance']:.2g}"))
    breakdown = _loss_breakdown(subject, outputs)
    if breakdown:
        name, group_losses = breakdown
        evidence[f"loss_by_{name}"] = group_losses
        highest = sorted(group_losses.items(), key=lambda kv: -kv[1])[:MAX_SHOWN]
        ellipsis = ", …" if len(group_losses) > MAX_SHOWN else ""
        rows.append((f"by {name}", ", ".join(f"{k}: {v:.3g}" for k, v in highest) + ellipsis))
    verdict, text, fix = assess(evidence["loss"], expected, has_model_loss=subject.has_model_loss)
    return Finding(check="init-loss", verdict=verdict, text=text, fix=fix, evidence=evidence, rows=rows)


def _tolerance(expected: float) -> float:
    return max(TOLERANCE * expected, MIN_TOLERANCE)


def assess(loss: float, expected: ExpectedLoss | None, *, has_model_loss: bool = False) -> tuple[Verdict, str, str]:
    """Return (verdict, text, fix) for the mean ``loss``."""
    if not math.isfinite(loss):
        return "fail", f"the loss is {loss} before any training", "look for a division by 0, a log of 0, or bad data"
    if expected is None:
        return "skipped", f"the loss is {loss:.4g}; its expected value is unknown for this objective", ""
    difference = loss - expected.loss
    text = f"the loss is {loss:.4g}; expected about {expected.loss:.4g} ({expected.formula})"
    if abs(difference) <= _tolerance(expected.loss):
        return "pass", text, ""
    verdict: Verdict = (
        "warn" if has_model_loss or abs(difference) <= max(FAIL_TOLERANCE * expected.loss, MIN_TOLERANCE) else "fail"
    )
    if difference < 0:
        fix = "check whether the inputs contain the target: an untrained model cannot predict it"
        return verdict, f"{text}: too low", fix
    return (
        verdict,
        f"{text}: too high",
        (
            "make the initial outputs smaller: initialize the last layer with a standard deviation of about 0.02, "
            "add a missing norm, or scale the inputs or targets to about 1"
        ),
    )


def _loss_breakdown(subject: Subject, outputs: list[tuple[Any, Any]]) -> tuple[str, dict[str, float]] | None:
    """Return ("class" or "bit", mean loss per class or per bit of a binary target), or None for other objectives."""
    objective = subject.recipe.objective_kind
    if infer_num_classes(*outputs[0]) is not None and objective == "cross-entropy":
        logits = torch.cat([o.flatten(0, -2).float() for o, _ in outputs])
        targets = torch.cat([t.flatten() for _, t in outputs])
        mask = targets != subject.recipe.objective.ignore_index
        losses = F.cross_entropy(logits[mask], targets[mask], reduction="none")
        class_losses = {str(c): losses[targets[mask] == c].mean().item() for c in torch.unique(targets[mask]).tolist()}
        return "class", class_losses
    if objective == "binary-cross-entropy" and outputs[0][0].dim() == 2:
        logits, targets = (torch.cat([pair[i].float() for pair in outputs]) for i in (0, 1))
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(0)
        return "bit", {str(i): v.item() for i, v in enumerate(losses)}
    return None


def initial_loss(
    recipe: Recipe, classes: int | None, targets: torch.Tensor | None = None, samples: int = 1
) -> ExpectedLoss | None:
    """Return the expected loss of ``recipe``'s objective at random initialization; None if it is unknown.

    Args:
        classes: number of classes of the model's logits; None if unknown.
        targets: sample targets for mse, l1 and huber, whose loss depends on them (outputs start near 0).
        samples: number of samples in a batch, which a contrastive loss may compare.
    """
    kind = recipe.objective_kind
    if kind == "cross-entropy":
        # Label smoothing changes nothing: with equal probabilities every class has the same loss.
        return None if classes is None else ExpectedLoss(math.log(classes), f"ln {classes}")
    if kind == "binary-cross-entropy":
        return ExpectedLoss(math.log(2), "ln 2")
    if kind == "nt-xent":
        if recipe.model.kind == "two-tower":
            group = recipe.objective.group or samples
            return ExpectedLoss(math.log(group), f"ln {group}, the passages that are compared")
        return None  # views of one sample resemble each other before any training
    if kind == "dpo" or targets is None or not targets.numel():  # ln 2 with the reference, which is not computed here
        return None
    magnitude = targets.double().abs()
    if kind == "mse":
        return ExpectedLoss(magnitude.square().mean().item(), "the mean of the squared targets")
    if kind == "l1":
        return ExpectedLoss(magnitude.mean().item(), "the mean absolute value of the targets")
    delta = recipe.objective.delta
    huber = torch.where(magnitude <= delta, magnitude.square() / 2, delta * (magnitude - delta / 2))
    return ExpectedLoss(huber.mean().item(), "the mean Huber loss of the targets against 0")
