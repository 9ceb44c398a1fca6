"""A synthetic run for the HTML page: four nodes for a day, preempted once; one GPU is idle, one throttled, one slow.

Its totals follow from its curves, so that no number on the page contradicts another.
"""

from __future__ import annotations

import math

import numpy as np

from clustertrain.run.usage.goodput import TIME_CATEGORIES, Goodput
from clustertrain.telemetry import xids
from clustertrain.telemetry.analysis.curves import GPU_CURVES, HOST_CURVES, Curves
from clustertrain.telemetry.analysis.resample import CurveTable, Matrix
from clustertrain.telemetry.insights.context import gpu_label
from clustertrain.telemetry.report_schema import (
    AttemptSummary,
    ErrorCounts,
    GpuSummary,
    HostSummary,
    Insight,
    ProcessSummary,
    Stats,
    Summary,
    ThrottleShares,
    Timeline,
    TimelineEvent,
    TimeWindow,
    TrainingSummary,
    Waste,
    XidRecord,
)

T0 = 1_790_000_000.0
GIB = 1 << 30
IDLE, HOT, FAULTY, SLOW = 5, 19, 23, 26  # rows
XID, XID_HOUR = 63, 20.1  # the run survives it
# Hours of a day; a shorter or longer run has the same parts.
FIRST_STEP, STOP = 0.1, 9.42
PREEMPTED, RESTARTED, RESUMED, END = 9.45, 10.5, 10.7, 24.0
TOKENS_PER_GPU = 12_288  # and step
PARAMETERS, PEAK_FLOPS = 8.03e9, 989e12  # of the model; of an H100 in bfloat16
STEP_S, FORWARD_S, LATE_S = 1.43, 0.3, 0.07
NODE_MEMORY_GIB, ALLOCATED_GIB = 1007.6, 900


def page(nodes: int = 4, gpus: int = 8, hours: float = 24.0, step_s: float = 60.0) -> tuple[Summary, Curves]:
    """Return a deterministic summary and its curves."""
    names = [f"gpu-node-{i + 1:02d}" for i in range(nodes)]
    points = int(hours * 3600 / step_s)
    t = T0 + (np.arange(points) + 0.5) * step_s
    goodput = _goodput(hours)
    attempts = _attempts(names, gpus, hours, _count_steps(goodput))
    running = np.zeros(points, dtype=bool)
    for a in attempts:
        assert a.start is not None and a.end is not None
        running |= (t >= a.start) & (t < a.end)
    values = _gpu_values(np.random.default_rng(7), nodes * gpus, points, running, step_s)
    gpu_curves = CurveTable(T0, step_s, points, values)
    hosts = CurveTable(T0, step_s, points, _host_values(nodes, points, running))
    training = _training_values(t, nodes * gpus, hours, _count_steps(goodput), running)
    by_node = {k: np.nanmean(m[:, running].reshape(nodes, gpus, -1), axis=1) for k, m in values.items()}
    node_values = {k: np.full((nodes, points), np.nan) for k in values}
    for k, m in by_node.items():
        node_values[k][:, running] = m
    overall = {k: np.full((3, points), np.nan) for k in values}
    for k, m in values.items():
        active = m[:, running]
        overall[k][:, running] = [active.mean(axis=0), active.min(axis=0), active.max(axis=0)]
    tables = {"gpus": gpu_curves, "hosts": hosts, "training": CurveTable(T0, step_s, points, training)}
    summary = _summary(names, gpus, tables, attempts, goodput)
    curves = Curves(
        gpus=gpu_curves,
        chosen=list(range(nodes * gpus)),
        heat=gpu_curves,
        overall=CurveTable(T0, step_s, points, overall),
        nodes=CurveTable(T0, step_s, points, node_values),
        hosts=hosts,
        node_names=names,
        training=tables["training"],
        source="Each point is the mean of 1 min.",
        choice=None,
        ranks=CurveTable(T0, step_s, points, _rank_values(points, running)),
    )
    return summary, curves


