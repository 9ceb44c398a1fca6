"""Makes run directories with telemetry, for the tests of the summary, the report and the command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from clustertrain import fsio
from clustertrain.run.folder import AttemptDir, RunDir
from clustertrain.telemetry.store import End, GpuFacts, Header, Processes, Reason, Sample, Writer

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
    log = fsio.Appender(attempt.events_of(f"agent-{node}"))
    log.append({"t": t, "mono": 0.0, "host": node, "pid": 1, "event": name, "node": node, **fields})
    log.close()


def record(
    attempt: AttemptDir,
    gpus: Sequence[tuple[GpuFacts, Values]],
    *,
    node: str = "n1",
    start: float = T0,
    seconds: int = 100,
    nvml: str | None = None,
    reasons: Sequence[Reason] = (),
    skip: Callable[[int], bool] = lambda s: False,
    ended: float | None = None,
) -> None:
    """One node's file. ``ended``: seconds after the start when its ranks ended, as the events tell it."""
    writer = Writer(attempt.telemetry / node)
    writer.add(
        Header(
            node=node,
            t=start,
            mono=0.0,
            interval_s=1.0,
            gpus=[facts for facts, _ in gpus],
            nvml=nvml,
            driver="570.1",
            cpu_count=96,
            memory_total_bytes=1024 * GIB,
        )
    )
    for reason in reasons:
        writer.add(reason)
    for s in range(seconds):
        if not skip(s):
            writer.add(Sample(float(s), [0.25, 128 * GIB, 12.5], [values(s) for _, values in gpus]))
    writer.add(Processes(0.0, 33, 90 * GIB, None))
    writer.add(Processes(10.0, 35, 92 * GIB, 7.5))
    writer.add(End(float(seconds)))
    writer.close()
    if ended is not None:
        event(attempt, "ranks_ended", node, start + ended, ending="completed", exit_code=0)
