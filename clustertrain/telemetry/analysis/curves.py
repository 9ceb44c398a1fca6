"""Telemetry of a run as curves over time for the HTML page: means in equal steps, few enough to embed.

The number of GPUs with individual curves is limited; :attr:`Curves.choice` describes the selection for the page.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from clustertrain.run import metrics_file
from clustertrain.run.run_dir import RunDir
from clustertrain.telemetry import fields
from clustertrain.telemetry.analysis.resample import CurveTable, Grid, GridSums, Matrix, SampleSeries, load_series
from clustertrain.telemetry.findings import SEVERITY_ORDER
from clustertrain.telemetry.report_schema import Summary
from clustertrain.telemetry.store import reader
from clustertrain.telemetry.store.reader import RecordedSegment

# Fields whose sum each curve shows; counters as rates per second.
GPU_CURVES: dict[str, tuple[str, ...]] = {
    "utilization": ("utilization",),
    "sm_activity": ("sm_activity",),
    "tensor_activity": ("tensor_activity",),
    "dram_activity": ("dram_activity",),
    "memory_used_bytes": ("memory_used_bytes",),
    "power_w": ("power_w",),
    "temperature_c": ("temperature_c",),
    "sm_clock_mhz": ("sm_clock_mhz",),
    "pcie_bytes_per_s": ("pcie_tx_bytes", "pcie_rx_bytes"),
    "nvlink_bytes_per_s": ("nvlink_tx_bytes", "nvlink_rx_bytes"),
    "throttled": ("throttle_thermal", "throttle_hardware"),
}
# Counters of each rank, in seconds, that become times per step.
RANK_CURVES = ("forward_s", "data_wait_s")
_RANK_FIELDS = {name: (name,) for name in ("step", *RANK_CURVES)}
HOST_CURVES: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu",),
    "memory_used_bytes": ("memory_used_bytes",),
    "job_memory_bytes": ("job_memory_bytes",),
    "network_bytes_per_s": ("network_rx_bytes", "network_tx_bytes"),
    "infiniband_bytes_per_s": ("infiniband_rx_bytes", "infiniband_tx_bytes"),
    "disk_bytes_per_s": ("disk_read_bytes", "disk_write_bytes"),
}
# Logged only by evaluations: each value is carried forward to the next one.
_HELD_CURVES = ("validation_loss", "validation_accuracy")
_LOGGED_CURVES = ("step_s", "tokens_per_s", "data_wait_s", "loss", *_HELD_CURVES, "grad_norm", "noise_scale", "lr")
# ``step`` is the x axis of the others by step.
TRAINING_CURVES = ("step", *_LOGGED_CURVES)
# Curves of the heat map if not every GPU has individual curves.
HEAT_CURVES = ("utilization", "power_w", "temperature_c", "memory_used_bytes", "sm_clock_mhz", "throttled")

_MAX_POINTS = 1500  # of one curve
_MAX_CELLS = 500_000  # values of all individual GPU curves, about a byte each on the page
_MAX_ROWS = 64  # GPUs, and nodes, with individual curves
_FINE, _COARSE = 60, 900  # s, steps of the roll-ups
_MIN_POINTS = 240  # points that a roll-up must provide to be used instead of samples
_MAX_SAMPLES = 500_000  # GPU-seconds read from samples; more would take seconds


@dataclass(frozen=True)
class Curves:
    """Curves of a run."""

    gpus: CurveTable
    """One row for each GPU in ``chosen``."""
    chosen: list[int]
    """Indices of the summary's GPUs with individual curves."""
    heat: CurveTable
    """One row for each GPU, with fewer steps if not all are in ``chosen``."""
    overall: CurveTable
    """Three rows: mean, lowest and highest GPU."""
    nodes: CurveTable
    """Means over the GPUs of each node in ``node_names``."""
    hosts: CurveTable
    """One row for each node in ``node_names``."""
    node_names: list[str]
    training: CurveTable
    """One row."""
    source: str
    """Description of a point."""
    choice: str | None
    """Description of the GPUs and nodes with individual curves; None if all have them."""
    ranks: CurveTable = field(default_factory=lambda: CurveTable(0.0, 1.0, 0))
    """Seconds per step of :data:`RANK_CURVES`. Three rows: mean, lowest and highest rank."""


