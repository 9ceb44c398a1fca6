"""A synthetic run for the HTML page: four nodes for a day, preempted once; one GPU is idle, one throttled, one slow."""

from __future__ import annotations

import numpy as np

from clustertrain.run.usage.goodput import Goodput
from clustertrain.telemetry.analysis.curves import GPU_CURVES, HOST_CURVES, Curves
from clustertrain.telemetry.analysis.resample import CurveTable, Matrix
from clustertrain.telemetry.report_schema import (
    AttemptSummary,
    GpuSummary,
    HostSummary,
    Insight,
    Stats,
    Summary,
    ThrottleShares,
    Timeline,
    TimelineEvent,
    TimeWindow,
    TrainingSummary,
    Waste,
)

T0 = 1_790_000_000.0
GIB = 1 << 30
IDLE, HOT, SLOW = 5, 19, 26  # rows


def page(nodes: int = 4, gpus: int = 8, hours: float = 24.0, step_s: float = 60.0) -> tuple[Summary, Curves]:
    """Return a deterministic summary and its curves."""
    names = [f"gpu-node-{i + 1:02d}" for i in range(nodes)]
    points = int(hours * 3600 / step_s)
    t = T0 + (np.arange(points) + 0.5) * step_s
    attempts = _attempts(names, gpus, hours)
    running = np.zeros(points, dtype=bool)
    for a in attempts:
        assert a.start is not None and a.end is not None
        running |= (t >= a.start) & (t < a.end)
    values = _gpu_values(np.random.default_rng(7), nodes * gpus, points, running, step_s)
    gpu_curves = CurveTable(T0, step_s, points, values)
    hosts = CurveTable(T0, step_s, points, _host_values(nodes, points, running))
    by_node = {k: np.nanmean(m[:, running].reshape(nodes, gpus, -1), axis=1) for k, m in values.items()}
    node_values = {k: np.full((nodes, points), np.nan) for k in values}
    for k, m in by_node.items():
        node_values[k][:, running] = m
    overall = {k: np.full((3, points), np.nan) for k in values}
    for k, m in values.items():
        active = m[:, running]
        overall[k][:, running] = [active.mean(axis=0), active.min(axis=0), active.max(axis=0)]
    summary = _summary(names, gpus, values, attempts, hours)
    curves = Curves(
        gpus=gpu_curves,
        chosen=list(range(nodes * gpus)),
        heat=gpu_curves,
        overall=CurveTable(T0, step_s, points, overall),
        nodes=CurveTable(T0, step_s, points, node_values),
        hosts=hosts,
        node_names=names,
        training=CurveTable(T0, step_s, points, _training_values(points, running)),
        source="Each point is the mean of 1 min.",
        choice=None,
        ranks=CurveTable(T0, step_s, points, _rank_values(points, running)),
    )
    return summary, curves


def _attempts(names: list[str], gpus: int, hours: float) -> list[AttemptSummary]:
    h = 3600 * hours / 24
    row = HOT % (len(names) * gpus)
    hot = f"GPU {row % gpus} of {names[row // gpus]}"
    first = [
        TimelineEvent(T0 + 300, "first_step", "step 0 of 60,000"),
        *[TimelineEvent(T0 + k * h, "checkpoint", f"step {k * 2500:,}, 38 s", T0 + k * h + 38) for k in range(1, 10)],
        *[TimelineEvent(T0 + k * h, "evaluation", f"step {k * 2500:,}, 5 min", T0 + k * h + 300) for k in (3.5, 7.5)],
        TimelineEvent(T0 + 9.4 * h, "signal", "SIGTERM: preempted by Slurm"),
        TimelineEvent(T0 + 9.42 * h, "stop_agreed", "at step 23,514, with a checkpoint"),
    ]
    second = [
        TimelineEvent(T0 + 10.6 * h, "restored", "step 23,514 in 41 s", T0 + 10.6 * h + 41),
        TimelineEvent(T0 + 10.7 * h, "first_step", "step 23,515"),
        *[TimelineEvent(T0 + k * h, "checkpoint", f"step {k * 2400:,}, 38 s", T0 + k * h + 38) for k in range(12, 24)],
        *[TimelineEvent(T0 + k * h, "evaluation", f"step {k * 2400:,}, 5 min", T0 + k * h + 300) for k in (13.5, 18.5)],
        TimelineEvent(T0 + 16.2 * h, "alert", f"{hot} is hot: 88 °C"),
        TimelineEvent(T0 + 20.1 * h, "xid", f"Xid 94 on {hot}"),
    ]
    start, end = (T0, T0 + 10.5 * h), (T0 + 9.45 * h, T0 + 24 * h)
    return [
        AttemptSummary(1, "8812", TimeWindow(start[0], end[0]), names, start[0], end[0], "preempted", first),
        AttemptSummary(2, "8812", TimeWindow(start[1], end[1]), names, start[1], end[1], "completed", second),
    ]


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
    power[hot] -= 170 * warm
    clock = 1965 - 60 * use + rng.normal(0, 4, (rows, points))
    clock[hot] -= 620 * warm
    temperature = 34 + 0.052 * power + np.arange(rows)[:, None] % 8 * 0.9
    temperature[hot] += 22 * warm
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
    values = {k: v * (1 + rng.normal(0, 0.03, (rows, points))) for k, v in level.items()}
    for m in values.values():
        m[:, ~running] = np.nan
    return values


