"""Speed and memory that a run measured, over the attempts that ran as planned."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from clustertrain.run import event_types, events, json_files, metrics_file
from clustertrain.run.run_dir import AttemptDir, RunDir

# Steps of each attempt that are not measured. Compilation, kernel selection, the allocator and the first batches slow
# them down; and until the GPU's queue is full, the host runs ahead, so its clock measures too little.
WARM_UP_STEPS = 5


class MeasuredSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the measured steps, None if there are none."""

    steps: int = 0
    """Number of steps measured."""
    step_s: float | None = None
    tokens_per_s: float | None = None
    """Throughput of all ranks together; also None for data without tokens."""


def split_by_world_size(run: RunDir, world_size: int) -> tuple[list[AttemptDir], list[AttemptDir]]:
    """Return the attempts that ran a step on ``world_size`` ranks, and those that did on another number of ranks.

    Both lists start with the oldest attempt.
    """
    matching: list[AttemptDir] = []
    different: list[AttemptDir] = []
    for attempt in run.attempts():
        log = events.for_attempt(attempt)
        started = events.select_last(log, event_types.SessionStarted)
        if started is not None and events.select_last(log, event_types.FirstStep) is not None:
            (matching if started.world_size == world_size else different).append(attempt)
    return matching, different


def measure_speed(run: RunDir, attempts: Sequence[AttemptDir]) -> MeasuredSpeed:
    """Return the medians over the steps after the warm-up of each attempt, for long files over a sample.

    Medians, because a save in the background or a late peer slows single steps down. The time of a step includes
    neither evaluation nor checkpoint stall.
    """
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


def _extract_numbers(rows: Sequence[Mapping[str, object]], key: str) -> list[float]:
    return [float(v) for row in rows if json_files.is_number(v := row.get(key))]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def find_peak_allocated_gib(run: RunDir, attempts: Sequence[AttemptDir]) -> float | None:
    """Return the peak memory of torch's allocator on the rank that needed most, in the newest attempt that reported it.

    All ranks report it when they end, and rank 0 while it trains. It never falls, so a sample that includes the end of
    the rows is sufficient.
    """
    for attempt in reversed(attempts):
        results = [json_files.poll_document(path).get("ranks") for path in sorted(attempt.results.glob("*.json"))]
        reported = [rank for ranks in results if isinstance(ranks, list) for rank in ranks if isinstance(rank, dict)]
        sampled = [row for path in run.metrics_files(attempt.n) for row in metrics_file.sample_rows(path)]
        peaks = _extract_numbers([*reported, *sampled], "peak_allocated_gib")
        if peaks:
            return max(peaks)
    return None
