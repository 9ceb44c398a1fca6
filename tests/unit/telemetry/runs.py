"""Builder of run folders with telemetry, for tests of the summary, the report and the command."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clustertrain import fsio
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.telemetry import fields
from clustertrain.telemetry.store.writer import GpuFacts, Header, Writer

GIB = 1 << 30
T0 = 1_790_000_000.0
Row = list[float | None] | None
# second -> utilization, bytes used, W, °C, MHz, MHz, J
Values = Callable[[int], Row]


def busy(utilization: float = 0.8, used_gib: float = 60.0) -> Values:
    return lambda s: [utilization, used_gib * GIB, 400.0, 65, 1980, 2619, 400.0 * s]


def gpu(number: int, *, node: str = "n1", ranks: Sequence[int] = ()) -> GpuFacts:
    return GpuFacts(
        f"GPU-{node}-{number}", number, number, "NVIDIA H100 80GB HBM3", 80 * GIB, ranks=list(ranks or [number])
    )


def new_run(home: Path, name: str = "gpt-abc234") -> RunDir:
    run = RunDir(home / "runs" / name)
    (run.path / "attempts").mkdir(parents=True)
    run.spec.write_text("")
    return run


def new_attempt(run: RunDir, n: int = 1, job_id: str = "4711", nodes: Sequence[str] = ("n1",)) -> AttemptDir:
    attempt = run.attempt(n)
    attempt.path.mkdir(parents=True)
    fsio.write_json(attempt.record, {"job_id": job_id, "restart": n - 1, "nodes": list(nodes), "host": nodes[0]})
    return attempt


def event(attempt: AttemptDir, name: str, node: str, t: float, **fields: Any) -> None:
    log = fsio.JsonlAppender(attempt.events_path(f"agent-{node}"))
    log.append({"t": t, "monotonic_s": t - T0, "host": node, "pid": 1, "event": name, "node": node} | fields)
    log.close()


class Reason(NamedTuple):
    """Missing field of GPU number ``gpu`` (None: of the host) from ``d`` on; a reason of None means it is back."""

    d: float
    gpu: int | None
    field: str
    reason: str | None


def record(
    attempt: AttemptDir,
    gpus: Sequence[tuple[GpuFacts, Values]],
    *,
    node: str = "n1",
    start: float = T0,
    mono: float | None = None,
    seconds: int = 100,
    nvml: str | None = None,
    reasons: Sequence[Reason] = (),
    skip: Callable[[int], bool] = lambda s: False,
    ended: float | None = None,
    ranks: Mapping[int, Callable[[int], list[float]]] | None = None,
    constants: Mapping[str, float] | None = None,
) -> None:
    """Write a segment of one node.

    Args:
        mono: the node's monotonic clock at ``start``; by default consistent with :func:`event`.
        ended: seconds after the start at which an event reports the end of its ranks.
        ranks: by global rank, its values at a second: step, phase, tokens, data_wait_s, forward_s.
        constants: constant values by column, such as ``gpu0.throttle_thermal``.
    """
    rank_values, fixed = ranks or {}, constants or {}
    fast, slow = (
        [c for c in fields.column_names(len(gpus), list(rank_values), pace) if c in fixed or _is_reported(c)]
        for pace in (fields.FAST, fields.SLOW)
    )
    writer = Writer(attempt.telemetry / node)
    writer.begin(
        Header(
            node=node,
            t=start,
            mono=start - T0 if mono is None else mono,
            interval_s=1.0,
            gpus=[facts for facts, _ in gpus],
            ranks=list(rank_values),
            nvml_error=nvml,
            driver="570.1",
            cpu_count=96,
            memory_total_bytes=1024 * GIB,
            fast=fast,
            slow=slow,
        )
    )
    for r in reasons:
        writer.null(r.d, fields.column_name("host" if r.gpu is None else f"gpu{r.gpu}", r.field), r.reason)
    for s in range(seconds):
        if skip(s):
            continue
        values = dict(fixed)
        for i, (_, sample_at) in enumerate(gpus):
            row = sample_at(s)
            values |= {} if row is None else _named(f"gpu{i}", FIELDS, row)
        for rank, values_at in rank_values.items():
            values |= _named(f"rank{rank}", [f.name for f in fields.RANK], values_at(s))
        writer.fast(float(s), _row(fast, values))
        if s % 10 == 0:
            job = [90 + s // 5, 7.5 * s, 33 + s // 5]
            host = _named("host", HOST_FIELDS, [0.25, 128 * GIB, 12.5, job[0] * GIB, job[1], job[2]])
            writer.slow(float(s), _row(slow, values | host))
    writer.end(float(seconds))
    writer.close()
    if ended is not None:
        event(attempt, "ranks_ended", node, start + ended, ending="completed", exit_code=0)


FIELDS = (
    "utilization",
    "memory_used_bytes",
    "power_w",
    "temperature_c",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "energy_j",
)
HOST_FIELDS = ("cpu", "memory_used_bytes", "load1", "job_memory_bytes", "job_cpu_s", "job_processes")


def _is_reported(column: str) -> bool:
    device, field = fields.split_column(column)
    return field in (FIELDS if device.startswith("gpu") else HOST_FIELDS) or device.startswith("rank")


def _named(device: str, names: Sequence[str], values: Sequence[float | None]) -> dict[str, float]:
    pairs = zip(names, values, strict=False)
    return {fields.column_name(device, name): math.nan if v is None else v for name, v in pairs}


def _row(columns: Sequence[str], values: Mapping[str, float]) -> Any:
    return np.array([values.get(c, math.nan) for c in columns])
