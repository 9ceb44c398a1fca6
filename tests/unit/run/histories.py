"""Histories of runs for tests, in the files that the batch process, the agents and rank 0 write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clustertrain import fsio
from clustertrain.run.run_dir import RunDir


class History:
    """A run to which a test adds one attempt after the other. Call :meth:`AttemptWriter.write` at the end of each."""

    def __init__(self, folder: Path, submitted: float | None = 0.0) -> None:
        self.run = RunDir(folder)
        for name in ("attempts", "events", "metrics"):
            (self.run.path / name).mkdir(parents=True)
        if submitted is not None:
            self.run_event(submitted, "submitted", job_id="7", backend="slurm")

    def run_event(self, t: float, name: str, **fields: Any) -> None:
        _append(self.run.events / "submit.jsonl", [{"t": t, "event": name, **fields}])

    def attempt(self, n: int, start: float | None) -> AttemptWriter:
        attempt = AttemptWriter(self.run, n)
        attempt.run.attempt(n).path.mkdir(parents=True, exist_ok=True)
        if start is not None:
            attempt.batch_event(start, "started", job_id="7")
        return attempt


class AttemptWriter:
    """The events and rows of one attempt. ``t`` is the time on rank 0's clock."""

    def __init__(self, run: RunDir, n: int) -> None:
        self.run, self.n = run, n
        self.t = 0.0
        self._sums = {"sum_step_s": 0.0, "sum_data_wait_s": 0.0, "sum_tokens": 0}
        self._events: dict[str, list[dict[str, Any]]] = {}
        self._rows: list[dict[str, Any]] = []
        self._rollbacks = 0

    def batch_event(self, t: float, name: str, **fields: Any) -> None:
        self._events.setdefault("batch", []).append({"t": t, "event": name, **fields})

    def event(self, name: str, **fields: Any) -> None:
        self._events.setdefault("rank-0", []).append({"t": self.t, "event": name, **fields})

    def timed_event(self, name: str, key: str, seconds: float, **fields: Any) -> None:
        """Add an event that takes ``seconds``."""
        begin = self.t
        self.t += seconds
        self.event(name, t_begin=begin, **{key: seconds}, **fields)

    def step(self, step: int, seconds: float, *, wait_s: float = 0.0, tokens: int = 0, **scalars: Any) -> None:
        begin = self.t
        self.t += seconds
        self._sums["sum_step_s"] += seconds
        self._sums["sum_data_wait_s"] += wait_s
        self._sums["sum_tokens"] += tokens
        self._rows.append(
            {"step": step, "t": self.t, "step_s": seconds, "data_wait_s": wait_s, **self._sums, **scalars}
        )
        if len(self._rows) == 1 and not self._rollbacks:
            self.event("first_step", step=step, t_begin=begin)

    def roll_back(self, step: int, to_step: int, seconds: float) -> None:
        """Roll back from ``step`` to a checkpoint. Later rows go to another file."""
        self.timed_event("rolled_back", "restore_s", seconds, step=step, to_step=to_step, reason="a spike", samples=8)
        _append(self.run.metrics_path(self.n, self._rollbacks), self._rows)
        self._rows, self._rollbacks = [], self._rollbacks + 1

    def write(self) -> None:
        for writer, records in self._events.items():
            _append(self.run.attempt(self.n).events_path(writer), records)
        _append(self.run.metrics_path(self.n, self._rollbacks), self._rows)


def _append(path: Path, records: list[dict[str, Any]]) -> None:
    log = fsio.JsonlAppender(path)
    log.append(*records)
    log.close()
