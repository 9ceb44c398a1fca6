"""The tables of GPUs and hosts; large ones show only the GPUs or hosts with insights and the extremes, and a count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from clustertrain.report import terminal
from clustertrain.report.terminal import Glyphs
from clustertrain.telemetry.findings import HOT_C
from clustertrain.telemetry.report_schema import GpuSummary, HostSummary, Stats, Summary

MEDIUM_COLUMNS, WIDE_COLUMNS = 76, 120  # terminal widths at which the table shows more columns, and all of them
MAX_UNFILTERED = 40  # GPUs or hosts
MAX_NOTED, EXTREMES = 16, 8  # rows of a longer table: those with insights, those with an extreme value
THROTTLED = 0.05  # share of the time
_SIGNS = {"critical": ("!!", "bold red"), "warning": ("!", "bold yellow")}  # before the index of a GPU with an insight


def stat_mean(stats: Stats | None) -> float | None:
    return None if stats is None else stats.mean


def stat_max(stats: Stats | None) -> float | None:
    return None if stats is None else stats.max


def mean_known(values: Sequence[float | None]) -> float | None:
    present = [v for v in values if v is not None]
    return sum(present) / len(present) if present else None


def memory_ratio(gpu: GpuSummary) -> float | None:
    used = stat_max(gpu.memory_used_gib)
    return None if used is None or not gpu.memory_total_gib else used / gpu.memory_total_gib


def busy_stats(gpu: GpuSummary) -> Stats | None:
    """Return the GPU's utilization, or its SM activity, because a MIG slice has no utilization."""
    return gpu.utilization or gpu.sm_activity


def render_gpus(summary: Summary, width: int, signs: Glyphs, show_all: bool = False) -> list[RenderableType]:
    selected = summary.gpus if show_all else select_gpus(summary)
    max_name_len = max((len(g.node) for g in selected), default=4)
    columns = _columns(signs, width, min(max_name_len, 24), find_severities(summary))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for title, right, _ in columns:
        table.add_column(title, justify="right" if right else "left", no_wrap=title != "Node", overflow="fold")
    previous_node = None
    for gpu in selected:
        cells = [cell(gpu) for *_, cell in columns]
        table.add_row(gpu.node if gpu.node != previous_node else "", *cells[1:])
        previous_node = gpu.node
    parts: list[RenderableType] = [table]
    if len(selected) < len(summary.gpus):
        parts.append(_remainder_line(summary, selected, signs))
    if width >= MEDIUM_COLUMNS and any(_throttle_cell(g) for g in selected):
        parts.append(Text("Held: share of time with a reduced clock, mostly by p: power limit, t: heat, h: hardware"))
    return parts


def find_severities(summary: Summary) -> dict[tuple[str | None, str | None], str]:
    """Return the severity of the worst insight about each GPU, by node and UUID."""
    severities: dict[tuple[str | None, str | None], str] = {}
    for insight in summary.insights:  # the most severe first
        if insight.uuid is not None and insight.severity in _SIGNS:
            severities.setdefault((insight.node, insight.uuid), insight.severity)
    return severities


def select_gpus(summary: Summary) -> list[GpuSummary]:
    """Return all GPUs, or of many those with the most severe insights and the extremes, in the summary's order."""
    if len(summary.gpus) <= MAX_UNFILTERED:
        return summary.gpus
    by_key = {(g.node, g.uuid): g for g in summary.gpus}
    noted = dict.fromkeys((n.node or "", n.uuid or "") for n in summary.insights if n.uuid is not None)
    picked = {key for key in list(noted)[:MAX_NOTED] if key in by_key}
    for metric, take_max in _EXTREMES:
        values = [(value, key) for key, g in by_key.items() if (value := metric(g)) is not None]
        if values:
            picked.add((max if take_max else min)(values)[1])
    return [g for g in summary.gpus if (g.node, g.uuid) in picked]


_EXTREMES: tuple[tuple[Callable[[GpuSummary], float | None], bool], ...] = (
    (lambda g: stat_mean(busy_stats(g)), False),
    (lambda g: stat_mean(busy_stats(g)), True),
    (memory_ratio, False),
    (memory_ratio, True),
    (lambda g: stat_mean(g.power_w), False),
    (lambda g: stat_mean(g.power_w), True),
    (lambda g: stat_max(g.temperature_c), True),
    (lambda g: stat_mean(g.sm_clock_mhz), False),
)


