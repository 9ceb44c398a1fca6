"""The page's static content: header, meters, goodput, cells of the GPU table."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from clustertrain.durations import format_duration, format_step_time
from clustertrain.report import insights, status, terminal
from clustertrain.report.terminal import UNICODE
from clustertrain.run.usage.goodput import TIME_CATEGORIES, Goodput
from clustertrain.telemetry.report_schema import GpuSummary, Stats, Summary


class Meter(msgspec.Struct, frozen=True):
    """A labeled bar; without a bar if ``ratio`` is None."""

    label: str
    ratio: float | None
    value: str
    text: str


class LedgerPart(msgspec.Struct, frozen=True):
    """One part of the goodput bar."""

    name: str
    key: str
    at: float
    """Left edge in percent of the bar."""
    width: float
    """Width in percent of the bar."""
    duration: str


class PageSummary(msgspec.Struct, frozen=True):
    """The static content above the curves."""

    rows: list[tuple[str, str]]
    meters: list[Meter]
    goodput: list[LedgerPart]
    goodput_ratio: float | None


def build_summary(summary: Summary) -> PageSummary:
    ratio = summary.goodput.ratio if summary.goodput and summary.goodput.wall_s > 0 else None
    return PageSummary(_header_rows(summary), _meters(summary), _ledger_parts(summary.goodput), ratio)


def gpu_label(gpu: GpuSummary) -> str:
    return f"{gpu.node}:{gpu.index}" if gpu.index is not None else f"{gpu.node} {shorten_uuid(gpu.uuid)}"


def shorten_uuid(uuid: str) -> str:
    return uuid if len(uuid) <= 16 else uuid[:12] + "…"


def format_ranks(gpu: GpuSummary) -> str:
    return ",".join(map(str, gpu.ranks))


def format_timestamp(t: float | None) -> str:
    """Format a time in UTC, because the page may be read in any time zone."""
    if t is None:
        return "–"
    try:
        return datetime.datetime.fromtimestamp(t, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return f"{t:.0f} s"


def format_percent(ratio: float | None) -> str:
    return terminal.format_percent(ratio, UNICODE)


def format_number(value: float | None, decimals: int = 0) -> str:
    return "–" if value is None else f"{value:,.{decimals}f}"


def get_stat(stats: Stats | None, name: str) -> float | None:
    return None if stats is None else getattr(stats, name)


def format_energy(joules: float | None) -> str:
    return terminal.format_energy(joules, UNICODE)


FILTERS: dict[str, Callable[..., Any]] = {
    "timestamp": format_timestamp,
    "percent": format_percent,
    "number": format_number,
    "stat": get_stat,
    "energy": format_energy,
    "duration": format_duration,
    "ranks": format_ranks,
    "unmentioned_ids": insights.unmentioned_ids,
}


def _header_rows(summary: Summary) -> list[tuple[str, str]]:
    jobs = list(dict.fromkeys(a.job_id for a in summary.attempts if a.job_id))
    rows = [("Run", summary.run), ("Job", ", ".join(jobs) or summary.job_id or "")]
    rows += [("User", summary.user or ""), ("State", summary.state or "")]
    names = ", ".join(sorted({g.name for g in summary.gpus if g.name}))
    nodes = {h.node for h in summary.hosts} | {g.node for g in summary.gpus}
    allocation = f"{_pluralize(len(nodes), 'node')}, {_pluralize(len(summary.gpus), 'GPU')} allocated"
    rows.append(("Where", allocation + (f" ({names})" if names else "")))
    start, end = summary.window.start, summary.window.end
    if start is not None and end is not None:
        rows.append(
            (
                "Recorded",
                f"{format_timestamp(start)} – {format_timestamp(end)}, {format_duration(end - start)}",
            )
        )
    rows.append(("Attempts", str(len(summary.attempts))))
    rows.append(("Layout", summary.layout or ""))
    return [(k, v) for k, v in rows if v] + _training_rows(summary)


def _training_rows(summary: Summary) -> list[tuple[str, str]]:
    rows, training = [], summary.training
    if training is not None:
        median_text = f", {format_step_time(training.step_s.p50)} each (median)" if training.step_s else ""
        rows.append(("Steps", f"{training.steps:,}{median_text}"))
        if training.tokens_per_s is not None:
            per_gpu = (
                f", {training.tokens_per_s_per_gpu:,.0f} per GPU" if training.tokens_per_s_per_gpu is not None else ""
            )
            rows.append(("Tokens/s", f"{training.tokens_per_s:,.0f}{per_gpu}"))
        if training.loss is not None:
            rows.append(("Loss", f"{training.loss:.4g}"))
        if training.joules_per_token is not None:
            rows.append(("Energy per token", f"{training.joules_per_token:.3g} J"))
    if summary.waste is not None:
        waste = summary.waste
        share = f" ({waste.wasted_gpu_hours / waste.gpu_hours:.0%})" if waste.gpu_hours else ""
        rows.append(
            ("GPU-hours", f"{waste.gpu_hours:,.2f}, including {waste.wasted_gpu_hours:,.2f}{share} without training")
        )
    return rows


def _pluralize(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _mean_known(values: Sequence[float | None]) -> float | None:
    present = [v for v in values if v is not None]
    return sum(present) / len(present) if present else None


def memory_ratio(gpu: GpuSummary) -> float | None:
    used = get_stat(gpu.memory_used_gib, "max")
    return None if used is None or not gpu.memory_total_gib else used / gpu.memory_total_gib


def _meters(summary: Summary) -> list[Meter]:
    gpus = summary.gpus
    meters = []
    if gpus:
        utilization = _mean_known([get_stat(g.utilization, "mean") for g in gpus])
        measured = [g for g in gpus if g.utilization]
        num_used = sum(1 for g in measured if g.utilization and g.utilization.max > 0)
        coverage = f"{num_used} of {len(measured)} GPUs used" if measured else "no metrics"
        if 0 < len(measured) < len(summary.gpus):
            coverage += f", {len(summary.gpus) - len(measured)} unknown"
        meters.append(Meter("GPU utilization", utilization, format_percent(utilization), coverage))
        memory = _mean_known([memory_ratio(g) for g in gpus])
        meters.append(Meter("GPU memory", memory, format_percent(memory), "peak, mean over GPUs"))
    if summary.training is not None and summary.training.mfu is not None:
        meters.append(Meter("MFU", summary.training.mfu, f"{summary.training.mfu:.1%}", "model FLOPs utilization"))
    if summary.goodput is not None and summary.goodput.ratio is not None and summary.goodput.wall_s > 0:
        ratio = summary.goodput.ratio
        meters.append(Meter("Goodput", ratio, format_percent(ratio), "productive share of wall time"))
    if summary.coverage is not None:
        meters.append(Meter("Coverage", summary.coverage, f"{summary.coverage:.1%}", "of the expected samples"))
    return [*meters, *_power_meter(gpus)]


def _power_meter(gpus: Sequence[GpuSummary]) -> list[Meter]:
    mean_power_w = _mean_known([get_stat(g.power_w, "mean") for g in gpus])
    energies_j = [g.energy_j for g in gpus if g.energy_j is not None]
    if mean_power_w is None and not energies_j:
        return []
    coverage = f", known for {len(energies_j)} of {len(gpus)} GPUs" if 0 < len(energies_j) < len(gpus) else ""
    text = f"{format_energy(sum(energies_j))} in total{coverage}" if energies_j else "energy unknown"
    return [Meter("Power per GPU", None, f"{format_number(mean_power_w)} W", text)]


def _ledger_parts(ledger: Goodput | None) -> list[LedgerPart]:
    if ledger is None or ledger.wall_s <= 0:
        return []
    parts, offset = [], 0.0
    for key in TIME_CATEGORIES:
        seconds = getattr(ledger, key)
        if seconds > 0:
            width = 100 * seconds / ledger.wall_s
            name, duration = status.GOODPUT_LABELS[key], format_duration(seconds)
            parts.append(LedgerPart(name, key.removesuffix("_s"), round(offset, 3), round(width, 3), duration))
            offset += width
    return parts
