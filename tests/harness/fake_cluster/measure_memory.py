"""Measurement of a cell: the peak of the rank that needs the most memory."""

from __future__ import annotations

from collections import Counter

import torch

from clustertrain.train.distributed import pipeline_stages
from clustertrain.train.models.build import build_model
from tests.harness.fake_cluster.in_child import call_in_child
from tests.harness.fake_cluster.memory_cells import MemoryCell
from tests.harness.fake_cluster.rank import RankTrace, trace_or_find_owner, trace_rank


def ranks_to_trace(cell: MemoryCell) -> list[int]:
    """Return the ranks that may need the most memory.

    Of a pipeline these are the first and the last, and the first of those with the most blocks; of the ranks that share
    a sequence the last one, whose keys are the most; of those that share parameters the first one, whose shards are
    the largest.
    """
    layout, layers = cell.layout, cell.recipe.model.layers
    last_chunk = (layout.cp - 1) * layout.tp
    if layout.pp == 1:
        return [last_chunk]
    stage_ranks = pipeline_stages.assign_stage_ranks(layout)
    model = build_model(cell.recipe.model)
    starts = pipeline_stages.find_stage_starts(model, len(stage_ranks), ())
    units = Counter[int]()
    for rank, start, end in zip(stage_ranks, starts, [*starts[1:], layers + 2], strict=True):
        units[rank] += sum(1 <= unit <= layers for unit in range(start, end))
    largest = min(rank for rank, count in units.items() if count == max(units.values()))
    ranks_per_stage = layout.world_size // layout.pp
    return [rank * ranks_per_stage + last_chunk for rank in sorted({0, largest, layout.pp - 1})]


def measure_cell(cell: MemoryCell) -> RankTrace:
    """Trace the cell's ranks and return the trace with the highest peak. Raise ChildFailed if one fails."""
    with torch.compiler.set_stance("force_eager"):
        traces = [_trace_heaviest(cell, rank) for rank in ranks_to_trace(cell)]
    return max(traces, key=lambda trace: trace.peak)


def _trace_heaviest(cell: MemoryCell, rank: int) -> RankTrace:
    """Trace ``rank``, or of the ranks that share optimizer state with it the one that owns the most."""
    result = call_in_child(trace_or_find_owner, cell, rank)
    return call_in_child(trace_rank, cell, result) if isinstance(result, int) else result
