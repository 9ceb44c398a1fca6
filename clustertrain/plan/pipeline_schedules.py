"""What a pipeline schedule asks of the number of micro-batches, and how many of them a rank holds at a time.

The rules are those that the constructors in ``torch.distributed.pipelining.schedules`` enforce (torch 2.13).
"""

from __future__ import annotations

from clustertrain.plan.layout import Layout

# Micro-batches for each rank of the pipeline: from 4 on the bubble is negligible (GPipe, arXiv 1811.06965, section
# 2.3).
MIN_MICRO_BATCHES_PER_RANK = 4
SPLIT_BACKWARD_SCHEDULES = ("zero-bubble", "zbv")  # schedules that do the gradients of inputs and of weights apart


def num_stages(layout: Layout) -> int:
    return layout.pp * layout.virtual_stages


def unsupported_reason(layout: Layout, micro_batches: int) -> str:
    """Why the schedule does not run ``micro_batches`` a step; empty where it does."""
    if layout.pp == 1:
        return ""
    if layout.schedule == "1f1b" and micro_batches < layout.pp:
        return f"1f1b needs as many micro-batches as stages, {layout.pp}, and there would be {micro_batches}"
    if layout.schedule in ("interleaved", "zero-bubble"):
        rounds = max(1, micro_batches // layout.pp)
        if micro_batches % rounds:
            return (
                f"{layout.schedule} runs in {micro_batches} // pp {layout.pp} = {rounds} rounds of equally many "
                f"micro-batches, {micro_batches} / {rounds} = {micro_batches / rounds:g}"
            )
    return ""


def min_micro_batches(layout: Layout) -> int:
    """From how many micro-batches a step on the pipeline is well filled; 1 without one."""
    return MIN_MICRO_BATCHES_PER_RANK * layout.pp if layout.pp > 1 else 1


def bubble_micro_batches(layout: Layout, micro_batches: int) -> float:
    """For how many micro-batches' work a rank of the pipeline waits in a step, while it fills and drains.

    (p - 1) / v of it (arXiv 2205.05198, section 4.2.3); the schedules that split the backward pass leave a third or
    nothing (arXiv 2401.10241, table 1). Of fewer micro-batches than ranks each comes back to a rank for its next stage
    only after all p ranks, so interleaving saves nothing then: one micro-batch keeps one rank busy at a time.
    """
    missing = max(0, layout.pp - micro_batches)
    bubble_factor = {"zero-bubble": 1 / 3, "zbv": 0.0}.get(layout.schedule or "", 1.0)
    return missing + bubble_factor * (layout.pp - 1 - missing) / layout.virtual_stages


def bubble_fraction(layout: Layout, micro_batches: int) -> float | None:
    """The part of a step in which a rank of the pipeline waits; None where that is not known.

    ZBV leaves none where forward pass and both halves of the backward pass take equally long and there is enough to
    fill it.
    """
    if layout.pp == 1 or not micro_batches:
        return None
    if layout.schedule == "zbv":
        return 0.0 if micro_batches >= min_micro_batches(layout) else None
    bubble = bubble_micro_batches(layout, micro_batches)
    return bubble / (micro_batches + bubble)


def in_flight_micro_batches(layout: Layout, micro_batches: int) -> tuple[float, float]:
    """Of how many micro-batches the first and the last rank of the pipeline keep the activations at their peak.

    Counted from the forward passes that a schedule does before the first backward. 1F1B and interleaved: arXiv
    2205.05198, section 4.2.3; zero-bubble and ZBV keep 1F1B's peak on every rank (arXiv 2401.10241, table 1).
    """
    p, v = layout.pp, layout.virtual_stages
    if p == 1:
        return 1.0, 1.0
    first, last = {
        "gpipe": (micro_batches, micro_batches),
        "1f1b": (p, 1),
        "interleaved": (p + (p - 1) / v, p - (p - 1) / v),
    }.get(layout.schedule or "", (p, p))
    return float(min(first, micro_batches)), float(min(last, micro_batches))
