"""Utilization in equal steps over the window of the job, from roll-ups where it is long, else from samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clustertrain.telemetry import fields
from clustertrain.telemetry.analysis.node_records import Part
from clustertrain.telemetry.report_schema import Timeline, Window
from clustertrain.telemetry.store.histogram import Column
from clustertrain.telemetry.store.rollup import LEVELS, Table

STEPS = 160  # as many as the widest terminal shows


def timelines(parts: Sequence[Part], window: Window) -> dict[tuple[str, str], Timeline]:
    """By node and UUID."""
    if window.start is None or window.end is None:
        return {}
    step = max((window.end - window.start) / STEPS, 1.0)
    count = int((window.end - window.start) / step + 1e-6) + 1
    sums: dict[tuple[str, str], tuple[Column, Column]] = {}
    for part in parts:
        t, values, weights = _points(part, step)
        at = np.clip(((t - window.start) / step).astype(int), 0, count - 1)
        for i, gpu in enumerate(part.gpus):
            number, total = sums.setdefault((part.node, gpu.uuid), (np.zeros(count), np.zeros(count)))
            if len(t):
                there = np.isfinite(values[:, i])
                weight = np.where(there, weights[:, i], 0.0)
                number += np.bincount(at, weights=weight, minlength=count)
                total += np.bincount(at, weights=weight * np.where(there, values[:, i], 0.0), minlength=count)
    return {key: _timeline(step, number, total) for key, (number, total) in sums.items()}


def _timeline(step: float, number: Column, total: Column) -> Timeline:
    means = [round(s / n, 4) if n else None for s, n in zip(total.tolist(), number.tolist(), strict=True)]
    return Timeline(round(step, 3), means)


def level(step_s: float) -> int | None:
    """The coarsest roll-up that still tells steps of ``step_s`` apart; None: only the samples do."""
    return max((one for one in LEVELS if one <= step_s), default=None)


def _points(part: Part, step_s: float) -> tuple[Column, Table, Table]:
    """When, and for each GPU of the part its utilization and how many samples that stands for."""
    columns = [fields.column(f"gpu{i}", "utilization") for i in range(len(part.gpus))]
    if part.segment is None or not columns or part.no_nvml is not None:
        return np.empty(0), np.empty((0, len(columns))), np.empty((0, len(columns)))
    coarse = level(step_s)
    if coarse is None:
        frame = part.segment.samples(fields.FAST, columns, since=part.since)
        missing = np.full(len(frame), np.nan)  # of a column that is damaged
        values = np.column_stack([frame.values.get(c, missing) for c in columns])
        return frame.t, values, np.ones(values.shape)
    rollup = part.segment.rollup(coarse, columns)
    t = rollup.t + coarse / 2
    keep = t >= (part.since or 0.0)
    mean, count = np.full((len(rollup), len(columns)), np.nan), np.zeros((len(rollup), len(columns)))
    at = [columns.index(c) for c in rollup.columns]
    mean[:, at], count[:, at] = rollup.mean, rollup.count
    return t[keep], mean[keep], count[keep]
