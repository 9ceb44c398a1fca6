"""Newest value of every column of a node, for the sampler's observers (alerts, exporter)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from clustertrain.telemetry.store.writer import GpuFacts


class Snapshot(msgspec.Struct, frozen=True):
    """One sample of a node. Slow fields keep their value between readings."""

    t: float  # UTC epoch s
    mono: float  # monotonic s
    node: str
    gpus: list[GpuFacts]  # ``gpus[i]`` is the device ``gpu<i>``
    ranks: list[int]
    values: Mapping[str, float]
    """Value by column (``gpu0.utilization``, see :mod:`.fields`); NaN if missing."""
    cpu_allocated: int | None = None
    """Processors of the job on this node; None if unknown."""
