"""Pipeline schedules: supported numbers of micro-batches, bubbles, and micro-batches in flight.

The rules are those that the constructors in ``torch.distributed.pipelining.schedules`` enforce (torch 2.13).
"""

from __future__ import annotations

from clustertrain.plan.layout import Layout

# From 4 micro-batches per pipeline rank on, the bubble is negligible (GPipe, arXiv 1811.06965, section 2.3).
MIN_MICRO_BATCHES_PER_RANK = 4
SPLIT_BACKWARD_SCHEDULES = ("zero-bubble", "zbv")  # separate gradients of inputs and weights
# Layers with weights in a block, and calls of autograd for their gradients if the backward pass is split: two norms,
# four linear layers of attention, and three of the feed-forward layer.
LAYERS_PER_BLOCK = 9


def num_stages(layout: Layout) -> int:
    """Return the number of stages over all ranks."""
    return layout.pp * layout.virtual_stages


def unsupported_reason(layout: Layout, micro_batches: int) -> str:
    """Return why the schedule does not support ``micro_batches`` per step; empty if it does."""
    if layout.pp == 1:
        return ""
    if layout.schedule == "1f1b" and micro_batches < layout.pp:
        return f"1f1b needs at least as many micro-batches as stages, {layout.pp}, but there would be {micro_batches}"
    if layout.schedule in ("interleaved", "zero-bubble"):
        rounds = max(1, micro_batches // layout.pp)
        if micro_batches % rounds:
            return (
                f"{layout.schedule} runs in {micro_batches} // pp {layout.pp} = {rounds} rounds of equal "
                f"size, but {micro_batches} / {rounds} = {micro_batches / rounds:g}"
            )
    return ""


def min_micro_batches(layout: Layout) -> int:
    """Return the number of micro-batches that fills the pipeline well; 1 without a pipeline."""
    return MIN_MICRO_BATCHES_PER_RANK * layout.pp if layout.pp > 1 else 1


def bubble_micro_batches(layout: Layout, micro_batches: int) -> float:
    """Return the idle time of a rank per step while the pipeline fills and drains, in units of a micro-batch's time.

    It is (p - 1) / v (arXiv 2205.05198, section 4.2.3); the schedules that split the backward pass leave a third or
    nothing (arXiv 2401.10241, table 1). With fewer micro-batches than ranks, interleaving saves nothing: a micro-batch
    returns to a rank for its next stage only after all p ranks, so each keeps one rank busy at a time.
    """
    missing = max(0, layout.pp - micro_batches)
    bubble_factor = {"zero-bubble": 1 / 3, "zbv": 0.0}.get(layout.schedule or "", 1.0)
    return missing + bubble_factor * (layout.pp - 1 - missing) / layout.virtual_stages


def bubble_fraction(layout: Layout, micro_batches: int) -> float | None:
    """Return the fraction of a step in which a pipeline rank is idle; None if unknown.

    ZBV has no bubble if the forward pass and both halves of the backward pass take equally long and the pipeline is
    filled.
    """
    if layout.pp == 1 or not micro_batches:
        return None
    if layout.schedule == "zbv":
        return 0.0 if micro_batches >= min_micro_batches(layout) else None
    bubble = bubble_micro_batches(layout, micro_batches)
    return bubble / (micro_batches + bubble)


def in_flight_micro_batches(layout: Layout, micro_batches: int, rank: int) -> float:
    """Return the micro-batches whose activations pipeline rank ``rank`` keeps at its peak.

    Counted from the forward passes that a schedule runs before the first backward pass. 1F1B and interleaved: arXiv
    2205.05198, section 4.2.3; zero-bubble and ZBV keep 1F1B's peak on every rank (arXiv 2401.10241, table 1), ZBV with
    2 p - 1 micro-batches or more.
    """
    return sum(in_flight_by_stage(layout, micro_batches, rank)) / layout.virtual_stages


def in_flight_by_stage(layout: Layout, micro_batches: int, rank: int) -> tuple[float, ...]:
    """Return the same for each stage of the rank, in the order of the model."""
    p, v = layout.pp, layout.virtual_stages
    if p == 1:
        return (1.0,)
    later_ranks = p - 1 - rank
    if layout.schedule == "interleaved":
        # Stages take turns, each with as many micro-batches as there are ranks.
        whole_turns, rest = divmod(min((v - 1) * p + 2 * later_ranks + 1, micro_batches * v), p * v)
        return tuple(float(whole_turns * p + min(max(rest - p * stage, 0), p)) for stage in range(v))
    in_flight: tuple[float, ...] = (float(p),) * v
    if layout.schedule == "gpipe":
        in_flight = (micro_batches,)
    elif layout.schedule == "1f1b":
        in_flight = (later_ranks + 1,)
    elif layout.schedule == "zbv":
        in_flight = (p + later_ranks, rank + 1)
    return tuple(float(min(n, micro_batches)) for n in in_flight)


def count_deferred(layout: Layout, micro_batches: int, rank: int) -> int:
    """Return how many passes for the gradients of weights wait at most on pipeline rank ``rank``.

    Counted in the orders of torch 2.13: zero-bubble starts them after as many passes for inputs as the rank's number,
    ZBV when the pipeline is full.
    """
    if layout.schedule == "zero-bubble":
        return min(rank, micro_batches * layout.virtual_stages - 1)
    if layout.schedule == "zbv":
        more = max(0, min(micro_batches, 2 * layout.pp - 1) - layout.pp)
        return min(rank, more) + max(0, rank + more - (layout.pp - 1))
    return 0


def count_in_flight_with_gradients(layout: Layout, micro_batches: int, rank: int) -> float:
    """Return the micro-batches that pipeline rank ``rank`` keeps when all its stages have done two backward passes.

    The last pass counts. The zero-bubble schedule goes through rounds of as many micro-batches as ranks, stage by
    stage. In ZBV, a micro-batch returns to the rank's first stage after all later ranks.
    """
    p, v = layout.pp, layout.virtual_stages
    left = micro_batches - 2 + 1 / v
    if layout.schedule == "zbv":
        left -= p - 1 - rank
    elif layout.schedule == "zero-bubble":
        left = micro_batches - ((v - 1) * p + 1) / v
    return max(0.0, min(left, in_flight_micro_batches(layout, micro_batches, rank)))


def count_recomputations(layout: Layout) -> int:
    """Return how many times full recomputation runs a block's forward pass again, with torch 2.13.

    A split backward pass does so in the pass for inputs and in each call of autograd for the gradients of weights
    (``stage_backward_weight``).
    """
    is_split = layout.pp > 1 and layout.schedule in SPLIT_BACKWARD_SCHEDULES
    return 1 + LAYERS_PER_BLOCK * is_split
