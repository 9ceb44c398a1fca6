"""Whether compiling the layers is worth it, found out before the first step: what a pass takes before and after, and
the layers as they were where the compiler fails."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from clustertrain import clock
from clustertrain.checkpoint.state import parts
from clustertrain.train import seeds
from clustertrain.train.data_parallel import units

log = logging.getLogger(__name__)

TIMED = 2  # passes, of which the quicker counts


def try_out(
    model: nn.Module,
    passes: Callable[[], object],
    device: torch.device,
    event: Callable[..., None],
) -> None:
    """Make ``passes``, the forward and backward passes of one step, with the layers as they are written and then
    compiled, and leave them compiled; where any rank's compiler fails, as they are written. Collective.

    Nothing is learned: gradients are thrown away, buffers and generators get back what they had. So a run that resumes
    computes what one that was never interrupted does.
    """
    compiled = [unit for part in parts(model) for _, unit in units(part)]
    with _as_before(model, device):
        with _eager(compiled):
            passes()
            eager_s = min(_timed(passes, device) for _ in range(TIMED))
        why, started = "", clock.monotonic()
        try:
            passes()
        except Exception as e:  # of the compiler's many; what is wrong with the model itself has shown above
            why = f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else 'no message'}"
        compile_s = clock.monotonic() - started
        if _any(bool(why), device):
            for unit in compiled:
                unit._compiled_call_impl = None
            why = why or "it failed on another rank"
            event("compile_failed", why=why, fix=_fix(why))
            log.warning("torch.compile failed, the layers run as they are written: %s", why)
            passes()  # a failure half way may have left ranks at different places; this must work
            return
        compiled_s = min(_timed(passes, device) for _ in range(TIMED))
    event("compiled", eager_s=eager_s, compiled_s=compiled_s, compile_s=compile_s)
    log.warning(
        "torch.compile: forward and backward take %.1f ms in place of %.1f ms (x%.2f), after %.1f s of compiling",
        compiled_s * 1e3,
        eager_s * 1e3,
        eager_s / compiled_s,
        compile_s,
    )


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """The layers of ``model`` uncompiled: nobody has tried yet whether the compiler works."""
    with _eager([unit for part in parts(model) for _, unit in units(part)]):
        yield


@contextmanager
def _eager(compiled: list[nn.Module]) -> Iterator[None]:
    kept = [unit._compiled_call_impl for unit in compiled]
    for unit in compiled:
        unit._compiled_call_impl = None
    try:
        yield
    finally:
        for unit, call in zip(compiled, kept, strict=True):
            unit._compiled_call_impl = call


@contextmanager
def _as_before(model: nn.Module, device: torch.device) -> Iterator[None]:
    random = seeds.capture(device)
    kept = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        model.zero_grad()
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
        seeds.restore(random, device)


def _timed(passes: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    started = clock.monotonic()
    passes()
    _wait(device)
    return clock.monotonic() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _any(failed: bool, device: torch.device) -> bool:
    if not dist.is_initialized():
        return failed
    found = torch.tensor(float(failed), device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def _fix(why: str) -> str:
    needs: Any = shutil.which("g++") or shutil.which("clang++")
    if not needs and "compiler" in why.lower():
        return "install g++ on the nodes: the compiler's back end for CPUs needs it"
    return "leave parallel.compile out, or see the rank's log for torch's own words"
