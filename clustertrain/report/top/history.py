"""What happened before the current frame of ``clustertrain top``: utilization of the last minutes, loss of the attempt.

The cost is bounded: a few nodes stand for all, of their samples only the last minutes are read, and of a long file of
metrics only evenly spaced windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from clustertrain.report import eta
from clustertrain.run import metrics_file
from clustertrain.telemetry.fields import FAST, SLOW, Pace, column_name
from clustertrain.telemetry.store.latest import NodeStatus
from clustertrain.telemetry.store.reader import open_node

BIN_S, BINS = 10.0, 60
MAX_NODES = 16  # whose samples are read
MAX_LOSSES = 4000  # more are thinned


class History(msgspec.Struct, frozen=True):
    """Curves, oldest value first."""

    busy: Sequence[float | None] = ()
    """Mean utilization of the GPUs, or of the CPUs if there are no GPUs, per ``BIN_S``; None: not recorded."""
    is_cpu: bool = False
    losses: Sequence[tuple[int, float]] = ()
    """Steps and finite losses."""


class BusyHistory:
    """Utilization of an attempt's first nodes in bins of ``BIN_S``."""

    def __init__(self, folder: Path) -> None:
        """Create a history of ``folder``, which is ``attempt.telemetry``."""
        self._folder = folder
        self._read_until: dict[str, float] = {}
        self._bins: dict[int, tuple[float, int]] = {}
        self.is_cpu = False

    def update(self, nodes: Sequence[NodeStatus]) -> None:
        """Add the samples that are new since the last call."""
        self.is_cpu = not any(node.header.gpus for node in nodes)
        for node in nodes[:MAX_NODES]:
            newest = node.snapshot.t if node.snapshot is not None else None
            if newest is None or newest <= self._read_until.get(node.node, -math.inf):
                continue
            since = max(self._read_until.get(node.node, -math.inf), newest - BINS * BIN_S)
            self._read_until[node.node] = newest
            self._add(node, since)
        oldest = max(self._bins, default=0) - BINS
        self._bins = {i: value for i, value in self._bins.items() if i > oldest}

    def _add(self, node: NodeStatus, since: float) -> None:
        pace: Pace = SLOW if self.is_cpu else FAST
        gpus = [column_name(f"gpu{i}", "utilization") for i in range(len(node.header.gpus))]
        columns = [column_name("host", "cpu")] if self.is_cpu else gpus
        segments = open_node(self._folder / node.node)
        if not segments or not columns:
            return
        frame = segments[-1].samples(pace, columns, since=math.nextafter(since, math.inf))
        for values in frame.values.values():
            known = np.isfinite(values)
            for t, value in zip(frame.t[known].tolist(), values[known].tolist(), strict=True):
                total, count = self._bins.get(int(t // BIN_S), (0.0, 0))
                self._bins[int(t // BIN_S)] = total + value, count + 1

    def values(self) -> list[float | None]:
        """Return the mean of each bin, from the oldest with samples to the newest."""
        if not self._bins:
            return []
        means = {i: total / count for i, (total, count) in self._bins.items()}
        return [means.get(i) for i in range(min(means), max(means) + 1)]


class LossHistory:
    """Losses of one file of metrics."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._losses: list[tuple[int, float]] = []

    def update(self, path: Path, newest_rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the losses of ``newest_rows``, which are the last rows of the file at ``path``."""
        if path != self._path:  # another attempt, or the file after a rollback
            self._path, self._losses = path, []
            self._extend(metrics_file.sample_rows(path))
        self._extend(newest_rows)

    def _extend(self, rows: Sequence[Mapping[str, Any]]) -> None:
        newest_step = self._losses[-1][0] if self._losses else -1
        for row in rows:
            loss, step = eta.as_finite(row.get("loss")), row.get("step")
            if loss is not None and isinstance(step, int) and step > newest_step:
                self._losses.append((step, loss))
                newest_step = step
        if len(self._losses) > MAX_LOSSES:
            self._losses = [*self._losses[:-1:2], self._losses[-1]]

    def values(self) -> list[tuple[int, float]]:
        return self._losses
