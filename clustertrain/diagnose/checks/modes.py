"""Check the state after a step and after evaluation: modes, accumulating gradients, parameters that never change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from clustertrain.checkpoint.core.state_dict import unwrap
from clustertrain.diagnose.child_output import ProgressCallback
from clustertrain.diagnose.registry import Finding, Verdict, worst_verdict
from clustertrain.diagnose.subject import (
    Subject,
    collect_tensors,
    disable_dropout,
    load_batch,
    mean_loss,
    model_output,
    repeat_batch,
)
from clustertrain.train.optim.lr_schedule import set_lr
from clustertrain.train.trainer import Trainer

TOLERANCE = 1e-3  # relative difference of two gradient norms that should be equal
MAX_SHOWN = 5

Note = tuple[Verdict, str, str]  # (verdict, text, fix)


def check(subject: Subject, on_progress: ProgressCallback) -> Finding:
    sub_checks: list[Callable[[Trainer, Any], tuple[list[Note], dict[str, Any]]]] = [
        _assess_training_mode, _assess_evaluation, _assess_parameters, _assess_zero_grad,
    ]  # fmt: skip
    notes: list[Note] = []
    evidence: dict[str, Any] = {}
    for i, sub_check in enumerate(sub_checks):
        with subject.with_overrides(data={"workers": 0}).trainer() as trainer:
            batch = load_batch(trainer, subject.recipe, max(subject.batch.micro_batch, subject.sample_multiple))
            new_notes, new_evidence = sub_check(trainer, batch)
        notes += new_notes
        evidence |= new_evidence
        on_progress(i + 1, len(sub_checks))
    verdict = worst_verdict(v for v, _, _ in notes)
    reported = [n for n in notes if n[0] == verdict] if verdict != "pass" else []
    rows = [
        ("modules", f"{evidence['modules']}, {len(evidence['in_eval_mode'])} in eval mode after a training step"),
        ("parameters", f"{evidence['parameters']} tensors, {len(evidence['frozen'])} frozen, "
                       f"{len(evidence['unused'])} without a gradient, "
                       f"{len(evidence['not_updated'])} unchanged by a step"),
        ("gradient norm", "{:.4g}; {:.4g} when the step is repeated".format(*evidence["gradient_norms"])),
    ]  # fmt: skip
    rows += [(v, text) for v, text, _ in notes if v not in (verdict, "pass")]
    return Finding(
        check="modes",
        verdict=verdict,
        text="; ".join(t for _, t, _ in reported) or "train and eval mode, gradients and parameters are correct",
        fix="; ".join(f for _, _, f in reported if f),
        evidence=evidence,
        rows=rows,
    )


def _format_names(names: list[str]) -> str:
    return ", ".join(names[:MAX_SHOWN]) + (f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else "")


def _modules_in_mode(model: nn.Module, training: bool) -> list[str]:
    """Return the names of the outermost modules in the given mode."""
    matching = [name for name, m in model.named_modules() if m.training is training]
    nested = {n for n in matching if any(n.startswith(f"{o}.") if o else n for o in matching)}
    return [n or "the model" for n in matching if n not in nested]


def _all_frozen(model: nn.Module, names: list[str]) -> bool:
    modules = dict(model.named_modules())
    parameters = [p for n in names for p in modules["" if n == "the model" else n].parameters()]
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def _assess_training_mode(trainer: Trainer, batch: Any) -> tuple[list[Note], dict[str, Any]]:
    """Check the modes of a newly built model and of the model after one step."""
    model = unwrap(trainer.model)
    initially_eval = _modules_in_mode(model, training=False)
    trainer.step()
    eval_after_step = _modules_in_mode(model, training=False)
    notes: list[Note] = []
    if eval_after_step and _all_frozen(model, eval_after_step):
        notes.append(
            (
                "warn",
                f"in eval mode while training: {_format_names(eval_after_step)}",
                "ignore this if they are meant to be frozen",
            )
        )
    elif initially_eval:
        fix = "return model.train() from model.entry; pretrained models load in eval mode"
        notes.append(("fail", f"built in eval mode and would train in it: {_format_names(initially_eval)}", fix))
    elif eval_after_step:
        fix = "call train() again after eval(), preferably in a `finally` block"
        text = f"in eval mode after a step and for the rest of the run: {_format_names(eval_after_step)}"
        notes.append(("fail", text, fix))
    return notes, {
        "modules": len(list(model.modules())),
        "in_eval_mode": eval_after_step,
        "built_in_eval_mode": initially_eval,
    }


@torch.no_grad()
def _assess_evaluation(trainer: Trainer, batch: Any) -> tuple[list[Note], dict[str, Any]]:
    """Check that two passes in eval mode give equal outputs and change no buffer, and that train() undoes eval()."""
    model = unwrap(trainer.model)
    model.eval()
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    outputs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        outputs.append([o.detach().float().clone() for o in collect_tensors(model_output(trainer, batch))])
    still_training = _modules_in_mode(model, training=True)
    is_deterministic = all(bool(torch.equal(a.nan_to_num(), b.nan_to_num())) for a, b in zip(*outputs, strict=True))
    changed_buffers = [name for name, b in model.named_buffers() if not torch.equal(buffers[name], b)]
    model.train()
    model_output(trainer, batch)
    still_eval = _modules_in_mode(model, training=False)
    notes: list[Note] = []
    if still_training:
        fix = "do not call train() in forward; make train(mode) pass its mode to submodules"
        notes.append(("fail", f"in train mode after eval(): {_format_names(still_training)}", fix))
    if not is_deterministic:
        fix = "pass training=self.training to F.dropout; add noise only `if self.training`"
        notes.append(("fail", "two passes in eval mode give different outputs: dropout or noise is active", fix))
    if changed_buffers:
        fix = "update running statistics only `if self.training`; otherwise the model learns from validation data"
        notes.append(("fail", f"evaluation changes the buffers {_format_names(changed_buffers)}", fix))
    if still_eval and not _all_frozen(model, still_eval):
        fix = "make train(mode) pass its mode to submodules"
        notes.append(("fail", f"in eval mode after train(): {_format_names(still_eval)}", fix))
    return notes, {
        "evaluation_is_deterministic": is_deterministic,
        "buffers_changed": changed_buffers,
        "train_mode_in_evaluation": still_training,
    }


def _assess_parameters(trainer: Trainer, batch: Any) -> tuple[list[Note], dict[str, Any]]:
    """Check that every trainable parameter gets a gradient and changes in a step."""
    model = unwrap(trainer.model)
    named_params = list(model.named_parameters())
    frozen = [n for n, p in named_params if not p.requires_grad]
    mean_loss(trainer, batch).backward()  # type: ignore[no-untyped-call]
    unused = [n for n, p in named_params if p.requires_grad and p.grad is None]
    zero_grad = [n for n, p in named_params if p.requires_grad and p.grad is not None and not bool(p.grad.any())]
    nonzero_grad = [n for n, p in named_params if p.grad is not None and bool(p.grad.any())]
    trainer.optimizer.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)
    values_before = {n: p.detach().clone() for n, p in named_params}
    repeat_batch(trainer, batch).step()
    not_updated = [n for n, p in named_params if n in nonzero_grad and torch.equal(values_before[n], p.detach())]
    notes: list[Note] = []
    if len(frozen) == len(named_params):
        notes.append(("fail", "all parameters are frozen", "set requires_grad, or check optim.freeze"))
    elif not nonzero_grad:
        fix = "look for detach(), .item(), no_grad or argmax between the parameters and the loss"
        notes.append(("fail", "no parameter has a nonzero gradient", fix))
    if unused:
        fix = "use them in forward, remove or freeze them, or set parallel.find_unused_parameters for ddp"
        notes.append(("fail", f"without a gradient: {_format_names(unused)}", fix))
    if not_updated:
        fix = "pass these parameters to the optimizer, not copies of them"
        notes.append(("fail", f"with a gradient, but unchanged by a step: {_format_names(not_updated)}", fix))
    evidence = {
        "frozen": frozen,
        "unused": unused,
        "zero_gradient": zero_grad,
        "not_updated": not_updated,
        "parameters": len(named_params),
    }
    return notes, evidence


def _assess_zero_grad(trainer: Trainer, batch: Any) -> tuple[list[Note], dict[str, Any]]:
    """Repeat one step at a learning rate of 0; a larger gradient norm means that gradients accumulate."""
    disable_dropout(trainer.model)
    repeated = repeat_batch(trainer, batch)
    norms = []
    for _ in range(2):
        set_lr(trainer.optimizer, 0.0)
        norms.append(float(repeated.step().grad_norm))
    remaining = [n for n, p in unwrap(trainer.model).named_parameters() if p.grad is not None and bool(p.grad.any())]
    notes: list[Note] = []
    if norms[1] > norms[0] * (1 + TOLERANCE) and norms[1] > 1.5 * norms[0]:
        fix = "look for a hook, a parameter outside of the model, or retain_graph that keeps gradients between steps"
        notes.append(("fail", "the gradients of one step carry over to the next", fix))
    return notes, {"gradient_norms": norms, "stale_gradients": remaining}