def _training_values(points: int, running: np.ndarray) -> dict[str, Matrix]:
    rng = np.random.default_rng(9)
    x = np.arange(points) / points
    step = 1.42 + rng.normal(0, 0.01, points) + 0.35 / (1 + np.exp(-(x - 0.62) * 80))
    loss = 2.1 + 8.5 * np.exp(-x * 9) + rng.normal(0, 0.02, points)
    values = {"step_s": step, "tokens_per_s": 4_194_304 / step, "data_wait_s": 0.03 + 0 * x, "loss": loss}
    values["lr"] = 3e-4 * np.minimum(1, x * 20) * (1 - 0.9 * x)
    values["validation_loss"] = 2.2 + 8.5 * np.exp(-np.floor(x * 10) * 0.9)
    values["step"] = np.floor(x * 57_480)
    values["grad_norm"] = 0.4 + np.exp(-x * 12) + rng.normal(0, 0.02, points)
    return {k: np.where(running, v, np.nan)[None, :] for k, v in values.items()}


def _rank_values(points: int, running: np.ndarray) -> dict[str, Matrix]:
    """Return the mean, the lowest and the highest rank; one rank becomes slow."""
    rng = np.random.default_rng(10)
    mean = 0.41 + rng.normal(0, 0.002, points)
    slow = 0.09 / (1 + np.exp(-(np.arange(points) / points - 0.62) * 80))
    rows = np.array([mean + slow / 32, mean - 0.01, mean + 0.012 + slow])
    return {"forward_s": np.where(running, rows, np.nan)}


def stats(values: Matrix, scale: float = 1.0) -> Stats | None:
    finite = values[np.isfinite(values)] * scale
    if not len(finite):
        return None
    p5, p50, p95 = (float(p) for p in np.percentile(finite, (5, 50, 95)))
    return Stats(float(finite.mean()), p5, p50, p95, float(finite.max()))


def _gpu(node: str, index: int, rank: int, row: dict[str, Matrix], *, is_hot: bool) -> GpuSummary:
    energy = float(np.nansum(row["power_w"])) * 60
    return GpuSummary(
        node=node,
        uuid=f"GPU-{rank:08x}-77aa-4b1e-9c3d-{rank * 7919:012x}",
        index=index,
        name="NVIDIA H100 80GB HBM3",
        ranks=[rank],
        attempts=[1, 2],
        samples=79_000,
        samples_expected=79_200,
        utilization=stats(row["utilization"]),
        memory_used_gib=stats(row["memory_used_bytes"], 1 / GIB),
        memory_total_gib=79.65,
        power_w=stats(row["power_w"]),
        energy_j=energy,
        energy_source="counter",
        temperature_c=stats(row["temperature_c"]),
        sm_clock_mhz=stats(row["sm_clock_mhz"]),
        memory_clock_mhz=None,
        timeline=Timeline(60.0, []),
        missing={},
        throttle_ratio=ThrottleShares(0.02, 0.38 if is_hot else 0.0, 0.0),
    )