def _goodput(hours: float) -> Goodput:
    h = 3600 * hours / 24
    g = Goodput(wall_s=24.5 * h, queue_s=1.55 * h, startup_s=0.2 * h, restore_s=0.05 * h, repeated_s=0.0)
    g.checkpoint_stall_s, g.evaluation_s, g.shutdown_s, g.other_s = 0.24 * h, 0.35 * h, 0.05 * h, 0.3 * h
    g.productive_s = g.wall_s - sum(getattr(g, name) for name in TIME_CATEGORIES if name != "productive_s")
    g.ratio = g.productive_s / g.wall_s
    return g


def _late(x: Matrix) -> Matrix:
    """Return how far the slow rank has become slow, 0-1, at the shares ``x`` of the run."""
    return np.asarray(1 / (1 + np.exp(-(x - 0.62) * 80)))


def _count_steps(goodput: Goodput) -> int:
    """Return how many steps fit into the productive time."""
    x = (np.arange(2400) + 0.5) / 2400
    running = (x < PREEMPTED / END) | (x >= RESTARTED / END)
    return max(1, int(goodput.productive_s / (STEP_S + LATE_S * float(_late(x)[running].mean()))))


def _step_at(hour: Matrix | float, steps: int) -> Matrix:
    """Return the steps completed at an hour of the day."""
    trained = np.clip(hour, FIRST_STEP, STOP) - FIRST_STEP + np.clip(hour, RESUMED, END) - RESUMED
    return np.floor(steps * trained / (STOP - FIRST_STEP + END - RESUMED))


def _attempts(names: list[str], gpus: int, hours: float, steps: int) -> list[AttemptSummary]:
    h = 3600 * hours / 24

    def step(hour: float) -> int:
        return int(_step_at(hour, steps))

    def mark(hour: float, kind: str, text: str, seconds: float | None = None) -> TimelineEvent:
        t = T0 + hour * h
        return TimelineEvent(t, kind, text, None if seconds is None else t + seconds)

    def routine(checkpoints: range, evaluations: tuple[float, ...]) -> list[TimelineEvent]:
        saves = [mark(k, "checkpoint", f"checkpoint of step {step(k)} (interval)", 38) for k in checkpoints]
        return saves + [mark(k, "evaluation", f"evaluation at step {step(k)}", 300) for k in evaluations]

    first = [
        mark(FIRST_STEP, "first_step", "first step, number 1"),
        *routine(range(1, 10), (3.5, 7.5)),
        mark(9.4, "signal", "stop requested (SIGTERM)"),
        mark(STOP, "stop_agreed", f"all ranks stop at step {step(STOP)}"),
    ]
    second = [
        mark(10.6, "restored", f"restored step {step(STOP)}", 41),
        mark(RESUMED, "first_step", f"first step, number {step(STOP) + 1}"),
        *routine(range(12, 24), (13.5, 18.5)),
        mark(16.2, "alert", f"alert raised: {_name(HOT, names, gpus)} is hot: 88 °C"),
        mark(XID_HOUR, "xid", f"XID {XID} on {_name(FAULTY, names, gpus)}: {xids.lookup_xid(XID).name}"),
    ]
    start, end = (T0, T0 + RESTARTED * h), (T0 + PREEMPTED * h, T0 + END * h)
    return [
        AttemptSummary(1, "8812", TimeWindow(start[0], end[0]), names, start[0], end[0], "preempted", first),
        AttemptSummary(2, "8812", TimeWindow(start[1], end[1]), names, start[1], end[1], "completed", second),
    ]


def _name(row: int, names: list[str], gpus: int) -> str:
    row %= len(names) * gpus
    return f"GPU {row % gpus} of {names[row // gpus]}"


