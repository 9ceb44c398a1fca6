"""The records of one node and attempt as columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from clustertrain.telemetry import store
from clustertrain.telemetry.store import Header

Column = npt.NDArray[np.float64]


@dataclass
class Series:
    """A header and what was recorded under it. Missing values are NaN; ``t`` is UTC epoch s.

    ``gpus`` and ``reasons`` run parallel to ``header.gpus``; ``reasons`` keeps the last reason of each field, also
    where the field came back.
    """

    header: Header
    t: Column
    gpus: list[dict[str, Column]]
    host: dict[str, Column]
    reasons: list[dict[str, str]]
    host_reasons: dict[str, str]
    processes: list[store.Processes]
    end: float | None  # when the sampler stopped, where it said so
    failure: str | None

    def after(self, since: float) -> Series:
        """Only the samples from ``since`` (UTC epoch s) on."""
        keep = self.t >= since
        return Series(
            self.header,
            self.t[keep],
            [{k: v[keep] for k, v in gpu.items()} for gpu in self.gpus],
            {k: v[keep] for k, v in self.host.items()},
            self.reasons,
            self.host_reasons,
            [p for p in self.processes if self.header.t + p.d >= since],
            self.end,
            self.failure,
        )


def load(folder: Path) -> list[Series]:
    """All series of a node's folder, oldest first; none where nothing was written."""
    found: list[_Open] = []
    for record in store.read(folder):
        if isinstance(record, Header):
            found.append(_Open(record, reasons=[{} for _ in record.gpus]))
        else:
            found[-1].add(record)
    return [part.close() for part in found]


@dataclass
class _Open:
    header: Header
    reasons: list[dict[str, str]]
    host_reasons: dict[str, str] = field(default_factory=dict)
    samples: list[store.Sample] = field(default_factory=list)
    processes: list[store.Processes] = field(default_factory=list)
    end: store.End | None = None

    def add(self, record: store.Record) -> None:
        match record:
            case store.Sample():
                self.samples.append(record)
            case store.Processes():
                self.processes.append(record)
            case store.End():
                self.end = record
            case store.Reason(gpu=None, reason=str() as reason):
                self.host_reasons[record.field] = reason
            case store.Reason(gpu=int() as gpu, reason=str() as reason) if gpu < len(self.reasons):
                self.reasons[gpu][record.field] = reason

    def close(self) -> Series:
        header = self.header
        blank: list[float | None] = [None] * len(header.gpu_fields)
        t = np.array([header.t + s.d for s in self.samples], dtype=np.float64)
        gpus = []
        for number in range(len(header.gpus)):
            rows = [(s.g[number] if number < len(s.g) else None) or blank for s in self.samples]
            gpus.append(_columns(rows, header.gpu_fields))
        host = _columns([s.h for s in self.samples], header.host_fields)
        ended = None if self.end is None else header.t + self.end.d
        failure = None if self.end is None else self.end.reason
        return Series(header, t, gpus, host, self.reasons, self.host_reasons, self.processes, ended, failure)


def _columns(rows: list[list[float | None]], names: tuple[str, ...]) -> dict[str, Column]:
    # None becomes NaN.
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(names))
    return {name: table[:, i] for i, name in enumerate(names)}
