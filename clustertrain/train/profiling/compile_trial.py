"""Whether compiling the layers is worth it, found out before the first step: what a pass takes before and after, and
the layers as they were where the compiler fails."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from clustertrain import clock
from clustertrain.checkpoint.core.control_group import Ranks
from clustertrain.checkpoint.core.state_dict import parts
from clustertrain.train.core import seeds
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed.compile import inductor
from clustertrain.train.distributed.data_parallel import units

log = logging.getLogger(__name__)

TIMED = 2  # passes, of which the quicker counts


def try_out(
    model: nn.Module,
    passes: Callable[[], object],
    context: RankContext,
    ranks: Ranks,
    event: Callable[..., None],
) -> None:
    """Make ``passes``, the forward and backward passes of one step, with the layers as they are written and then
    compiled, and leave them compiled; where any rank's compiler fails, as they are written. Collective.

    Nothing is learned: gradients are thrown away, buffers and generators get back what they had. So a run that resumes
    computes what one that was never interrupted does.
    """
    compiled, device = [unit for part in parts(model) for _, unit in units(part)], context.device
    with _as_before(model, device):
        with _eager(compiled):
            passes()
            eager_s = min(_timed(passes, device) for _ in range(TIMED))
        started = clock.monotonic()
        failure = None
        if context.layout.tp > 1:
            # A rank that runs its layers as they are written would be alone in the collectives of the others' backward
            # pass, which torch 2.13 fails to compile under tp: first, whether each one's compiler works at all.
            failure = _failure(ranks, _failed(lambda: _small(device)), context.node)
        if failure is None:
            failure = _failure(ranks, _failed(passes), context.node)
        compile_s = clock.monotonic() - started
        if failure is not None:
            for unit in compiled:
                unit._compiled_call_impl = None
            event("compile_failed", **failure)
            log.warning("torch.compile failed, the layers run as they are written: %s", failure["why"])
            passes()  # what cannot be traced fails on all ranks alike, but half way; this must work
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


def _small(device: torch.device) -> None:
    torch.compile(torch.sin, backend=inductor)(torch.ones(8, device=device))


def _failed(passes: Callable[[], object]) -> Exception | None:
    """What this rank's compiler fails of in ``passes``."""
    with inductor.tolerant():
        try:
            passes()
        except Exception as e:  # of the tracer's many; what is wrong with the model itself has shown before
            return e
    return inductor.failed


def _failure(ranks: Ranks, mine: Exception | None, node: str) -> dict[str, str] | None:
    """Of the first rank whose compiler has failed why it did and what to do. Collective."""
    told = None
    if mine is not None:
        words = str(mine).strip().splitlines() or ["no message"]
        why = f"{type(mine).__name__}: {words[0]}"
        told = {"why": why, "fix": _fix(why), "node": node}
    everybody = ranks.told(told)
    failed = [(rank, told) for rank, told in enumerate(everybody) if told is not None]
    if not failed:
        return None
    rank, first = failed[0]
    where = "" if len(failed) == len(everybody) else f"on rank {rank} (node {first['node']}): "
    return {"why": where + first["why"], "fix": first["fix"]}


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


def _fix(why: str) -> str:
    needs: Any = shutil.which("g++") or shutil.which("clang++")
    if not needs and "compiler" in why.lower():
        return "install g++ on the nodes: the compiler's back end for CPUs needs it"
    return "leave parallel.compile out, or see the rank's log for torch's own words"