def _summary(
    names: list[str], gpus: int, values: dict[str, Matrix], attempts: list[AttemptSummary], hours: float
) -> Summary:
    hot_row = HOT % (len(names) * gpus)
    gpu_summaries = [
        _gpu(node, i, n * gpus + i, {k: m[n * gpus + i] for k, m in values.items()}, is_hot=n * gpus + i == hot_row)
        for n, node in enumerate(names)
        for i in range(gpus)
    ]
    idle, hot, slow = (gpu_summaries[row % len(gpu_summaries)] for row in (IDLE, HOT, SLOW))
    insights = [
        Insight(
            severity="critical",
            code="gpu_unused",
            text=f"GPU {idle.index} of {idle.node} (rank {idle.ranks[0]}, {idle.uuid}) was not used: 0 % all day.",
            fix="ask for one GPU less, or look why its rank is stuck",
            node=idle.node,
            uuid=idle.uuid,
            rank=idle.ranks[0],
            gpu_hours=22.9,
        ),
        Insight(
            severity="warning",
            code="throttled",
            text=f"GPU {hot.index} of {hot.node} was throttled by heat in 38 % of its samples.",
            fix=f"notify the administrators; until then --exclude {hot.node}",
            node=hot.node,
            uuid=hot.uuid,
            rank=hot.ranks[0],
            gpu_hours=96.3,
        ),
        Insight(
            severity="warning",
            code="straggler",
            text=f"Rank {slow.ranks[0]} on GPU {slow.index} of {slow.node} is 14 % slower than the median.",
            fix=f"clustertrain requeue --exclude {slow.node} continues without the node",
            node=slow.node,
            uuid=slow.uuid,
            rank=slow.ranks[0],
        ),
        Insight(
            severity="info",
            code="host_memory_over_requested",
            text="The job used 412 of 1,024 GiB of memory allocated on a node (40%)",
            fix="use --mem=495G, the peak plus 20 %",
        ),
    ]
    h = 3600 * hours / 24
    goodput = Goodput(wall_s=24.5 * h, queue_s=1.55 * h, startup_s=0.2 * h, restore_s=0.05 * h, repeated_s=0.0)
    goodput.checkpoint_stall_s, goodput.evaluation_s, goodput.shutdown_s = 0.4 * h, 0.35 * h, 0.05 * h
    goodput.other_s = 0.3 * h
    goodput.productive_s = goodput.wall_s - 2.9 * h
    goodput.ratio = goodput.productive_s / goodput.wall_s
    return Summary(
        run="llama-8b-pretrain-k3v7xq",
        job_id="8812",
        window=TimeWindow(T0, T0 + 24 * h),
        coverage=0.9975,
        attempts=attempts,
        gpus=gpu_summaries,
        hosts=[_host(node) for node in names],
        insights=insights,
        state="completed",
        user="mina",
        layout=f"hybrid_shard: dp_replicate {len(names)} × dp_shard {gpus}",
        training=TrainingSummary(
            steps=57_480,
            tokens=57_480 * 4_194_304.0,
            step_s=Stats(1.43, 1.40, 1.42, 1.78, 3.1),
            tokens_per_s=2_930_000.0,
            tokens_per_s_per_gpu=91_500.0,
            mfu=0.412,
            energy_j=sum(g.energy_j or 0 for g in gpu_summaries),
            joules_per_token=0.0066,
            data_wait_share=0.02,
            loss=2.104,
        ),
        goodput=goodput,
        waste=Waste(
            gpu_hours=732.8,
            wasted_gpu_hours=71.4,
            by_cause={"idle_gpus": 22.9, "evaluation": 10.5},
        ),
    )


def _host(node: str) -> HostSummary:
    return HostSummary(
        node=node,
        attempts=[1, 2],
        samples=79_100,
        samples_expected=79_200,
        nvml_error=None,
        driver="580.95.05",
        allocation_source=None,
        cpu=Stats(0.22, 0.18, 0.22, 0.26, 0.9),
        cpu_count=96,
        memory_used_gib=Stats(412, 400, 412, 420, 431),
        memory_total_gib=1007.6,
        load1=Stats(21, 18, 21, 24, 40),
        processes=None,
        missing={},
    )
