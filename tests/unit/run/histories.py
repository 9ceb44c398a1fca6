"""Histories of runs for tests, written as batch, agents and rank 0 write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clustertrain import fsio
from clustertrain.run.run_dir import RunDir


class History:
    """One attempt after the other; :meth:`write` at the end of each."""

    def __init__(self, folder: Path, submitted: float | None = 0.0) -> None:
        self.run = RunDir(folder)
        for inner in ("attempts", "events", "metrics"):
            (self.run.path / inner).mkdir(parents=True)
        if submitted is not None:
            self.of_run(submitted, "submitted", job_id="7", backend="slurm")

    def of_run(self, t: float, name: str, **fields: Any) -> None:
        _append(self.run.events / "submit.jsonl", [{"t": t, "event": name, **fields}])

    def attempt(self, n: int, start: float | None) -> Told:
        told = Told(self.run, n)
        told.run.attempt(n).path.mkdir(parents=True, exist_ok=True)
        if start is not None:
            told.batch(start, "started", job_id="7")
        return told


class Told:
    """What is told of one attempt. ``t`` is where rank 0's clock stands."""

    def __init__(self, run: RunDir, n: int) -> None:
        self.run, self.n = run, n
        self.t = 0.0
        self._sums = {"sum_step_s": 0.0, "sum_data_wait_s": 0.0, "sum_tokens": 0}
        self._events: dict[str, list[dict[str, Any]]] = {}
        self._rows: list[dict[str, Any]] = []
        self._stretch = 0

    def batch(self, t: float, name: str, **fields: Any) -> None:
        self._events.setdefault("batch", []).append({"t": t, "event": name, **fields})

    def event(self, name: str, **fields: Any) -> None:
        self._events.setdefault("rank-0", []).append({"t": self.t, "event": name, **fields})

    def lasting(self, name: str, key: str, seconds: float, **fields: Any) -> None:
        """An event of something that takes ``seconds``."""
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
        if len(self._rows) == 1 and not self._stretch:
            self.event("first_step", step=step, t_begin=begin)

    def back(self, step: int, to_step: int, seconds: float) -> None:
        """Go back to a checkpoint because of ``step``: the rows to come are in another file."""
        self.lasting("rolled_back", "restore_s", seconds, step=step, to_step=to_step, reason="a spike", samples=8)
        _append(self.run.metrics_path(self.n, self._stretch), self._rows)
        self._rows, self._stretch = [], self._stretch + 1

    def write(self) -> None:
        for writer, found in self._events.items():
            _append(self.run.attempt(self.n).events_path(writer), found)
        _append(self.run.metrics_path(self.n, self._stretch), self._rows)


def _append(path: Path, records: list[dict[str, Any]]) -> None:
    log = fsio.JsonlAppender(path)
    log.append(*records)
    log.close()
