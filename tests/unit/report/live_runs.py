"""Files of an active run with telemetry, metrics and events, for the tests of `top`."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

from clustertrain import fsio, settings
from clustertrain.run import heartbeat
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.local import LocalJob, job_folder
from clustertrain.telemetry import fields
from clustertrain.telemetry.fields import FAST, SLOW
from clustertrain.telemetry.store.writer import GpuFacts, Header, Writer

GIB = 1 << 30
Change = Callable[[str, int, dict[str, float]], None]


def create_job(job_id: str, run: RunDir, state: str = "RUNNING", reason: str = "", start: float | None = None) -> None:
    """Create a job of the local backend whose supervisor is this process."""
    folder = job_folder(job_id)
    folder.path.mkdir(parents=True, exist_ok=True)
    this_process = psutil.Process()
    folder.write(
        LocalJob(
            job_id=job_id,
            run_dir=str(run.path),
            nodes=1,
            host=socket.gethostname(),
            pid=this_process.pid,
            pid_created=this_process.create_time(),
            state=state,
            reason=reason,
            start_time=start,
        )
    )


def new_run(home: Path, now: float, *, name: str = "llama-abc234", spec: str = "", submitted: float = 4000.0) -> RunDir:
    os.environ[settings.HOME] = str(home)
    run = RunDir(home / "runs" / name)
    for folder in (run.path / "attempts", run.metrics, run.events):
        folder.mkdir(parents=True)
    run.spec.write_text(spec or '[job]\nbackend = "local"\n')
    log = fsio.JsonlAppender(run.events / "submit.jsonl")
    log.append({"t": now - submitted, "event": "submitted", "job_id": "local-1", "backend": "local"})
    log.close()
    return run


def begin(
    run: RunDir, now: float, nodes: list[str], *, steps: int = 1200, total: int = 10_000, step_s: float = 0.5
) -> None:
    """Create attempt 1, whose last step ends at ``now``."""
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    start = now - steps * step_s
    record = {"job_id": "local-1", "restart": 0, "nodes": nodes, "host": nodes[0], "t": start - 60}
    fsio.write_json(attempt.record, record)
    rows = [
        {"step": s, "t": start + s * step_s, "loss": 8 / (1 + s / 200), "step_s": step_s, "tokens_per_s": 1.05e6}
        for s in range(1, steps + 1)
    ]
    log = fsio.JsonlAppender(run.metrics_path(1))
    log.append(*rows)
    log.close()
    log = fsio.JsonlAppender(attempt.events_path("batch"))
    log.append({"t": start - 60, "event": "started", "job_id": "local-1", "nodes": nodes})
    log.close()
    log = fsio.JsonlAppender(attempt.events_path("rank-0"))
    log.append({"t": start, "event": "first_step", "step": 1, "total": total})
    for s in range(200, steps, 200):
        log.append({"t": start + s * step_s, "event": "checkpoint", "step": s, "stall_s": 2.0, "save_s": 3.1})
    log.close()


def record(
    run: RunDir, node: str, now: float, *, gpus: int = 8, first: int = 0, steps: int = 1200, seconds: int = 40,
    change: Change = lambda node, s, v: None, ranks: int | None = None, end: bool = False, nvml: str | None = None,
) -> None:  # fmt: skip
    """Record the telemetry of one node up to ``now``."""
    numbers = [first + i for i in range(gpus if ranks is None else ranks)]
    facts = [
        GpuFacts(
            f"GPU-{node}-{i}",
            i,
            i,
            "NVIDIA H100 80GB HBM3",
            80 * GIB,
            ranks=[first + i] if first + i in numbers else [],
        )
        for i in range(gpus)
    ]
    header = Header(
        node=node, t=now - seconds, mono=100.0, interval_s=1.0, gpus=facts, ranks=numbers, nvml_error=nvml,
        memory_total_bytes=1024 * GIB, fast=fields.column_names(gpus, numbers, FAST),
        slow=fields.column_names(gpus, numbers, SLOW),
    )  # fmt: skip
    writer = Writer(run.attempt(1).telemetry / node)
    writer.begin(header)
    for s in range(seconds + 1):
        values = _values(gpus, numbers, steps - (seconds - s) * 2)
        change(node, s, values)
        writer.fast(float(s), np.array([values.get(c, math.nan) for c in header.fast]))
        if s % 10 == 0:
            writer.slow(float(s), np.array([values.get(c, math.nan) for c in header.slow]))
            writer.flush()
    if end:
        writer.end(float(seconds))
        writer.close()


def _values(gpus: int, ranks: list[int], step: int) -> dict[str, float]:
    values = {"host.cpu": 0.21, "host.memory_used_bytes": 310.0 * GIB}
    for i in range(gpus):
        values |= {
            f"gpu{i}.utilization": 0.93 + i / 200,
            f"gpu{i}.memory_used_bytes": (61 + i / 4) * GIB,
            f"gpu{i}.power_w": 612.0 + 7 * i,
            f"gpu{i}.temperature_c": 61.0 + i,
            f"gpu{i}.sm_clock_mhz": 1830.0 - 5 * i,
            f"gpu{i}.sm_activity": 0.61,
            f"gpu{i}.tensor_activity": 0.38,
            f"gpu{i}.throttle_power": float(i == 1),
        }
    for r in ranks:
        values |= {
            f"rank{r}.step": float(step),
            f"rank{r}.phase": float(heartbeat.TRAIN),
            f"rank{r}.data_wait_s": step * 0.004,
        }
    return values
