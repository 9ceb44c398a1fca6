"""A home full of synthetic runs, for the tests, the pictures and the benchmark of `clustertrain ui`."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from clustertrain import fsio, settings
from clustertrain.config.contract import ContractSpec
from clustertrain.config.job import JobSpec, RunSpec
from clustertrain.config.recipe import Recipe
from clustertrain.config.train import TrainSpec
from clustertrain.run import heartbeat
from clustertrain.run.run_dir import RunDir, sweeps_folder
from clustertrain.scheduler.local import LocalJob, job_folder
from clustertrain.submit.transaction import format_spec
from clustertrain.telemetry import fields
from clustertrain.telemetry.fields import FAST, SLOW
from clustertrain.telemetry.store.writer import GpuFacts, Header, Writer

GIB = 1 << 30
HOUR = 3600.0
NAMES = (
    "llama-8b-pretrain", "llama-1b-ablation", "vit-l16-imagenet", "sft-chat-8b", "dpo-helpful", "two-tower-search",
    "unet-segmentation", "qwen-7b-lora", "mamba-130m", "reward-model",
)  # fmt: skip


@dataclass
class Made:
    """How one run is to look."""

    name: str
    state: str = "completed"
    """completed, failed, cancelled, running, pending or requeued."""
    age_s: float = 6 * HOUR
    """Since its submission."""
    queue_s: float = 120.0
    steps: int = 2000
    total: int = 2000
    step_s: float = 2.0
    nodes: int = 1
    gpus: int = 8
    preempted: int = 0
    """Attempts that were preempted before the last one."""
    idle_gpus: int = 0
    busy: float = 0.93
    loss: float = 2.4
    """The last loss."""
    lr: float = 3e-4
    telemetry: bool = True
    rows: int = 300
    """Rows of metrics; each stands for several steps."""
    samples: int = 300
    """Samples of telemetry per node; at least 1 s apart."""
    job_id: str = ""


def make_run(home: Path, now: float, made: Made, seed: int = 0) -> RunDir:
    """Create the run and, if it is active, its job, whose supervisor is this process."""
    rng = random.Random(seed)
    suffix = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz234567") for _ in range(6))
    run = RunDir(home / "runs" / f"{made.name}-{suffix}")
    for folder in (run.attempts_folder, run.metrics, run.events, run.checkpoints):
        folder.mkdir(parents=True)
    submitted = now - made.age_s
    recipe = Recipe(train=TrainSpec(steps=made.total), contract=ContractSpec(metric="loss"))
    job = JobSpec(name=made.name, backend="local", nodes=made.nodes, gpus=made.gpus)
    run.spec.write_text(format_spec(RunSpec(job=job, recipe=recipe)))
    fsio.write_json(run.record, {"user": "mira", "git": {"commit": f"{seed:07x}c0ffee"}})
    fsio.write_json(run.plan, {"world_size": made.nodes * made.gpus, "device": "cuda"})
    job_id = made.job_id or f"local-{1000 + seed}"
    _log(run.events / "submit.jsonl", {"t": submitted, "event": "submitted", "job_id": job_id, "backend": "local"})
    if made.state in ("running", "pending", "requeued"):
        _make_job(job_id, run, "RUNNING" if made.state == "running" else "PENDING", made.nodes)
    if made.state != "pending":
        _make_attempts(run, now, submitted + made.queue_s, job_id, made, rng)
    os.utime(run.spec, (submitted, submitted))  # the order of the runs
    if made.state == "cancelled":
        fsio.write_json(run.cancel_marker, {"t": now, "user": "mira"})
    return run


def _log(path: Path, *records: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    log = fsio.JsonlAppender(path)
    log.append(*records)
    log.close()


def _make_job(job_id: str, run: RunDir, state: str, nodes: int) -> None:
    folder, this_process = job_folder(job_id), psutil.Process()
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write(
        LocalJob(
            job_id=job_id,
            run_dir=str(run.path),
            nodes=nodes,
            host=socket.gethostname(),
            pid=this_process.pid,
            pid_created=this_process.create_time(),
            state=state,
            reason="" if state == "RUNNING" else "Priority",
        )
    )


def _make_attempts(run: RunDir, now: float, start: float, job_id: str, made: Made, rng: random.Random) -> None:
    parts = made.preempted + 1
    bounds = [round(made.steps * i / parts) for i in range(parts + 1)]
    for n, (first, last) in enumerate(itertools.pairwise(bounds), start=1):
        is_last = n == parts
        attempt, startup_s = run.attempt(n), rng.uniform(30, 120)
        step_s = made.step_s
        if is_last and made.state == "running":  # up to now
            step_s = max(1e-3, (now - start - startup_s) / max(1, last - first))
        nodes = [f"gpu-{made.name[:3]}-{i + 1:02d}" for i in range(made.nodes)]
        trained = start + startup_s
        end = trained + (last - first) * step_s + 12
        attempt.path.mkdir()
        fsio.write_json(
            attempt.record, {"job_id": job_id, "restart": n - 1, "nodes": nodes, "host": nodes[0], "t": start}
        )
        _log(
            attempt.events_path("rank-0"),
            {"t": start + 20, "event": "session_started", "world_size": made.nodes * made.gpus},
            {"t": trained + step_s, "t_begin": trained, "event": "first_step", "step": first + 1, "total": made.total},
            *_checkpoints(run, first, last, trained, step_s, made),
        )
        _log(
            attempt.events_path("batch"),
            {"t": start, "event": "started", "job_id": job_id, "nodes": nodes},
            *_ending(made, job_id, end, last, is_last=is_last),
        )
        _write_rows(run, n, (first, last), trained, step_s, made, rng)
        if made.telemetry:
            for i, node in enumerate(nodes):
                record(attempt.telemetry / node, node, start, end - start, made, i, seed=rng.randrange(1 << 30))
        start = end + rng.uniform(300, 1800)


def _ending(made: Made, job_id: str, end: float, last: int, *, is_last: bool) -> Iterator[dict[str, object]]:
    if not is_last or made.state == "requeued":
        yield {"t": end, "event": "ended", "ending": "preempted", "last_step": last}
        yield {"t": end + 1, "event": "requeued", "method": "requeue", "job_id": job_id}
    elif made.state == "completed":
        yield {"t": end, "event": "ended", "ending": "completed", "last_step": last}
    elif made.state == "failed":
        reason = "rank 3 on gpu-01: RuntimeError: CUDA out of memory"
        yield {"t": end, "event": "ended", "ending": "out_of_memory", "last_step": last, "reason": reason}
        yield {"t": end + 1, "event": "stopped", "reason": reason}
    elif made.state == "cancelled":
        yield {"t": end, "event": "ended", "ending": "cancelled", "last_step": last}


def _checkpoints(
    run: RunDir, first: int, last: int, trained: float, step_s: float, made: Made
) -> Iterator[dict[str, object]]:
    every = max(1, made.total // 10)
    for step in range(first + 1, last + 1):
        if step % every == 0 or step == last:
            folder = run.checkpoints / f"step-{step:08d}"
            folder.mkdir(exist_ok=True)
            (folder / "COMMITTED").write_text(f"{step}")
            t = trained + (step - first) * step_s
            yield {"t": t, "event": "checkpoint", "step": step, "stall_s": 0.8 * step_s, "save_s": 2 * step_s}


def _write_rows(
    run: RunDir, n: int, steps: tuple[int, int], trained: float, step_s: float, made: Made, rng: random.Random
) -> None:
    first, last = steps
    every = max(1, (last - first) // made.rows)
    with run.metrics_path(n).open("w") as f:
        for step in range(first + every, last + 1, every):
            f.write(json.dumps(row(made, step, trained + (step - first) * step_s, step_s, step - first, rng)) + "\n")


def row(made: Made, step: int, t: float, step_s: float, done: int, rng: random.Random) -> dict[str, object]:
    """Return a row of metrics ``done`` steps after the start of its attempt, at ``t``."""
    tokens_per_s = made.nodes * made.gpus * 11_000 / step_s
    loss = made.loss + 8.0 * math.exp(-6 * step / made.total) + rng.gauss(0, 0.02)
    return {
        "step": step, "t": t, "loss": loss, "lr": made.lr * (1 - 0.9 * step / made.total), "step_s": step_s * 0.97,
        "sum_step_s": done * step_s * 0.97, "tokens_per_s": tokens_per_s, "sum_tokens": tokens_per_s * step_s * done,
        "data_wait_s": 0.01 * step_s, "sum_data_wait_s": 0.01 * step_s * done, "grad_norm": 0.4 + rng.random() / 10,
    }  # fmt: skip


def record(folder: Path, node: str, start: float, seconds: float, made: Made, index: int, seed: int = 0) -> None:
    """Record the telemetry of one node, with at most ``made.samples`` samples."""
    rng = np.random.default_rng(seed)
    interval_s = max(1.0, seconds / made.samples)
    ranks = [index * made.gpus + i for i in range(made.gpus)]
    header = Header(
        node=node, t=start, mono=1000.0, interval_s=interval_s, slow_s=10 * interval_s, ranks=ranks,
        gpus=[
            GpuFacts(f"GPU-{seed:08x}-{i:04d}", i, i, "NVIDIA H100 80GB HBM3", 80 * GIB, ranks=[ranks[i]])
            for i in range(made.gpus)
        ],
        memory_total_bytes=1024 * GIB, fast=fields.column_names(made.gpus, ranks, FAST),
        slow=fields.column_names(made.gpus, ranks, SLOW),
    )  # fmt: skip
    writer, count = Writer(folder), int(seconds / interval_s)
    writer.begin(header)
    busy = np.clip(made.busy + 0.05 * np.sin(np.arange(count) / 40) + rng.normal(0, 0.02, count), 0, 1)
    busy[: int(60 / interval_s)] = 0.0
    fast, slow = np.full((count, len(header.fast)), np.nan), np.full((count, len(header.slow)), np.nan)
    for i in range(made.gpus):
        of_gpu = busy * (index != 0 or i < made.gpus - made.idle_gpus)
        _fill(header, fast, f"gpu{i}.utilization", of_gpu)
        _fill(header, fast, f"gpu{i}.memory_used_bytes", np.where(of_gpu > 0, 61.0, 0.5) * GIB)
        _fill(header, fast, f"gpu{i}.power_w", 90 + 560 * of_gpu)
        _fill(header, fast, f"gpu{i}.temperature_c", 40 + 25 * of_gpu)
        _fill(header, fast, f"rank{ranks[i]}.phase", np.full(count, float(heartbeat.TRAIN)))
        _fill(header, fast, f"rank{ranks[i]}.step", np.arange(count, dtype=float))
    slow[:, header.slow.index("host.cpu")] = 0.2
    slow[:, header.slow.index("host.memory_used_bytes")] = 310.0 * GIB
    for s in range(count):
        writer.fast(s * interval_s, fast[s])
        if s % 10 == 0:
            writer.slow(s * interval_s, slow[s])
        if s % 100 == 99:
            writer.flush()
    if made.state == "running":
        writer.flush()
    else:
        writer.end(seconds)
    writer.close()


def _fill(header: Header, rows: np.ndarray, column: str, values: np.ndarray) -> None:
    rows[:, header.fast.index(column)] = values


def make_sweep(home: Path, now: float, name: str, points: Sequence[tuple[dict[str, float], Made]]) -> Path:
    """Create a sweep with one run per point."""
    folder = sweeps_folder() / name
    folder.mkdir(parents=True)
    for task, (values, made) in enumerate(points):
        run = make_run(home, now, made, seed=5000 + task)
        fsio.write_json(run.record, {"user": "mira", "sweep": {"values": values}})
        (folder / str(task)).symlink_to(run.path)
    return folder


def made_runs(count: int, seed: int = 1) -> list[Made]:
    """Return ``count`` runs of the usual kinds, newest first: most have ended, some run, some wait."""
    rng = random.Random(seed)
    result = []
    for i in range(count):
        state = "pending" if i % 12 == 1 else "running" if i % 9 == 0 else rng.choices(
            ("completed", "failed", "cancelled", "requeued"), (78, 12, 8, 2))[0]  # fmt: skip
        total = rng.choice((500, 2000, 10_000, 60_000))
        share = 1.0 if state == "completed" else rng.uniform(0.1, 0.95)
        hours = (i + 1) * rng.uniform(1.0, 3.0)
        steps = max(2, int(total * share))
        result.append(
            Made(
                name=NAMES[rng.randrange(len(NAMES))],
                state=state,
                age_s=hours * HOUR,
                queue_s=min(hours * HOUR / 4, rng.uniform(30, 4000)),
                steps=steps,
                total=total,
                step_s=min(rng.uniform(0.3, 6), hours * HOUR * 0.5 / steps),
                nodes=rng.choice((1, 1, 1, 2, 4)),
                preempted=rng.choice((0, 0, 0, 1, 2)),
                idle_gpus=int(rng.random() < 0.08),
                busy=rng.uniform(0.55, 0.97),
                loss=rng.uniform(1.6, 3.2),
                telemetry=rng.random() < 0.9,
            )
        )
    return result


def use_home(home: Path) -> None:
    """Make ``home`` the home of this process."""
    os.environ[settings.HOME] = str(home)
