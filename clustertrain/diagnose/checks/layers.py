"""What happens layer by layer in the first steps: gradient norms that should be of one size, units that never answer,
activations that grow or vanish on the way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from clustertrain.checkpoint.core.state_dict import unwrap
from clustertrain.diagnose.child_output import Tell
from clustertrain.diagnose.registry import Finding, Verdict, worst
from clustertrain.diagnose.subject import Subject, batch_of, mean_loss, tensors
from clustertrain.train.distributed.data_parallel import units

STEPS = 3  # before anything is measured: a block that begins as its shortcut has no gradient inside
BATCHES = 4
SAMPLES = 32  # that a unit must answer to none of to be dead; more where a batch has more
SPREAD, EXTREME = 10.0, 100.0  # of a layer's gradient norm to the middle one
DEAD, MANY_DEAD = 0.5, 0.25  # of a layer's units
LARGE, SMALL = 1e3, 1e-5  # of the root mean square of an activation
SHOWN = 8
_RECTIFIERS = frozenset({"relu", "relu_", "relu6", "hardtanh", "hardtanh_", "threshold", "threshold_"})


def check(subject: Subject, tell: Tell) -> Finding:
    quiet = subject.changed(data={"workers": 0})
    with quiet.trainer() as t:
        model = unwrap(t.model)
        for i in range(STEPS):
            t.step()
            tell(i + 1, STEPS)
        layers, groups = _layers(model), dict[str, float]()
        watched = _Watched()
        count = max(subject.batch.micro_batch, subject.eight)
        rounds = max(BATCHES, -(-SAMPLES // count))
        for i in range(rounds):
            model.zero_grad(set_to_none=True)
            batch = batch_of(t, subject.recipe, count, (STEPS + i) * count)
            with watched.forward(model):
                loss = mean_loss(t, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            for name, module in layers:
                groups[name] = groups.get(name, 0.0) + _norm(module)
            tell(STEPS + i + 1, STEPS + rounds)
    norms = {name: total / rounds for name, total in groups.items()}
    dead = {name: float((most == 0).double().mean()) for name, most in watched.most.items()}
    sizes = {
        name: math.sqrt(total / number) if number else math.nan for name, (total, number) in watched.squares.items()
    }
    parts = [judged_norms(norms), judged_dead(dead), judged_sizes(sizes)]
    verdict = worst(v for v, _, _ in parts)
    chosen = [(text, fix) for v, text, fix in parts if v == verdict]
    evidence: dict[str, Any] = {"gradient_norms": norms, "dead_share": dead, "activation_rms": sizes}
    rows = [("gradient norm", _row(norms, "{:.2e}")), ("dead units", _row(dead, "{:.0%}") or "no rectifier seen")]
    rows.append(("activation rms", _row(sizes, "{:.2g}")))
    return Finding(
        check="layers",
        verdict=verdict,
        text="; ".join(text for text, _ in chosen),
        fix="; ".join(fix for _, fix in chosen if fix),
        evidence=evidence,
        rows=rows,
    )


def _row(values: dict[str, float], form: str) -> str:
    found = [f"{name} {form.format(v)}" for name, v in values.items()]
    middle = [f"… {len(found) - SHOWN} more …"] if len(found) > SHOWN else []
    return ", ".join([*found[: SHOWN // 2], *middle, *found[-SHOWN // 2 :]] if middle else found)


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """What is compared: the repeated layers, and where there are none the modules with a matrix of their own."""
    repeated = list(units(model))
    if len(repeated) > 1:
        return repeated
    return [
        (name or "the model itself", m)
        for name, m in model.named_modules()
        if any(p.dim() > 1 and p.requires_grad for p in m.parameters(recurse=False))
    ]


def _norm(module: nn.Module) -> float:
    squares = [p.grad.double().square().sum() for p in module.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


class _Watched(TorchFunctionMode):
    """Sees each rectifier's output and each layer's activation, by the name of the module that is at work."""

    def __init__(self) -> None:
        super().__init__()
        self.most: dict[str, torch.Tensor] = {}  # by unit, over all samples
        self.squares: dict[str, tuple[float, int]] = {}
        self._inside: list[str] = []
        self._axis = -1
        self._layer = ""  # the last one with parameters

    @contextmanager
    def forward(self, model: nn.Module) -> Iterator[None]:
        hooks = []
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(self._entering(name or "the model itself")))
            hooks.append(module.register_forward_hook(self._leaving(name or "the model itself"), always_call=True))
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, inputs: Any) -> None:
            self._inside.append(name)

        return enter

    def _leaving(self, name: str) -> Any:
        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self._inside.pop()
            if isinstance(module, nn.modules.conv._ConvNd):
                self._axis = 1
            elif isinstance(module, nn.Linear):
                self._axis = -1
            if any(True for _ in module.parameters(recurse=False)):
                self._layer = name
                for t in [t for t in tensors(output) if t.is_floating_point()]:
                    before, number = self.squares.get(name, (0.0, 0))
                    self.squares[name] = (before + float(t.detach().double().square().sum()), number + t.numel())

        return leave

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _RECTIFIERS and isinstance(output, torch.Tensor) and output.dim() > 1:
            place = self._inside[-1] if self._inside else "the model itself"
            name = f"{place} after {self._layer}" if self._layer else place
            flat = output.detach().movedim(1 if output.dim() > 3 else self._axis, -1).flatten(0, -2)
            most = flat.abs().amax(0)
            self.most[name] = torch.maximum(self.most[name], most) if name in self.most else most
        return output


def judged_norms(norms: dict[str, float]) -> tuple[Verdict, str, str]:
    """(verdict, text, fix) of gradient norms by layer."""
    values = sorted(norms.values())
    if not all(map(math.isfinite, values)):
        name = next(n for n, v in norms.items() if not math.isfinite(v))
        return "fail", f"the gradient of {name} is not finite", "see `clustertrain diagnose gradients`"
    if len(values) < 2:
        return "pass", "one layer has a gradient", ""
    middle = values[len(values) // 2] or values[-1]
    if middle == 0:
        return "fail", "no layer has a gradient", "the loss does not depend on the parameters: see `modes`"
    name, value = max(norms.items(), key=lambda kv: abs(math.log(kv[1] / middle)) if kv[1] else math.inf)
    factor = value / middle
    if SPREAD >= factor >= 1 / SPREAD:
        spread = values[-1] / values[0]
        return "pass", f"gradient norms lie within a factor of {spread:.1f}", ""
    said = "zero" if value == 0 else f"{factor:.1f} times" if factor > 1 else f"1/{1 / factor:.0f} of"
    verdict: Verdict = "warn" if EXTREME >= factor >= 1 / EXTREME else "fail"
    fix = "its initial values, a norm that is missing before it, or a residual branch that is not scaled"
    return verdict, f"the gradient norm of {name} is {said}{'' if value == 0 else ' the middle one'}", fix


def judged_dead(dead: dict[str, float]) -> tuple[Verdict, str, str]:
    """(verdict, text, fix) of the shares of units that are 0 on all samples."""
    if not dead:
        return "pass", "no rectifier, so no dead units", ""
    name, share = max(dead.items(), key=lambda kv: kv[1])
    said = f"{share:.0%} of the units of {name} are dead"
    fix = "a lower rate, biases that begin at 0, weights drawn for rectifiers (He et al.), leaky_relu or gelu"
    if share >= DEAD:
        return "fail", said, fix
    return ("warn", said, fix) if share >= MANY_DEAD else ("pass", f"{share:.0%} dead units at most", "")


def judged_sizes(sizes: dict[str, float]) -> tuple[Verdict, str, str]:
    """(verdict, text, fix) of the root mean squares of activations."""
    bad = [name for name, v in sizes.items() if not math.isfinite(v)]
    if bad:
        return "fail", f"the activations of {bad[0]} are not finite", "look for a division by 0, or an overflow"
    for what, names in (("large", _beyond(sizes, LARGE, above=True)), ("small", _beyond(sizes, SMALL, above=False))):
        if names:
            fix = "scale its initial values, or normalise before it"
            return "warn", f"the activations of {names[0]} are {what}: {sizes[names[0]]:.2g}", fix
    return "pass", "activations of ordinary size", ""


def _beyond(sizes: dict[str, float], limit: float, *, above: bool) -> Sequence[str]:
    return [name for name, v in sizes.items() if (v > limit if above else 0 < v < limit)]
