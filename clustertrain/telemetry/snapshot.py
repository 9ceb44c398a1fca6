"""The newest value of every column of a node, as those who watch the sampler get it: alerts, exporter."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from clustertrain.telemetry.store.writer import GpuFacts


class Snapshot(msgspec.Struct, frozen=True):
    """``t`` UTC epoch s, ``mono`` monotonic s; ``values`` by column (``gpu0.utilization``, :mod:`.fields`), NaN where
    missing. What is read every 10 s keeps its value in between. ``gpus[i]`` is the device ``gpu<i>``.
    ``cpu_allocated``: processors of the job here, where that is known."""

    t: float
    mono: float
    node: str
    gpus: list[GpuFacts]
    ranks: list[int]
    values: Mapping[str, float]
    cpu_allocated: int | None = None
