"""The words and figures of the page that need no script: header, meters, goodput, cells of the GPU table."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from clustertrain.report import insights, status, terminal
from clustertrain.report.terminal import UNICODE
from clustertrain.run.goodput import PARTS, Goodput
from clustertrain.telemetry.report_schema import GpuSummary, Stats, Summary


class Meter(msgspec.Struct, frozen=True):
    """``ratio`` None: not known."""

    label: str
    ratio: float | None
    value: str
    text: str


class Part(msgspec.Struct, frozen=True):
    """One part of the ledger's bar, in per cent of its width."""

    name: str
    key: str
    at: float
    width: float
    duration: str


class Facts(msgspec.Struct, frozen=True):
    rows: list[tuple[str, str]]
    meters: list[Meter]
    goodput: list[Part]
    goodput_ratio: float | None


def of(summary: Summary) -> Facts:
    ratio = summary.goodput.ratio if summary.goodput and summary.goodput.wall_s > 0 else None
    return Facts(_rows(summary), _meters(summary), _parts(summary.goodput), ratio)


def label(gpu: GpuSummary) -> str:
    return f"{gpu.node}:{gpu.index}" if gpu.index is not None else f"{gpu.node} {short(gpu.uuid)}"


def short(uuid: str) -> str:
    return uuid if len(uuid) <= 16 else uuid[:12] + "…"


def ranks(gpu: GpuSummary) -> str:
    return ",".join(map(str, gpu.ranks))


def moment(t: float | None) -> str:
    """In UTC, as the page may be read anywhere."""
    if t is None:
        return "–"
    try:
        return datetime.datetime.fromtimestamp(t, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return f"{t:.0f} s"


def percent(ratio: float | None) -> str:
    return terminal.percent(ratio, UNICODE)


def number(value: float | None, places: int = 0) -> str:
    return "–" if value is None else f"{value:,.{places}f}"


def stat(stats: Stats | None, name: str) -> float | None:
    return None if stats is None else getattr(stats, name)


def energy(joules: float | None) -> str:
    return terminal.energy(joules, UNICODE)


FILTERS: dict[str, Callable[..., Any]] = {
    "moment": moment,
    "percent": percent,
    "number": number,
    "stat": stat,
    "energy": energy,
    "duration": terminal.duration,
    "ranks": ranks,
    "unsaid": insights.unsaid,
}


def _rows(summary: Summary) -> list[tuple[str, str]]:
    jobs = list(dict.fromkeys(a.job_id for a in summary.attempts if a.job_id))
    rows = [("Run", summary.run), ("Job", ", ".join(jobs) or summary.job_id or "")]
    rows += [("User", summary.user or ""), ("State", summary.state or "")]
    names = ", ".join(sorted({g.name for g in summary.gpus if g.name}))
    nodes = {h.node for h in summary.hosts} | {g.node for g in summary.gpus}
    where = f"{_count(len(nodes), 'node')}, {_count(len(summary.gpus), 'GPU')} allocated"
    rows.append(("Where", where + (f" ({names})" if names else "")))
    start, end = summary.window.start, summary.window.end
    if start is not None and end is not None:
        rows.append(("Recorded", f"{moment(start)} – {moment(end)}, {terminal.duration(end - start)}"))
    rows.append(("Attempts", str(len(summary.attempts))))
    rows.append(("Layout", summary.layout or ""))
    return [(k, v) for k, v in rows if v] + _training(summary)


def _training(summary: Summary) -> list[tuple[str, str]]:
    rows, t = [], summary.training
    if t is not None:
        step = f", {terminal.brief_time(t.step_s.p50)} each (median)" if t.step_s else ""
        rows.append(("Steps", f"{t.steps:,}{step}"))
        if t.tokens_per_s is not None:
            a_gpu = f", {t.tokens_per_s_per_gpu:,.0f} a GPU" if t.tokens_per_s_per_gpu is not None else ""
            rows.append(("Tokens/s", f"{t.tokens_per_s:,.0f}{a_gpu}"))
        if t.loss is not None:
            rows.append(("Loss", f"{t.loss:.4g}"))
        if t.joules_per_token is not None:
            rows.append(("Energy a token", f"{t.joules_per_token:.3g} J"))
    if summary.waste is not None:
        w = summary.waste
        share = f" ({w.wasted_gpu_hours / w.gpu_hours:.0%})" if w.gpu_hours else ""
        rows.append(("GPU-hours", f"{w.gpu_hours:,.2f}, of them {w.wasted_gpu_hours:,.2f}{share} trained nothing"))
    return rows


def _count(amount: int, thing: str) -> str:
    return f"{amount:,} {thing}{'s' * (amount != 1)}"


def _average(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def memory_ratio(gpu: GpuSummary) -> float | None:
    used = stat(gpu.memory_used_gib, "max")
    return None if used is None or not gpu.memory_total_gib else used / gpu.memory_total_gib


def _meters(summary: Summary) -> list[Meter]:
    gpus = summary.gpus
    found = []
    if gpus:
        use = _average([stat(g.utilization, "mean") for g in gpus])
        known = [g for g in gpus if g.utilization]
        used = sum(1 for g in known if g.utilization and g.utilization.max > 0)
        about = f"{used} of {len(known)} GPUs used" if known else "no figures"
        if 0 < len(known) < len(summary.gpus):
            about += f", {len(summary.gpus) - len(known)} not known"
        found.append(Meter("GPU utilization", use, percent(use), about))
        memory = _average([memory_ratio(g) for g in gpus])
        found.append(Meter("GPU memory", memory, percent(memory), "at its peak, mean of the GPUs"))
    if summary.training is not None and summary.training.mfu is not None:
        found.append(Meter("MFU", summary.training.mfu, f"{summary.training.mfu:.1%}", "model FLOPs utilization"))
    if summary.goodput is not None and summary.goodput.ratio is not None and summary.goodput.wall_s > 0:
        found.append(Meter("Goodput", summary.goodput.ratio, percent(summary.goodput.ratio), "productive of wall time"))
    if summary.coverage is not None:
        found.append(Meter("Coverage", summary.coverage, f"{summary.coverage:.1%}", "of the expected samples"))
    return [*found, *_power(gpus)]


def _power(gpus: Sequence[GpuSummary]) -> list[Meter]:
    watts = _average([stat(g.power_w, "mean") for g in gpus])
    joules = [g.energy_j for g in gpus if g.energy_j is not None]
    if watts is None and not joules:
        return []
    missing = f", known of {len(joules)} of {len(gpus)} GPUs" if 0 < len(joules) < len(gpus) else ""
    text = f"{energy(sum(joules))} in all{missing}" if joules else "energy not known"
    return [Meter("Power of a GPU", None, f"{number(watts)} W", text)]


def _parts(ledger: Goodput | None) -> list[Part]:
    if ledger is None or ledger.wall_s <= 0:
        return []
    found, at = [], 0.0
    for key in PARTS:
        seconds = getattr(ledger, key)
        if seconds > 0:
            width = 100 * seconds / ledger.wall_s
            name, length = status.PART_WORDS[key], terminal.duration(seconds)
            found.append(Part(name, key.removesuffix("_s"), round(at, 3), round(width, 3), length))
            at += width
    return found
