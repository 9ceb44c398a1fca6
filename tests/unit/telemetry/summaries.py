"""Handwritten summaries for tests of rules and reports: a healthy job and possible problems."""

from __future__ import annotations

from typing import Any

import msgspec

from clustertrain.run.usage.goodput import Goodput
from clustertrain.telemetry import insights
from clustertrain.telemetry.report_schema import (
    AttemptSummary,
    GpuSummary,
    HostSummary,
    Insight,
    PhaseStats,
    ProcessSummary,
    RankSummary,
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
HOUR = 3600.0
replace = msgspec.structs.replace


def stats(mean: float, spread: float = 0.02, most: float | None = None) -> Stats:
    high = mean * (1 + spread)
    return Stats(mean, mean * (1 - spread), mean, high, high * 1.01 if most is None else most)


def gpu(number: int, node: str = "n1", rank: int | None = None, **changes: Any) -> GpuSummary:
    """Return a GPU that trains at its power limit, with warm-up, an evaluation and some checkpoints."""
    clock = 1905.0 + 3 * number  # chips differ
    phases = {
        "startup": PhaseStats(0.03, 0.02, 120.0, 1200.0),
        "train": PhaseStats(0.92, 0.97, 650.0, clock, 0.82, 0.41, ThrottleShares(0.7, 0.0, 0.0)),
        "checkpoint": PhaseStats(0.02, 0.4, 300.0, 1980.0),
        "evaluation": PhaseStats(0.03, 0.8, 500.0, 1950.0),
    }
    values: dict[str, Any] = {
        "node": node,
        "uuid": f"GPU-{node}-{number}-5b1c9f0e",
        "index": number,
        "name": "NVIDIA H100 80GB HBM3",
        "ranks": [] if rank is None else [rank],
        "attempts": [1],
        "samples": 7200,
        "samples_expected": 7200,
        "utilization": Stats(0.93, 0.35, 0.97, 0.99, 1.0),
        "memory_used_gib": stats(61.0),
        "memory_total_gib": 80.0,
        "power_w": Stats(615.0, 120.0, 650.0, 699.0, 702.0),
        "energy_j": 615.0 * 2 * HOUR,
        "energy_source": "counter",
        "temperature_c": Stats(62.0, 40.0, 64.0, 67.0, 68.0),
        "sm_clock_mhz": stats(clock),
        "memory_clock_mhz": stats(2619.0),
        "timeline": Timeline(45.0, [0.0] * 5 + [0.97] * 90 + [0.5] + [0.97] * 64),
        "missing": {},
        "sm_activity": stats(0.78),
        "tensor_activity": stats(0.38),
        "nvlink_bytes_per_s": stats(60e9),
        "pcie_bytes_per_s": stats(1e9),
        "nvlinks_active_min": 18,
        "nvlinks_active_max": 18,
        "throttle_ratio": ThrottleShares(0.64, 0.0, 0.0),
        "phases": phases,
        "power_limit_w": 700.0,
    }
    return GpuSummary(**{**values, **changes})


def host(node: str, **changes: Any) -> HostSummary:
    values: dict[str, Any] = {
        "node": node,
        "attempts": [1],
        "samples": 7200,
        "samples_expected": 7200,
        "nvml_error": None,
        "driver": "570.1",
        "allocation_source": "slurm",
        "cpu": stats(0.25),
        "cpu_count": 96,
        "memory_used_gib": stats(128.0),
        "memory_total_gib": 1024.0,
        "load1": stats(12.5),
        "processes": ProcessSummary(stats(90.0), stats(12.0), 35),
        "missing": {},
        "cpu_allocated": 16,
        "memory_allocated_gib": 128.0,
    }
    return HostSummary(**{**values, **changes})


def healthy(nodes: int = 4, gpus: int = 2, **changes: Any) -> Summary:
    """Return a summary of two hours of healthy training, without insights."""
    names = [f"n{i + 1}" for i in range(nodes)]
    all_gpus = [gpu(i, node, n * gpus + i) for n, node in enumerate(names) for i in range(gpus)]
    ranks = [
        RankSummary(
            rank=g.ranks[0],
            node=g.node,
            uuid=g.uuid,
            step=9000,
            data_wait_s=0.004 + 0.0005 * (g.ranks[0] % 3),
            forward_s=0.21 + 0.002 * (g.ranks[0] % 5),
        )
        for g in all_gpus
    ]
    end = T0 + 2 * HOUR
    marks = [
        TimelineEvent(T0 + 216, "first_step", "step 1"),
        *(TimelineEvent(T0 + 1500.0 * i, "checkpoint", f"step {1800 * i}", T0 + 1500.0 * i + 20) for i in range(1, 5)),
        TimelineEvent(T0 + 4000, "evaluation", "step 5000", T0 + 4200),
    ]
    values: dict[str, Any] = {
        "run": "gpt-abc234",
        "job_id": "4711",
        "window": TimeWindow(T0, end),
        "coverage": 0.999,
        "attempts": [AttemptSummary(1, "4711", TimeWindow(T0, end), names, T0 - 5, end, "completed", marks)],
        "gpus": all_gpus,
        "hosts": [host(node) for node in names],
        "insights": [],
        "state": "completed",
        "user": "ada",
        "layout": "hybrid-shard 4 x 2",
        "ranks": ranks,
        "training": TrainingSummary(
            steps=9000,
            tokens=9000 * 0.5e6,
            step_s=Stats(0.74, 0.72, 0.73, 0.78, 1.9),
            tokens_per_s=676_000.0,
            tokens_per_s_per_gpu=676_000.0 / (nodes * gpus),
            mfu=0.43,
            energy_j=sum(g.energy_j or 0.0 for g in all_gpus),
            joules_per_token=0.0079,
            data_wait_share=0.006,
            loss=2.31,
        ),
        "goodput": Goodput(
            wall_s=2 * HOUR + 605,
            queue_s=600.0,
            startup_s=221.0,
            productive_s=6600.0,
            checkpoint_stall_s=140.0,
            evaluation_s=200.0,
            shutdown_s=44.0,
            ratio=6600 / (2 * HOUR + 605),
        ),
        "waste": Waste(
            gpu_hours=2.0 * nodes * gpus,
            wasted_gpu_hours=0.168 * nodes * gpus,
            by_cause={"startup": 0.061 * nodes * gpus, "evaluation": 0.056 * nodes * gpus},
        ),
    }
    return Summary(**{**values, **changes})


def with_gpu(summary: Summary, node: str, number: int, **changes: Any) -> Summary:
    """Return ``summary`` with one GPU changed."""
    gpus = [replace(g, **changes) if (g.node, g.index) == (node, number) else g for g in summary.gpus]
    return replace(summary, gpus=gpus)


def with_gpus(summary: Summary, **changes: Any) -> Summary:
    return replace(summary, gpus=[replace(g, **changes) for g in summary.gpus])


def in_training(summary: Summary, node: str, number: int, **changes: Any) -> Summary:
    """Return ``summary`` with changed training statistics of one GPU."""
    (selected,) = (g for g in summary.gpus if (g.node, g.index) == (node, number))
    train = replace(selected.phases["train"], **changes)
    return with_gpu(summary, node, number, phases={**selected.phases, "train": train})


def with_rank(summary: Summary, rank: int, **changes: Any) -> Summary:
    return replace(summary, ranks=[replace(r, **changes) if r.rank == rank else r for r in summary.ranks])


def idle(summary: Summary, node: str, number: int) -> Summary:
    zero = Stats(0.0, 0.0, 0.0, 0.0, 0.0)
    train = PhaseStats(0.92, 0.0, 72.0, 345.0, 0.0, 0.0, ThrottleShares(0.0, 0.0, 0.0))
    return with_gpu(
        summary,
        node,
        number,
        utilization=zero,
        sm_activity=zero,
        tensor_activity=zero,
        memory_used_gib=stats(0.5),
        power_w=stats(72.0),
        energy_j=72.0 * 2 * HOUR,
        sm_clock_mhz=stats(345.0),
        throttle_ratio=ThrottleShares(0.0, 0.0, 0.0),
        phases={"train": train},
        timeline=Timeline(45.0, [0.0] * 160),
    )


def throttling(summary: Summary, node: str, number: int) -> Summary:
    shares = ThrottleShares(0.1, 0.37, 0.0)
    summary = with_gpu(summary, node, number, throttle_ratio=shares, temperature_c=Stats(84.0, 60.0, 86.0, 90.0, 92.0))
    return in_training(
        summary, node, number, sm_clock_mhz=1410.0, power_w=430.0, throttle_ratio=ThrottleShares(0.1, 0.4, 0.0)
    )


def slow(summary: Summary, node: str, number: int, by: float = 0.12) -> Summary:
    shares = ThrottleShares(0.0, 0.0, 0.0)
    summary = with_gpu(summary, node, number, throttle_ratio=shares)
    return in_training(summary, node, number, sm_clock_mhz=1910.0 * (1 - by), power_w=520.0, throttle_ratio=shares)


def build_insights(summary: Summary, log: list[dict[str, Any]] | None = None) -> list[Insight]:
    return insights.build_insights(summary, log or [])


def codes(summary: Summary, *, info: bool = False) -> list[str]:
    """Return the codes of critical insights and warnings."""
    return [n.code for n in build_insights(summary) if info or n.severity != "info"]


def broken() -> Summary:
    """Return a summary with insights of four nodes with two GPUs each: one is idle, one throttled, one slow."""
    summary = slow(throttling(idle(healthy(), "n2", 1), "n3", 0), "n4", 1)
    # The ranks of the slow GPUs are late too, which is the same problem.
    summary = with_rank(with_rank(summary, 4, forward_s=0.29), 7, forward_s=0.26)
    summary = with_rank(summary, 3, forward_s=None, data_wait_s=0.5)
    waste = Waste(gpu_hours=16.0, wasted_gpu_hours=3.2, by_cause={"idle_gpus": 2.0, "startup": 1.2})
    summary = replace(summary, waste=waste)
    return replace(summary, insights=build_insights(summary))
