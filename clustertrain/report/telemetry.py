"""The per-job report of ``clustertrain telemetry``: header, meters, training, GPUs, hosts, timeline, goodput, notes."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from clustertrain.report import gpu_table, insights, status, terminal, timeline
from clustertrain.report.gpu_table import max_of, mean, mean_of, memory_ratio, use_of
from clustertrain.report.terminal import Glyphs
from clustertrain.run.goodput import Goodput
from clustertrain.telemetry.report_schema import HostSummary, Summary, TrainingSummary


def show(summary: Summary, console: Console, every: bool = False) -> None:
    """Print the report. ``every``: all GPUs, hosts, events and notes, however many there are."""
    terminal.emit(console, *render(summary, console.width, terminal.glyphs(console), every))


def render(summary: Summary, width: int, signs: Glyphs = terminal.UNICODE, every: bool = False) -> list[RenderableType]:
    """The report's parts in order, for a terminal of ``width`` columns."""
    blocks: list[list[RenderableType]] = [
        [_head(summary, signs)],
        [part for part in (_overall(summary, width, signs), _power(summary, signs)) if part is not None],
        gpu_table.gpus(summary, width, signs, every) if summary.gpus else [],
        gpu_table.hosts(summary, width, signs, every) if summary.hosts else [],
        timeline.render(summary, width, signs, every),
        [status.goodput(summary.goodput, signs)] if summary.goodput and summary.goodput.wall_s > 0 else [],
        insights.render(summary.notes, every) if summary.notes else [],
    ]
    return [part for block in blocks if block for part in ("", *block)][1:]


def _head(summary: Summary, signs: Glyphs) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")

    def row(title: str, *words: str | Text | None) -> None:
        table.add_row(Text(title, style="bold"), Text(signs.dot).join(Text.assemble(w) for w in words if w))

    jobs = list(dict.fromkeys(a.job_id for a in summary.attempts if a.job_id)) or [summary.job_id or ""]
    job = f"job {', '.join(jobs)}" if jobs[0] else None
    who = f"by {summary.user}" if summary.user else None
    state = status.styled(summary.state) if summary.state else None
    row("Run", summary.run, state, _count(len(summary.attempts), "attempt"), job, who)
    kinds = ", ".join(sorted({g.name for g in summary.gpus if g.name}))
    gpus = f"{_count(len(summary.gpus), 'GPU')} allocated" if summary.gpus else "no GPU figures"
    row("Where", _count(len(summary.hosts), "node"), gpus, kinds, summary.layout and f"layout {summary.layout}")
    start, end = summary.window.start, summary.window.end
    if start is not None and end is not None:
        up = sum(_length(a.window.start, a.window.end) for a in summary.attempts)
        pause = None if end - start - up < 1 else f"recorded {terminal.duration(up)}"
        row("When", f"{terminal.moment(start)} + {terminal.duration(end - start)}", pause)
    if summary.coverage is not None:
        counted = [(g.samples, g.expected) for g in summary.gpus] or [(h.samples, h.expected) for h in summary.hosts]
        of = f" ({sum(n for n, _ in counted):,} of {sum(n for _, n in counted):,})"
        text = f"{summary.coverage:.1%} of the expected samples{of}"
        row("Coverage", Text(text, style="" if summary.coverage >= 0.9 else "bold yellow"))
    if summary.training is not None:
        row("Training", *_training(summary.training))
    for title, words in status.contract_rows(summary.contract):
        row(title.capitalize(), words)
    return table


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"


