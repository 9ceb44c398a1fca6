"""What a rank says of its steps: its beat, for the agent of its node, and the running totals of rank 0's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clustertrain import clock
from clustertrain.run import heartbeat, metrics

TOTAL_KEYS = ("sum_step_s", "sum_tokens", "sum_data_wait_s")


class ProgressReporter:
    """Outside a run nothing is written. ``tokens`` are those of all ranks."""

    def __init__(self, rank_dir: Path | None, rank: int, world_size: int, get_forward_s: Callable[[], float]) -> None:
        """``get_forward_s`` is asked at each step's begin."""
        self._writer = heartbeat.HeartbeatWriter(rank_dir, rank) if rank_dir is not None else None
        self._heartbeat = self._writer.beat if self._writer is not None else heartbeat.Heartbeat()
        self._world_size = world_size
        self._get_forward_s = get_forward_s
        self._totals = dict.fromkeys(TOTAL_KEYS, 0.0)
        self._started = 0.0
        self.enter_phase(heartbeat.STARTUP)

    def load_totals(self, path: Path | None) -> None:
        """``path``: of the attempt's rows, which a session before this one may have begun."""
        last_row = metrics.read_last_row(path) if path is not None else None
        if last_row is not None:
            self._totals.update(
                {k: float(last_row[k]) for k in TOTAL_KEYS if isinstance(last_row.get(k), (int, float))}
            )

    def enter_phase(self, phase: int) -> None:
        """From now on the rank is in ``phase``, a code of ``beat.PHASES``."""
        self._heartbeat.phase = phase
        if self._writer is not None:
            self._writer.write()

    @contextmanager
    def in_phase(self, phase: int) -> Iterator[None]:
        previous = self._heartbeat.phase
        self.enter_phase(phase)
        try:
            yield
        finally:
            self.enter_phase(previous)

    def begin_step(self, step: int) -> None:
        """``step``: how many are done."""
        self._started = clock.monotonic()
        if self._writer is None:
            return
        beat = self._heartbeat
        beat.step, beat.phase, beat.t, beat.forward_s = step, heartbeat.TRAIN, self._started, self._get_forward_s()
        self._writer.write()

    def end_step(
        self, step: int, excluded_s: float, tokens: int, data_wait_s: float | None, samples: int = 0
    ) -> dict[str, Any]:
        """The session's own part of the row of this step, of which ``excluded_s`` seconds were something else.
        ``step``:
        how many are done now; ``data_wait_s``: None without a loader; ``samples``: of all ranks, 0 where nobody
        knows."""
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
