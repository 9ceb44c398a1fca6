"""What a rank says of its steps: its beat, for the agent of its node, and the running totals of rank 0's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clustertrain import clock
from clustertrain.run import heartbeat, metrics

SUMS = ("sum_step_s", "sum_tokens", "sum_data_wait_s")


class Marks:
    """Outside a run nothing is written. ``tokens`` are those of all ranks."""

    def __init__(self, rank_dir: Path | None, rank: int, world_size: int, forward_s: Callable[[], float]) -> None:
        """``forward_s`` is asked at each step's begin."""
        self._writer = heartbeat.Writer(rank_dir, rank) if rank_dir is not None else None
        self._beat = self._writer.beat if self._writer is not None else heartbeat.Beat()
        self._world_size = world_size
        self._forward_s = forward_s
        self._sums = dict.fromkeys(SUMS, 0.0)
        self._started = 0.0
        self.enter(heartbeat.STARTUP)

    def continue_rows(self, path: Path | None) -> None:
        """``path``: of the attempt's rows, which a session before this one may have begun."""
        before = metrics.last_row(path) if path is not None else None
        if before is not None:
            self._sums.update({k: float(before[k]) for k in SUMS if isinstance(before.get(k), (int, float))})

    def enter(self, phase: int) -> None:
        """From now on the rank is in ``phase``, a code of ``beat.PHASES``."""
        self._beat.phase = phase
        if self._writer is not None:
            self._writer.write()

    @contextmanager
    def during(self, phase: int) -> Iterator[None]:
        before = self._beat.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def step_begins(self, step: int) -> None:
        """``step``: how many are done."""
        self._started = clock.monotonic()
        if self._writer is None:
            return
        mine = self._beat
        mine.step, mine.phase, mine.t, mine.forward_s = step, heartbeat.TRAIN, self._started, self._forward_s()
        self._writer.write()

    def step_ends(
        self, step: int, apart_s: float, tokens: int, data_wait_s: float | None, samples: int = 0
    ) -> dict[str, Any]:
        """The session's own part of the row of this step, of which ``apart_s`` seconds were something else. ``step``:
        how many are done now; ``data_wait_s``: None without a loader; ``samples``: of all ranks, 0 where nobody
        knows."""
        step_s = max(0.0, clock.monotonic() - self._started - apart_s)
        sums = self._sums
        row: dict[str, Any] = {"step": step, "t": clock.now(), "step_s": step_s}
        self._beat.step = step
        sums["sum_step_s"] += step_s
        row["sum_step_s"] = round(sums["sum_step_s"], 6)
        if tokens:
            sums["sum_tokens"] += tokens
            self._beat.tokens += tokens / self._world_size
            row["tokens_per_s"] = tokens / step_s if step_s else 0.0
            row["sum_tokens"] = int(sums["sum_tokens"])
        elif samples:
            row["samples_per_s"] = samples / step_s if step_s else 0.0
        if data_wait_s is not None:
            sums["sum_data_wait_s"] += data_wait_s
            self._beat.data_wait_s += data_wait_s
            row["data_wait_s"] = data_wait_s
            row["sum_data_wait_s"] = round(sums["sum_data_wait_s"], 6)
        return row

    def close(self) -> None:
        self.enter(heartbeat.IDLE)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
