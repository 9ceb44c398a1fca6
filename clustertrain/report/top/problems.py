"""GPUs and ranks that differ from the others at the moment: what ``clustertrain top`` shows first.

Alerts and insights judge minutes; these judge the newest sample, so that a person sees where to look.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec

from clustertrain.report.top.view import GpuRow
from clustertrain.telemetry.findings import CRITICAL, HIGH_DATA_WAIT, HOT_C, SEVERITY_ORDER, WARNING, gpu_label

IDLE, OTHERS_BUSY = 0.05, 0.3  # utilization of an idle GPU, and of the others
FULL_MEMORY = 0.97
SLOW_CLOCK = 0.9  # of the median clock of the others
MAX_SINGLE = 3  # rows with the same kinds of problems that get a line each


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with one row."""

    row: GpuRow
    severity: str
    kinds: tuple[str, ...]
    """What is wrong, without figures; rows with the same kinds can share a line."""
    text: str
    """The same with figures."""


class _Finding(msgspec.Struct, frozen=True):
    severity: str
    kind: str
    text: str


class _Peers(msgspec.Struct, frozen=True):
    """Medians over all rows; None if no row has the value."""

    utilization: float | None
    clock_mhz: float | None
    data_wait: float | None


def find_problems(rows: Sequence[GpuRow]) -> list[Problem]:
    """Return the rows with problems, the worst first."""
    peers = _Peers(
        _median(r.utilization for r in rows),
        _median(r.sm_clock_mhz for r in rows if (r.utilization or 0.0) >= OTHERS_BUSY),
        _median(r.data_wait_share for r in rows),
    )
    problems = []
    for row in rows:
        findings = [found for rule in _RULES if (found := rule(row, peers)) is not None]
        if findings:
            findings.sort(key=lambda f: SEVERITY_ORDER[f.severity])
            problems.append(
                Problem(
                    row=row,
                    severity=findings[0].severity,
                    kinds=tuple(f.kind for f in findings),
                    text=", ".join(f.text for f in findings),
                )
            )
    return sorted(problems, key=lambda p: (SEVERITY_ORDER[p.severity], -len(p.kinds)))


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def is_lost(row: GpuRow) -> bool:
    """Return whether nothing is known about a GPU. A MIG slice has no utilization, but memory in use."""
    known = (row.utilization, row.sm_activity, row.memory_used_gib, row.power_w, row.temperature_c)
    return row.uuid is not None and all(value is None for value in known)


def is_late(row: GpuRow) -> bool:
    # Ranks that train together differ by one step between two samples.
    return row.behind is not None and row.behind > 1


def is_hot(row: GpuRow) -> bool:
    return row.temperature_c is not None and row.temperature_c >= HOT_C


def is_full(row: GpuRow) -> bool:
    used, total = row.memory_used_gib, row.memory_total_gib
    return used is not None and bool(total) and used >= FULL_MEMORY * (total or 0.0)


def _lost(row: GpuRow, peers: _Peers) -> _Finding | None:
    # Without any GPU's metrics, as without a driver, no GPU differs from the others.
    if not is_lost(row) or (row.reason is None and peers.utilization is None):
        return None
    text = row.reason or "no metrics"
    return _Finding(CRITICAL if peers.utilization is not None else WARNING, text, text)


def _idle(row: GpuRow, peers: _Peers) -> _Finding | None:
    if row.utilization is None or row.utilization >= IDLE or (peers.utilization or 0.0) < OTHERS_BUSY:
        return None
    cause = ", no rank uses it" if row.rank is None else ""
    return _Finding(CRITICAL, "idle", f"idle at {row.utilization:.0%}, the median is {peers.utilization:.0%}{cause}")


def _throttled(row: GpuRow, peers: _Peers) -> _Finding | None:
    cause = "heat" if "thermal" in row.throttled else "the hardware" if "hardware" in row.throttled else ""
    if not cause:
        return None
    clock = "" if row.sm_clock_mhz is None else f" to {row.sm_clock_mhz:,.0f} MHz"
    temperature = "" if row.temperature_c is None else f" at {row.temperature_c:.0f} °C"
    return _Finding(WARNING, f"throttled by {cause}", f"throttled by {cause}{clock}{temperature}")


def _hot(row: GpuRow, peers: _Peers) -> _Finding | None:
    if not is_hot(row) or "thermal" in row.throttled:
        return None
    return _Finding(WARNING, "hot", f"hot: {row.temperature_c:.0f} °C")


def _slow_clock(row: GpuRow, peers: _Peers) -> _Finding | None:
    clock, usual = row.sm_clock_mhz, peers.clock_mhz
    is_busy = (row.utilization or 0.0) >= OTHERS_BUSY
    if clock is None or usual is None or clock >= SLOW_CLOCK * usual or not is_busy or set(row.throttled) - {"power"}:
        return None
    return _Finding(WARNING, "a low clock", f"clock at {clock:,.0f} MHz, the median is {usual:,.0f}")


def _full(row: GpuRow, peers: _Peers) -> _Finding | None:
    if not is_full(row):
        return None
    text = f"memory full: {row.memory_used_gib or 0.0:.1f} of {row.memory_total_gib or 0.0:.1f} GiB"
    return _Finding(WARNING, "memory full", text)


def _late(row: GpuRow, peers: _Peers) -> _Finding | None:
    return _Finding(WARNING, "steps behind", f"{row.behind} steps behind") if is_late(row) else None


def _waiting(row: GpuRow, peers: _Peers) -> _Finding | None:
    share, usual = row.data_wait_share, peers.data_wait
    if share is None or usual is None or share < usual + HIGH_DATA_WAIT:
        return None
    return _Finding(WARNING, "waiting for data", f"waits for data {share:.0%} of the time, the median is {usual:.0%}")


_RULES: tuple[Callable[[GpuRow, _Peers], _Finding | None], ...] = (
    _lost, _idle, _throttled, _hot, _slow_clock, _full, _late, _waiting,
)  # fmt: skip


def format_row_name(row: GpuRow) -> str:
    """Return ``GPU 1 of node-01 (rank 5)``, or ``rank 5 on node-01`` without a GPU."""
    if row.uuid is None:
        return f"rank {row.rank} on {row.node}"
    return f"{gpu_label(row.gpu, row.uuid)} of {row.node}" + ("" if row.rank is None else f" (rank {row.rank})")


def format_problems(problems: Sequence[Problem]) -> list[tuple[str, str]]:
    """Return (severity, line) of all problems, worst first; several rows with the same problems share a line."""
    groups: dict[tuple[str, ...], list[Problem]] = {}
    for problem in problems:
        groups.setdefault(problem.kinds, []).append(problem)
    lines = []
    for kinds, group in groups.items():
        if len(group) <= MAX_SINGLE:
            lines += [(p.severity, f"{format_row_name(p.row)}: {p.text}") for p in group]
        else:
            name = format_row_name(group[0].row)
            noun = "GPUs" if group[0].row.uuid is not None else "ranks"
            lines.append((group[0].severity, f"{name} and {len(group) - 1} more {noun}: {', '.join(kinds)}"))
    return lines
