"""A run under way for the pictures of its page: 32 GPUs, preempted once, one GPU idle and one slowed by heat."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clustertrain import clock, fsio
from clustertrain.run.run_dir import AttemptDir, RunDir
from tests.unit.report import live_runs

NODES = ("gpu-node-01", "gpu-node-02", "gpu-node-03", "gpu-node-04")
RANKS, STEP_S, TOTAL = 32, 0.9, 10_000
IDLE, HOT = ("gpu-node-02", 5), ("gpu-node-03", 3)
RECORDED_S = 2400  # of each attempt, up to its end
HOT_S, HOT_STEP_S = RECORDED_S * 2 / 3, 1.02  # how long before the end a GPU is too hot, and the time of a step then
FIRST, LAST, LOST_FROM, NOW = 1, 2400, 2201, 5100  # steps: of attempt 1, the first of attempt 2, the newest one
# Of a GPU while it trains: constants, and counters by their rate per second.
CONSTANTS = {
    "memory_clock_mhz": 2619.0, "throttle_power": 0.0, "throttle_hardware": 0.0, "processes": 1.0, "ecc_corrected": 0.0,
    "ecc_uncorrected": 0.0, "remapped_rows": 0.0, "remap_pending": 0.0, "remap_failed": 0.0, "nvlinks_active": 18.0,
    "nvlink_errors": 0.0, "pcie_replays": 0.0, "memory_temperature_c": 71.0,
}  # fmt: skip
RATES = {"pcie_tx_bytes": 4e8, "pcie_rx_bytes": 1.1e9, "nvlink_tx_bytes": 9e10, "nvlink_rx_bytes": 9e10}
HOST = {"load1": 9.0, "job_memory_bytes": 180e9, "job_processes": 40.0}
HOST_RATES = {
    "network_rx_bytes": 5e5, "network_tx_bytes": 3e5, "infiniband_rx_bytes": 2.1e10, "infiniband_tx_bytes": 2.1e10,
    "disk_read_bytes": 4e6, "disk_write_bytes": 8e4, "job_cpu_s": 11.0,
}  # fmt: skip
SPEC = """[job]
name = "llama-1b"
backend = "local"
nodes = 4
gpus = 8
[env]
HF_HOME = "/data/hf"
WANDB_PROJECT = "llama"
[recipe.model]
preset = "llama3.2-1b"
[recipe.data]
kind = "tokens"
path = "/data/fineweb"
seq_len = 4096
[recipe.train]
steps = 10000
global_batch = 512
[recipe.optim]
lr = 3e-4
"""
DIFF = """diff --git a/data.py b/data.py
@@ -14,7 +14,7 @@ def mix(sources):
-    weights = [s.tokens for s in sources]
+    weights = [s.tokens ** 0.7 for s in sources]
"""


def make(home: Path) -> RunDir:
    """Create the run in ``home``, which becomes ``$CLUSTERTRAIN_HOME``; it was submitted two hours ago."""
    now = clock.now()
    run = live_runs.new_run(home, now, name="llama-1b-k3v7xq", spec=SPEC, submitted=2 * 3600)
    live_runs.create_job("local-1", run)
    hot_steps = int(HOT_S / HOT_STEP_S)
    start = now - hot_steps * HOT_STEP_S - (NOW - LOST_FROM - hot_steps) * STEP_S
    first_start = start - 900 - LAST * STEP_S

    def time_of(step: int) -> float:
        """Return when a step of attempt 2 ended."""
        return start + (step - LOST_FROM) * STEP_S + max(0, step - NOW + hot_steps) * (HOT_STEP_S - STEP_S)

    def first_time_of(step: int) -> float:
        return first_start + step * STEP_S

    first_end = first_time_of(LAST) + 50
    _write_attempt(run.attempt(1), first_time_of, FIRST, LAST, first_end)
    _write_attempt(run.attempt(2), time_of, LOST_FROM, NOW, None)
    rng = random.Random(1)
    append(run.metrics_path(1), *[make_row(s, first_time_of(s), STEP_S, rng) for s in range(FIRST, LAST + 1)])
    append(
        run.metrics_path(2),
        *[make_row(s, time_of(s), HOT_STEP_S if s > NOW - hot_steps else STEP_S, rng) for s in range(LOST_FROM, NOW)],
    )
    for i, node in enumerate(NODES):
        live_runs.record(
            run, node, first_end, first=8 * i, steps=LAST, seconds=int(LAST * STEP_S), change=_Change(rng, math.inf)
        )
        change = _Change(rng, RECORDED_S - HOT_S)
        live_runs.record(_Second(run), node, now, first=8 * i, steps=NOW, seconds=RECORDED_S, change=change)  # type: ignore[arg-type]
    for rank in range(RANKS):
        write_log(run.attempt(2), rank, range(4000, NOW))
    marker = run.checkpoints / "step-00005000" / "COMMITTED"
    marker.parent.mkdir(parents=True)
    marker.touch()
    _write_documents(run, now)
    return run


def make_row(step: int, t: float, step_s: float, rng: random.Random) -> dict[str, Any]:
    """Return the metric row of a step that ended at ``t``."""
    loss = 2.1 + 8.5 / (1 + step / 120) ** 0.8 + rng.gauss(0, 0.03)
    warm = min(1.0, step / 500)
    row = {
        "step": step, "t": t, "loss": loss, "step_s": step_s + abs(rng.gauss(0, 0.02)),
        "tokens_per_s": 2.1e6 / step_s * (1 + rng.gauss(0, 0.01)),
        "grad_norm": 0.4 + 2.5 / (1 + step / 200) + abs(rng.gauss(0, 0.08)),
        "lr": 3e-4 * warm * 0.5 * (1 + math.cos(math.pi * step / TOTAL)), "data_wait_s": 0.004 + rng.random() * 0.002,
        "allocated_gib": 61.2, "clip_fraction": 0.2 / (1 + step / 400) + rng.random() * 0.01,
    }  # fmt: skip
    if step % 200 == 0:
        row["validation_loss"] = loss + 0.08 + rng.gauss(0, 0.01)
    return row


def write_log(attempt: AttemptDir, rank: int, steps: range) -> None:
    lines = [log_line(step, rank) for step in steps]
    lines.insert(-7, "WARNING: NCCL: connection to gpu-node-03 retried\n")
    attempt.logs.mkdir(exist_ok=True)
    attempt.rank_log(rank).write_text("".join(lines))


def log_line(step: int, rank: int) -> str:
    loss, left = 2.1 + 8.5 / (1 + step / 120) ** 0.8, (TOTAL - step) * STEP_S / 60
    return (
        f"step {step:,}/{TOTAL:,}  {left:.0f} min left  loss {loss:.4f}  {STEP_S:.2f} s  72,900 tokens/s  rank {rank}\n"
    )


def append(path: Path, *records: dict[str, Any]) -> None:
    log = fsio.JsonlAppender(path)
    log.append(*records)
    log.close()


class _Second:
    """Makes ``live_runs.record`` write to attempt 2."""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    def attempt(self, n: int) -> AttemptDir:
        return self._run.attempt(2)


class _Change:
    """Noise, dips at checkpoints, and the two bad GPUs."""

    def __init__(self, rng: random.Random, hot_from_s: float) -> None:
        self._rng, self._hot_from_s = rng, hot_from_s
        self._energy_j = [5e7] * 8

    def __call__(self, node: str, second: int, values: dict[str, float]) -> None:
        dip = 0.35 if second % 180 < 14 else 1.0
        for i in range(8):
            busy = 0.0 if (node, i) == IDLE else dip * (0.95 + self._rng.gauss(0, 0.012))
            hot = (node, i) == HOT and second > self._hot_from_s
            use = min(1.0, max(0.0, busy * (0.66 if hot else 1.0)))
            self._energy_j[i] += 96 + 560 * use
            values |= {
                f"gpu{i}.utilization": use,
                f"gpu{i}.power_w": 96 + 560 * use + self._rng.gauss(0, 6),
                f"gpu{i}.temperature_c": 89.0 if hot else 38 + 26 * use + i,
                f"gpu{i}.sm_clock_mhz": 1210.0 if hot else 1830.0 - 5 * i,
                f"gpu{i}.sm_activity": use * 0.81,
                f"gpu{i}.tensor_activity": use * 0.47,
                f"gpu{i}.memory_used_bytes": (61.2 + i / 8 if busy else 0.6) * live_runs.GIB,
                f"gpu{i}.memory_busy": use * 0.5,
                f"gpu{i}.dram_activity": use * 0.4,
                f"gpu{i}.throttle_thermal": float(hot),
                f"gpu{i}.energy_j": self._energy_j[i],
                **{f"gpu{i}.{name}": value for name, value in CONSTANTS.items()},
                **{f"gpu{i}.{name}": rate * second * bool(busy) for name, rate in RATES.items()},
            }
        values |= {f"host.{name}": value for name, value in HOST.items()}
        values |= {f"host.{name}": rate * second for name, rate in HOST_RATES.items()}


def _write_attempt(
    attempt: AttemptDir, time_of: Callable[[int], float], first: int, last: int, end: float | None
) -> None:
    start = time_of(first)
    attempt.path.mkdir(parents=True)
    record = {"job_id": "local-1", "restart": attempt.n - 1, "nodes": list(NODES), "host": NODES[0], "t": start - 90}
    fsio.write_json(attempt.record, record)
    batch, rank = attempt.events_path("batch"), attempt.events_path("rank-0")
    append(batch, {"t": start - 90, "event": "started", "job_id": "local-1", "nodes": list(NODES)})
    if first > 1:
        append(rank, {"t": start - 20, "event": "restored", "step": first - 1, "restore_s": 21.0})
    append(rank, {"t": start, "event": "first_step", "step": first, "total": TOTAL})
    for step in range(first - first % 200 + 200, last, 200):
        t = time_of(step)
        append(rank, {"t": t, "event": "checkpoint", "step": step, "stall_s": 1.2, "save_s": 14.1})
        append(rank, {"t": t + 12, "event": "evaluation", "step": step, "eval_s": 11.0})
    if end is not None:
        append(batch, {"t": end - 9, "event": "signal", "signal": "SIGTERM", "source": "preemption"})
        append(rank, {"t": end - 7, "event": "stop_agreed", "step": last})
        append(batch, {"t": end, "event": "ended", "ending": "preempted", "reason": "preempted", "last_step": last})
        append(batch, {"t": end, "event": "requeued", "method": "slurm"})


def _write_documents(run: RunDir, now: float) -> None:
    git = {"commit": "4f1c2ab09d7e", "branch": "mix", "repository": "/home/ada/llm", "dirty": True, "diff": DIFF}
    fsio.write_json(run.record, {
        "time": now - 2 * 3600, "user": "ada", "host": "login1", "cwd": "/home/ada/llm", "clustertrain": "0.1.0",
        "argv": ["clustertrain", "submit", "--nodes", "4", "--gpus", "8", "llama-1b.toml"], "python": "3.12.1",
        "kernel": "Linux 6.8 x86_64", "packages": {"torch": "2.9.1", "numpy": "2.1.3"}, "git": git,
    })  # fmt: skip
    fsio.write_json(run.plan, {
        "device": "cuda", "precision": "bf16", "nodes": 4, "gpus_per_node": 8, "world_size": RANKS,
        "layout": {"strategy": "fsdp"}, "memory": {"peak_gib": 61.2, "capacity_gib": 80},
        "time": {"step_s": 0.9, "mfu": 0.41}, "batch": {"global_batch": 512, "micro_batch": 8, "grad_accum": 2},
        "reasons": ["FSDP shards over all 32 ranks: a replica does not fit.", "Micro-batch 8 is the largest that fits"],
    })  # fmt: skip
