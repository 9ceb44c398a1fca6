"""The page's charts and timeline: title, unit and scale of each curve, events and phases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from clustertrain.durations import format_step_time
from clustertrain.report import timeline
from clustertrain.telemetry.analysis.curves import Curves
from clustertrain.telemetry.analysis.resample import CurveTable
from clustertrain.telemetry.findings import LOW_UTILIZATION
from clustertrain.telemetry.insights.utilization import VERY_LOW_UTILIZATION
from clustertrain.telemetry.report_schema import Summary, TimelineEvent

_GIB = 1 / (1 << 30)
_MAX_EVENTS = 1500
_MAX_SPANS = 3000


class Chart(msgspec.Struct, frozen=True):
    """One chart."""

    table: str
    """The tables: ``gpus`` (with ``nodes`` and ``overall``), ``hosts``, ``ranks`` or ``training``."""
    curve: str
    """The column of the tables."""
    title: str
    unit: str
    scale: float
    """Factor from the recorded values to ``unit``."""
    span: str
    """The y axis: ``percent`` is 0-100, ``zero`` starts at 0, ``data`` fits the values."""
    places: int
    """Decimals."""
    low_limits: tuple[float, float] | None = None
    """Values below which the heat map shows a GPU as nearly idle, and as not busy."""


_USE_LIMITS = (100 * VERY_LOW_UTILIZATION, 100 * LOW_UTILIZATION)
CHARTS = (
    Chart("training", "step_s", "Step time", "s", 1, "zero", 3),
    Chart("training", "tokens_per_s", "Tokens per second", "tokens/s", 1, "zero", 0),
    Chart("training", "data_wait_s", "Data wait per step", "s", 1, "zero", 3),
    Chart("training", "loss", "Loss", "", 1, "data", 4),
    Chart("training", "validation_loss", "Validation loss (latest)", "", 1, "data", 4),
    Chart("training", "validation_accuracy", "Validation accuracy (latest)", "", 1, "data", 4),
    Chart("training", "grad_norm", "Gradient norm", "", 1, "zero", 3),
    Chart("training", "noise_scale", "Gradient noise scale", "samples", 1, "zero", 1),
    Chart("training", "lr", "Learning rate", "", 1, "zero", 7),
    Chart("ranks", "forward_s", "Forward passes per step, spread of the ranks", "s", 1, "zero", 3),
    Chart("ranks", "data_wait_s", "Data wait per step, spread of the ranks", "s", 1, "zero", 3),
    Chart("gpus", "utilization", "GPU utilization", "%", 100, "percent", 0, _USE_LIMITS),
    Chart("gpus", "sm_activity", "SM activity", "%", 100, "percent", 0),
    Chart("gpus", "tensor_activity", "Tensor core activity", "%", 100, "percent", 0),
    Chart("gpus", "dram_activity", "Memory bandwidth in use", "%", 100, "percent", 0),
    Chart("gpus", "memory_used_bytes", "GPU memory", "GiB", _GIB, "zero", 1),
    Chart("gpus", "power_w", "Power", "W", 1, "zero", 0),
    Chart("gpus", "temperature_c", "Temperature", "°C", 1, "data", 0),
    Chart("gpus", "sm_clock_mhz", "SM clock", "MHz", 1, "zero", 0),
    Chart("gpus", "throttled", "Slowed by heat or hardware", "%", 100, "percent", 0),
    Chart("gpus", "pcie_bytes_per_s", "PCIe, both directions", "B/s", 1, "zero", 2),
    Chart("gpus", "nvlink_bytes_per_s", "NVLink, both directions", "B/s", 1, "zero", 2),
    Chart("hosts", "cpu", "Host CPU", "%", 100, "percent", 0),
    Chart("hosts", "memory_used_bytes", "Host memory", "GiB", _GIB, "zero", 1),
    Chart("hosts", "job_memory_bytes", "Memory of the job's processes", "GiB", _GIB, "zero", 1),
    Chart("hosts", "network_bytes_per_s", "Network, both directions", "B/s", 1, "zero", 3),
    Chart("hosts", "infiniband_bytes_per_s", "InfiniBand, both directions", "B/s", 1, "zero", 3),
    Chart("hosts", "disk_bytes_per_s", "Disk, both directions", "B/s", 1, "zero", 3),
)


def scales(table: str) -> dict[str, float]:
    return {c.curve: c.scale for c in CHARTS if c.table == table}


def charts_with_data(curves: Curves) -> list[Chart]:
    """Return the charts whose curve was recorded."""
    tables: dict[str, CurveTable] = {
        "gpus": curves.overall,
        "hosts": curves.hosts,
        "training": curves.training,
        "ranks": curves.ranks,
    }
    return [c for c in CHARTS if c.curve in tables[c.table].values]


# The timeline's lanes from top to bottom with their sign, so that color is never the only meaning.
_LANES = {
    "Faults": ("cross", ("xid", "ecc", "gpu_lost", "gpu_back", "telemetry_failed", "save_abandoned")),
    "Alerts": ("diamond", ("alert",)),
    "Stops": ("square", ("signal", "stop_agreed", "stopped", "requeued", "ended")),
    "Starts": ("up", ("started", "restored", "first_step")),
    "Checkpoints": ("bar", ("checkpoint",)),
    "Evaluations": ("bar", ("evaluation",)),
}
_OTHER = "Other"
_ROUTINE = ("Checkpoints", "Evaluations", "Starts")


class LaneEvent(msgspec.Struct, frozen=True):
    """An event in its lane of the timeline."""

    mark: TimelineEvent
    attempt: int
    lane: str
    sign: str
    prominent: bool
    """Whether it is also drawn across every chart."""


def lane_events(summary: Summary) -> tuple[list[LaneEvent], str | None]:
    """Return the events by time, and a note if some are left out; routine events are thinned out first."""
    events = [_assign_lane(m, a.n) for a in summary.attempts for m in a.events]
    events.sort(key=lambda p: p.mark.t)
    if len(events) <= _MAX_EVENTS:
        return events, None
    prominent = [p for p in events if p.lane not in _ROUTINE]
    routine = [p for p in events if p.lane in _ROUTINE]
    selected = _decimate(prominent, _MAX_EVENTS) + _decimate(
        routine, max(_MAX_EVENTS - len(prominent), _MAX_EVENTS // 3)
    )
    selected.sort(key=lambda p: p.mark.t)
    return selected, f"{len(selected)} of {len(events)} events are shown; frequent kinds are thinned out."


def _decimate(marks: list[LaneEvent], max_events: int) -> list[LaneEvent]:
    return marks if len(marks) <= max_events else [marks[i * len(marks) // max_events] for i in range(max_events)]


def _assign_lane(mark: TimelineEvent, attempt: int) -> LaneEvent:
    for lane, (sign, kinds) in _LANES.items():
        if mark.kind in kinds:
            return LaneEvent(mark, attempt, lane, sign, lane in ("Faults", "Alerts"))
    return LaneEvent(mark, attempt, _OTHER, "dot", False)


def used_lanes(marks: Iterable[LaneEvent]) -> list[str]:
    """Return the lanes with at least one event, from top to bottom."""
    present = {p.lane for p in marks}
    return [lane for lane in (*_LANES, _OTHER) if lane in present]


def events_to_json(marks: Iterable[LaneEvent]) -> list[dict[str, Any]]:
    return [
        {"t": p.mark.t, "end": p.mark.end, "kind": p.mark.kind, "text": p.mark.text, "lane": p.lane, "sign": p.sign,
         "prominent": p.prominent, "attempt": p.attempt}
        for p in marks
    ]  # fmt: skip


PhaseSpan = tuple[float, float, str]  # (start, end, phase)


def phase_spans(summary: Summary) -> tuple[list[PhaseSpan], str | None]:
    """Return the phases of the run, and a note if the shortest ones are left out."""
    spans = timeline.phase_spans(summary.attempts)
    if len(spans) <= _MAX_SPANS:
        return spans, None
    # A dropped span is merged into the one before it, which often merges with the next too: half the excess suffices.
    lengths = sorted(end - start for start, end, _ in spans)
    min_s = lengths[(len(spans) - _MAX_SPANS) // 2]
    merged: list[PhaseSpan] = []
    for start, end, phase in spans:
        is_adjacent = bool(merged) and merged[-1][1] == start
        if is_adjacent and (end - start <= min_s or merged[-1][2] == phase):
            merged[-1] = (merged[-1][0], end, merged[-1][2])
        else:
            merged.append((start, end, phase))
    return merged, f"Phases of {format_step_time(min_s)} or less are left out."