def build_curves(run: RunDir, summary: Summary) -> Curves:
    """Build the curves for the window, attempts and GPUs of ``summary``.

    Unreadable files are left out; ``summary.read_errors`` lists them.
    """
    chosen, node_names = _choose_gpus(summary), _node_names(summary)
    nodes = _choose_nodes(summary, node_names, chosen)
    plan = _CurvePlan.for_summary(summary, len(chosen))
    gpus, hosts = GridSums(plan.gpu_grid, len(summary.gpus)), GridSums(plan.host_grid, len(node_names))
    ranks = GridSums(plan.gpu_grid, 1 + max((r.rank for r in summary.ranks), default=-1))
    row_by_gpu = {(g.node, g.uuid): i for i, g in enumerate(summary.gpus)}
    for node, segment in _iter_segments(run, summary, node_names):
        row_by_device = {f"gpu{i}": row_by_gpu.get((node, facts.uuid)) for i, facts in enumerate(segment.header.gpus)}
        known_rows = {device: row for device, row in row_by_device.items() if row is not None}
        known_ranks = [rank for rank in segment.header.ranks if rank < ranks.rows]
        gpu_fields = [*_columns(known_rows, GPU_CURVES), *_columns([f"rank{r}" for r in known_ranks], _RANK_FIELDS)]
        gpu_columns, host_columns = plan.read(segment, gpu_fields, _columns(["host"], HOST_CURVES))
        for device, row in known_rows.items():
            gpus.add(row, gpu_columns, device, GPU_CURVES)
        for rank in known_ranks:
            ranks.add(rank, gpu_columns, f"rank{rank}", _RANK_FIELDS)
        hosts.add(node_names.index(node), host_columns, "host", HOST_CURVES)
    gpu_table = _clip_throttled(gpus.table())
    return Curves(
        gpus=gpu_table.rows(chosen),
        chosen=chosen,
        heat=gpu_table if len(chosen) == len(summary.gpus) else _heat(gpus),
        overall=_pool_rows(gpu_table, lambda m: [_mean(m), _low(m), _high(m)]),
        nodes=_pool_rows(gpu_table, lambda m: [_mean(m[rows]) for rows in _rows_by_node(summary, nodes)]),
        hosts=hosts.table().rows([node_names.index(n) for n in nodes]),
        node_names=nodes,
        training=_training_curves(run, summary, plan.gpu_grid),
        source=plan.description,
        choice=_describe_selection(summary, chosen, node_names, nodes),
        ranks=_pool_rows(_per_step(ranks.table()), lambda m: [_mean(m), _low(m), _high(m)]),
    )


def _clip_throttled(table: CurveTable) -> CurveTable:
    """Return the table with at most 1 where two causes lowered a clock, and without the curve if none did."""
    values = dict(table.values)
    throttled = values.pop("throttled", None)
    if throttled is not None and np.nanmax(throttled, initial=0.0) > 0:
        values["throttled"] = np.minimum(throttled, 1.0)
    return dataclasses.replace(table, values=values)


def _per_step(table: CurveTable) -> CurveTable:
    """Return the rates of the ranks' times divided by the rate of their steps."""
    if "step" not in table.values:
        return dataclasses.replace(table, values={})
    steps = np.where(table.values["step"] > 0, table.values["step"], np.nan)
    per_step = {name: table.values[name] / steps for name in RANK_CURVES if name in table.values}
    return dataclasses.replace(table, values={k: m for k, m in per_step.items() if np.isfinite(m).any()})