def _remainder_line(summary: Summary, selected: Sequence[GpuSummary], signs: Glyphs) -> Text:
    selected_keys = {(g.node, g.uuid) for g in selected}
    remaining = [g for g in summary.gpus if (g.node, g.uuid) not in selected_keys]
    means = [stats.mean for g in remaining if (stats := busy_stats(g)) is not None]
    busy_text = f", busy {' to '.join(dict.fromkeys(f'{m:.0%}' for m in (min(means), max(means))))}" if means else ""
    noted = {(n.node, n.uuid) for n in summary.insights if n.uuid is not None}
    num_noted = sum((g.node, g.uuid) in noted for g in remaining)
    noted_text = f"; {num_noted:,} of them also have insights" if num_noted else ""
    text = (
        f"{len(selected):,} of {len(summary.gpus):,} GPUs: those with insights and the extremes. The other"
        f" {len(remaining):,}"
    )
    return Text(f"{text} are in between{busy_text}{noted_text} (--all shows them, --json has them)")


Severities = Mapping[tuple[str | None, str | None], str]
GpuColumn = tuple[str, bool, Callable[[GpuSummary], RenderableType]]


def _columns(signs: Glyphs, width: int, name_width: int, severities: Severities) -> list[GpuColumn]:
    """Return (title, right-aligned, cell) of each column; the sparkline gets the remaining width."""

    def index_cell(gpu: GpuSummary) -> Text:
        index = signs.dash if gpu.index is None else str(gpu.index)
        sign, style = _SIGNS.get(severities.get((gpu.node, gpu.uuid), ""), ("", ""))
        return Text(f"{sign}{index}", style=style)

    def percentile(name: str) -> Callable[[GpuSummary], str]:
        return lambda g: signs.dash if busy_stats(g) is None else f"{100 * getattr(busy_stats(g), name):.0f}"

    percentile_columns: list[GpuColumn] = [
        ("p5", True, percentile("p5")),
        ("p95", True, percentile("p95")),
        ("max", True, percentile("max")),
    ]
    throttle_columns: list[GpuColumn] = [("Held", True, lambda g: _throttle_cell(g) or Text(signs.dash))]
    wide_columns: list[GpuColumn] = [
        ("MHz", True, lambda g: terminal.format_number(stat_mean(g.sm_clock_mhz), signs)),
        ("Energy", True, lambda g: terminal.format_energy(g.energy_j, signs)),
        ("UUID", False, lambda g: shorten_uuid(g.uuid)),
    ]
    is_medium, is_wide = width >= MEDIUM_COLUMNS, width >= WIDE_COLUMNS
    sparkline_width = max(8, min(60, width - name_width - (37 + 16 * is_medium + 28 * is_wide)))
    return [
        ("Node", False, lambda g: g.node),
        ("GPU", True, index_cell),
        ("Rank", True, lambda g: ",".join(map(str, g.ranks)) or signs.dash),
        ("Util", True, lambda g: _utilization_cell(g, signs, severities)),
        *(percentile_columns if is_medium else []),
        ("Over the job", False, lambda g: _sparkline_cell(g, sparkline_width, signs, severities)),
        ("GiB", True, lambda g: _memory_cell(g, signs)),
        ("W", True, lambda g: terminal.format_number(stat_mean(g.power_w), signs)),
        (signs.degree, True, lambda g: _temperature_cell(g, signs)),
        *(throttle_columns if is_medium else []),
        *(wide_columns if is_wide else []),
    ]


def _sparkline_cell(gpu: GpuSummary, width: int, signs: Glyphs, severities: Severities) -> Text:
    text = terminal.sparkline(gpu.timeline.utilization, width, signs).ljust(width)
    return Text(text, style=_busy_style(gpu, severities))


def _busy_style(gpu: GpuSummary, severities: Severities) -> str:
    """Return the color of a GPU's utilization: red if there is an insight about it, such as that the others wait."""
    stats = busy_stats(gpu)
    if stats is None:
        return ""
    return "red" if (gpu.node, gpu.uuid) in severities else terminal.utilization_style(stats.mean)


def shorten_uuid(uuid: str) -> str:
    """Return a prefix that identifies the GPU; ``--gpu`` accepts prefixes."""
    return uuid if len(uuid) <= 13 else uuid[:12]


def _utilization_cell(gpu: GpuSummary, signs: Glyphs, severities: Severities) -> Text:
    stats = busy_stats(gpu)
    if stats is None:
        return Text(signs.dash)
    return Text("unused" if stats.max == 0 else f"{stats.mean:.0%}", style=f"bold {_busy_style(gpu, severities)}")


def _temperature_cell(gpu: GpuSummary, signs: Glyphs) -> Text:
    peak = stat_max(gpu.temperature_c)
    is_hot = peak is not None and peak >= HOT_C
    return Text(terminal.format_number(peak, signs), style="bold yellow" if is_hot else "")


