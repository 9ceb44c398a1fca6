"""Advice for out-of-memory errors, with the measured peak."""

from __future__ import annotations

import torch

from clustertrain.plan.explain import advice
from clustertrain.plan.layout import Batch
from clustertrain.train.core import memory, result
from clustertrain.train.core.context import RankContext


def add_memory_note(error: BaseException, context: RankContext) -> None:
    """Add the measured peak and ways to use less memory to an out-of-memory ``error``; ignore other errors."""
    if result.classify_failure(error) != "out_of_memory":
        return
    peak = memory.peak_allocated_gib(context.device)
    if peak is None:
        measured = f"measured peak: {memory.peak_resident_gib():.2f} GiB of host memory in this process"
    else:
        total = torch.cuda.get_device_properties(context.device).total_memory / (1 << 30)
        measured = f"measured peak: {peak:.2f} GiB allocated of the {total:.2f} GiB of {context.device}"
    fixes = advice.advise_memory(context.layout, context.batch or Batch(), context.parallel)
    lines = [f"{measured}, with {context.layout.describe()}", "what needs less, the least invasive first:"]
    error.add_note("\n".join([*lines, *(f"  {n}. {fix}" for n, fix in enumerate(fixes, 1))]))
