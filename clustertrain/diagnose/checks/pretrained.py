"""Compare the first loss of a model with pretrained weights with that of random ones.

Weights read into the wrong places, tokens of another tokenizer or an unknown chat template make the loss as high as
that of random weights. Training hides this, because the loss falls anyway.
"""

from __future__ import annotations

import math

import torch

from clustertrain.diagnose.child_output import ProgressCallback
from clustertrain.diagnose.registry import Finding, Verdict
from clustertrain.diagnose.subject import Subject, load_batch, mean_loss

BATCHES = 8
PASS_BELOW, FAIL_ABOVE = 0.7, 0.95  # of ln V; small models of code or of rare languages reach a half


def check(subject: Subject, on_progress: ProgressCallback) -> Finding:
    """Measure the loss of a few batches without an optimizer step."""
    recipe = subject.recipe
    if not recipe.model.weight_files:
        return Finding(check="pretrained", verdict="skipped", text="model.init is not set: the weights are random")
    if not recipe.model.is_decoder or recipe.objective_kind != "cross-entropy":
        text = "the loss of random weights is known for the cross-entropy of the built-in decoder only"
        return Finding(check="pretrained", verdict="skipped", text=text)
    losses = []
    with subject.with_overrides(data={"workers": 0}).trainer() as trainer, torch.no_grad():
        for i in range(BATCHES):
            batch = load_batch(trainer, recipe, subject.batch.micro_batch, i * subject.batch.micro_batch)
            losses.append(mean_loss(trainer, batch).item())
            on_progress(i + 1, BATCHES)
    loss, random_loss = sum(losses) / len(losses), math.log(recipe.model.vocab_size)
    verdict, text, fix = assess(loss, recipe.model.vocab_size)
    evidence = {"loss": loss, "loss_of_random_weights": random_loss, "batches": BATCHES}
    rows = [("loss", f"{loss:.4g} over {BATCHES} batches"), ("random weights", f"{random_loss:.4g}")]
    return Finding(check="pretrained", verdict=verdict, text=text, fix=fix, evidence=evidence, rows=rows)


def assess(loss: float, vocab_size: int) -> tuple[Verdict, str, str]:
    """Return (verdict, text, fix) for the mean ``loss``."""
    random_loss = math.log(vocab_size)
    text = f"the first loss is {loss:.4g}; random weights have about {random_loss:.4g} (ln {vocab_size})"
    if loss < PASS_BELOW * random_loss:
        return "pass", text, ""
    fix = "check that the data was tokenized with the tokenizer of model.init, and that model.init is the right model"
    return ("warn" if loss < FAIL_ABOVE * random_loss else "fail"), f"{text}, which is close", fix
