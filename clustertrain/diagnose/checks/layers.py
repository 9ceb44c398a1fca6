"""Check the first steps layer by layer: differences in gradient norm, dead units, activations that grow or vanish."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from clustertrain.checkpoint.core.state_dict import unwrap
from clustertrain.diagnose.child_output import ProgressCallback
from clustertrain.diagnose.registry import Finding, Verdict, worst_verdict
from clustertrain.diagnose.subject import Subject, collect_tensors, load_batch, mean_loss
from clustertrain.train.distributed.data_parallel import repeated_layers

WARMUP_STEPS = 3  # before measuring, because a residual block initialized to 0 has no gradient inside at first
BATCHES = 4
SAMPLES = 32  # minimum; a unit that is 0 on all of them is dead
WARN_FACTOR, FAIL_FACTOR = 10.0, 100.0  # a layer's gradient norm relative to the median
FAIL_DEAD_SHARE, WARN_DEAD_SHARE = 0.5, 0.25  # of a layer's units
MAX_RMS, MIN_RMS = 1e3, 1e-5  # of an activation
MAX_SHOWN = 8
_RECTIFIERS = frozenset({"relu", "relu_", "relu6", "hardtanh", "hardtanh_", "threshold", "threshold_"})


def check(subject: Subject, on_progress: ProgressCallback) -> Finding:
    single_process = subject.with_overrides(data={"workers": 0})
    with single_process.trainer() as trainer:
        model = unwrap(trainer.model)
        for i in range(WARMUP_STEPS):
            trainer.step()
            on_progress(i + 1, WARMUP_STEPS)
        layers, norm_totals = _find_layers(model), dict[str, float]()
        recorder = _ActivationRecorder()
        count = max(subject.batch.micro_batch, subject.small_sample_count)
        rounds = max(BATCHES, -(-SAMPLES // count))
        for i in range(rounds):
            model.zero_grad(set_to_none=True)
            batch = load_batch(trainer, subject.recipe, count, (WARMUP_STEPS + i) * count)
            with recorder.record(model):
                loss = mean_loss(trainer, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            for name, module in layers:
                norm_totals[name] = norm_totals.get(name, 0.0) + _gradient_norm(module)
            on_progress(WARMUP_STEPS + i + 1, WARMUP_STEPS + rounds)
    norms = {name: total / rounds for name, total in norm_totals.items()}
    dead_shares = {name: float((unit_max == 0).double().mean()) for name, unit_max in recorder.unit_max.items()}
    rms = {
        name: math.sqrt(total / numel) if numel else math.nan for name, (total, numel) in recorder.square_sums.items()
    }
    assessments = [assess_norms(norms), assess_dead_units(dead_shares), assess_activation_rms(rms)]
    verdict = worst_verdict(v for v, _, _ in assessments)
    reported = [(text, fix) for v, text, fix in assessments if v == verdict]
    evidence: dict[str, Any] = {"gradient_norms": norms, "dead_share": dead_shares, "activation_rms": rms}
    rows = [
        ("gradient norm", _format_row(norms, "{:.2e}")),
        ("dead units", _format_row(dead_shares, "{:.0%}") or "no rectifiers"),
    ]
    rows.append(("activation rms", _format_row(rms, "{:.2g}")))
    return Finding(
        check="layers",
        verdict=verdict,
        text="; ".join(text for text, _ in reported),
        fix="; ".join(fix for _, fix in reported if fix),
        evidence=evidence,
        rows=rows,
    )


def _format_row(values: dict[str, float], template: str) -> str:
    entries = [f"{name} {template.format(v)}" for name, v in values.items()]
    middle = [f"… {len(entries) - MAX_SHOWN} more …"] if len(entries) > MAX_SHOWN else []
    return ", ".join([*entries[: MAX_SHOWN // 2], *middle, *entries[-MAX_SHOWN // 2 :]] if middle else entries)


def _find_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the repeated layers, or, if there are none, the modules that hold a trainable matrix directly."""
    repeated = list(repeated_layers(model))
    if len(repeated) > 1:
        return repeated
    return [
        (name or "the root module", m)
        for name, m in model.named_modules()
        if any(p.dim() > 1 and p.requires_grad for p in m.parameters(recurse=False))
    ]


