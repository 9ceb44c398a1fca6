"""Gradients against central differences, in float64 on the CPU and on few samples.

Along a random direction of each parameter (and along its element of the largest gradient) the loss is taken a little
before and behind: their difference is the gradient without autograd. Where one is wrong, each module is tried by
itself, with the inputs that it got, from the inside out: the first that is wrong has the mistake.

Initial values are often special ones: a weight of 0 behind a rectifier puts every unit on its kink, where there is no
gradient to compare. So the parameters are moved a little first, and where the slopes ahead and behind differ, any value
between them is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from clustertrain.diagnose.checks.float64_mode import doubled
from clustertrain.diagnose.child_output import Tell
from clustertrain.diagnose.registry import Finding, Verdict
from clustertrain.diagnose.subject import Subject, batch_of, no_dropout, tensors
from clustertrain.train.core import step_types
from clustertrain.train.trainer import Trainer

GOOD, BUG = 1e-7, 1e-5  # of the relative error
STEPS = (1e-4, 1e-5, 1e-6)  # of the difference, relative to the parameter: too long bends, too short rounds
MOST_PARAMETERS = 20_000_000  # of a model that is tried as it is; in float64 and many times over
MOST_TENSORS = 60
MOVED = 0.02  # added to each element times a normal random number
ROUNDED = 8  # times the rounding of one number: the loss is a sum of many
KINK = 1e-3  # the relative difference of the slopes ahead and behind
SMALLEST = 1e-4  # of the usual slope; a slope below it is lost in the rounding of the loss
SAMPLES = 2
SHOWN = 5


@dataclass(frozen=True)
class Slope:
    """Of the loss along one direction; ``rounding`` is what float64 leaves open of the numeric one."""

    name: str
    numeric: float
    analytic: float
    rounding: float = 0.0

    def error(self, usual: float) -> float:
        largest = max(abs(self.numeric), abs(self.analytic), SMALLEST * usual)
        off = abs(self.numeric - self.analytic)
        if math.isnan(off):
            return math.inf
        return max(0.0, off - self.rounding) / largest if largest > 0 else 0.0


def check(subject: Subject, tell: Tell) -> Finding:
    subject = _small(subject.without_noise())
    with subject.trainer() as t:
        size = sum(p.numel() for p in t.model.parameters())
        if size > MOST_PARAMETERS:
            return Finding(
                check="gradients",
                verdict="skipped",
                text=f"the model has {size:,} parameters, and is tried {4 * MOST_TENSORS} times over in float64",
                fix="try a small copy: --set model.args.…=… for fewer layers and a smaller width",
                evidence={"parameters": size},
            )
        return _of(t, subject, tell)


def _small(subject: Subject) -> Subject:
    """A built-in model's code is the same at any size."""
    spec = subject.recipe.model
    if spec.entry or spec.kind == "convnet":
        return subject
    heads = 2 if spec.kv_heads == spec.heads else 4
    return subject.changed(
        model={
            "preset": "", "dim": 32, "heads": heads, "kv_heads": 2, "layers": min(spec.layers, 2), "ffn_dim": 64,
            "vocab_size": spec.vocab_size,
        },
        data={"seq_len": min(subject.recipe.data.seq_len, 32)},
    )  # fmt: skip


