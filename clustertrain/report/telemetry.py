"""The report of ``clustertrain telemetry``: verdict, header, meters, training, GPUs, hosts, timeline, goodput, notes.

With a critical insight, the insights precede the tables.
"""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from clustertrain.durations import format_duration, format_step_time
from clustertrain.printable import printable
from clustertrain.report import gpu_table, insights, status, terminal, timeline
from clustertrain.report.gpu_table import busy_stats, mean_known, memory_ratio, stat_max, stat_mean
from clustertrain.report.terminal import Glyphs
from clustertrain.run.state import FAILED
from clustertrain.run.usage.goodput import Goodput
from clustertrain.telemetry import findings
from clustertrain.telemetry.report_schema import HostSummary, Summary, TrainingSummary


def show(summary: Summary, console: Console, show_all: bool = False, *, brief: bool = False) -> None:
    """Print the report; ``show_all`` includes every GPU, host, event and insight; ``brief`` leaves out the tables."""
    terminal.emit(console, *render(summary, console.width, terminal.glyphs(console), show_all, brief=brief))


def render(
    summary: Summary,
    width: int,
    signs: Glyphs = terminal.UNICODE,
    show_all: bool = False,
    *,
    brief: bool = False,
) -> list[RenderableType]:
    """Return the report's parts in order, for a terminal of ``width`` columns."""
    notes = insights.render(summary.insights, show_all) if summary.insights else []
    is_urgent = brief or any(insight.severity == "critical" for insight in summary.insights)
    tables: list[list[RenderableType]] = [
        gpu_table.render_gpus(summary, width, signs, show_all) if summary.gpus else [],
        gpu_table.render_hosts(summary, width, signs, show_all) if summary.hosts else [],
        timeline.render(summary, width, signs, show_all),
        [status.goodput_table(summary.goodput, signs, width)] if _has_ledger(summary) and summary.goodput else [],
    ]
    verdict = insights.verdict(summary.insights, has_failed=summary.state == FAILED)
    blocks: list[list[RenderableType]] = [
        [verdict] if summary.insights or summary.hosts else [],
        [_header(summary, signs)],
        [part for part in (_meters(summary, width, signs), _power_line(summary, signs)) if part is not None],
        notes if is_urgent else [],
        *([] if brief else tables),
        [] if is_urgent else notes,
    ]
    return [part for block in blocks if block for part in ("", *block)][1:]


def _has_ledger(summary: Summary) -> bool:
    """Return whether it is known where the time went. A watched job reports no steps."""
    return summary.goodput is not None and summary.goodput.wall_s > 0 and not summary.watched


def _header(summary: Summary, signs: Glyphs) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")

    def row(title: str, *parts: str | Text | None) -> None:
        table.add_row(Text(title, style="bold"), Text(signs.dot).join(Text.assemble(p) for p in parts if p))

    jobs = list(dict.fromkeys(a.job_id for a in summary.attempts if a.job_id)) or [summary.job_id or ""]
    job = f"job {', '.join(jobs)}" if jobs[0] else None
    user = f"by {summary.user}" if summary.user else None
    state = status.styled_state(summary.state) if summary.state else None
    row("Run", summary.run, state, _pluralize(len(summary.attempts), "attempt"), job, user)
    if summary.failure_reason:
        row("Failed", Text(printable(summary.failure_reason), style="red"))
    models = ", ".join(sorted({g.name for g in summary.gpus if g.name}))
    gpus = f"{_pluralize(len(summary.gpus), 'GPU')} allocated" if summary.gpus else "no GPU metrics"
    row("Where", _pluralize(len(summary.hosts), "node"), gpus, models, summary.layout and f"layout {summary.layout}")
    start, end = summary.window.start, summary.window.end
    if start is not None and end is not None:
        recorded_s = sum(_duration_s(a.window.start, a.window.end) for a in summary.attempts)
        recorded_text = None if end - start - recorded_s < 1 else f"recorded {format_duration(recorded_s)}"
        row("When", f"{terminal.format_timestamp(start)} + {format_duration(end - start)}", recorded_text)
    if summary.coverage is not None:
        samples = [(g.samples, g.samples_expected) for g in summary.gpus] or [
            (h.samples, h.samples_expected) for h in summary.hosts
        ]
        totals = f" ({sum(n for n, _ in samples):,} of {sum(n for _, n in samples):,})"
        text = f"{summary.coverage:.1%} of the expected samples{totals}"
        row("Coverage", Text(text, style="" if summary.coverage >= 0.9 else "bold yellow"))
    if summary.training is not None:
        row("Training", *_training(summary.training))
    elif summary.watched:
        row("Training", status.WATCHED_STEPS)
    for title, text in status.contract_rows(summary.contract):
        row(title.capitalize(), text)
    return table


