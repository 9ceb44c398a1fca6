"""What a run has measured of its own speed and memory, over the attempts that ran as they were planned."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from clustertrain.run import event_types, events, json_files, metrics_file
from clustertrain.run.run_dir import AttemptDir, RunDir

# Compilation, the choice of kernels, the allocator and the data's first batches; and until its queue is full the host
# runs ahead of a GPU, so that its clock says too little.
WARM_UP_STEPS = 5  # of each attempt


class MeasuredSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """``steps``: how many were measured. The others are None where there is nothing yet; ``tokens_per_s`` is of all
    ranks together, and None for data that has no tokens."""

    steps: int = 0
    step_s: float | None = None
    tokens_per_s: float | None = None


def split_by_world_size(run: RunDir, world_size: int) -> tuple[list[AttemptDir], list[AttemptDir]]:
    """The attempts that did a step on ``world_size`` ranks, and those that did one on another number, oldest first."""
    matching: list[AttemptDir] = []
    others: list[AttemptDir] = []
    for attempt in run.attempts():
        log = events.for_attempt(attempt)
        started = events.select_last(log, event_types.SessionStarted)
        if started is not None and events.select_last(log, event_types.FirstStep) is not None:
            (matching if started.world_size == world_size else others).append(attempt)
    return matching, others


def measure_speed(run: RunDir, attempts: Sequence[AttemptDir]) -> MeasuredSpeed:
    """The medians over the steps after the first ones of each attempt, and where those are very many over a sample:
    the ones beside which a save is written, or a peer is late, do not move them. A step's time has neither evaluation
    nor checkpoint stall in it."""
    rows = [
        row
        for a in attempts
        for path in run.metrics_files(a.n)
        for row in metrics_file.sample_rows(path, WARM_UP_STEPS)
    ]
    step_s = _extract_numbers(rows, "step_s")
    return MeasuredSpeed(
        steps=len(step_s), step_s=_median(step_s), tokens_per_s=_median(_extract_numbers(rows, "tokens_per_s"))
    )


def _extract_numbers(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [float(v) for row in rows if json_files.is_number(v := row.get(key))]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def find_peak_allocated_gib(run: RunDir, attempts: Sequence[AttemptDir]) -> float | None:
    """What torch's allocator had given out at most on the rank that needed most, in the newest attempt that says so.

    All ranks tell it when they end, and rank 0 while it trains; it never falls, so of a very long attempt a sample with
    its end does.
    """
    for attempt in reversed(attempts):
        results = [json_files.poll_document(path).get("ranks") for path in sorted(attempt.results.glob("*.json"))]
        reported = [rank for ranks in results if isinstance(ranks, list) for rank in ranks if isinstance(rank, dict)]
        sampled = [row for path in run.metrics_files(attempt.n) for row in metrics_file.sample_rows(path)]
        peaks = _extract_numbers([*reported, *sampled], "peak_allocated_gib")
        if peaks:
            return max(peaks)
    return None
