"""The table of GPUs of a page: the worst first, bad values marked. ``templates/parts/tables.js`` draws it too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from clustertrain.report.gpu_table import THROTTLED, busy_stats, find_severities, memory_ratio, stat_max, stat_mean
from clustertrain.report.html import facts
from clustertrain.telemetry.findings import LOW_UTILIZATION, SEVERITY_ORDER
from clustertrain.telemetry.insights.memory import NEARLY_FULL_SHARE
from clustertrain.telemetry.insights.utilization import VERY_LOW_UTILIZATION
from clustertrain.telemetry.report_schema import GpuSummary, Insight, Summary


class Column(msgspec.Struct, frozen=True):
    """A column and its title."""

    key: str
    title: str
    numeric: bool = True


class Cell(msgspec.Struct, frozen=True):
    """One cell; ``value`` sorts it."""

    text: str
    value: float | None = None
    bad: str | None = None
    """``critical`` or ``warning`` if the value is bad."""
    why: str | None = None


class Row(msgspec.Struct, frozen=True):
    """One GPU."""

    key: str
    """Node and UUID: the same UUID on two nodes is two rows."""
    gpu: int
    """Index into the summary's GPUs."""
    severity: str | None
    notes: str
    """What the insights found, in a few words."""
    cells: list[Cell]


class GpuTable(msgspec.Struct, frozen=True):
    """The table, the worst GPU first."""

    columns: list[Column]
    rows: list[Row]


def gpu_key(node: str, uuid: str) -> str:
    return f"{node} {uuid}"


def build_table(summary: Summary) -> GpuTable:
    """Return the table of all GPUs of the summary."""
    has_models = len({g.name for g in summary.gpus}) > 1
    columns = [c for c in _COLUMNS if has_models or c.key != "model"]
    severities = find_severities(summary)
    insights = _insights_by_gpu(summary.insights)
    rows = [
        _row(i, gpu, columns, severities.get((gpu.node, gpu.uuid)), insights[gpu.node, gpu.uuid])
        for i, gpu in enumerate(summary.gpus)
    ]
    return _without_empty_columns(GpuTable(columns, sorted(rows, key=_badness)))


def _without_empty_columns(table: GpuTable) -> GpuTable:
    """Leave out numbers that no GPU reports."""
    kept = [
        i
        for i, column in enumerate(table.columns)
        if not column.numeric or any(row.cells[i].value is not None for row in table.rows)
    ]
    rows = [msgspec.structs.replace(row, cells=[row.cells[i] for i in kept]) for row in table.rows]
    return GpuTable([table.columns[i] for i in kept], rows)


def _badness(row: Row) -> tuple[int, int, int, int]:
    bad = [cell.bad for cell in row.cells if cell.bad]
    order = SEVERITY_ORDER.get(row.severity or "", len(SEVERITY_ORDER))
    return order, -bad.count("critical"), -len(bad), row.gpu


def _insights_by_gpu(insights: Sequence[Insight]) -> Mapping[tuple[str, str], list[Insight]]:
    found: dict[tuple[str, str], list[Insight]] = defaultdict(list)
    for insight in insights:
        if insight.node is not None and insight.uuid is not None:
            found[insight.node, insight.uuid].append(insight)
    return found


def _row(i: int, gpu: GpuSummary, columns: Sequence[Column], severity: str | None, insights: Sequence[Insight]) -> Row:
    notes = ", ".join(dict.fromkeys(n.code.removeprefix("gpu_").replace("_", " ") for n in insights))
    cells = _cells(gpu)
    cells["notes"] = Cell(notes or "–")
    for insight in insights:
        for key in _CELLS_OF_INSIGHT.get(insight.code, ()):
            if cells[key].bad is None and insight.severity in ("critical", "warning"):
                cells[key] = msgspec.structs.replace(cells[key], bad=insight.severity, why=insight.text)
    return Row(gpu_key(gpu.node, gpu.uuid), i, severity, notes, [cells[c.key] for c in columns])