def _length(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else end - start


def _training(t: TrainingSummary) -> list[str]:
    words = [_count(t.steps, "step")]
    if t.step_s is not None:
        p95 = terminal.brief_time(t.step_s.p95)
        words.append(f"{terminal.brief_time(t.step_s.p50)} a step (p95 {p95})")
    if t.tokens_per_s_per_gpu is not None:
        words.append(f"{t.tokens_per_s_per_gpu:,.0f} tokens/s a GPU")
    elif t.tokens_per_s is not None:
        words.append(f"{t.tokens_per_s:,.0f} tokens/s")
    elif t.samples_per_s is not None:
        words.append(f"{t.samples_per_s:,.1f} samples/s")
    if t.mfu is not None:
        words.append(f"MFU {t.mfu:.1%}")
    if t.joules_per_token is not None:
        words.append(f"{terminal.joules(t.joules_per_token)} a token")
    if t.data_wait_share is not None:
        words.append(f"{t.data_wait_share:.0%} waiting on data")
    if t.loss is not None:
        words.append(f"loss {t.loss:.4g}")
    return words


Row = tuple[str, float | None, str, str]  # title, ratio, style, remark


def _overall(summary: Summary, width: int, signs: Glyphs) -> Table | None:
    rows = [*_gpu_rows(summary), *_host_rows(summary.hosts), *_goodput_row(summary.goodput)]
    if not rows:
        return None
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    cells = min(50, width - 43)
    for title, ratio, style, remark in rows:
        percent = Text(terminal.percent(ratio, signs), style=f"bold {style}".strip())
        table.add_row(Text(title, style="bold"), terminal.meter(ratio, cells, style, signs), percent, remark)
    return table


def _gpu_rows(summary: Summary) -> list[Row]:
    if not summary.gpus:
        return []
    use = mean([mean_of(use_of(g)) for g in summary.gpus])
    used = sum(1 for g in summary.gpus if (u := use_of(g)) is not None and u.max > 0)
    known = sum(1 for g in summary.gpus if use_of(g) is not None)
    about = f"{used:,} of {known:,} used" if known else "not known"
    if 0 < known < len(summary.gpus):
        about += f", {len(summary.gpus) - known:,} not known"
    rows = [("GPU utilization", use, _grade(use), about)]
    training = mean([g.phases["train"].utilization for g in summary.gpus if "train" in g.phases])
    if training is not None:
        rows.append(("while training", training, _grade(training), ""))
    rows.append(("GPU memory", mean([memory_ratio(g) for g in summary.gpus]), "cyan", "at its peak"))
    return rows


def _grade(ratio: float | None) -> str:
    return terminal.grade(ratio) if ratio is not None else ""


def _host_rows(hosts: list[HostSummary]) -> list[Row]:
    """The job's own, of its allocation, where that is known on all hosts; else of whole nodes with all their users. The
    titles say which, as the table of hosts has both."""
    if not hosts:
        return []
    rows: list[Row] = []
    cores = [
        (h.processes.cpu_cores.mean, h.cpu_allocated)
        for h in hosts
        if h.processes is not None and h.processes.cpu_cores is not None and h.cpu_allocated
    ]
    if len(cores) == len(hosts):
        given = sum(int(n) for _, n in cores)
        rows.append(("Job's CPU", sum(u for u, _ in cores) / given, "cyan", f"of {_count(given, 'core')}"))
    else:
        rows.append(("Nodes' CPU", mean([mean_of(h.cpu) for h in hosts]), "cyan", "of whole nodes"))
    memory = [
        (h.processes.rss_gib.max, h.memory_allocated_gib)
        for h in hosts
        if h.processes is not None and h.memory_allocated_gib
    ]
    if len(memory) == len(hosts):
        total = sum(n for _, n in memory)
        rows.append(("Job's memory", sum(u for u, _ in memory) / total, "cyan", f"of {total:,.0f} GiB"))
    else:
        ratios = [max_of(h.memory_used_gib) for h in hosts]
        totals = [h.memory_total_gib for h in hosts]
        shares = [u / t for u, t in zip(ratios, totals, strict=True) if u is not None and t]
        rows.append(("Nodes' memory", mean(shares), "cyan", "of whole nodes"))
    return rows


def _goodput_row(goodput: Goodput | None) -> list[Row]:
    if goodput is None or goodput.ratio is None or goodput.wall_s <= 0:
        return []
    remark = f"of {terminal.duration(goodput.wall_s)}"
    return [("Goodput", goodput.ratio, "green", remark)]


def _power(summary: Summary, signs: Glyphs) -> Text | None:
    if not summary.gpus:
        return None
    watts = mean([mean_of(g.power_w) for g in summary.gpus])
    joules_of = [g.energy_j for g in summary.gpus if g.energy_j is not None]
    total = terminal.energy(sum(joules_of) if joules_of else None, signs)
    missing = f" on {len(joules_of)} of {len(summary.gpus)}" if 0 < len(joules_of) < len(summary.gpus) else ""
    text = f"{terminal.number(watts, signs)} W a GPU on average{signs.dot}{total}{missing}"
    return Text.assemble(("GPU power        ", "bold"), text)