def _gpu_values(
    rng: np.random.Generator, rows: int, points: int, running: np.ndarray, step_s: float
) -> dict[str, Matrix]:
    wave = 0.04 * np.sin(np.arange(points) * step_s / 1800)
    use = np.clip(0.93 + wave + rng.normal(0, 0.02, (rows, points)), 0, 1)
    every_hour = (np.arange(points) * step_s) % 3600 < max(step_s, 90)
    use[:, every_hour] *= 0.55
    idle, hot, slow = (row % rows for row in (IDLE, HOT, SLOW))
    use[slow] *= 0.86
    use[idle] = 0.0
    warm = 1 / (1 + np.exp(-(np.arange(points) - 0.6 * points) / (0.02 * points + 1)))
    power = 95 + 560 * use + rng.normal(0, 6, (rows, points))
    power[hot] -= 30 * warm
    clock = 1965 - 60 * use + rng.normal(0, 4, (rows, points))
    clock[hot] -= 100 * warm
    temperature = 34 + 0.052 * power + np.arange(rows)[:, None] % 8 * 0.9
    temperature[hot] += 20 * warm
    memory = np.where(use > 0, 68.5, 0.6) * GIB + rng.normal(0, 0.05, (rows, points)) * GIB
    values = {
        "utilization": use,
        "sm_activity": use * 0.81,
        "tensor_activity": use * 0.47 + rng.normal(0, 0.005, (rows, points)) * (use > 0),
        "dram_activity": use * 0.38,
        "memory_used_bytes": memory,
        "power_w": power,
        "temperature_c": temperature,
        "sm_clock_mhz": clock,
        "pcie_bytes_per_s": use * 3.1e9,
        "nvlink_bytes_per_s": use * 212e9 + rng.normal(0, 2e9, (rows, points)) * (use > 0),
        "throttled": np.where(np.arange(rows)[:, None] == hot, np.round(warm * (rng.random(points) < 0.7)), 0.0),
    }
    assert values.keys() == GPU_CURVES.keys()
    for m in values.values():
        m[:, ~running] = np.nan
    return values


def _host_values(rows: int, points: int, running: np.ndarray) -> dict[str, Matrix]:
    rng = np.random.default_rng(8)
    level = {"cpu": 0.22, "memory_used_bytes": 412 * GIB, "job_memory_bytes": 388 * GIB}
    level |= {"network_bytes_per_s": 2.1e8, "infiniband_bytes_per_s": 3.9e10, "disk_bytes_per_s": 4e7}
    assert level.keys() == HOST_CURVES.keys()
    noise = {k: 0.004 if "memory" in k else 0.03 for k in level}
    values = {k: v * (1 + rng.normal(0, noise[k], (rows, points))) for k, v in level.items()}
    for m in values.values():
        m[:, ~running] = np.nan
    return values


def _training_values(t: Matrix, gpus: int, hours: float, steps: int, running: np.ndarray) -> dict[str, Matrix]:
    rng, points = np.random.default_rng(9), len(t)
    x = np.arange(points) / points
    step = STEP_S + rng.normal(0, 0.01, points) + LATE_S * _late(x)
    loss = 2.1 + 8.5 * np.exp(-x * 9) + rng.normal(0, 0.02, points)
    values = {"step_s": step, "tokens_per_s": gpus * TOKENS_PER_GPU / step, "data_wait_s": 0.03 + 0 * x, "loss": loss}
    values["lr"] = 3e-4 * np.minimum(1, x * 20) * (1 - 0.9 * x)
    values["validation_loss"] = 2.2 + 8.5 * np.exp(-np.floor(x * 10) * 0.9)
    values["step"] = _step_at((t - T0) / 3600 * 24 / hours, steps)
    values["grad_norm"] = 0.4 + np.exp(-x * 12) + rng.normal(0, 0.02, points)
    return {k: np.where(running, v, np.nan)[None, :] for k, v in values.items()}


def _rank_values(points: int, running: np.ndarray) -> dict[str, Matrix]:
    """Return the mean, the lowest and the highest rank; one rank becomes slow."""
    rng = np.random.default_rng(10)
    mean = FORWARD_S + rng.normal(0, 0.002, points)
    slow = LATE_S * _late(np.arange(points) / points)
    rows = np.array([mean + slow / 32, mean - 0.01, mean + 0.012 + slow])
    return {"forward_s": np.where(running, rows, np.nan)}


def stats(values: Matrix, scale: float = 1.0) -> Stats | None:
    finite = values[np.isfinite(values)] * scale
    if not len(finite):
        return None
    p5, p50, p95 = (float(p) for p in np.percentile(finite, (5, 50, 95)))
    return Stats(float(finite.mean()), p5, p50, p95, float(finite.max()))