def _gradient_norm(module: nn.Module) -> float:
    squares = [p.grad.double().square().sum() for p in module.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


class _ActivationRecorder(TorchFunctionMode):
    """Recorder of rectifier outputs and layer activations, by the name of the module that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.unit_max: dict[str, torch.Tensor] = {}  # largest magnitude per unit, over all samples
        self.square_sums: dict[str, tuple[float, int]] = {}  # (sum of squares, elements)
        self._module_stack: list[str] = []
        self._unit_axis = -1
        self._last_layer = ""  # the last module with parameters

    @contextmanager
    def record(self, model: nn.Module) -> Iterator[None]:
        """Record the forward passes of ``model`` inside the ``with`` block."""
        hooks = []
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(self._pre_hook(name or "the root module")))
            hooks.append(module.register_forward_hook(self._post_hook(name or "the root module"), always_call=True))
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _pre_hook(self, name: str) -> Any:
        def enter(module: nn.Module, inputs: Any) -> None:
            self._module_stack.append(name)

        return enter

    def _post_hook(self, name: str) -> Any:
        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self._module_stack.pop()
            if isinstance(module, nn.modules.conv._ConvNd):
                self._unit_axis = 1
            elif isinstance(module, nn.Linear):
                self._unit_axis = -1
            if any(True for _ in module.parameters(recurse=False)):
                self._last_layer = name
                for t in [t for t in collect_tensors(output) if t.is_floating_point()]:
                    total, numel = self.square_sums.get(name, (0.0, 0))
                    self.square_sums[name] = (total + float(t.detach().double().square().sum()), numel + t.numel())

        return leave

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _RECTIFIERS and isinstance(output, torch.Tensor) and output.dim() > 1:
            module_name = self._module_stack[-1] if self._module_stack else "the root module"
            name = f"{module_name} after {self._last_layer}" if self._last_layer else module_name
            flat = output.detach().movedim(1 if output.dim() > 3 else self._unit_axis, -1).flatten(0, -2)
            unit_max = flat.abs().amax(0)
            self.unit_max[name] = torch.maximum(self.unit_max[name], unit_max) if name in self.unit_max else unit_max
        return output


def assess_norms(norms: dict[str, float]) -> tuple[Verdict, str, str]:
    """Return (verdict, text, fix) for gradient norms by layer."""
    values = sorted(norms.values())
    if not all(map(math.isfinite, values)):
        name = next(n for n, v in norms.items() if not math.isfinite(v))
        return "fail", f"the gradient of {name} is NaN or Inf", "run `clustertrain diagnose gradients`"
    if len(values) < 2:
        return "pass", "only one layer has a gradient", ""
    median = values[len(values) // 2] or values[-1]
    if median == 0:
        fix = "run `clustertrain diagnose modes`: the loss does not depend on the parameters"
        return "fail", "no layer has a gradient", fix
    name, value = max(norms.items(), key=lambda kv: abs(math.log(kv[1] / median)) if kv[1] else math.inf)
    factor = value / median
    if WARN_FACTOR >= factor >= 1 / WARN_FACTOR:
        spread = values[-1] / values[0]
        return "pass", f"gradient norms are within a factor of {spread:.1f}", ""
    ratio_text = "zero" if value == 0 else f"{factor:.1f} times" if factor > 1 else f"1/{1 / factor:.0f} of"
    verdict: Verdict = "warn" if FAIL_FACTOR >= factor >= 1 / FAIL_FACTOR else "fail"
    fix = "check its initial values, a missing norm before it, and unscaled residual branches"
    return verdict, f"the gradient norm of {name} is {ratio_text}{'' if value == 0 else ' the median'}", fix


def assess_dead_units(dead_shares: dict[str, float]) -> tuple[Verdict, str, str]:
    """Return (verdict, text, fix) for the shares of units that are 0 on all samples."""
    if not dead_shares:
        return "pass", "no rectifiers, so no dead units", ""
    name, share = max(dead_shares.items(), key=lambda kv: kv[1])
    text = f"{share:.0%} of the units of {name} are dead"
    fix = "use a lower learning rate, biases of 0, He initialization, leaky_relu or gelu"
    if share >= FAIL_DEAD_SHARE:
        return "fail", text, fix
    return ("warn", text, fix) if share >= WARN_DEAD_SHARE else ("pass", f"at most {share:.0%} dead units", "")


def assess_activation_rms(rms: dict[str, float]) -> tuple[Verdict, str, str]:
    """Return (verdict, text, fix) for the root mean squares of activations."""
    bad = [name for name, v in rms.items() if not math.isfinite(v)]
    if bad:
        return "fail", f"the activations of {bad[0]} contain NaN or Inf", "look for a division by 0 or an overflow"
    for description, names in (
        ("large", _layers_beyond(rms, MAX_RMS, above=True)),
        ("small", _layers_beyond(rms, MIN_RMS, above=False)),
    ):
        if names:
            fix = "scale its initial values, or normalize its inputs"
            return "warn", f"the activations of {names[0]} are {description}: {rms[names[0]]:.2g}", fix
    return "pass", "activations have ordinary sizes", ""


def _layers_beyond(rms: dict[str, float], limit: float, *, above: bool) -> Sequence[str]:
    return [name for name, v in rms.items() if (v > limit if above else 0 < v < limit)]
