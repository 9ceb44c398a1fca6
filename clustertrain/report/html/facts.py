"""The page's static content: header, meters, goodput, cells of the GPU table."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from clustertrain.durations import format_duration, format_step_time
from clustertrain.plan.layout import pluralize
from clustertrain.printable import printable
from clustertrain.report import insights, status, terminal
from clustertrain.report.gpu_table import busy_stats, mean_known, memory_ratio, stat_mean
from clustertrain.report.html.notes import Linker, Piece
from clustertrain.report.terminal import UNICODE
from clustertrain.run.state import FAILED
from clustertrain.run.usage.goodput import TIME_CATEGORIES, Goodput
from clustertrain.telemetry import findings
from clustertrain.telemetry.findings import LOW_UTILIZATION
from clustertrain.telemetry.insights.context import SHORT_S
from clustertrain.telemetry.insights.cost import WASTED_SHARE
from clustertrain.telemetry.insights.memory import NEARLY_FULL_SHARE
from clustertrain.telemetry.insights.utilization import VERY_LOW_UTILIZATION
from clustertrain.telemetry.report_schema import GpuSummary, Stats, Summary, Waste

LOW_COVERAGE = 0.9  # of the expected samples
LOW_GOODPUT = 0.7  # of the wall time


class Meter(msgspec.Struct, frozen=True):
    """A labeled bar; without a bar if ``ratio`` is None."""

    label: str
    ratio: float | None
    value: str
    text: str
    tone: str | None = None
    """``critical`` or ``warning`` if it is bad."""
    problem: str = ""
    """What is bad about it."""
    gpu: int | None = None
    """Index of the GPU that is the problem."""


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

    state_tone: str
    """The color of the state's badge: ``good``, ``active``, ``warning``, ``critical`` or ``neutral``."""
    verdict: list[Piece]
    verdict_tone: str
    rows: list[tuple[str, str | TimeSpan]]
    meters: list[Meter]
    goodput: list[LedgerPart]
    goodput_ratio: float | None


class TimeSpan(msgspec.Struct, frozen=True):
    """Two times, UTC epoch s."""

    start: float
    end: float


def build_summary(summary: Summary) -> PageSummary:
    ratio = summary.goodput.ratio if summary.goodput and summary.goodput.wall_s > 0 else None
    severities = {i.severity for i in summary.insights}
    good = "warning" if summary.state == FAILED or insights.is_unrecorded(summary.insights) else "good"
    verdict_tone = next((s for s in ("critical", "warning") if s in severities), good)
    return PageSummary(
        state_tone=_STATE_TONES.get(summary.state or "", "critical"),
        verdict=_verdict(summary),
        verdict_tone=verdict_tone,
        rows=_header_rows(summary),
        meters=_meters(summary),
        goodput=[] if summary.watched else _ledger_parts(summary.goodput),
        goodput_ratio=ratio,
    )


def _verdict(summary: Summary) -> list[Piece]:
    """Return the terminal's verdict."""
    if not summary.insights and not summary.hosts:
        return []
    worst = summary.insights[0] if summary.insights else None  # the most severe comes first
    linker = Linker(summary.gpus)
    gpu = linker.find(worst.node, worst.uuid, worst.rank) if worst is not None else None
    return linker.split(insights.verdict(summary.insights, has_failed=summary.state == FAILED).plain, gpu)


# As in the terminal: clustertrain.report.status.STATE_STYLES.
_TONE_OF_STYLE = {"green": "good", "cyan": "active", "yellow": "warning", "magenta": "neutral"}
_STATE_TONES = {state: _TONE_OF_STYLE[style] for state, style in status.STATE_STYLES.items()}


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
}


def _header_rows(summary: Summary) -> list[tuple[str, str | TimeSpan]]:
    jobs = list(dict.fromkeys(a.job_id for a in summary.attempts if a.job_id))
    names = ", ".join(sorted({g.name for g in summary.gpus if g.name}))
    nodes = {h.node for h in summary.hosts} | {g.node for g in summary.gpus}
    allocation = f"{pluralize(len(nodes), 'node')}, {pluralize(len(summary.gpus), 'GPU')} allocated"
    rows: list[tuple[str, str | TimeSpan]] = [
        ("Failed", printable(summary.failure_reason or "")),
        ("Job", ", ".join(jobs) or summary.job_id or ""),
        ("User", summary.user or ""),
        ("Where", allocation + (f" ({names})" if names else "")),
    ]
    start, end = summary.window.start, summary.window.end
    if start is not None and end is not None:
        rows += [("Recorded", TimeSpan(start, end)), ("Duration", format_duration(end - start))]
    rows += [("Attempts", str(len(summary.attempts))), ("Layout", summary.layout or "")]
    return [(k, v) for k, v in rows if v] + _training_rows(summary)