def _gpu(node: str, index: int, rank: int, row: dict[str, Matrix], step_s: float, errors: ErrorCounts) -> GpuSummary:
    seconds = float(np.isfinite(row["power_w"]).sum()) * step_s
    return GpuSummary(
        node=node,
        uuid=f"GPU-{rank:08x}-77aa-4b1e-9c3d-{rank * 7919:012x}",
        index=index,
        name="NVIDIA H100 80GB HBM3",
        ranks=[rank],
        attempts=[1, 2],
        samples=int(0.9975 * seconds),
        samples_expected=int(seconds),
        utilization=stats(row["utilization"]),
        memory_used_gib=stats(row["memory_used_bytes"], 1 / GIB),
        memory_total_gib=79.65,
        power_w=stats(row["power_w"]),
        energy_j=float(np.nansum(row["power_w"])) * step_s,
        energy_source="counter",
        temperature_c=stats(row["temperature_c"]),
        sm_clock_mhz=stats(row["sm_clock_mhz"]),
        memory_clock_mhz=None,
        timeline=Timeline(60.0, []),
        missing={},
        throttle_ratio=ThrottleShares(0.02, _mean(stats(row["throttled"])), 0.0),
        errors=errors,
    )


def _summary(
    names: list[str], gpus: int, tables: dict[str, CurveTable], attempts: list[AttemptSummary], goodput: Goodput
) -> Summary:
    values, training = tables["gpus"].values, tables["training"].values
    step_s, rows = tables["gpus"].step_s, len(names) * gpus
    t0, t1 = attempts[0].start, attempts[-1].end
    assert t0 is not None and t1 is not None
    xid = ErrorCounts(xids=[XidRecord(t0 + XID_HOUR / 24 * (t1 - t0), XID)])
    gpu_summaries = [
        _gpu(names[row // gpus], row % gpus, row, {k: m[row] for k, m in values.items()}, step_s,
             xid if row == FAULTY % rows else ErrorCounts())
        for row in range(rows)
    ]  # fmt: skip
    hosts = [_host(name, {k: m[n] for k, m in tables["hosts"].values.items()}, step_s) for n, name in enumerate(names)]
    waste = _waste(goodput, rows)
    steps = _count_steps(goodput)
    tokens_per_s = rows * TOKENS_PER_GPU * steps / goodput.productive_s
    energy_j = sum(g.energy_j or 0 for g in gpu_summaries)
    return Summary(
        run="llama-8b-pretrain-k3v7xq",
        job_id="8812",
        window=TimeWindow(t0, t1),
        coverage=0.9975,
        attempts=attempts,
        gpus=gpu_summaries,
        hosts=hosts,
        insights=_insights(gpu_summaries, hosts, waste.gpu_hours, goodput),
        state="completed",
        user="mina",
        layout=f"hybrid_shard: dp_replicate {len(names)} × dp_shard {gpus}",
        training=TrainingSummary(
            steps=steps,
            tokens=float(steps * rows * TOKENS_PER_GPU),
            step_s=stats(training["step_s"]),
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_gpu=tokens_per_s / rows,
            mfu=tokens_per_s / rows * 6 * PARAMETERS / PEAK_FLOPS,
            energy_j=energy_j,
            joules_per_token=energy_j / (steps * rows * TOKENS_PER_GPU),
            data_wait_share=0.02,
            loss=float(training["loss"][0, -1]),
        ),
        goodput=goodput,
        waste=waste,
    )


def _waste(goodput: Goodput, gpus: int) -> Waste:
    """Return the waste with one idle GPU, as the telemetry computes it."""
    held_hours = (goodput.wall_s - goodput.queue_s) / 3600
    names = ("startup", "restore", "checkpoint_stall", "evaluation", "shutdown")
    causes = {name: (gpus - 1) * getattr(goodput, f"{name}_s") / 3600 for name in names}
    causes |= {"idle_gpus": held_hours}
    return Waste(gpu_hours=gpus * held_hours, wasted_gpu_hours=sum(causes.values()), by_cause=causes)


def _insights(gpus: list[GpuSummary], hosts: list[HostSummary], gpu_hours: float, goodput: Goodput) -> list[Insight]:
    """Return insights in the words and with the costs of the real rules."""
    idle, hot, faulty, slow = (gpus[row % len(gpus)] for row in (IDLE, HOT, FAULTY, SLOW))
    training_hours = gpu_hours * goodput.productive_s / (goodput.wall_s - goodput.queue_s)
    clock, usual_clock = (_mean(g.sm_clock_mhz) for g in (hot, gpus[(HOT + 1) % len(gpus)]))
    peak_c = hot.temperature_c.max if hot.temperature_c is not None else 0.0
    wait_s = LATE_S * (1 - 0.62) * END / (END - RESTARTED)  # of the newest attempt
    used = max(h.processes.rss_gib.max for h in hosts if h.processes is not None)
    return [
        _insight(idle, "critical", "gpu_unused", f"{gpu_label(idle)} was not used: its utilization stayed at 0",
                 f"check `clustertrain logs llama-8b-pretrain-k3v7xq --rank {idle.ranks[0]}` for what its rank does; "
                 "or request fewer GPUs", gpu_hours / len(gpus)),
        _insight(slow, "warning", "straggler",
                 f"rank {slow.ranks[0]} on {slow.node} needs {FORWARD_S + wait_s:.2f} s per step for "
                 f"forward passes, {wait_s / FORWARD_S:.0%} more than the others: all wait for it",
                 f"{_exclude(slow)} if it is always this rank; if the rank changes, samples differ "
                 "in length", training_hours * wait_s / (STEP_S + wait_s)),
        _insight(hot, "warning", "throttled",
                 f"{gpu_label(hot)} throttles: heat lowered its clock for "
                 f"{hot.throttle_ratio.thermal:.0%} of the training, to {clock:,.0f} MHz "
                 f"while the others run at {usual_clock:,.0f}; it reached {peak_c:.0f} °C",
                 f"{_exclude(hot)}; ask the administrators to check the cooling of the node",
                 training_hours * max(0.0, 1 - clock / usual_clock)),
        _insight(faulty, xids.lookup_xid(XID).severity, "xid", f"{gpu_label(faulty)} {xids.format_report(XID)}",
                 xids.format_fix(XID, faulty.node)),
        Insight(
            severity="info",
            code="host_memory_over_requested",
            text=f"the job used {used:.1f} of {ALLOCATED_GIB:.1f} GiB of memory allocated on a node "
            f"({used / ALLOCATED_GIB:.0%})",
            fix=f"use --mem={math.ceil(used * 1.2)}G, the peak plus 20 %",
        ),
    ]  # fmt: skip


def _exclude(gpu: GpuSummary) -> str:
    return f"`clustertrain submit --exclude {gpu.node}` leaves the node out next time"


def _insight(gpu: GpuSummary, severity: str, code: str, text: str, fix: str, gpu_hours: float | None = None) -> Insight:
    return Insight(
        severity=severity, code=code, text=text, fix=fix, node=gpu.node,
        uuid=gpu.uuid, rank=gpu.ranks[0], gpu_hours=gpu_hours,
    )  # fmt: skip


def _mean(values: Stats | None) -> float:
    return values.mean if values is not None else 0.0


def _host(node: str, row: dict[str, Matrix], step_s: float) -> HostSummary:
    seconds = float(np.isfinite(row["cpu"]).sum()) * step_s
    rss = stats(row["job_memory_bytes"], 1 / GIB)
    return HostSummary(
        node=node,
        attempts=[1, 2],
        samples=int(0.9987 * seconds),
        samples_expected=int(seconds),
        nvml_error=None,
        driver="580.95.05",
        allocation_source=None,
        cpu=stats(row["cpu"]),
        cpu_count=96,
        memory_used_gib=stats(row["memory_used_bytes"], 1 / GIB),
        memory_total_gib=NODE_MEMORY_GIB,
        memory_allocated_gib=float(ALLOCATED_GIB),
        load1=Stats(21, 18, 21, 24, 40),
        processes=None if rss is None else ProcessSummary(rss, None, 40),
        missing={},
    )
