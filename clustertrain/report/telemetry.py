"""The per-job report of ``clustertrain telemetry``: header, overall meters, GPUs by node, hosts, notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from clustertrain.report import terminal
from clustertrain.report.terminal import Glyphs
from clustertrain.telemetry.summary import GpuSummary, HostSummary, Note, Stats, Summary

WIDE = 120  # columns from which the table shows everything
_SIGNS = {"critical": ("!!", "bold red"), "warning": ("! ", "bold yellow"), "info": ("i ", "bold cyan")}
_MOST_ALIKE = 3  # notes of one kind that are spelt out; the rest is counted


def show(summary: Summary, console: Console) -> None:
    """Print the report."""
    terminal.emit(console, *render(summary, console.width, terminal.glyphs(console)))


def render(summary: Summary, width: int, signs: Glyphs = terminal.UNICODE) -> list[RenderableType]:
    """The report's parts in order, for a terminal of ``width`` columns."""
    parts: list[RenderableType] = [_head(summary, signs)]
    if summary.gpus:
        parts += [
            "",
            _overall(summary, width, signs),
            _power(summary.gpus, signs),
            "",
            _gpu_table(summary, width, signs),
        ]
    if summary.hosts:
        parts += ["", _host_table(summary.hosts, width, signs)]
    if summary.notes:
        parts += ["", *_notes(summary.notes)]
    return parts


