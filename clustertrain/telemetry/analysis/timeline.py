"""Utilization in equal steps over the job's window, from roll-ups for long jobs, else from samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clustertrain.telemetry import fields
from clustertrain.telemetry.analysis.node_records import NodeRecord
from clustertrain.telemetry.report_schema import Timeline, TimeWindow
from clustertrain.telemetry.store.histogram import Column
from clustertrain.telemetry.store.rollup import LEVELS, Table

MAX_STEPS = 160  # as many as the widest terminal shows


def build_timelines(records: Sequence[NodeRecord], window: TimeWindow) -> dict[tuple[str, str], Timeline]:
    """Return the timelines by node and UUID."""
    if window.start is None or window.end is None:
        return {}
    step = max((window.end - window.start) / MAX_STEPS, 1.0)
    count = int((window.end - window.start) / step + 1e-6) + 1
    sums: dict[tuple[str, str], tuple[Column, Column]] = {}
    for record in records:
        t, values, weights = _utilization_points(record, step)
        bins = np.clip(((t - window.start) / step).astype(int), 0, count - 1)
        for i, gpu in enumerate(record.gpus):
            sample_count, total = sums.setdefault((record.node, gpu.uuid), (np.zeros(count), np.zeros(count)))
            if len(t):
                present = np.isfinite(values[:, i])
                weight = np.where(present, weights[:, i], 0.0)
                sample_count += np.bincount(bins, weights=weight, minlength=count)
                total += np.bincount(bins, weights=weight * np.where(present, values[:, i], 0.0), minlength=count)
    return {key: _timeline(step, number, total) for key, (number, total) in sums.items()}


def _timeline(step: float, sample_count: Column, total: Column) -> Timeline:
    means = [round(s / n, 4) if n else None for s, n in zip(total.tolist(), sample_count.tolist(), strict=True)]
    return Timeline(round(step, 3), means)


def coarsest_level(step_s: float) -> int | None:
    """Return the coarsest roll-up that resolves steps of ``step_s``; None if only samples do."""
    return max((one for one in LEVELS if one <= step_s), default=None)


def _utilization_points(record: NodeRecord, step_s: float) -> tuple[Column, Table, Table]:
    """Return times [n], and utilization and number of samples by GPU [n, GPUs]."""
    columns = [fields.column_name(f"gpu{i}", "utilization") for i in range(len(record.gpus))]
    if record.segment is None or not columns or record.nvml_error is not None:
        return np.empty(0), np.empty((0, len(columns))), np.empty((0, len(columns)))
    rollup_s = coarsest_level(step_s)
    if rollup_s is None:
        frame = record.segment.samples(fields.FAST, columns, since=record.since)
        missing = np.full(len(frame), np.nan)  # for a damaged column
        values = np.column_stack([frame.values.get(c, missing) for c in columns])
        return frame.t, values, np.ones(values.shape)
    rollup = record.segment.rollup(rollup_s, columns)
    t = rollup.t + rollup_s / 2
    keep = t >= (record.since or 0.0)
    mean, count = np.full((len(rollup), len(columns)), np.nan), np.zeros((len(rollup), len(columns)))
    indices = [columns.index(c) for c in rollup.columns]
    mean[:, indices], count[:, indices] = rollup.mean, rollup.count
    return t[keep], mean[keep], count[keep]
