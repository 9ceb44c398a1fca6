"""What the page draws: title, unit and scale of each curve, and the marks of the timeline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from clustertrain.report import terminal, timeline
from clustertrain.telemetry.analysis.curves import Curves
from clustertrain.telemetry.analysis.resample import Table
from clustertrain.telemetry.report_schema import Mark, Summary

_GIB = 1 / (1 << 30)
_GB = 1e-9
_MOST_MARKS = 1500
_MOST_STRETCHES = 3000


class Chart(msgspec.Struct, frozen=True):
    """``curve`` of the tables named ``of`` (``gpus`` with ``nodes`` and ``overall``; ``hosts``; ``training``), shown
    times ``scale``. ``span``: ``percent`` is 0-100, ``zero`` begins at 0, ``data`` is as wide as the values."""

    of: str
    curve: str
    title: str
    unit: str
    scale: float
    span: str
    places: int


CHARTS = (
    Chart("training", "step_s", "Step time", "s", 1, "zero", 3),
    Chart("training", "tokens_per_s", "Tokens per second", "tokens/s", 1, "zero", 0),
    Chart("training", "data_wait_s", "Wait for data, of a step", "s", 1, "zero", 3),
    Chart("training", "loss", "Loss", "", 1, "data", 4),
    Chart("training", "grad_norm", "Gradient norm", "", 1, "zero", 3),
    Chart("gpus", "utilization", "GPU utilization", "%", 100, "percent", 0),
    Chart("gpus", "sm_activity", "SM activity", "%", 100, "percent", 0),
    Chart("gpus", "tensor_activity", "Tensor core activity", "%", 100, "percent", 0),
    Chart("gpus", "dram_activity", "Memory bandwidth in use", "%", 100, "percent", 0),
    Chart("gpus", "memory_used_bytes", "GPU memory", "GiB", _GIB, "zero", 1),
    Chart("gpus", "power_w", "Power", "W", 1, "zero", 0),
    Chart("gpus", "temperature_c", "Temperature", "°C", 1, "data", 0),
    Chart("gpus", "sm_clock_mhz", "SM clock", "MHz", 1, "zero", 0),
    Chart("gpus", "pcie_bytes_per_s", "PCIe, both directions", "GB/s", _GB, "zero", 2),
    Chart("gpus", "nvlink_bytes_per_s", "NVLink, both directions", "GB/s", _GB, "zero", 2),
    Chart("hosts", "cpu", "Host processors", "%", 100, "percent", 0),
    Chart("hosts", "memory_used_bytes", "Host memory", "GiB", _GIB, "zero", 1),
    Chart("hosts", "job_memory_bytes", "Memory of the job's processes", "GiB", _GIB, "zero", 1),
    Chart("hosts", "network_bytes_per_s", "Network, both directions", "GB/s", _GB, "zero", 3),
    Chart("hosts", "infiniband_bytes_per_s", "InfiniBand, both directions", "GB/s", _GB, "zero", 3),
    Chart("hosts", "disk_bytes_per_s", "Disk, both directions", "GB/s", _GB, "zero", 3),
)


def scales(of: str) -> dict[str, float]:
    return {c.curve: c.scale for c in CHARTS if c.of == of}


def drawn(curves: Curves) -> list[Chart]:
    """The charts that have something to show."""
    tables: dict[str, Table] = {"gpus": curves.overall, "hosts": curves.hosts, "training": curves.training}
    return [c for c in CHARTS if c.curve in tables[c.of].values]


# The timeline's lanes from top to bottom, and the sign that each draws: meaning is not by colour alone.
_LANES = {
    "Faults": ("cross", ("xid", "ecc", "gpu_lost", "gpu_back", "telemetry_failed", "save_given_up")),
    "Alerts": ("diamond", ("alert",)),
    "Stops": ("square", ("signal", "stop_agreed", "stopped", "requeued", "ended")),
    "Restores": ("up", ("started", "restored", "first_step")),
    "Checkpoints": ("bar", ("checkpoint",)),
    "Evaluations": ("bar", ("evaluation",)),
}
_OTHER = "Other"
_ROUTINE = ("Checkpoints", "Evaluations", "Restores")


class Placed(msgspec.Struct, frozen=True):
    """A mark in its lane. ``loud`` ones are drawn across every chart."""

    mark: Mark
    attempt: int
    lane: str
    sign: str
    loud: bool


def placed(summary: Summary) -> tuple[list[Placed], str | None]:
    """All marks by time, and in words what was left out: of very many only every so many routine ones are kept."""
    found = [_place(m, a.n) for a in summary.attempts for m in a.events]
    found.sort(key=lambda p: p.mark.t)
    if len(found) <= _MOST_MARKS:
        return found, None
    loud = [p for p in found if p.lane not in _ROUTINE]
    routine = [p for p in found if p.lane in _ROUTINE]
    kept = _thinned(loud, _MOST_MARKS) + _thinned(routine, max(_MOST_MARKS - len(loud), _MOST_MARKS // 3))
    kept.sort(key=lambda p: p.mark.t)
    return kept, f"{len(kept)} of {len(found)} events are shown: of frequent ones only every so many."


def _thinned(marks: list[Placed], most: int) -> list[Placed]:
    return marks if len(marks) <= most else [marks[i * len(marks) // most] for i in range(most)]


def _place(mark: Mark, attempt: int) -> Placed:
    for lane, (sign, kinds) in _LANES.items():
        if mark.kind in kinds:
            return Placed(mark, attempt, lane, sign, lane in ("Faults", "Alerts"))
    return Placed(mark, attempt, _OTHER, "dot", False)


def lanes(marks: Iterable[Placed]) -> list[str]:
    """Those that have a mark, from top to bottom."""
    present = {p.lane for p in marks}
    return [lane for lane in (*_LANES, _OTHER) if lane in present]


def for_page(marks: Iterable[Placed]) -> list[dict[str, Any]]:
    return [
        {"t": p.mark.t, "end": p.mark.end, "kind": p.mark.kind, "text": p.mark.text, "lane": p.lane, "sign": p.sign,
         "loud": p.loud, "attempt": p.attempt}
        for p in marks
    ]  # fmt: skip


Stretch = tuple[float, float, str]  # from, to, phase


def phases(summary: Summary) -> tuple[list[Stretch], str | None]:
    """What the run was in, and in words what was left out: of very many stretches the shortest."""
    every = timeline.stretches(summary.attempts)
    if len(every) <= _MOST_STRETCHES:
        return every, None
    # One that goes is laid to the one before it, which then often meets its like: half as many have to go.
    lengths = sorted(end - start for start, end, _ in every)
    least_s = lengths[(len(every) - _MOST_STRETCHES) // 2]
    kept: list[Stretch] = []
    for start, end, phase in every:
        joins = bool(kept) and kept[-1][1] == start
        if joins and (end - start <= least_s or kept[-1][2] == phase):
            kept[-1] = (kept[-1][0], end, kept[-1][2])
        else:
            kept.append((start, end, phase))
    return kept, f"Phases of {terminal.brief_time(least_s)} or less are left out."
