"""Trial of torch.compile before the first step, with timings and a fallback to eager layers if compilation fails."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from clustertrain import clock
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.state_dict import model_parts
from clustertrain.train.core import seeds
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed.compile import inductor
from clustertrain.train.distributed.data_parallel import repeated_layers
from clustertrain.train.distributed.grad_norm import local_squared_norm

log = logging.getLogger(__name__)

TIMED_PASSES = 2  # the fastest counts
# Largest relative difference of the losses of one batch by rounding alone; gradient norms may differ ten times as much.
_TOLERANCES: Mapping[str, float] = {"fp32": 1e-4, "tf32": 2e-3, "bf16": 1e-2, "fp16": 5e-3, "fp8": 5e-2}


def run_compile_trial(
    model: nn.Module,
    run_passes: Callable[[], torch.Tensor],
    context: RankContext,
    ranks: Ranks,
    emit_event: Callable[..., None],
) -> None:
    """Time ``run_passes``, the forward and backward passes of one step, eagerly and compiled. Collective.

    Loss and gradient norm of both are compared; a difference above the precision's tolerance is a warning. The layers
    stay compiled, or eager if the compiler failed on any rank. Gradients are discarded, and buffers and random
    generators restored, so a resumed run computes the same as an uninterrupted one.
    """
    device = context.device
    compiled_modules = [unit for part in model_parts(model) for _, unit in repeated_layers(part)]
    with _restore_afterwards(model, device):
        with _eager_modules(compiled_modules):
            eager_result = _measure(model, run_passes, device)
            eager_s = min(_time_passes(run_passes, device) for _ in range(TIMED_PASSES))
        started = clock.monotonic()
        failure = None
        if context.layout.tp > 1:
            # Under tp a rank with eager layers would not match the collectives of the other ranks' compiled backward
            # pass (torch 2.13), so first check whether each rank's compiler works at all.
            failure = _gather_failure(ranks, _find_compile_error(lambda: _compile_small_function(device)), context.node)
        if failure is None:
            failure = _gather_failure(ranks, _find_compile_error(run_passes), context.node)
        compile_s = clock.monotonic() - started
        if failure is not None:
            for unit in compiled_modules:
                unit._compiled_call_impl = None
            emit_event("compile_failed", **failure)
            log.warning("torch.compile failed, the layers run uncompiled: %s", failure["reason"])
            run_passes()  # a tracing failure stops all ranks halfway through; the eager passes must work
            return
        compiled_result = _measure(model, run_passes, device)
        compiled_s = min(_time_passes(run_passes, device) for _ in range(TIMED_PASSES))
    differences = _gather_differences(ranks, eager_result, compiled_result) if not draws_dropout(model) else {}
    finite = {name: value for name, value in differences.items() if math.isfinite(value)}  # JSON has no infinity
    emit_event("compiled", eager_s=eager_s, compiled_s=compiled_s, compile_s=compile_s, **finite)
    _warn_of_differences(differences, context.precision, emit_event)
    log.warning(
        "torch.compile: forward and backward take %.1f ms instead of %.1f ms (x%.2f), after %.1f s of compilation",
        compiled_s * 1e3,
        eager_s * 1e3,
        eager_s / compiled_s,
        compile_s,
    )


def draws_dropout(model: nn.Module) -> bool:
    """Return whether torch's dropout is active, whose random numbers a compiled layer draws differently."""
    return any(isinstance(m, nn.modules.dropout._DropoutNd) and m.training and m.p > 0 for m in model.modules())


def _measure(model: nn.Module, run_passes: Callable[[], torch.Tensor], device: torch.device) -> tuple[float, float]:
    """Return this rank's mean loss and the norm of its gradients, from the same random state on every call."""
    rng_state = seeds.capture_rng_state(device)
    model.zero_grad()
    total, count = run_passes().sum(0).tolist()
    seeds.restore_rng_state(rng_state, device)
    norm = float(local_squared_norm([p for p in model.parameters() if p.grad is not None], device).sqrt())
    model.zero_grad()
    return total / count if count else math.nan, norm


