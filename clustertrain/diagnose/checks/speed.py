"""Measure where a step's time goes and how fast the dataset is read, to find out whether the device waits for data."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clustertrain import clock, fsio
from clustertrain.diagnose.child_output import ProgressCallback
from clustertrain.diagnose.registry import Finding, Verdict
from clustertrain.diagnose.subject import Subject
from clustertrain.train.data.loader import Loader, resolve_workers
from clustertrain.train.data.streams.source import as_map_style
from clustertrain.train.profiling.profiler import Profiler
from clustertrain.train.trainer import Trainer

WARMUP_STEPS, TIMED_STEPS = 3, 7
WORKER_COUNTS = (0, 1, 2, 4)
READ_TIME_S = 1.5  # at most, per number of workers
MAX_BATCHES = 40  # per number of workers; at least two
WARN_DATA_SHARE, FAIL_DATA_SHARE = 0.2, 0.5  # of a step's time
HEADROOM = 1.2  # read rate over the rate that a step needs, for workers to suffice


def check(subject: Subject, on_progress: ProgressCallback) -> Finding:
    total = WARMUP_STEPS + TIMED_STEPS + len(WORKER_COUNTS)
    cores = len(os.sched_getaffinity(0))
    configured_workers = resolve_workers(subject.recipe.data.workers, subject.device, cores)
    with subject.trainer() as trainer:
        parts = _measure_parts(trainer, subject, lambda completed: on_progress(completed, total))
    read_rates = {}
    for i, workers in enumerate(sorted({*WORKER_COUNTS, configured_workers})):
        read_rates[workers] = _measure_samples_per_s(subject, workers)
        on_progress(WARMUP_STEPS + TIMED_STEPS + min(i + 1, len(WORKER_COUNTS)), total)
    step_s = parts.pop("step")
    computing_s = max(step_s - parts["data"], 1e-9)
    needed_rate = subject.batch.micro_batch / computing_s
    data_share = parts["data"] / step_s
    evidence: dict[str, Any] = {
        "step_s": step_s,
        "parts_s": parts,
        "data_share": data_share,
        "samples_per_s_needed": needed_rate,
        "samples_per_s_read": {str(n): rate for n, rate in read_rates.items()},
        "workers": configured_workers,
        "workers_suggested": sufficient_workers(read_rates, needed_rate),
    }
    rows = [("step", f"{step_s * 1e3:.2f} ms for {subject.batch.micro_batch} samples")]
    rows += [("", f"{name.replace('_', ' '):<15}{s * 1e3:9.2f} ms {s / step_s:6.1%}") for name, s in parts.items()]
    rows.append(("needed", f"{needed_rate:,.0f} samples/s if no step waits for data"))
    rows += [(f"{n} workers", f"{rate:,.0f} samples/s{'  <- data.workers' if n == configured_workers else ''}")
             for n, rate in read_rates.items()]  # fmt: skip
    verdict, text, fix = assess(data_share, configured_workers, read_rates, needed_rate)
    return Finding(check="speed", verdict=verdict, text=text, fix=fix, evidence=evidence, rows=rows)


def sufficient_workers(read_rates: dict[int, float], needed_rate: float) -> int | None:
    """Return the fewest workers that read fast enough, or None; 0 workers read inside the step and never suffice."""
    return next((n for n, rate in sorted(read_rates.items()) if n and rate >= HEADROOM * needed_rate), None)


def assess(
    data_share: float, configured_workers: int, read_rates: dict[int, float], needed_rate: float
) -> tuple[Verdict, str, str]:
    """Return (verdict, text, fix).

    Args:
        data_share: the share of a step that waits for data.
        configured_workers: ``data.workers``.
        read_rates: samples per second by number of workers.
        needed_rate: samples per second of a step that does not wait for data.
    """
    if data_share <= WARN_DATA_SHARE:
        return "pass", f"{data_share:.0%} of a step waits for data", ""
    verdict: Verdict = "fail" if data_share >= FAIL_DATA_SHARE else "warn"
    rates_text = (
        f"{configured_workers} workers read {read_rates[configured_workers]:,.0f} samples/s, and a step could use"
        f" {needed_rate:,.0f}"
    )
    text = f"{data_share:.0%} of a step waits for data: {rates_text}"
    suggested = sufficient_workers(read_rates, needed_rate)
    if suggested is not None and suggested > configured_workers:
        return verdict, text, f"set data.workers = {suggested}"
    best = max(read_rates, key=lambda n: read_rates[n])
    if best == 0 and read_rates[0] >= needed_rate:
        fix = "use a larger train.micro_batch, or a dataset that returns whole batches"
        return verdict, text, f"{fix}: reading is fast, and worker processes cost more here than they save"
    fix = "preprocess the dataset once, or read fewer and larger files: the dataset is too slow"
    return verdict, text, f"data.workers = {best} is the fastest here; {fix}" if best != configured_workers else fix


def _measure_parts(trainer: Trainer, subject: Subject, on_progress: Any) -> dict[str, float]:
    """Return the median seconds of each part of a step and of the whole step."""
    measurements: list[dict[str, float]] = []
    for i in range(WARMUP_STEPS + TIMED_STEPS):
        if i < WARMUP_STEPS:
            trainer.step()
        else:
            with _timed_step(trainer, i, subject.run.path / "speed") as parts:
                trainer.step()
            measurements.append(parts)
        on_progress(i + 1)
    return {name: statistics.median(parts[name] for parts in measurements) for name in measurements[0]}


@contextmanager
def _timed_step(trainer: Trainer, step: int, folder: Path) -> Iterator[dict[str, float]]:
    """Yield a dictionary that holds the seconds of each part after the ``with`` block."""
    parts: dict[str, float] = {}
    profiler = Profiler(range(step, step + 1), folder, step, trainer.session.device, lambda name, **fields: None)
    profiler.begin(step)
    yield parts
    profiler.end(step)
    profile: Any = fsio.read_json(next(folder.glob(f"attempt-{step}-*.json")))
    parts.update(profile["parts_s"])
    parts["step"] = profile["step_s"]


def _measure_samples_per_s(subject: Subject, workers: int) -> float:
    """Return the samples per second that a loader with ``workers`` reads on an idle machine, excluding its startup."""
    dataset = as_map_style(subject.build_task().dataset)
    micro_batch = subject.batch.micro_batch
    loader = Loader(
        dataset,
        global_batch=micro_batch,
        micro_batch=micro_batch,
        workers=workers,
        seed=subject.recipe.train.seed,
        rank=0,
        ranks=1,
        device=subject.device,
    )
    try:
        next(loader)
        started, batches_read = clock.monotonic(), 0
        # Batches that workers prefetched during startup must not count as read in no time.
        prefetched = 2 * workers
        while batches_read < prefetched + MAX_BATCHES:
            next(loader)
            batches_read += 1
            if batches_read == prefetched:
                started = clock.monotonic()
            if batches_read >= prefetched + 2 and clock.monotonic() - started > READ_TIME_S:
                break
        return (batches_read - prefetched) * micro_batch / max(clock.monotonic() - started, 1e-9)
    finally:
        loader.close()
