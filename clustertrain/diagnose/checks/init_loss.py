"""The loss before any training. A model that knows nothing gives every class the same probability, so its loss is known
beforehand; another one tells of initial values that shout, of a wrong number of classes, or of inputs that hold the
answer."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from clustertrain.diagnose.child_output import Tell
from clustertrain.diagnose.registry import Finding, Verdict
from clustertrain.diagnose.subject import Subject, batch_of, classes_of, mean_loss, output_of
from clustertrain.train.models.initial_loss import Expected, initial_loss

BATCHES = 8
TOLERANCE = 0.1  # of the expected loss
LEAST_TOLERANCE = 0.25  # what logits of a usual spread, 0.6, add to it is half their variance
ALARMING = 0.5  # of the expected loss: so far off nothing but a mistake explains it
SHOWN = 5


def check(subject: Subject, tell: Tell) -> Finding:
    """The optimizer is never stepped."""
    losses, outputs = [], []
    with subject.changed(data={"workers": 0}).trainer() as t, torch.no_grad():
        for i in range(BATCHES):
            batch = batch_of(t, subject.recipe, subject.batch.micro_batch, i * subject.batch.micro_batch)
            losses.append(mean_loss(t, batch).item())
            outputs.append((output_of(t, batch), batch[1]))
            tell(i + 1, BATCHES)
    targets = [target for _, target in outputs if isinstance(target, torch.Tensor)]
    classes = classes_of(*outputs[0])
    expected = initial_loss(subject.recipe, classes, torch.cat([x.flatten() for x in targets]) if targets else None)
    evidence: dict[str, Any] = {
        "loss": sum(losses) / len(losses),
        "loss_least": min(losses),
        "loss_most": max(losses),
        "batches": BATCHES,
        "expected": expected.loss if expected else None,
        "formula": expected.formula if expected else None,
        "tolerance": _tolerance(expected.loss) if expected else None,
        "classes": classes,
    }
    rows = [("loss", f"{evidence['loss']:.4g} over {BATCHES} batches ({min(losses):.4g} to {max(losses):.4g})")]
    if expected is not None:
        rows.append(("expected", f"{expected.loss:.4g} = {expected.formula}, give or take {evidence['tolerance']:.2g}"))
    apart = _apart(subject, outputs)
    if apart:
        name, found = apart
        evidence[f"loss_by_{name}"] = found
        most = sorted(found.items(), key=lambda kv: -kv[1])[:SHOWN]
        rest = ", …" if len(found) > SHOWN else ""
        rows.append((f"by {name}", ", ".join(f"{k}: {v:.3g}" for k, v in most) + rest))
    verdict, text, fix = judged(evidence["loss"], expected, own_loss=subject.own_loss)
    return Finding(check="init-loss", verdict=verdict, text=text, fix=fix, evidence=evidence, rows=rows)


def _tolerance(expected: float) -> float:
    return max(TOLERANCE * expected, LEAST_TOLERANCE)


def judged(loss: float, expected: Expected | None, *, own_loss: bool = False) -> tuple[Verdict, str, str]:
    """(verdict, text, fix) of the mean ``loss``."""
    if not math.isfinite(loss):
        return "fail", f"the loss is {loss} before any training", "look for a division by 0, a log of 0, or bad data"
    if expected is None:
        return "skipped", f"the loss is {loss:.4g}, and what it should be is not known of this objective", ""
    off = loss - expected.loss
    said = f"the loss is {loss:.4g}, and should be about {expected.loss:.4g} ({expected.formula})"
    if abs(off) <= _tolerance(expected.loss):
        return "pass", said, ""
    verdict: Verdict = "warn" if own_loss or abs(off) <= max(ALARMING * expected.loss, LEAST_TOLERANCE) else "fail"
    if off < 0:
        fix = "a model that has learned nothing cannot know: see whether the inputs hold the target"
        return verdict, f"{said}: too low", fix
    return (
        verdict,
        f"{said}: too high",
        (
            "the first outputs are too large: initialise the last layer smaller (a standard deviation of 0.02, say), "
            "look for a norm that is missing, scale the inputs or targets to about 1"
        ),
    )


def _apart(subject: Subject, outputs: list[tuple[Any, Any]]) -> tuple[str, dict[str, float]] | None:
    """The mean loss of each class, or of each bit of a binary target."""
    kind = subject.recipe.objective_kind
    if classes_of(*outputs[0]) is not None and kind == "cross-entropy":
        logits = torch.cat([o.flatten(0, -2).float() for o, _ in outputs])
        targets = torch.cat([t.flatten() for _, t in outputs])
        counted = targets != subject.recipe.objective.ignore_index
        each = F.cross_entropy(logits[counted], targets[counted], reduction="none")
        found = {str(c): each[targets[counted] == c].mean().item() for c in torch.unique(targets[counted]).tolist()}
        return "class", found
    if kind == "binary-cross-entropy" and outputs[0][0].dim() == 2:
        logits, targets = (torch.cat([pair[i].float() for pair in outputs]) for i in (0, 1))
        each = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(0)
        return "bit", {str(i): v.item() for i, v in enumerate(each)}
    return None
