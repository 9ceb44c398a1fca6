"""What a step leaves behind, and what evaluation does: modes, gradients that add up, parameters that never move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from clustertrain.checkpoint.core.state_dict import unwrap
from clustertrain.diagnose.child_output import Tell
from clustertrain.diagnose.registry import Finding, Verdict, worst
from clustertrain.diagnose.subject import (
    Subject,
    batch_of,
    mean_loss,
    no_dropout,
    output_of,
    repeating,
    set_rate,
    tensors,
)
from clustertrain.train.trainer import Trainer

SAME = 1e-3  # relative difference of two gradient norms that should be one
SHOWN = 5

Note = tuple[Verdict, str, str]


def check(subject: Subject, tell: Tell) -> Finding:
    parts: list[Callable[[Trainer, Any], tuple[list[Note], dict[str, Any]]]] = [
        _training_mode, _evaluation, _parameters, _zeroed,
    ]  # fmt: skip
    notes: list[Note] = []
    evidence: dict[str, Any] = {}
    for i, part in enumerate(parts):
        with subject.changed(data={"workers": 0}).trainer() as t:
            batch = batch_of(t, subject.recipe, max(subject.batch.micro_batch, subject.in_groups))
            found, numbers = part(t, batch)
        notes += found
        evidence |= numbers
        tell(i + 1, len(parts))
    verdict = worst(v for v, _, _ in notes)
    told = [n for n in notes if n[0] == verdict] if verdict != "pass" else []
    rows = [
        ("modules", f"{evidence['modules']}, {len(evidence['in_eval_mode'])} in eval mode after a step of training"),
        ("parameters", f"{evidence['parameters']} tensors, {len(evidence['frozen'])} frozen, "
                       f"{len(evidence['unused'])} without a gradient, {len(evidence['unmoved'])} that a step leaves"),
        ("gradient norm", "{:.4g}, and {:.4g} when the step is done again".format(*evidence["gradient_norms"])),
    ]  # fmt: skip
    rows += [(v, text) for v, text, _ in notes if v not in (verdict, "pass")]
    return Finding(
        check="modes",
        verdict=verdict,
        text="; ".join(t for _, t, _ in told) or "train and eval mode, gradients and parameters are as they should be",
        fix="; ".join(f for _, _, f in told if f),
        evidence=evidence,
        rows=rows,
    )


def _named(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _in_mode(model: nn.Module, training: bool) -> list[str]:
    """The modules that are in the mode, the outermost ones alone."""
    found = [name for name, m in model.named_modules() if m.training is training]
    inside = {n for n in found if any(n.startswith(f"{o}.") if o else n for o in found)}
    return [n or "the model" for n in found if n not in inside]


def _only_frozen(model: nn.Module, names: list[str]) -> bool:
    modules = dict(model.named_modules())
    held = [p for n in names for p in modules["" if n == "the model" else n].parameters()]
    return bool(held) and not any(p.requires_grad for p in held)


def _training_mode(t: Trainer, batch: Any) -> tuple[list[Note], dict[str, Any]]:
    """What the trainer finds, before anybody has set a mode, and after one step."""
    model = unwrap(t.model)
    at_first = _in_mode(model, training=False)
    t.step()
    after = _in_mode(model, training=False)
    notes: list[Note] = []
    if after and _only_frozen(model, after):
        notes.append(
            (
                "warn",
                f"in eval mode while training: {_named(after)}",
                "as it should be where they are frozen on purpose",
            )
        )
    elif at_first:
        fix = "return model.train() from model.entry; what is loaded pretrained comes in eval mode"
        notes.append(("fail", f"made in eval mode, and would train so: {_named(at_first)}", fix))
    elif after:
        fix = "call train() again after eval(), best in a `finally`"
        notes.append(("fail", f"in eval mode after a step, and so for the rest of the run: {_named(after)}", fix))
    return notes, {"modules": len(list(model.modules())), "in_eval_mode": after, "made_in_eval_mode": at_first}


@torch.no_grad()
def _evaluation(t: Trainer, batch: Any) -> tuple[list[Note], dict[str, Any]]:
    """Two passes in eval mode must be one and the same, and leave nothing behind."""
    model = unwrap(t.model)
    model.eval()
    before = {name: b.detach().clone() for name, b in model.named_buffers()}
    outputs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        outputs.append([o.detach().float().clone() for o in tensors(output_of(t, batch))])
    training = _in_mode(model, training=True)
    same = all(bool(torch.equal(a.nan_to_num(), b.nan_to_num())) for a, b in zip(*outputs, strict=True))
    changed = [name for name, b in model.named_buffers() if not torch.equal(before[name], b)]
    model.train()
    output_of(t, batch)
    still = _in_mode(model, training=False)
    notes: list[Note] = []
    if training:
        fix = "do not call train() in forward; let train(mode) hand its mode on"
        notes.append(("fail", f"in train mode after eval(): {_named(training)}", fix))
    if not same:
        fix = "dropout by function needs training=self.training; noise belongs under `if self.training`"
        notes.append(("fail", "two passes in eval mode give different outputs: dropout or noise is active", fix))
    if changed:
        fix = "a norm that still gathers statistics would learn from what it is measured on: use self.training"
        notes.append(("fail", f"evaluation changes the buffers {_named(changed)}", fix))
    if still and not _only_frozen(model, still):
        notes.append(("fail", f"in eval mode after train(): {_named(still)}", "let train(mode) hand its mode on"))
    return notes, {"evaluation_repeats": same, "buffers_changed": changed, "train_mode_in_evaluation": training}


def _parameters(t: Trainer, batch: Any) -> tuple[list[Note], dict[str, Any]]:
    """Which ones get a gradient, and which ones a step moves."""
    model = unwrap(t.model)
    named = list(model.named_parameters())
    frozen = [n for n, p in named if not p.requires_grad]
    mean_loss(t, batch).backward()  # type: ignore[no-untyped-call]
    unused = [n for n, p in named if p.requires_grad and p.grad is None]
    flat = [n for n, p in named if p.requires_grad and p.grad is not None and not bool(p.grad.any())]
    sloped = [n for n, p in named if p.grad is not None and bool(p.grad.any())]
    t.optimizer.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)
    before = {n: p.detach().clone() for n, p in named}
    repeating(t, batch).step()
    unmoved = [n for n, p in named if n in sloped and torch.equal(before[n], p.detach())]
    notes: list[Note] = []
    if len(frozen) == len(named):
        notes.append(("fail", "all parameters are frozen", "set requires_grad, or see optim.freeze"))
    elif not sloped:
        fix = "look for detach(), .item(), no_grad or argmax between the parameters and the loss"
        notes.append(("fail", "no parameter has a gradient other than 0", fix))
    if unused:
        fix = "use them in forward, remove or freeze them; DistributedDataParallel waits for their gradients for ever"
        notes.append(("fail", f"without a gradient: {_named(unused)}", fix))
    if unmoved:
        fix = "see that the optimizer is given these parameters, and not copies of them"
        notes.append(("fail", f"with a gradient, and not moved by a step: {_named(unmoved)}", fix))
    kept = {"frozen": frozen, "unused": unused, "zero_gradient": flat, "unmoved": unmoved, "parameters": len(named)}
    return notes, kept


def _zeroed(t: Trainer, batch: Any) -> tuple[list[Note], dict[str, Any]]:
    """The same step twice, at a rate of 0: what is left of the first gradient shows in the second."""
    no_dropout(t.model)
    again = repeating(t, batch)
    norms = []
    for _ in range(2):
        set_rate(t.optimizer, 0.0)
        norms.append(float(again.step().grad_norm))
    left = [n for n, p in unwrap(t.model).named_parameters() if p.grad is not None and bool(p.grad.any())]
    notes: list[Note] = []
    if norms[1] > norms[0] * (1 + SAME) and norms[1] > 1.5 * norms[0]:
        fix = "something keeps gradients from step to step: a hook, a parameter outside of the model, retain_graph"
        notes.append(("fail", "the gradients of one step are in the next one", fix))
    return notes, {"gradient_norms": norms, "gradients_left": left}