_COLUMNS = (
    Column("gpu", "GPU", numeric=False),
    Column("rank", "Rank"),
    Column("notes", "Findings", numeric=False),
    Column("mean", "Util. mean %"),
    Column("p5", "p5"),
    Column("p95", "p95"),
    Column("memory", "Memory max GiB"),
    Column("total", "of GiB"),
    Column("power", "Power W"),
    Column("temperature", "Temp. max °C"),
    Column("clock", "SM clock MHz"),
    Column("throttled", "Slowed %"),
    Column("energy", "Energy"),
    Column("samples", "Samples %"),
    Column("model", "Model", numeric=False),
    Column("uuid", "UUID", numeric=False),
)
# The cells that show what an insight on a GPU found.
_CELLS_OF_INSIGHT = {
    "gpu_unused": ("mean",),
    "imbalance": ("mean",),
    "throttled": ("clock", "temperature"),
    "slow_gpu": ("clock",),
    "power_capped": ("clock", "power"),
    "memory_nearly_full": ("memory",),
    "gpu_lost": ("samples",),
    "straggler": ("rank",),
    "straggler_data": ("rank",),
}


def _cells(gpu: GpuSummary) -> dict[str, Cell]:
    use = busy_stats(gpu)
    percent = {name: None if use is None else 100 * getattr(use, name) for name in ("mean", "p5", "p95")}
    cells = {name: _number(value) for name, value in percent.items()}
    if use is not None and use.mean < LOW_UTILIZATION:
        bad = "critical" if use.mean < VERY_LOW_UTILIZATION else "warning"
        limit = VERY_LOW_UTILIZATION if bad == "critical" else LOW_UTILIZATION
        why = "never used" if use.max == 0 else f"below {limit:.0%}"
        cells["mean"] = msgspec.structs.replace(cells["mean"], bad=bad, why=why)
    return {
        **cells,
        "gpu": Cell(facts.gpu_label(gpu)),
        "rank": Cell(facts.format_ranks(gpu) or "–", gpu.ranks[0] if gpu.ranks else None),
        "memory": _memory(gpu),
        "total": _number(gpu.memory_total_gib),
        "power": _number(stat_mean(gpu.power_w)),
        "temperature": _number(stat_max(gpu.temperature_c)),
        "clock": _number(stat_mean(gpu.sm_clock_mhz)),
        "throttled": _throttled(gpu),
        "energy": Cell(facts.format_energy(gpu.energy_j), gpu.energy_j),
        "samples": _samples(gpu),
        "model": Cell(gpu.name or "–"),
        "uuid": Cell(gpu.uuid),
    }


def _number(value: float | None, decimals: int = 0) -> Cell:
    return Cell(facts.format_number(value, decimals), value)


def _marked(cell: Cell, value: float | None, is_bad: Callable[[float], bool], why: str) -> Cell:
    if value is None or not is_bad(value):
        return cell
    return msgspec.structs.replace(cell, bad="warning", why=why)


def _memory(gpu: GpuSummary) -> Cell:
    cell = _number(stat_max(gpu.memory_used_gib), 1)
    return _marked(cell, memory_ratio(gpu), lambda ratio: ratio >= NEARLY_FULL_SHARE, "nearly full")


def _throttled(gpu: GpuSummary) -> Cell:
    """Return the share of the samples in which heat or the board lowered the clock."""
    shares = [s for s in (gpu.throttle_ratio.thermal, gpu.throttle_ratio.hardware) if s is not None]
    share = max(shares) if shares else None
    cell = _number(None if share is None else 100 * share)
    return _marked(cell, share, lambda s: s >= THROTTLED, "heat or the board lowered the clock")


def _samples(gpu: GpuSummary) -> Cell:
    share = gpu.samples / gpu.samples_expected if gpu.samples_expected else None
    cell = _number(None if share is None else 100 * share)
    return _marked(cell, share, lambda s: s < facts.LOW_COVERAGE, "samples are missing")