def _gather_differences(ranks: Ranks, eager: tuple[float, float], compiled: tuple[float, float]) -> dict[str, float]:
    """Return the largest relative differences of any rank, infinite where only the compiled value is not finite.

    A rank whose uncompiled value is not finite has nothing to compare, such as the loss of a stage before the last.
    Collective.
    """
    local = [_find_difference(*pair) for pair in zip(eager, compiled, strict=True)]
    gathered = [entry["values"] for entry in ranks.all_gather_optional({"values": local})]
    found = [[value for values in gathered if (value := values[i]) is not None] for i in range(2)]
    names = ("loss_difference", "grad_norm_difference")
    return {name: max(values) for name, values in zip(names, found, strict=True) if values}


def _find_difference(eager: float, compiled: float) -> float | None:
    if not math.isfinite(eager):
        return None
    if not math.isfinite(compiled):
        return math.inf
    return abs(compiled - eager) / abs(eager) if eager else abs(compiled)


def _warn_of_differences(differences: Mapping[str, float], precision: str, emit_event: Callable[..., None]) -> None:
    tolerance = _TOLERANCES[precision]
    limits = {"loss_difference": tolerance, "grad_norm_difference": 10 * tolerance}
    above = {name: value for name, value in differences.items() if value > limits[name]}
    if not above:
        return
    name, value = next(iter(above.items()))
    quantity = "loss" if name == "loss_difference" else "gradient norm"
    text = f"torch.compile: on the same batch, the {quantity} of the compiled layers " + (
        f"differs by {value:.2g} (relative) from that of the uncompiled ones, more than {limits[name]:g} in {precision}"
        if math.isfinite(value)
        else "is not finite, but that of the uncompiled ones is"
    )
    fix = "remove parallel.compile, or find the layer that differs; layers that draw random numbers also differ"
    log.warning("%s; %s", text, fix)
    emit_event(
        "training_warning",
        code="compile_differs",
        step=None,
        text=text,
        fix=fix,
        value=value if math.isfinite(value) else None,
        limit=limits[name],
    )


def _compile_small_function(device: torch.device) -> None:
    torch.compile(torch.sin, backend=inductor)(torch.ones(8, device=device))


def _find_compile_error(run_passes: Callable[[], object]) -> Exception | None:
    """Return the error of this rank's compiler in ``run_passes``, or None."""
    with inductor.tolerant():
        try:
            run_passes()
        except Exception as e:  # the tracer raises many types; errors of the model itself have already surfaced
            return e
    return inductor.first_error


def _gather_failure(ranks: Ranks, local_error: Exception | None, node: str) -> dict[str, str] | None:
    """Return the reason and fix from the first rank whose compiler failed, or None. Collective."""
    local_failure = None
    if local_error is not None:
        lines = str(local_error).strip().splitlines() or ["no message"]
        reason = f"{type(local_error).__name__}: {lines[0]}"
        local_failure = {"reason": reason, "fix": _suggest_fix(reason), "node": node}
    failures = ranks.all_gather_optional(local_failure)
    reported = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
    if not reported:
        return None
    rank, first = reported[0]
    location = "" if len(reported) == len(failures) else f"on rank {rank} (node {first['node']}): "
    return {"reason": location + first["reason"], "fix": first["fix"]}


@contextmanager
def eager_layers(model: nn.Module) -> Iterator[None]:
    """Run the layers of ``model`` uncompiled inside the block, before it is known whether the compiler works."""
    with _eager_modules([unit for part in model_parts(model) for _, unit in repeated_layers(part)]):
        yield


@contextmanager
def _eager_modules(compiled_modules: list[nn.Module]) -> Iterator[None]:
    saved_calls = [unit._compiled_call_impl for unit in compiled_modules]
    for unit in compiled_modules:
        unit._compiled_call_impl = None
    try:
        yield
    finally:
        for unit, call in zip(compiled_modules, saved_calls, strict=True):
            unit._compiled_call_impl = call


@contextmanager
def _restore_afterwards(model: nn.Module, device: torch.device) -> Iterator[None]:
    rng_state = seeds.capture_rng_state(device)
    saved_buffers = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        model.zero_grad()
        with torch.no_grad():
            for buffer, value in saved_buffers:
                buffer.copy_(value)
        seeds.restore_rng_state(rng_state, device)


def _time_passes(run_passes: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    started = clock.monotonic()
    run_passes()
    _synchronize(device)
    return clock.monotonic() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _suggest_fix(reason: str) -> str:
    cxx_compiler: Any = shutil.which("g++") or shutil.which("clang++")
    if not cxx_compiler and "compiler" in reason.lower():
        return "install g++ on the nodes: the compiler's CPU backend needs it"
    return "remove parallel.compile, or see torch's message in the rank's log"
