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
    from clustertrain.report.plan_range import print_table
    from clustertrain.submit.prepare import prepare

    first_prepared = prepare(request, purpose="plan")
    gpus_per_node = first_prepared.spec.job.gpus
    batch = first_prepared.spec.recipe.train.global_batch
    sizes = parse_gpu_counts(text, gpus_per_node)
    if not batch:
        batch = prepare(_with_gpus(request, sizes[-1], gpus_per_node, 0), purpose="plan").plan.batch.global_batch
    rows: list[tuple[int, Plan | None, str]] = []
    backend = None  # of the largest, for all: a part of one node must not be planned for this machine and its CPU
    for size in reversed(sizes):
        try:
            prepared = prepare(_with_gpus(request, size, gpus_per_node, batch), backend, "plan")
            backend = prepared.backend
            rows.insert(0, (size, prepared.plan, ""))
        except ConfigError as e:
            rows.insert(0, (size, None, str(e)))
    predicted = [(n, plan) for n, plan, _ in rows if plan is not None and plan.time.tokens_per_s_per_gpu]
    base_rate = predicted[0][1].time.tokens_per_s_per_gpu if predicted else None
    entries = [_to_json(n, plan, reason, base_rate) for n, plan, reason in rows]
    if as_json:
        print_json({"global_batch": batch, "sizes": entries})
    else:
        print_table(entries, batch)
    return 0


def parse_gpu_counts(text: str, gpus_per_node: int) -> list[int]:
    """``8-64``: 8, 16, 32, 64; ``8,24,64``: these. In whole nodes, or parts of one that divide it.

    Raises:
        UsageError: it is neither, or a number that nodes of ``gpus_per_node`` cannot make.
    """
    match = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", text)
    if match:
        low, high = int(match[1]), int(match[2])
        sizes = [low << n for n in range(64) if low and low << n <= high]
    else:
        sizes = [int(part) for part in text.split(",") if re.fullmatch(r"\s*[0-9]{1,9}\s*", part)]
        if len(sizes) != text.count(",") + 1:
            sizes = []
    if not sizes or min(sizes) < 1:
        raise UsageError(
            f"--gpus-range {text!r}: not of the form LOW-HIGH or N,N,N", fix="for example --gpus-range 8-64"
        )
    invalid = [n for n in sizes if n % gpus_per_node and (n > gpus_per_node or gpus_per_node % n)]
    if invalid:
        raise UsageError(
            f"--gpus-range {text!r}: {invalid[0]} GPUs are no whole number of nodes of {gpus_per_node}",
            fix="choose multiples, or another --gpus",
        )
    return sorted(set(sizes))


def _with_gpus(request: SubmitRequest, size: int, gpus_per_node: int, batch: int) -> SubmitRequest:
    nodes, gpus = (size // gpus_per_node, gpus_per_node) if size >= gpus_per_node else (1, size)
    extra = (f"train.global_batch={batch}",) if batch else ()
    return replace(
        request, job={**request.job, "nodes": nodes, "gpus": gpus}, assignments=(*request.assignments, *extra)
    )


def _to_json(size: int, plan: Plan | None, reason: str, base_rate: float | None) -> dict[str, Any]:
    if plan is None:
        return {"gpus": size, "layout": None, "step_s": None, "tokens_per_s": None, "efficiency": None,
                "peak_gib": None, "fits": None, "why": reason}  # fmt: skip
    rate = plan.time.tokens_per_s_per_gpu
    return {
        "gpus": size,
        "layout": plan.layout.describe(),
        "step_s": plan.time.step_s,
        "tokens_per_s": rate * size if rate else None,
        "efficiency": rate / base_rate if rate and base_rate else None,
        "peak_gib": plan.memory.peak_gib,
        "fits": plan.memory.fits,
        "why": plan.way_out,
    }