def _of(t: Trainer, subject: Subject, tell: Tell) -> Finding:
    no_dropout(t.model)
    count = max(SAMPLES, subject.in_groups)
    batch = _cast(batch_of(t, subject.recipe, count), torch.device("cpu"))
    model = t.model.to("cpu").double().train()
    _move(model)

    def loss() -> torch.Tensor:
        torch.manual_seed(0)
        with doubled():
            output = step_types.call_model(model, batch[0], None)
            value, number = step_types.as_sum_and_count(t.loss(output, batch[1]), batch[1], False)
            return value / number

    first = loss()
    if first.dtype != torch.float64:
        return Finding(
            check="gradients",
            verdict="skipped",
            text=f"the loss comes in {first.dtype} from a model in float64, so that nothing can be compared",
            fix="let the model compute in the type of its parameters",
        )
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.numel()]
    every = max(1, -(-len(named) // MOST_TENSORS))
    slopes = slopes_of(named[::every], loss, first, tell)
    usual = usual_of(slopes)
    errors = sorted(((s.error(usual), s.name) for s in slopes), reverse=True)
    worst = errors[0][0] if errors else 0.0
    blamed = first_wrong(model, batch, loss) if worst > BUG else None
    evidence: dict[str, Any] = {
        "worst_relative_error": worst,
        "good_below": GOOD,
        "bug_above": BUG,
        "directions": len(slopes),
        "parameters_tried": len(named[::every]),
        "parameters": len(named),
        "errors": {name: e for e, name in reversed(errors)},
        "module": blamed[0] if blamed else None,
        "module_error": blamed[1] if blamed else None,
    }
    rows = [("worst", f"{worst:.1e} relative error along {len(slopes)} directions of {len(named[::every])} parameters")]
    rows += [(f"{e:.1e}", name) for e, name in errors[:SHOWN] if e > GOOD]
    verdict, text, fix = judged(worst, errors[0][1] if errors else "", blamed)
    return Finding(check="gradients", verdict=verdict, text=text, fix=fix, evidence=evidence, rows=rows)


def judged(worst: float, parameter: str, blamed: tuple[str, float] | None) -> tuple[Verdict, str, str]:
    """(verdict, text, fix); ``blamed`` is the module that has the mistake, and its error."""
    if not math.isfinite(worst):
        return "fail", f"the gradient of {parameter} is not finite", "look for a division by 0, or a root or log of 0"
    if worst > BUG:
        where = f"in the backward pass of {blamed[0]}" if blamed else f"at {parameter}"
        fix = "correct the backward() of its autograd.Function; torch.autograd.gradcheck tries one by itself"
        if blamed is None:
            fix = "no module is wrong by itself: look at the loss, at detach() and no_grad, and at what is random"
        return "fail", f"the gradients are wrong, {where}: relative error {worst:.1e}", fix
    if worst > GOOD:
        text = f"a relative error of {worst:.1e} at {parameter}"
        return "warn", text, "a kink (relu, abs, max) near these samples explains it, and so does float32 inside"
    return "pass", f"all are right, to a relative error of {worst:.1e}", ""


@torch.no_grad()
def _move(model: nn.Module) -> None:
    random = torch.Generator().manual_seed(3)
    for p in model.parameters():
        p.add_(torch.randn(p.shape, generator=random, dtype=torch.float64), alpha=MOVED)


def _cast(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, torch.float64) if batch.is_floating_point() else batch.to(device)
    if isinstance(batch, dict):
        return {k: _cast(v, device) for k, v in batch.items()}
    return tuple(_cast(v, device) for v in batch) if isinstance(batch, (tuple, list)) else batch


def usual_of(slopes: Sequence[Slope]) -> float:
    sizes = sorted(abs(s.analytic) for s in slopes)
    return sizes[len(sizes) // 2] if sizes else 0.0


def slopes_of(
    named: Sequence[tuple[str, torch.Tensor]], loss: Callable[[], torch.Tensor], first: torch.Tensor, tell: Tell
) -> list[Slope]:
    grads = torch.autograd.grad(first, [p for _, p in named], allow_unused=True)
    random = torch.Generator().manual_seed(1)
    found = []
    for i, ((name, p), grad) in enumerate(zip(named, grads, strict=True)):
        g = torch.zeros_like(p) if grad is None else grad
        direction = torch.randn(p.shape, generator=random, dtype=torch.float64)
        found.append(_slope(name, p, g, direction / direction.norm(), loss, float(first.detach())))
        if p.numel() > 1 and bool(g.any()):
            at = int(g.abs().argmax())
            alone = torch.zeros(p.numel(), dtype=torch.float64)
            alone[at] = 1.0
            found.append(_slope(f"{name}[{at}]", p, g, alone.view(p.shape), loss, float(first.detach())))
        tell(i + 1, len(named))
    return found


@torch.no_grad()
def _slope(
    name: str,
    p: torch.Tensor,
    grad: torch.Tensor,
    direction: torch.Tensor,
    loss: Callable[[], torch.Tensor],
    here: float,
) -> Slope:
    """At the step of the difference that agrees best; ``here`` is the loss without a step."""
    analytic, found = float((grad * direction).sum()), []
    size = max(1.0, float(p.norm()))
    for h in (s * size for s in STEPS):
        p.add_(direction, alpha=h)
        ahead = float(loss())
        p.sub_(direction, alpha=2 * h)
        behind = float(loss())
        p.add_(direction, alpha=h)
        rounding = ROUNDED * torch.finfo(torch.float64).eps * abs(here) / h
        found.append(Slope(name, (ahead - behind) / (2 * h), analytic, rounding))
        if found[-1].error(0.0) < GOOD:
            break
        sides = sorted(((ahead - here) / h, (here - behind) / h))
        if sides[1] - sides[0] > KINK * max(map(abs, sides)) and sides[0] <= analytic <= sides[1]:
            return Slope(name, analytic, analytic)
    return min(found, key=lambda s: s.error(0.0))


def first_wrong(model: nn.Module, batch: Any, loss: Callable[[], torch.Tensor]) -> tuple[str, float] | None:
    """The innermost module whose own gradients are wrong, with its error."""
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, (_detached(args), _detached(kwargs)))

    hooks = [m.register_forward_pre_hook(note, with_kwargs=True) for m in model.modules()]
    try:
        loss()
    finally:
        for hook in hooks:
            hook.remove()
    inside_out = sorted(model.named_modules(), key=lambda named: -(named[0].count(".") + bool(named[0])))
    for name, module in inside_out:
        if module in calls and (error := error_alone(module, *calls[module])) > BUG:
            return f"{name or 'the model itself'} ({type(module).__name__})", error
    return None


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.is_floating_point())
    if isinstance(value, dict):
        return {k: _detached(v) for k, v in value.items()}
    return tuple(_detached(v) for v in value) if isinstance(value, (tuple, list)) else value


def error_alone(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The relative error of one module's gradients, of its parameters and of its inputs; 0 where it has none."""
    weights: list[torch.Tensor] = []

    def loss() -> torch.Tensor:
        torch.manual_seed(0)
        with doubled():
            outputs = [o for o in tensors(module(*args, **kwargs)) if o.is_floating_point()]
            if not weights:
                random = torch.Generator().manual_seed(2)
                weights.extend(torch.randn(o.shape, generator=random, dtype=torch.float64) for o in outputs)
            return sum(((o * w).sum() for o, w in zip(outputs, weights, strict=True)), torch.zeros(()).double())

    first = loss()
    inputs = [t for t in tensors((args, kwargs)) if t.is_floating_point()]
    wanted: list[tuple[str, torch.Tensor]] = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    wanted += [(f"input {i}", t) for i, t in enumerate(inputs)]
    if not wanted or not first.requires_grad:
        return 0.0
    slopes = slopes_of(wanted, loss, first, lambda done, total: None)
    return max((s.error(usual_of(slopes)) for s in slopes), default=0.0)
