"""Snapshots as passed to the sampler's observers."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from clustertrain import clock
from clustertrain.telemetry import fields
from clustertrain.telemetry.export.feed import Labels
from clustertrain.telemetry.snapshot import Snapshot
from clustertrain.telemetry.store.writer import GpuFacts

LABELS = Labels("demo-abcdef", "4711", 2, "node1")
GIB = 1 << 30


def gpu(number: int) -> GpuFacts:
    return GpuFacts(f"GPU-{number}", number, minor=number, name="H100", memory_total_bytes=80 * GIB, ranks=[8 + number])


def full(gpus: int = 2) -> dict[str, float]:
    """Return a value for every column of a node."""
    ranks = [8 + i for i in range(gpus)]
    columns = [*fields.column_names(gpus, ranks, fields.FAST), *fields.column_names(gpus, ranks, fields.SLOW)]
    return dict.fromkeys(columns, 0.5)


def snapshot(values: Mapping[str, float], *, gpus: int = 2, age_s: float = 0.0, mono: float | None = None) -> Snapshot:
    facts = [gpu(i) for i in range(gpus)]
    at = clock.monotonic() - age_s if mono is None else mono
    return Snapshot(clock.now() - age_s, at, LABELS.node, facts, [8 + i for i in range(gpus)], values)


def mig_slice(parent: str) -> GpuFacts:
    return msgspec.structs.replace(gpu(0), uuid="MIG-1", parent=parent)
