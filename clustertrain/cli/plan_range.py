"""``plan --gpus-range``: the same training on several numbers of GPUs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clustertrain.cli.common import print_json
from clustertrain.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from clustertrain.plan.planner import Plan
    from clustertrain.submit.request import SubmitRequest


def show_range(request: SubmitRequest, text: str, *, as_json: bool) -> int:
    """A line for each number of GPUs: what would be chosen, how fast, and how much of the smallest one's speed a GPU
    keeps. All have the global batch of the recipe, or else of the largest."""
    from clustertrain.report.plan_range import lines
    from clustertrain.submit.request import prepare

    first = prepare(request, purpose="plan")
    per_node = first.spec.job.gpus
    batch = first.spec.recipe.train.global_batch
    sizes = worlds(text, per_node)
    if not batch:
        batch = prepare(_sized(request, sizes[-1], per_node, 0), purpose="plan").plan.batch.global_batch
    rows: list[tuple[int, Plan | None, str]] = []
    backend = None  # of the largest, for all: a part of one node must not be planned for this machine and its CPU
    for size in reversed(sizes):
        try:
            made = prepare(_sized(request, size, per_node, batch), backend, "plan")
            backend = made.backend
            rows.insert(0, (size, made.plan, ""))
        except ConfigError as e:
            rows.insert(0, (size, None, str(e)))
    known = [(n, each) for n, each, _ in rows if each is not None and each.time.tokens_per_s_per_gpu]
    base = known[0][1].time.tokens_per_s_per_gpu if known else None
    shown = [_row(n, each, why, base) for n, each, why in rows]
    if as_json:
        print_json({"global_batch": batch, "sizes": shown})
    else:
        lines(shown, batch)
    return 0


def worlds(text: str, per_node: int) -> list[int]:
    """``8-64``: 8, 16, 32, 64; ``8,24,64``: these. In whole nodes, or parts of one that divide it.

    Raises:
        UsageError: it is neither, or a number that nodes of ``per_node`` cannot make.
    """
    span = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", text)
    if span:
        low, high = int(span[1]), int(span[2])
        sizes = [low << n for n in range(64) if low and low << n <= high]
    else:
        sizes = [int(part) for part in text.split(",") if re.fullmatch(r"\s*[0-9]{1,9}\s*", part)]
        if len(sizes) != text.count(",") + 1:
            sizes = []
    if not sizes or min(sizes) < 1:
        raise UsageError(
            f"--gpus-range {text!r}: not of the form LOW-HIGH or N,N,N", fix="for example --gpus-range 8-64"
        )
    wrong = [n for n in sizes if n % per_node and (n > per_node or per_node % n)]
    if wrong:
        raise UsageError(
            f"--gpus-range {text!r}: {wrong[0]} GPUs are no whole number of nodes of {per_node}",
            fix="choose multiples, or another --gpus",
        )
    return sorted(set(sizes))


def _sized(request: SubmitRequest, size: int, per_node: int, batch: int) -> SubmitRequest:
    nodes, gpus = (size // per_node, per_node) if size >= per_node else (1, size)
    more = (f"train.global_batch={batch}",) if batch else ()
    return replace(
        request, job={**request.job, "nodes": nodes, "gpus": gpus}, assignments=(*request.assignments, *more)
    )


def _row(size: int, made: Plan | None, why: str, base: float | None) -> dict[str, Any]:
    if made is None:
        return {"gpus": size, "layout": None, "step_s": None, "tokens_per_s": None, "efficiency": None,
                "peak_gib": None, "fits": None, "why": why}  # fmt: skip
    rate = made.time.tokens_per_s_per_gpu
    return {
        "gpus": size,
        "layout": made.layout.words(),
        "step_s": made.time.step_s,
        "tokens_per_s": rate * size if rate else None,
        "efficiency": rate / base if rate and base else None,
        "peak_gib": made.memory.peak_gib,
        "fits": made.memory.fits,
        "why": made.way_out,
    }
