"""Utilization in equal steps over the job's window, from roll-ups where the job is long and from samples where short."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clustertrain.telemetry import fields
from clustertrain.telemetry.histogram import Column
from clustertrain.telemetry.parts import Part
from clustertrain.telemetry.rollup import LEVELS
from clustertrain.telemetry.summary import Timeline, Window

STEPS = 160  # as many as the widest terminal shows


def timeline_of(of: Sequence[tuple[Part, str]], window: Window) -> Timeline:
    """Args: parts, each with the GPU's device in it (``gpu0``)."""
    if window.start is None or window.end is None:
        return Timeline(1.0, [])
    step = max((window.end - window.start) / STEPS, 1.0)
    count = int((window.end - window.start) / step + 1e-6) + 1
    number, total = np.zeros(count), np.zeros(count)
    for part, device in of:
        t, mean, weight = _points(part, fields.column(device, "utilization"), step)
        at = np.clip(((t - window.start) / step).astype(int), 0, count - 1)
        number += np.bincount(at, weights=weight, minlength=count)
        total += np.bincount(at, weights=weight * mean, minlength=count)
    means = [round(float(s / n), 4) if n else None for s, n in zip(total, number, strict=True)]
    return Timeline(round(step, 3), means)


def level(step_s: float) -> int | None:
    """The coarsest roll-up that still tells steps of ``step_s`` apart; None: only the samples do."""
    return max((one for one in LEVELS if one <= step_s), default=None)


def _points(part: Part, column: str, step_s: float) -> tuple[Column, Column, Column]:
    """Times, values and how many samples each stands for."""
    nothing = np.empty(0)
    if part.segment is None or column not in part.segment.header.fast:
        return nothing, nothing, nothing
    coarse = level(step_s)
    if coarse is None:
        frame = part.segment.samples(fields.FAST, (column,), since=part.since)
        t, mean = frame.t, frame.values[column]
        weight = np.ones(len(t))
    else:
        rollup = part.segment.rollup(coarse, (column,))
        t, mean, weight = rollup.t + coarse / 2, rollup.mean[:, 0], rollup.count[:, 0]
    there = np.isfinite(mean) & (t >= (part.since or 0.0))
    return t[there], mean[there], weight[there]