def _pluralize(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _duration_s(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else end - start


def _training(training: TrainingSummary) -> list[str]:
    parts = [_pluralize(training.steps, "step")]
    if training.step_s is not None:
        p95 = format_step_time(training.step_s.p95)
        parts.append(f"{format_step_time(training.step_s.p50)} per step (p95 {p95})")
    if training.tokens_per_s_per_gpu is not None:
        parts.append(f"{training.tokens_per_s_per_gpu:,.0f} tokens/s per GPU")
    elif training.tokens_per_s is not None:
        parts.append(f"{training.tokens_per_s:,.0f} tokens/s")
    elif training.samples_per_s is not None:
        parts.append(f"{training.samples_per_s:,.1f} samples/s")
    if training.mfu is not None:
        parts.append(f"MFU {training.mfu:.1%}")
    if training.joules_per_token is not None:
        parts.append(f"{findings.format_joules(training.joules_per_token)} per token")
    if training.data_wait_share is not None:
        parts.append(f"{training.data_wait_share:.0%} waiting on data")
    if training.loss is not None:
        parts.append(f"loss {training.loss:.4g}")
    return parts


MeterRow = tuple[str, float | None, str, str]  # title, ratio, style, remark


def _meters(summary: Summary, width: int, signs: Glyphs) -> Table | None:
    rows = [*_gpu_rows(summary), *_host_rows(summary.hosts), *_goodput_row(summary.goodput)]
    if not rows:
        return None
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    meter_width = min(50, width - 43)
    for title, ratio, style, remark in rows:
        percent = Text(terminal.format_percent(ratio, signs), style=f"bold {style}".strip())
        table.add_row(Text(title, style="bold"), terminal.meter(ratio, meter_width, style, signs), percent, remark)
    return table


def _gpu_rows(summary: Summary) -> list[MeterRow]:
    if not summary.gpus:
        return []
    utilization = mean_known([stat_mean(busy_stats(g)) for g in summary.gpus])
    num_used = sum(1 for g in summary.gpus if (stats := busy_stats(g)) is not None and stats.max > 0)
    num_known = sum(1 for g in summary.gpus if busy_stats(g) is not None)
    coverage = f"{num_used:,} of {num_known:,} used" if num_known else "unknown"
    if 0 < num_known < len(summary.gpus):
        coverage += f", {len(summary.gpus) - num_known:,} unknown"
    rows = [("GPU utilization", utilization, _utilization_style(utilization), coverage)]
    training = mean_known([g.phases["train"].utilization for g in summary.gpus if "train" in g.phases])
    if training is not None:
        rows.append(("while training", training, _utilization_style(training), ""))
    rows.append(("GPU memory", mean_known([memory_ratio(g) for g in summary.gpus]), "cyan", "peak"))
    return rows


def _utilization_style(ratio: float | None) -> str:
    return terminal.utilization_style(ratio) if ratio is not None else ""


def _host_rows(hosts: list[HostSummary]) -> list[MeterRow]:
    """Return CPU and memory of the job relative to its allocation if known on all hosts, else of the whole nodes.

    The titles state which, because the host table shows both.
    """
    if not hosts:
        return []
    rows: list[MeterRow] = []
    cores = [
        (h.processes.cpu_cores.mean, h.cpu_allocated)
        for h in hosts
        if h.processes is not None and h.processes.cpu_cores is not None and h.cpu_allocated
    ]
    if len(cores) == len(hosts):
        allocated = sum(int(n) for _, n in cores)
        rows.append(("Job's CPU", sum(u for u, _ in cores) / allocated, "cyan", f"of {_pluralize(allocated, 'core')}"))
    else:
        rows.append(("Nodes' CPU", mean_known([stat_mean(h.cpu) for h in hosts]), "cyan", "of whole nodes"))
    memory = [
        (h.processes.rss_gib.max, h.memory_allocated_gib)
        for h in hosts
        if h.processes is not None and h.memory_allocated_gib
    ]
    if len(memory) == len(hosts):
        total = sum(n for _, n in memory)
        rows.append(("Job's memory", sum(u for u, _ in memory) / total, "cyan", f"of {total:,.0f} GiB"))
    else:
        used_gib = [stat_max(h.memory_used_gib) for h in hosts]
        totals = [h.memory_total_gib for h in hosts]
        shares = [u / total_gib for u, total_gib in zip(used_gib, totals, strict=True) if u is not None and total_gib]
        rows.append(("Nodes' memory", mean_known(shares), "cyan", "of whole nodes"))
    return rows


def _goodput_row(goodput: Goodput | None) -> list[MeterRow]:
    if goodput is None or goodput.ratio is None or goodput.wall_s <= 0:
        return []
    remark = f"of {format_duration(goodput.wall_s)}"
    return [("Goodput", goodput.ratio, "green", remark)]


def _power_line(summary: Summary, signs: Glyphs) -> Text | None:
    if not summary.gpus:
        return None
    mean_power_w = mean_known([stat_mean(g.power_w) for g in summary.gpus])
    energies_j = [g.energy_j for g in summary.gpus if g.energy_j is not None]
    total = terminal.format_energy(sum(energies_j) if energies_j else None, signs)
    coverage = f" on {len(energies_j)} of {len(summary.gpus)}" if 0 < len(energies_j) < len(summary.gpus) else ""
    text = f"{terminal.format_number(mean_power_w, signs)} W per GPU on average{signs.dot}{total}{coverage}"
    return Text.assemble(("GPU power        ", "bold"), text)
