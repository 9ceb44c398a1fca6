"""The tables of GPUs and hosts. Of many only the worst ones and the extremes are shown, with a count of the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from clustertrain.report import terminal
from clustertrain.report.terminal import Glyphs
from clustertrain.telemetry.report_schema import GpuSummary, HostSummary, Stats, Summary

MEDIUM, WIDE = 76, 120  # columns from which the table shows more, and everything
ALL_UP_TO = 40  # GPUs or hosts
NAMED, EXTREMES = 16, 8  # of more: those with notes, and those at the ends of the figures
THROTTLED = 0.05


def mean_of(stats: Stats | None) -> float | None:
    return None if stats is None else stats.mean


def max_of(stats: Stats | None) -> float | None:
    return None if stats is None else stats.max


def mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def memory_ratio(gpu: GpuSummary) -> float | None:
    used = max_of(gpu.memory_used_gib)
    return None if used is None or not gpu.memory_total_gib else used / gpu.memory_total_gib


def use_of(gpu: GpuSummary) -> Stats | None:
    """A MIG slice has no utilization, but its multiprocessors are seen."""
    return gpu.utilization or gpu.sm_activity


def gpus(summary: Summary, width: int, signs: Glyphs, every: bool = False) -> list[RenderableType]:
    shown = summary.gpus if every else chosen(summary)
    names = max((len(g.node) for g in shown), default=4)
    columns = _columns(signs, width, min(names, 24))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for title, right, _ in columns:
        table.add_column(title, justify="right" if right else "left", no_wrap=title != "Node", overflow="fold")
    before = None
    for gpu in shown:
        cells = [cell(gpu) for *_, cell in columns]
        table.add_row(gpu.node if gpu.node != before else "", *cells[1:])
        before = gpu.node
    parts: list[RenderableType] = [table]
    if len(shown) < len(summary.gpus):
        parts.append(_rest(summary, shown, signs))
    if width >= MEDIUM and any(_held(g) for g in shown):
        parts.append(Text("Held: the clock was held down, most by p the power limit, t heat, h the board"))
    return parts


def chosen(summary: Summary) -> list[GpuSummary]:
    """All, or those with notes, the most severe ones first, and the extremes; in the order of the summary."""
    if len(summary.gpus) <= ALL_UP_TO:
        return summary.gpus
    by_key = {(g.node, g.uuid): g for g in summary.gpus}
    noted = dict.fromkeys((n.node or "", n.uuid or "") for n in summary.notes if n.uuid is not None)
    picked = {key for key in list(noted)[:NAMED] if key in by_key}
    for figure, most in _EXTREMES:
        known = [(value, key) for key, g in by_key.items() if (value := figure(g)) is not None]
        if known:
            picked.add((max if most else min)(known)[1])
    return [g for g in summary.gpus if (g.node, g.uuid) in picked]


_EXTREMES: tuple[tuple[Callable[[GpuSummary], float | None], bool], ...] = (
    (lambda g: mean_of(use_of(g)), False),
    (lambda g: mean_of(use_of(g)), True),
    (memory_ratio, False),
    (memory_ratio, True),
    (lambda g: mean_of(g.power_w), False),
    (lambda g: mean_of(g.power_w), True),
    (lambda g: max_of(g.temperature_c), True),
    (lambda g: mean_of(g.sm_clock_mhz), False),
)


def _rest(summary: Summary, shown: Sequence[GpuSummary], signs: Glyphs) -> Text:
    there = {(g.node, g.uuid) for g in shown}
    rest = [g for g in summary.gpus if (g.node, g.uuid) not in there]
    means = [use.mean for g in rest if (use := use_of(g)) is not None]
    busy = f", busy {' to '.join(dict.fromkeys(f'{m:.0%}' for m in (min(means), max(means))))}" if means else ""
    noted = {(n.node, n.uuid) for n in summary.notes if n.uuid is not None}
    more = sum((g.node, g.uuid) in noted for g in rest)
    also = f"; {more:,} of them have notes too" if more else ""
    text = f"{len(shown):,} of {len(summary.gpus):,} GPUs: those with notes and the extremes. The other {len(rest):,}"
    return Text(f"{text} stand between them{busy}{also}: --all shows them, --json has them")


Column = tuple[str, bool, Callable[[GpuSummary], RenderableType]]


def _columns(signs: Glyphs, width: int, names: int) -> list[Column]:
    """Title, aligned right, cell. What is left of the width goes to the curve."""

    def part(name: str) -> Callable[[GpuSummary], str]:
        return lambda g: signs.dash if use_of(g) is None else f"{100 * getattr(use_of(g), name):.0f}"

    spread: list[Column] = [("p5", True, part("p5")), ("p95", True, part("p95")), ("max", True, part("max"))]
    held: list[Column] = [("Held", True, lambda g: _held(g) or Text(signs.dash))]
    more: list[Column] = [
        ("MHz", True, lambda g: terminal.number(mean_of(g.sm_clock_mhz), signs)),
        ("Energy", True, lambda g: terminal.energy(g.energy_j, signs)),
        ("UUID", False, lambda g: short_uuid(g.uuid)),
    ]
    medium, wide = width >= MEDIUM, width >= WIDE
    spark = max(8, min(60, width - names - (37 + 16 * medium + 28 * wide)))
    return [
        ("Node", False, lambda g: g.node),
        ("GPU", True, lambda g: signs.dash if g.index is None else str(g.index)),
        ("Rank", True, lambda g: ",".join(map(str, g.ranks)) or signs.dash),
        ("Util", True, _utilization(signs)),
        *(spread if medium else []),
        ("Over the job", False, lambda g: _curve(g, spark, signs)),
        ("GiB", True, lambda g: _memory(g, signs)),
        ("W", True, lambda g: terminal.number(mean_of(g.power_w), signs)),
        (signs.degree, True, lambda g: terminal.number(max_of(g.temperature_c), signs)),
        *(held if medium else []),
        *(more if wide else []),
    ]


def _curve(gpu: GpuSummary, cells: int, signs: Glyphs) -> Text:
    use = use_of(gpu)
    text = terminal.sparkline(gpu.timeline.utilization, cells, signs).ljust(cells)
    return Text(text, style=terminal.grade(use.mean) if use is not None else "")


def short_uuid(uuid: str) -> str:
    """Enough of it to find the GPU: ``--gpu`` takes the beginning."""
    return uuid if len(uuid) <= 13 else uuid[:12]


def _utilization(signs: Glyphs) -> Callable[[GpuSummary], Text]:
    def cell(gpu: GpuSummary) -> Text:
        use = use_of(gpu)
        if use is None:
            return Text(signs.dash)
        text = "unused" if use.max == 0 else f"{use.mean:.0%}"
        return Text(text, style=f"bold {terminal.grade(use.mean)}")

    return cell


def _memory(gpu: GpuSummary, signs: Glyphs) -> Text:
    ratio = memory_ratio(gpu)
    style = "bold yellow" if ratio is not None and ratio >= 0.95 else ""
    return Text(terminal.used_of(max_of(gpu.memory_used_gib), gpu.memory_total_gib, signs), style=style)


def _held(gpu: GpuSummary) -> Text | None:
    """The cause that held the clock down most; heat and hardware before the power limit, which is usual."""
    t = gpu.throttled
    bad, cause = max(((t.thermal or 0.0, "t"), (t.hardware or 0.0, "h")))
    if bad >= THROTTLED:
        return Text(f"{bad:.0%}{cause}", style="bold yellow")
    return Text(f"{t.power:.0%}p") if t.power is not None and t.power >= 0.005 else None


def hosts(summary: Summary, width: int, signs: Glyphs, every: bool = False) -> list[RenderableType]:
    shown = summary.hosts if every else chosen_hosts(summary)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("Host", overflow="fold")
    columns = [c for c in _host_columns(signs) if width >= c[1]]
    for title, _, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for h in shown:
        table.add_row(h.node, *(cell(h) for _, _, cell in columns))
    parts: list[RenderableType] = [table]
    if len(shown) < len(summary.hosts):
        of = f"{len(shown):,} of {len(summary.hosts):,} hosts"
        text = f"{of}: those with notes and the extremes; --all shows them all"
        parts.append(Text(text))
    return parts


def chosen_hosts(summary: Summary) -> list[HostSummary]:
    if len(summary.hosts) <= ALL_UP_TO:
        return summary.hosts
    noted = dict.fromkeys(n.node for n in summary.notes if n.node is not None)
    picked = set(list(noted)[:NAMED])
    for figure in _HOST_EXTREMES:
        known = [(value, h.node) for h in summary.hosts if (value := figure(h)) is not None]
        picked |= {max(known)[1], min(known)[1]} if known else set()
    return [h for h in summary.hosts if h.node in picked]


_HOST_EXTREMES: tuple[Callable[[HostSummary], float | None], ...] = (
    lambda h: max_of(h.memory_used_gib),
    lambda h: mean_of(h.cpu),
    lambda h: mean_of(h.load1),
)


def _host_columns(signs: Glyphs) -> list[tuple[str, int, Callable[[HostSummary], str]]]:
    """Title, the width from which it is shown, cell."""

    def job_gib(h: HostSummary) -> str:
        used, given = h.processes.rss_gib.max if h.processes else None, h.memory_allocated_gib
        return terminal.number(used, signs, 1) if given is None else terminal.used_of(used, given, signs)

    def job_cores(h: HostSummary) -> str:
        used = terminal.number(mean_of(h.processes.cpu_cores) if h.processes else None, signs, 1)
        return used if h.cpu_allocated is None else f"{used}/{h.cpu_allocated}"

    def rate(stats: Stats | None) -> str:
        return terminal.number(None if stats is None else stats.mean / 1e9, signs, 2)

    return [
        ("Cores", 0, lambda h: str(h.cpu_count) if h.cpu_count else signs.dash),
        ("Node's CPU", 0, lambda h: terminal.percent(mean_of(h.cpu), signs)),
        ("max", 0, lambda h: terminal.percent(max_of(h.cpu), signs)),
        ("Node's GiB", 0, lambda h: terminal.used_of(max_of(h.memory_used_gib), h.memory_total_gib, signs)),
        ("Load", MEDIUM, lambda h: terminal.number(mean_of(h.load1), signs, 1)),
        ("Job's GiB", MEDIUM, job_gib),
        ("Job's cores", MEDIUM, job_cores),
        ("Net GB/s", WIDE, lambda h: rate(h.network_bytes_per_s)),
        ("IB GB/s", WIDE, lambda h: rate(h.infiniband_bytes_per_s)),
        ("Disk GB/s", WIDE, lambda h: rate(h.disk_bytes_per_s)),
        ("Samples", MEDIUM, lambda h: f"{h.samples}/{h.expected}"),
    ]