def _head(summary: Summary, signs: Glyphs) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    jobs = list(dict.fromkeys(a.job_id for a in summary.attempts if a.job_id))
    about = _count(len(summary.attempts), "attempt") + (f"{signs.dot}job {', '.join(jobs)}" if jobs else "")
    table.add_row(Text("Run", style="bold"), f"{summary.run}{signs.dot}{about}")
    names = sorted({g.name for g in summary.gpus if g.name})
    on = f"{_count(len(summary.hosts), 'node')}{signs.dot}"
    gpus = f"{_count(len(summary.gpus), 'GPU')} allocated" if summary.gpus else "no GPU figures"
    table.add_row(Text("Where", style="bold"), on + gpus + (f"{signs.dot}{', '.join(names)}" if names else ""))
    start, end = summary.window.start, summary.window.end
    if start is not None and end is not None:
        up = sum(_length(a.window.start, a.window.end) for a in summary.attempts)
        pause = "" if end - start - up < 1 else f"{signs.dot}recorded {terminal.duration(up)}"
        when = f"{terminal.moment(start)} + {terminal.duration(end - start)}{pause}"
        table.add_row(Text("When", style="bold"), when)
    if summary.coverage is not None:
        text = f"{summary.coverage:.1%} of the expected samples"
        style = "" if summary.coverage >= 0.9 else "bold yellow"
        table.add_row(Text("Coverage", style="bold"), Text(text, style=style))
    return table


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _length(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else end - start


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _mean_of(stats: Stats | None) -> float | None:
    return None if stats is None else stats.mean


def _max_of(stats: Stats | None) -> float | None:
    return None if stats is None else stats.max


def _memory_ratio(gpu: GpuSummary) -> float | None:
    used = _max_of(gpu.memory_used_gib)
    return None if used is None or not gpu.memory_total_gib else used / gpu.memory_total_gib


def _overall(summary: Summary, width: int, signs: Glyphs) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    cells = min(50, width - 39)
    use = _mean([_mean_of(g.utilization) for g in summary.gpus])
    used = sum(1 for g in summary.gpus if g.utilization and g.utilization.max > 0)
    known = sum(1 for g in summary.gpus if g.utilization)
    style = terminal.grade(use) if use is not None else ""
    meter, percent = terminal.meter, terminal.percent
    table.add_row(
        Text("GPU utilization", style="bold"),
        meter(use, cells, style, signs),
        Text(percent(use, signs), style=f"bold {style}".strip()),
        f"{used} of {known} used" if known else "not known",
    )
    memory = _mean([_memory_ratio(g) for g in summary.gpus])
    table.add_row(
        Text("GPU memory", style="bold"),
        meter(memory, cells, "cyan", signs),
        Text(percent(memory, signs), style="bold"),
        "at its peak",
    )
    return table


def _power(gpus: Sequence[GpuSummary], signs: Glyphs) -> Text:
    watts = _mean([_mean_of(g.power_w) for g in gpus])
    joules = [g.energy_j for g in gpus if g.energy_j is not None]
    total = terminal.energy(sum(joules) if joules else None, signs)
    missing = f" on {len(joules)} of {len(gpus)}" if 0 < len(joules) < len(gpus) else ""
    text = f"{terminal.number(watts, signs)} W a GPU on average{signs.dot}{total}{missing}"
    return Text.assemble(("GPU power        ", "bold"), text)


def _gpu_table(summary: Summary, width: int, signs: Glyphs) -> Table:
    wide = width >= WIDE
    names = max((len(h.node) for h in summary.hosts), default=4)
    spark = max(10, min(60, width - (77 if wide else 46) - min(names, 24)))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    columns = [c for c in _columns(signs, spark) if wide or not c[2]]
    for title, right, _, _ in columns:
        table.add_column(title, justify="right" if right else "left", no_wrap=title != "Node", overflow="fold")
    before = None
    for gpu in summary.gpus:
        cells = [cell(gpu) for *_, cell in columns]
        table.add_row(gpu.node if gpu.node != before else "", *cells[1:])
        before = gpu.node
    return table


_Column = tuple[str, bool, bool, Callable[[GpuSummary], RenderableType]]


def _columns(signs: Glyphs, spark: int) -> list[_Column]:
    """Title, aligned right, only when wide, cell."""

    def range_of(gpu: GpuSummary) -> str:
        use = gpu.utilization
        return signs.dash if use is None else f"{use.p5:.0%}{signs.dash}{use.p95:.0%}"

    return [
        ("Node", False, False, lambda g: g.node),
        ("GPU", True, False, lambda g: signs.dash if g.index is None else str(g.index)),
        ("Rank", True, False, lambda g: ",".join(map(str, g.ranks)) or signs.dash),
        ("Util", True, False, _utilization(signs)),
        ("p5" + signs.dash + "p95", True, True, range_of),
        ("Over the job", False, False, lambda g: terminal.sparkline(g.timeline.utilization, spark, signs).ljust(spark)),
        ("GiB", True, False, lambda g: _memory(g, signs)),
        ("W", True, False, lambda g: terminal.number(_mean_of(g.power_w), signs)),
        ("max" + signs.degree, True, False, lambda g: terminal.number(_max_of(g.temperature_c), signs)),
        ("MHz", True, True, lambda g: terminal.number(_mean_of(g.sm_clock_mhz), signs)),
        ("Energy", True, True, lambda g: terminal.energy(g.energy_j, signs)),
        ("UUID", False, True, lambda g: g.uuid if len(g.uuid) <= 13 else g.uuid[:12]),
    ]


def _utilization(signs: Glyphs) -> Callable[[GpuSummary], Text]:
    def cell(gpu: GpuSummary) -> Text:
        use = gpu.utilization
        if use is None:
            return Text(signs.dash)
        text = "unused" if use.max == 0 else f"{use.mean:.0%}"
        return Text(text, style=f"bold {terminal.grade(use.mean)}")

    return cell


def _memory(gpu: GpuSummary, signs: Glyphs) -> Text:
    ratio = _memory_ratio(gpu)
    style = "bold yellow" if ratio is not None and ratio >= 0.95 else ""
    return Text(terminal.used_of(_max_of(gpu.memory_used_gib), gpu.memory_total_gib, signs), style=style)


def _host_table(hosts: Sequence[HostSummary], width: int, signs: Glyphs) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("Host", overflow="fold")
    titles = ("Cores", "CPU", "max", "GiB max", "Load", "Ranks' GiB", "Ranks' cores", "Samples")
    shown = len(titles) if width >= terminal.FALLBACK else 4
    for title in titles[:shown]:
        table.add_column(title, justify="right", no_wrap=True)
    for h in hosts:
        processes = h.processes
        cells = (
            str(h.cpu_count) if h.cpu_count else signs.dash,
            terminal.percent(_mean_of(h.cpu), signs),
            terminal.percent(_max_of(h.cpu), signs),
            terminal.used_of(_max_of(h.memory_used_gib), h.memory_total_gib, signs),
            terminal.number(_mean_of(h.load1), signs, 1),
            terminal.number(processes.rss_gib.max if processes else None, signs, 1),
            terminal.number(_mean_of(processes.cpu_cores) if processes else None, signs, 1),
            f"{h.samples}/{h.expected}",
        )
        table.add_row(h.node, *cells[:shown])
    return table


def _notes(notes: Sequence[Note]) -> list[RenderableType]:
    """Notes of one kind stand together; past a few of them only their number is told."""
    kinds: dict[tuple[str, str], list[Note]] = {}
    for note in notes:
        kinds.setdefault((note.severity, note.code), []).append(note)
    parts: list[RenderableType] = [Text("Notes", style="bold")]
    for (severity, _), alike in kinds.items():
        sign, style = _SIGNS[severity]
        for note in alike[:_MOST_ALIKE]:
            grid = Table.grid(padding=(0, 1))
            grid.add_column(width=2)
            grid.add_column(overflow="fold")
            grid.add_row(Text(sign, style=style), Text(note.text))
            parts.append(grid)
        if len(alike) > _MOST_ALIKE:
            parts.append(Padding(f"and {len(alike) - _MOST_ALIKE} more like these (--json has them all)", (0, 0, 0, 3)))
        fixes = list(dict.fromkeys(n.fix for n in alike[:_MOST_ALIKE] if n.fix))
        parts += [Padding(Text(f"fix: {fix}"), (0, 0, 0, 3)) for fix in fixes]
    return parts
