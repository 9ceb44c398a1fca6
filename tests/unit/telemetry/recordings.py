"""Builder of a node's segments, for tests of the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from clustertrain.telemetry import fields
from clustertrain.telemetry.fields import FAST, SLOW
from clustertrain.telemetry.store.writer import GpuFacts, Header, Writer

T0 = 1_790_000_000.0
TRAIN, CHECKPOINT = 3.0, 4.0
Values = Callable[[int], dict[str, float]]


def header(gpus: int = 1, t: float = T0) -> Header:
    ranks = list(range(gpus))
    return Header(
        node="n1",
        t=t,
        mono=7.0 + t - T0,
        interval_s=1.0,
        gpus=[GpuFacts(f"GPU-{i}", i, i, "H100", 80 << 30, ranks=[i]) for i in ranks],
        ranks=ranks,
        fast=fields.column_names(gpus, ranks, FAST),
        slow=fields.column_names(gpus, ranks, SLOW),
    )


def working(second: int) -> dict[str, float]:
    """Return the sample of a 400 W GPU that alternates 50 s of training and 10 s of saving, without byte counters."""
    saving = second % 60 >= 50
    return {
        "gpu0.utilization": 0.0 if saving else 0.95 + (second % 3) / 100,
        "gpu0.memory_used_bytes": float(60 << 30),
        "gpu0.power_w": 130.5 if saving else 400.0 + second % 7,
        "gpu0.energy_j": 1e6 + 400.0 * second,
        "rank0.step": float(second // 2),
        "rank0.phase": CHECKPOINT if saving else TRAIN,
        "host.cpu": 0.25,
        "host.network_rx_bytes": 1000.0 * second,
    }


def row(columns: list[str], values: dict[str, float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([values.get(c, np.nan) for c in columns])


def fill(
    writer: Writer, segment_header: Header, start: int, stop: int, values: Values = working, flush: int = 10
) -> None:
    """Write one sample per second, slow ones every ten seconds, with a flush every ``flush`` s."""
    for s in range(start, stop):
        writer.fast(s, row(segment_header.fast, values(s)))
        if s % 10 == 0:
            writer.slow(s, row(segment_header.slow, values(s)))
        if flush and s % flush == flush - 1:
            writer.flush()


def record(
    node: Path,
    seconds: int,
    *,
    segment_header: Header | None = None,
    values: Values = working,
    end: bool = True,
    flush: int = 10,
) -> Path:
    """Write a segment and return its folder; without ``end``, as left by a kill after the last flush."""
    segment_header = segment_header or header()
    writer = Writer(node)
    writer.begin(segment_header)
    fill(writer, segment_header, 0, seconds, values, flush)
    writer.flush()
    folder = writer.segment
    assert folder is not None
    if end:
        writer.end(float(seconds))
        writer.close()
    return folder
