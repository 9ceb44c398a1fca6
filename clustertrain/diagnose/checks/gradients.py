"""Compare gradients with central differences, in float64 on the CPU and on few samples.

The loss is evaluated on both sides of each parameter's value, along a random direction and along the element with the
largest gradient; the difference gives the slope without autograd. If a gradient is wrong, each module is checked alone
with its recorded inputs, innermost first: the first wrong module contains the bug.

Initial values are often special: a weight of 0 before a rectifier puts every unit at its kink, where no gradient
exists. The parameters are therefore perturbed first, and if the one-sided slopes differ, any value between them passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from clustertrain.diagnose.checks.float64_mode import force_float64
from clustertrain.diagnose.child_output import ProgressCallback
from clustertrain.diagnose.registry import Finding, Verdict
from clustertrain.diagnose.subject import Subject, collect_tensors, disable_dropout, load_batch
from clustertrain.train.core import step_types
from clustertrain.train.trainer import Trainer

PASS_BELOW, FAIL_ABOVE = 1e-7, 1e-5  # of the relative error
STEP_SIZES = (1e-4, 1e-5, 1e-6)  # relative to the parameter: larger steps add curvature, smaller ones rounding
MAX_PARAMETERS = 20_000_000  # of a user's model, which runs many times, in float64
MAX_TENSORS = 60
PERTURBATION = 0.02  # standard deviation of the noise added to each element
ROUNDING_FACTOR = 8  # times the rounding error of one number: the loss is a sum of many
KINK_TOLERANCE = 1e-3  # relative difference of the one-sided slopes
MIN_RELATIVE_SLOPE = 1e-4  # of the typical slope; a smaller slope is lost in the rounding of the loss
SAMPLES = 2
MAX_SHOWN = 5


@dataclass(frozen=True)
class Slope:
    """The slope of the loss along one direction."""

    name: str
    numeric: float
    analytic: float
    rounding: float = 0.0
    """The error of ``numeric`` due to float64 rounding."""

    def error(self, typical: float) -> float:
        """Return the relative error beyond rounding; ``typical`` is the slope of a typical direction."""
        largest = max(abs(self.numeric), abs(self.analytic), MIN_RELATIVE_SLOPE * typical)
        difference = abs(self.numeric - self.analytic)
        if math.isnan(difference):
            return math.inf
        return max(0.0, difference - self.rounding) / largest if largest > 0 else 0.0


def check(subject: Subject, on_progress: ProgressCallback) -> Finding:
    subject = _shrink_model(_simplify_adapter(subject.without_regularization()))
    with subject.trainer() as trainer:
        num_params = sum(p.numel() for p in trainer.model.parameters())
        if num_params > MAX_PARAMETERS:
            return Finding(
                check="gradients",
                verdict="skipped",
                text=f"the model has {num_params:,} parameters; this check runs at most {MAX_PARAMETERS:,} in float64",
                fix="check a small copy: --set model.args.…=… for fewer layers and a smaller width",
                evidence={"parameters": num_params},
            )
        return _check_gradients(trainer, subject, on_progress)


def _simplify_adapter(subject: Subject) -> Subject:
    """Return a subject whose adapters have exact gradients: DoRA takes the norms of its rows as constant."""
    spec = subject.recipe.adapter
    if not spec.is_enabled:
        return subject
    return subject.with_overrides(adapter={"kind": "lora", "base_precision": "unchanged", "init": "", "dropout": 0.0})


def _shrink_model(subject: Subject) -> Subject:
    """Return a subject with a small built-in model; its code is the same at any size."""
    spec = subject.recipe.model
    if spec.entry or spec.kind == "convnet":
        return subject
    heads = 2 if spec.kv_heads == spec.heads else 4
    return subject.with_overrides(
        model={
            "preset": "", "init": "", "dim": 32, "heads": heads, "kv_heads": 2, "head_dim": 0,
            "layers": min(spec.layers, 2), "ffn_dim": 64, "vocab_size": spec.vocab_size,
        },
        adapter={"rank": min(subject.recipe.adapter.rank, 8)},  # the smallest matrix has 16 rows
        data={"seq_len": min(subject.recipe.data.seq_len, 32)},
    )  # fmt: skip


def _check_gradients(trainer: Trainer, subject: Subject, on_progress: ProgressCallback) -> Finding:
    disable_dropout(trainer.model)
    count = max(SAMPLES, subject.sample_multiple)
    batch = _to_float64(load_batch(trainer, subject.recipe, count), torch.device("cpu"))
    model = trainer.model.to("cpu").double().train()
    _perturb(model)

    def loss() -> torch.Tensor:
        torch.manual_seed(0)
        with force_float64():
            output = step_types.call_model(model, batch[0], None)
            loss_sum, loss_count = step_types.as_sum_and_count(trainer.loss(output, batch[1]), batch[1], False)
            return loss_sum / loss_count

    initial_loss = loss()
    if initial_loss.dtype != torch.float64:
        return Finding(
            check="gradients",
            verdict="skipped",
            text=f"the loss of a float64 model is {initial_loss.dtype}, too coarse to compare",
            fix="compute in the dtype of the model's parameters",
        )
    named_params = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.numel()]
    stride = max(1, -(-len(named_params) // MAX_TENSORS))
    slopes = compute_slopes(named_params[::stride], loss, initial_loss, on_progress)
    typical = typical_slope(slopes)
    errors = sorted(((s.error(typical), s.name) for s in slopes), reverse=True)
    worst_error = errors[0][0] if errors else 0.0
    faulty_module = find_faulty_module(model, batch, loss) if worst_error > FAIL_ABOVE else None
    evidence: dict[str, Any] = {
        "max_relative_error": worst_error,
        "pass_below": PASS_BELOW,
        "fail_above": FAIL_ABOVE,
        "directions": len(slopes),
        "parameters_checked": len(named_params[::stride]),
        "parameters": len(named_params),
        "errors": {name: e for e, name in reversed(errors)},
        "module": faulty_module[0] if faulty_module else None,
        "module_error": faulty_module[1] if faulty_module else None,
    }
    rows = [
        (
            "worst",
            (
                f"{worst_error:.1e} relative error along {len(slopes)} directions of {len(named_params[::stride])}"
                " parameters"
            ),
        )
    ]
    rows += [(f"{e:.1e}", name) for e, name in errors[:MAX_SHOWN] if e > PASS_BELOW]
    verdict, text, fix = assess(worst_error, errors[0][1] if errors else "", faulty_module)
    return Finding(check="gradients", verdict=verdict, text=text, fix=fix, evidence=evidence, rows=rows)


def assess(worst_error: float, parameter: str, faulty_module: tuple[str, float] | None) -> tuple[Verdict, str, str]:
    """Return (verdict, text, fix); ``faulty_module`` is the module with the bug, and its error."""
    if not math.isfinite(worst_error):
        return "fail", f"the gradient of {parameter} is NaN or Inf", "look for a division by 0, or a root or log of 0"
    if worst_error > FAIL_ABOVE:
        location = f"in the backward pass of {faulty_module[0]}" if faulty_module else f"at {parameter}"
        fix = "correct the backward() of its autograd.Function; torch.autograd.gradcheck checks one alone"
        if faulty_module is None:
            fix = "check the loss, detach(), no_grad and randomness: each module alone has correct gradients"
        return "fail", f"the gradients are wrong, {location}: relative error {worst_error:.1e}", fix
    if worst_error > PASS_BELOW:
        text = f"relative error {worst_error:.1e} at {parameter}"
        fix = "look for a kink (relu, abs, max) near these samples or for float32 inside the model; both explain it"
        return "warn", text, fix
    return "pass", f"all gradients are correct to a relative error of {worst_error:.1e}", ""


@torch.no_grad()
def _perturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64), alpha=PERTURBATION)


def _to_float64(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, torch.float64) if batch.is_floating_point() else batch.to(device)
    if isinstance(batch, dict):
        return {k: _to_float64(v, device) for k, v in batch.items()}
    return tuple(_to_float64(v, device) for v in batch) if isinstance(batch, (tuple, list)) else batch


def typical_slope(slopes: Sequence[Slope]) -> float:
    """Return the median magnitude of the analytic slopes."""
    magnitudes = sorted(abs(s.analytic) for s in slopes)
    return magnitudes[len(magnitudes) // 2] if magnitudes else 0.0


def compute_slopes(
    named_params: Sequence[tuple[str, torch.Tensor]],
    loss: Callable[[], torch.Tensor],
    initial_loss: torch.Tensor,
    on_progress: ProgressCallback,
) -> list[Slope]:
    """Return the slopes of ``loss`` along a random direction and the largest gradient element of each parameter."""
    grads = torch.autograd.grad(initial_loss, [p for _, p in named_params], allow_unused=True)
    generator = torch.Generator().manual_seed(1)
    slopes = []
    for i, ((name, p), grad) in enumerate(zip(named_params, grads, strict=True)):
        g = torch.zeros_like(p) if grad is None else grad
        direction = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        slopes.append(_compute_slope(name, p, g, direction / direction.norm(), loss, float(initial_loss.detach())))
        if p.numel() > 1 and bool(g.any()):
            index = int(g.abs().argmax())
            one_hot = torch.zeros(p.numel(), dtype=torch.float64)
            one_hot[index] = 1.0
            slopes.append(
                _compute_slope(f"{name}[{index}]", p, g, one_hot.view(p.shape), loss, float(initial_loss.detach()))
            )
        on_progress(i + 1, len(named_params))
    return slopes


@torch.no_grad()
def _compute_slope(
    name: str,
    p: torch.Tensor,
    grad: torch.Tensor,
    direction: torch.Tensor,
    loss: Callable[[], torch.Tensor],
    loss_value: float,
) -> Slope:
    """Return the slope at the step size that agrees best; ``loss_value`` is the loss at the current parameters."""
    analytic, candidates = float((grad * direction).sum()), []
    size = max(1.0, float(p.norm()))
    for h in (s * size for s in STEP_SIZES):
        p.add_(direction, alpha=h)
        loss_plus = float(loss())
        p.sub_(direction, alpha=2 * h)
        loss_minus = float(loss())
        p.add_(direction, alpha=h)
        rounding = ROUNDING_FACTOR * torch.finfo(torch.float64).eps * abs(loss_value) / h
        candidates.append(Slope(name, (loss_plus - loss_minus) / (2 * h), analytic, rounding))
        if candidates[-1].error(0.0) < PASS_BELOW:
            break
        sides = sorted(((loss_plus - loss_value) / h, (loss_value - loss_minus) / h))
        if sides[1] - sides[0] > KINK_TOLERANCE * max(map(abs, sides)) and sides[0] <= analytic <= sides[1]:
            return Slope(name, analytic, analytic)
    return min(candidates, key=lambda s: s.error(0.0))


def find_faulty_module(model: nn.Module, batch: Any, loss: Callable[[], torch.Tensor]) -> tuple[str, float] | None:
    """Return the innermost module with wrong gradients and its error, or None."""
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def record_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, (_detach(args), _detach(kwargs)))

    hooks = [m.register_forward_pre_hook(record_call, with_kwargs=True) for m in model.modules()]
    try:
        loss()
    finally:
        for hook in hooks:
            hook.remove()
    innermost_first = sorted(model.named_modules(), key=lambda named: -(named[0].count(".") + bool(named[0])))
    for name, module in innermost_first:
        if module in calls and (error := module_gradient_error(module, *calls[module])) > FAIL_ABOVE:
            return f"{name or 'the root module'} ({type(module).__name__})", error
    return None


def _detach(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.is_floating_point())
    if isinstance(value, dict):
        return {k: _detach(v) for k, v in value.items()}
    return tuple(_detach(v) for v in value) if isinstance(value, (tuple, list)) else value


def module_gradient_error(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the relative error of a module's parameter and input gradients; 0 if it has none."""
    weights: list[torch.Tensor] = []

    def loss() -> torch.Tensor:
        torch.manual_seed(0)
        with force_float64():
            outputs = [o for o in collect_tensors(module(*args, **kwargs)) if o.is_floating_point()]
            if not weights:
                generator = torch.Generator().manual_seed(2)
                weights.extend(torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs)
            return sum(((o * w).sum() for o, w in zip(outputs, weights, strict=True)), torch.zeros(()).double())

    initial_loss = loss()
    inputs = [t for t in collect_tensors((args, kwargs)) if t.is_floating_point()]
    named_tensors: list[tuple[str, torch.Tensor]] = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    named_tensors += [(f"input {i}", t) for i, t in enumerate(inputs)]
    if not named_tensors or not initial_loss.requires_grad:
        return 0.0
    slopes = compute_slopes(named_tensors, loss, initial_loss, lambda completed, total: None)
    return max((s.error(typical_slope(slopes)) for s in slopes), default=0.0)