@dataclass(frozen=True)
class _CurvePlan:
    """Grids of the curves, and the steps of the roll-ups read for them."""

    gpu_grid: Grid
    host_grid: Grid
    gpu_s: float
    host_s: float

    @staticmethod
    def for_summary(summary: Summary, rows: int) -> _CurvePlan:
        start, end = summary.window.start, summary.window.end
        if start is None or end is None:
            return _CurvePlan(Grid(0.0, 1.0, 0), Grid(0.0, 1.0, 0), _COARSE, _COARSE)
        span = max(end - start, 1.0)
        step = span / min(_MAX_POINTS, max(_MAX_CELLS // max(1, rows * len(GPU_CURVES)), _MIN_POINTS))
        if span / _FINE < _MIN_POINTS and span * max(1, len(summary.gpus)) <= _MAX_SAMPLES:
            # Two samples per point, so that a late sample leaves no point empty; hosts are sampled every 10 s.
            gpu, host = Grid.covering(start, span, max(step, 2.0)), Grid.covering(start, span, max(step, 20.0))
            return _CurvePlan(gpu, host, gpu.step_s, host.step_s)
        rollup = _FINE if span / _COARSE < 2 * _MIN_POINTS else _COARSE
        grid = Grid.covering(start, span, max(step, rollup))
        return _CurvePlan(grid, grid, rollup, rollup)

    def read(
        self, segment: RecordedSegment, gpu: Sequence[str], host: Sequence[str]
    ) -> tuple[Mapping[str, SampleSeries], Mapping[str, SampleSeries]]:
        """Read the columns of GPUs and host, at once if they use the same roll-up."""
        if self.gpu_s == self.host_s:
            both = load_series(segment, [*gpu, *host], self.gpu_s)
            return both, both
        return load_series(segment, gpu, self.gpu_s), load_series(segment, host, self.host_s)

    @property
    def description(self) -> str:
        step = self.gpu_grid.step_s
        return f"Each point is the mean of {f'{step / 60:g} min' if step >= 60 else f'{step:g} s'}."


def _columns(devices: Iterable[str], curve_fields: Mapping[str, Sequence[str]]) -> list[str]:
    return [fields.column_name(d, f) for d in devices for parts in curve_fields.values() for f in parts]


def _iter_segments(run: RunDir, summary: Summary, node_names: Sequence[str]) -> Iterator[tuple[str, RecordedSegment]]:
    for attempt in summary.attempts:
        for node in node_names:
            for segment in reader.drop_overlapping(reader.open_node(run.attempt(attempt.n).telemetry / node)):
                yield node, segment


def _node_names(summary: Summary) -> list[str]:
    return list(dict.fromkeys([h.node for h in summary.hosts] + [g.node for g in summary.gpus]))


def _choose_gpus(summary: Summary) -> list[int]:
    """Return all GPUs or, if there are too many, those with the most severe insights, then the least used ones."""
    gpus = summary.gpus
    if len(gpus) <= _MAX_ROWS:
        return list(range(len(gpus)))
    severity: dict[str, int] = {}
    for note in summary.insights:
        if note.uuid is not None:
            rank = SEVERITY_ORDER.get(note.severity, len(SEVERITY_ORDER))
            severity[note.uuid] = min(rank, severity.get(note.uuid, rank))

    def order(i: int) -> tuple[int, float, int]:
        use = gpus[i].utilization
        return severity.get(gpus[i].uuid, len(SEVERITY_ORDER) + 1), -1.0 if use is None else use.mean, i

    return sorted(sorted(range(len(gpus)), key=order)[:_MAX_ROWS])


def _choose_nodes(summary: Summary, node_names: list[str], chosen: Sequence[int]) -> list[str]:
    """Return all nodes or, if there are too many, first those of the chosen GPUs."""
    if len(node_names) <= _MAX_ROWS:
        return node_names
    first = dict.fromkeys([summary.gpus[i].node for i in chosen] + node_names)
    selected = set(list(first)[:_MAX_ROWS])
    return [n for n in node_names if n in selected]


def _describe_selection(
    summary: Summary, chosen: Sequence[int], node_names: Sequence[str], nodes: Sequence[str]
) -> str | None:
    sentences = []
    if len(chosen) < len(summary.gpus):
        sentences.append(
            f"{len(chosen)} of {len(summary.gpus)} GPUs have individual curves: those named in insights, then those "
            "with the lowest mean utilization. The heat map, the table and the curves of the whole job cover all GPUs."
        )
    if len(nodes) < len(node_names):
        sentences.append(f"{len(nodes)} of {len(node_names)} nodes have individual curves, first those of these GPUs.")
    return " ".join(sentences) or None


def _heat(gpus: GridSums) -> CurveTable:
    """Return the curves of all GPUs, with few enough steps to keep the page small."""
    most = max(1, _MAX_CELLS * 2 // (gpus.rows * len(HEAT_CURVES)))
    return _clip_throttled(gpus.table(HEAT_CURVES, group_size=max(1, math.ceil(gpus.grid.points / most))))


def _pool_rows(table: CurveTable, pool: Callable[[Matrix], list[Matrix]]) -> CurveTable:
    values = {name: np.array(pool(m)) for name, m in table.values.items()}
    return CurveTable(table.start, table.step_s, table.points, values)


def _rows_by_node(summary: Summary, nodes: Sequence[str]) -> list[list[int]]:
    return [[i for i, g in enumerate(summary.gpus) if g.node == node] for node in nodes]


def _over_rows(matrix: Matrix, reduce: Callable[..., Matrix]) -> Matrix:
    """Reduce over the rows, ignoring NaN; NaN if no row has a value."""
    if not len(matrix):
        return np.full(matrix.shape[1], np.nan)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice|All-NaN", RuntimeWarning)
        return reduce(matrix, axis=0)


def _mean(matrix: Matrix) -> Matrix:
    return _over_rows(matrix, np.nanmean)


def _low(matrix: Matrix) -> Matrix:
    return _over_rows(matrix, np.nanmin)


def _high(matrix: Matrix) -> Matrix:
    return _over_rows(matrix, np.nanmax)


def _hold(column: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return ``column`` with each NaN replaced by the last value before it, if there is one."""
    indices = np.maximum.accumulate(np.where(np.isfinite(column), np.arange(len(column)), -1))
    return np.where(indices >= 0, column[indices], np.nan)


def _training_curves(run: RunDir, summary: Summary, grid: Grid) -> CurveTable:
    """Return the curves of the metrics that rank 0 logged in all attempts, including repeated steps."""
    logs = []
    for path in (path for attempt in summary.attempts for path in run.metrics_files(attempt.n)):
        try:
            columns = metrics_file.read_columns(path, ("t", *TRAINING_CURVES))
        except OSError:
            continue
        log = {name: np.asarray(column) for name, column in columns.items()}
        log = {name: column[np.isfinite(log["t"])] for name, column in log.items()}
        logs.append({name: _hold(column) if name in _HELD_CURVES else column for name, column in log.items()})
    intervals = np.concatenate([np.diff(log["t"]) for log in logs] or [np.empty(0)])
    if len(intervals) and grid.points:
        # A step may be longer than a point of the GPU curves, and isolated points draw no line.
        span = grid.points * grid.step_s
        grid = Grid.covering(grid.start, span, min(max(grid.step_s, 1.5 * float(np.median(intervals))), span))
    sums = GridSums(grid, 1)
    for log in logs:
        for name in TRAINING_CURVES:
            sums.add_series(0, name, SampleSeries(log["t"], log[name], np.ones(len(log["t"]))))
    return sums.table()
