"""Trial of torch.compile before the first step, with timings and a fallback to eager layers if compilation fails."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
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

log = logging.getLogger(__name__)

TIMED_PASSES = 2  # the fastest counts


def run_compile_trial(
    model: nn.Module,
    run_passes: Callable[[], object],
    context: RankContext,
    ranks: Ranks,
    emit_event: Callable[..., None],
) -> None:
    """Time ``run_passes``, the forward and backward passes of one step, eagerly and compiled. Collective.

    The layers stay compiled, or eager if the compiler failed on any rank. Gradients are discarded, and buffers and
    random generators restored, so a resumed run computes the same as an uninterrupted one.
    """
    device = context.device
    compiled_modules = [unit for part in model_parts(model) for _, unit in repeated_layers(part)]
    with _restore_afterwards(model, device):
        with _eager_modules(compiled_modules):
            run_passes()
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
        compiled_s = min(_time_passes(run_passes, device) for _ in range(TIMED_PASSES))
    emit_event("compiled", eager_s=eager_s, compiled_s=compiled_s, compile_s=compile_s)
    log.warning(
        "torch.compile: forward and backward take %.1f ms instead of %.1f ms (x%.2f), after %.1f s of compilation",
        compiled_s * 1e3,
        eager_s * 1e3,
        eager_s / compiled_s,
        compile_s,
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