def _training_rows(summary: Summary) -> list[tuple[str, str | TimeSpan]]:
    rows: list[tuple[str, str | TimeSpan]] = []
    training = summary.training
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
            rows.append(("Energy per token", findings.format_joules(training.joules_per_token)))
    elif summary.watched:
        rows.append(("Training", status.WATCHED_STEPS))
    return rows


def _meters(summary: Summary) -> list[Meter]:
    meters = [_utilization_meter(summary.gpus), _memory_meter(summary.gpus)] if summary.gpus else []
    if summary.training is not None and summary.training.mfu is not None:
        meters.append(Meter("MFU", summary.training.mfu, f"{summary.training.mfu:.1%}", "model FLOPs utilization"))
    if summary.goodput is not None and summary.goodput.ratio is not None and summary.goodput.wall_s > 0:
        ratio = summary.goodput.ratio
        tone = "warning" if ratio < LOW_GOODPUT and summary.goodput.wall_s >= SHORT_S else None
        text = f"productive share of {format_duration(summary.goodput.wall_s)}"
        meters.append(Meter("Goodput", ratio, format_percent(ratio), text, tone))
    if not summary.watched and summary.waste is not None and summary.waste.gpu_hours:
        meters.append(_waste_meter(summary.waste))
    if summary.coverage is not None:
        tone = "warning" if summary.coverage < LOW_COVERAGE else None
        meters.append(Meter("Coverage", summary.coverage, f"{summary.coverage:.1%}", "of the expected samples", tone))
    return [*meters, *_power_meter(summary.gpus)]


def _utilization_meter(gpus: Sequence[GpuSummary]) -> Meter:
    """Return the mean over the GPUs; one GPU that is nearly idle makes it bad, whatever the mean."""
    use = {i: stats for i, g in enumerate(gpus) if (stats := busy_stats(g)) is not None}
    mean = mean_known([stats.mean for stats in use.values()])
    text = f"{sum(stats.max > 0 for stats in use.values()):,} of {len(use):,} GPUs used" if use else "no metrics"
    if 0 < len(use) < len(gpus):
        text += f", {len(gpus) - len(use):,} unknown"
    idle = [i for i, stats in use.items() if stats.mean < VERY_LOW_UTILIZATION]
    meter = Meter("GPU utilization", mean, format_percent(mean), text)
    if idle:
        others = f" and {len(idle) - 1:,} more" if len(idle) > 1 else ""
        problem = f"{gpu_label(gpus[idle[0]])}{others} below {VERY_LOW_UTILIZATION:.0%}"
        return msgspec.structs.replace(meter, tone="critical", problem=problem, gpu=idle[0])
    low = mean is not None and mean < LOW_UTILIZATION
    return msgspec.structs.replace(meter, tone="warning") if low else meter


def _memory_meter(gpus: Sequence[GpuSummary]) -> Meter:
    ratios = {i: ratio for i, g in enumerate(gpus) if (ratio := memory_ratio(g)) is not None}
    mean = mean_known(list(ratios.values()))
    meter = Meter("GPU memory", mean, format_percent(mean), "peak, mean over GPUs")
    fullest = max(ratios, key=lambda i: ratios[i], default=None)
    if fullest is None or ratios[fullest] < NEARLY_FULL_SHARE:
        return meter
    problem = f"{gpu_label(gpus[fullest])} at {ratios[fullest]:.0%}"
    return msgspec.structs.replace(meter, tone="warning", problem=problem, gpu=fullest)


def _waste_meter(waste: Waste) -> Meter:
    share = waste.wasted_gpu_hours / waste.gpu_hours
    tone = "warning" if share >= WASTED_SHARE else None
    text = f"{waste.wasted_gpu_hours:,.2f} of {waste.gpu_hours:,.2f} GPU-hours trained nothing"
    return Meter("Wasted", share, f"{share:.0%}", text, tone)


def _power_meter(gpus: Sequence[GpuSummary]) -> list[Meter]:
    mean_power_w = mean_known([stat_mean(g.power_w) for g in gpus])
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
