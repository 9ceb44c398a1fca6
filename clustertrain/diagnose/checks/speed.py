"""Where the time of a step goes, and how fast the data set is read: whether the device waits for the rest of the
system."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clustertrain import clock, fsio
from clustertrain.diagnose.child_output import Tell
from clustertrain.diagnose.registry import Finding, Verdict
from clustertrain.diagnose.subject import Subject
from clustertrain.train.data.loader import Loader
from clustertrain.train.profiling.profiler import Profiler
from clustertrain.train.trainer import Trainer

WARM, TIMED = 3, 7  # steps
WORKERS = (0, 1, 2, 4)
READING_S = 1.5  # of each number of workers, at most
BATCHES = 40  # of each, at most; at least two
WAITING, TOO_LONG = 0.2, 0.5  # of a step, for data
ROOM = 1.2  # times what the step needs, for a number of workers to be enough


def check(subject: Subject, tell: Tell) -> Finding:
    total = WARM + TIMED + len(WORKERS)
    with subject.trainer() as t:
        parts = _parts(t, subject, lambda done: tell(done, total))
    reading = {}
    for i, workers in enumerate(sorted({*WORKERS, max(0, subject.recipe.data.workers)})):
        reading[workers] = _samples_per_s(subject, workers)
        tell(WARM + TIMED + min(i + 1, len(WORKERS)), total)
    step_s = parts.pop("step")
    computing_s = max(step_s - parts["data"], 1e-9)
    need = subject.batch.micro_batch / computing_s
    asked = max(0, subject.recipe.data.workers)
    waiting = parts["data"] / step_s
    evidence: dict[str, Any] = {
        "step_s": step_s,
        "parts_s": parts,
        "data_share": waiting,
        "samples_per_s_needed": need,
        "samples_per_s_read": {str(n): rate for n, rate in reading.items()},
        "workers": asked,
        "workers_suggested": enough(reading, need),
    }
    rows = [("step", f"{step_s * 1e3:.2f} ms for {subject.batch.micro_batch} samples")]
    rows += [("", f"{name.replace('_', ' '):<15}{s * 1e3:9.2f} ms {s / step_s:6.1%}") for name, s in parts.items()]
    rows.append(("needed", f"{need:,.0f} samples/s, without waiting for data"))
    rows += [(f"{n} workers", f"{rate:,.0f} samples/s{'  <- data.workers' if n == asked else ''}")
             for n, rate in reading.items()]  # fmt: skip
    verdict, text, fix = judged(waiting, asked, reading, need)
    return Finding(check="speed", verdict=verdict, text=text, fix=fix, evidence=evidence, rows=rows)


def enough(reading: dict[int, float], need: float) -> int | None:
    """The fewest workers that read fast enough beside the step; 0 reads inside it, and is never beside it."""
    return next((n for n, rate in sorted(reading.items()) if n and rate >= ROOM * need), None)


def judged(waiting: float, asked: int, reading: dict[int, float], need: float) -> tuple[Verdict, str, str]:
    """(verdict, text, fix).

    Args:
        waiting: the share of a step that data takes.
        asked: ``data.workers``.
        reading: samples per second by workers.
        need: samples per second of a step that waits for no data.
    """
    if waiting <= WAITING:
        return "pass", f"{waiting:.0%} of a step waits for data", ""
    verdict: Verdict = "fail" if waiting >= TOO_LONG else "warn"
    rates = f"with {asked} workers {reading[asked]:,.0f} samples/s are read, and {need:,.0f} could be learned from"
    text = f"{waiting:.0%} of a step waits for data: {rates}"
    wanted = enough(reading, need)
    if wanted is not None and wanted > asked:
        return verdict, text, f"set data.workers = {wanted}"
    best = max(reading, key=lambda n: reading[n])
    if best == 0 and reading[0] >= need:
        fix = "samples are read quickly, but inside the step, and a process that reads costs more here than it saves"
        return verdict, text, f"{fix}: a larger train.micro_batch, or a data set that hands over whole batches"
    fix = "the data set itself is too slow: do its work once and beforehand, read fewer and larger files"
    return verdict, text, f"data.workers = {best} is the fastest here; {fix}" if best != asked else fix


def _parts(t: Trainer, subject: Subject, tell: Any) -> dict[str, float]:
    """The median of each part of a step, and of the step, in seconds."""
    found: list[dict[str, float]] = []
    for i in range(WARM + TIMED):
        if i < WARM:
            t.step()
        else:
            with _timed(t, i, subject.run.path / "speed") as parts:
                t.step()
            found.append(parts)
        tell(i + 1)
    return {name: statistics.median(parts[name] for parts in found) for name in found[0]}


@contextmanager
def _timed(t: Trainer, step: int, folder: Path) -> Iterator[dict[str, float]]:
    """Fills the dictionary at the end of the ``with``."""
    parts: dict[str, float] = {}
    profiler = Profiler(range(step, step + 1), folder, step, t.session.device, lambda name, **fields: None)
    profiler.begin(step)
    yield parts
    profiler.end(step)
    told: Any = fsio.read_json(next(folder.glob(f"attempt-{step}-*.json")))
    parts.update(told["parts_s"])
    parts["step"] = told["step_s"]


def _samples_per_s(subject: Subject, workers: int) -> float:
    """What a loader with ``workers`` reads when nobody else has anything to do. Its start does not count."""
    dataset = subject.task().dataset
    micro = subject.batch.micro_batch
    loader = Loader(
        dataset,
        global_batch=micro,
        micro_batch=micro,
        workers=workers,
        seed=subject.recipe.train.seed,
        rank=0,
        ranks=1,
        device=subject.device,
    )
    try:
        next(loader)
        started, done = clock.monotonic(), 0
        # What the workers have read ahead while they were waited for must not count as read in no time.
        ahead = 2 * workers
        while done < ahead + BATCHES:
            next(loader)
            done += 1
            if done == ahead:
                started = clock.monotonic()
            if done >= ahead + 2 and clock.monotonic() - started > READING_S:
                break
        return (done - ahead) * micro / max(clock.monotonic() - started, 1e-9)
    finally:
        loader.close()