def _memory_cell(gpu: GpuSummary, signs: Glyphs) -> Text:
    ratio = memory_ratio(gpu)
    style = "bold yellow" if ratio is not None and ratio >= 0.95 else ""
    return Text(terminal.format_used(stat_max(gpu.memory_used_gib), gpu.memory_total_gib, signs), style=style)


def _throttle_cell(gpu: GpuSummary) -> Text | None:
    """Return the main throttle cause; heat and hardware come before the power limit, which is common."""
    throttled = gpu.throttle_ratio
    share, cause = max(((throttled.thermal or 0.0, "t"), (throttled.hardware or 0.0, "h")))
    if share >= THROTTLED:
        return Text(f"{share:.0%}{cause}", style="bold yellow")
    return Text(f"{throttled.power:.0%}p") if throttled.power is not None and throttled.power >= 0.005 else None


def render_hosts(summary: Summary, width: int, signs: Glyphs, show_all: bool = False) -> list[RenderableType]:
    selected = summary.hosts if show_all else select_hosts(summary)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("Host", overflow="fold")
    columns = [c for c in _host_columns(signs) if width >= c[1]]
    for title, _, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for h in selected:
        table.add_row(h.node, *(cell(h) for _, _, cell in columns))
    parts: list[RenderableType] = [table]
    if len(selected) < len(summary.hosts):
        count_text = f"{len(selected):,} of {len(summary.hosts):,} hosts"
        text = f"{count_text}: those with insights and the extremes; --all shows them all"
        parts.append(Text(text))
    return parts


def select_hosts(summary: Summary) -> list[HostSummary]:
    """Return all hosts, or of many those with insights and the extremes, in the summary's order."""
    if len(summary.hosts) <= MAX_UNFILTERED:
        return summary.hosts
    noted = dict.fromkeys(n.node for n in summary.insights if n.node is not None)
    picked = set(list(noted)[:MAX_NOTED])
    for metric in _HOST_EXTREMES:
        values = [(value, h.node) for h in summary.hosts if (value := metric(h)) is not None]
        picked |= {max(values)[1], min(values)[1]} if values else set()
    return [h for h in summary.hosts if h.node in picked]


_HOST_EXTREMES: tuple[Callable[[HostSummary], float | None], ...] = (
    lambda h: stat_max(h.memory_used_gib),
    lambda h: stat_mean(h.cpu),
    lambda h: stat_mean(h.load1),
)


def _host_columns(signs: Glyphs) -> list[tuple[str, int, Callable[[HostSummary], str]]]:
    """Return (title, smallest terminal width, cell) of each column."""

    def job_gib(h: HostSummary) -> str:
        used, allocated = h.processes.rss_gib.max if h.processes else None, h.memory_allocated_gib
        return (
            terminal.format_number(used, signs, 1)
            if allocated is None
            else terminal.format_used(used, allocated, signs)
        )

    def job_cores(h: HostSummary) -> str:
        used = terminal.format_number(stat_mean(h.processes.cpu_cores) if h.processes else None, signs, 1)
        return used if h.cpu_allocated is None else f"{used}/{h.cpu_allocated}"

    def rate(stats: Stats | None) -> str:
        return terminal.format_number(None if stats is None else stats.mean / 1e9, signs, 2)

    return [
        ("Cores", 0, lambda h: str(h.cpu_count) if h.cpu_count else signs.dash),
        ("Node's CPU", 0, lambda h: terminal.format_percent(stat_mean(h.cpu), signs)),
        ("max", 0, lambda h: terminal.format_percent(stat_max(h.cpu), signs)),
        ("Node's GiB", 0, lambda h: terminal.format_used(stat_max(h.memory_used_gib), h.memory_total_gib, signs)),
        ("Load", MEDIUM_COLUMNS, lambda h: terminal.format_number(stat_mean(h.load1), signs, 1)),
        ("Job's GiB", MEDIUM_COLUMNS, job_gib),
        ("Job's cores", MEDIUM_COLUMNS, job_cores),
        ("Net GB/s", WIDE_COLUMNS, lambda h: rate(h.network_bytes_per_s)),
        ("IB GB/s", WIDE_COLUMNS, lambda h: rate(h.infiniband_bytes_per_s)),
        ("Disk GB/s", WIDE_COLUMNS, lambda h: rate(h.disk_bytes_per_s)),
        ("Samples", MEDIUM_COLUMNS, lambda h: f"{h.samples}/{h.samples_expected}"),
    ]
