"""A rank's progress: its heartbeat for the node agent, and the running totals in rank 0's rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clustertrain import clock
from clustertrain.run import heartbeat, metrics

TOTAL_KEYS = ("sum_step_s", "sum_tokens", "sum_data_wait_s")


class ProgressReporter:
    """Reporter of the rank's phase and steps. It writes nothing outside a run. Token counts are over all ranks."""

    def __init__(self, rank_dir: Path | None, rank: int, world_size: int, get_forward_s: Callable[[], float]) -> None:
        """``get_forward_s`` returns the total seconds of all forward passes; called at the start of each step."""
        hooks = sys.modules.get("clustertrain_hooks.progress")
        if hooks is not None:  # of a command; they would write the same files
            hooks.leave_to_session()
        self._writer = heartbeat.HeartbeatWriter(rank_dir, rank) if rank_dir is not None else None
        self._heartbeat = self._writer.beat if self._writer is not None else heartbeat.Heartbeat()
        self._world_size = world_size
        self._get_forward_s = get_forward_s
        self._totals = dict.fromkeys(TOTAL_KEYS, 0.0)
        self._started = 0.0
        self.enter_phase(heartbeat.STARTUP)

    def load_totals(self, path: Path | None) -> None:
        """Continue the totals in the attempt's rows in ``path``, which an earlier session may have written."""
        last_row = metrics.read_last_row(path) if path is not None else None
        if last_row is not None:
            self._totals.update(
                {k: float(last_row[k]) for k in TOTAL_KEYS if isinstance(last_row.get(k), (int, float))}
            )

    def enter_phase(self, phase: int) -> None:
        """Report that the rank is in ``phase``, a code in ``heartbeat.PHASES``."""
        self._heartbeat.phase = phase
        if self._writer is not None:
            self._writer.write()

    @contextmanager
    def in_phase(self, phase: int) -> Iterator[None]:
        """Report ``phase`` during the block, and the previous phase after it."""
        previous = self._heartbeat.phase
        self.enter_phase(phase)
        try:
            yield
        finally:
            self.enter_phase(previous)

    def begin_step(self, step: int) -> None:
        """Report the start of a step; ``step`` is the number of steps done."""
        self._started = clock.monotonic()
        if self._writer is None:
            return
        record = self._heartbeat
        record.step, record.phase = step, heartbeat.TRAIN
        record.t, record.forward_s = self._started, self._get_forward_s()
        self._writer.write()

    def end_step(
        self, step: int, excluded_s: float, tokens: int, data_wait_s: float | None, samples: int = 0
    ) -> dict[str, Any]:
        """Return the time and throughput columns of the step's row.

        Args:
            step: steps done, including this one.
            excluded_s: seconds of the step that are not training.
            tokens: tokens of the step, 0 if unknown.
            data_wait_s: seconds spent waiting for data, None without a loader.
            samples: samples of the step over all ranks, 0 if unknown.
        """
        step_s = max(0.0, clock.monotonic() - self._started - excluded_s)
        totals = self._totals
        row: dict[str, Any] = {"step": step, "t": clock.now(), "step_s": step_s}
        self._heartbeat.step = step
        totals["sum_step_s"] += step_s
        row["sum_step_s"] = round(totals["sum_step_s"], 6)
        if tokens:
            totals["sum_tokens"] += tokens
            self._heartbeat.tokens += tokens / self._world_size
            row["tokens_per_s"] = tokens / step_s if step_s else 0.0
            row["sum_tokens"] = int(totals["sum_tokens"])
        elif samples:
            row["samples_per_s"] = samples / step_s if step_s else 0.0
        if data_wait_s is not None:
            totals["sum_data_wait_s"] += data_wait_s
            self._heartbeat.data_wait_s += data_wait_s
            row["data_wait_s"] = data_wait_s
            row["sum_data_wait_s"] = round(totals["sum_data_wait_s"], 6)
        return row

    def close(self) -> None:
        self.enter_phase(heartbeat.IDLE)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
