"""Save under one layout, load under another, and compare."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
import torch.distributed as dist

from clustertrain import clock, fsio
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.offline import diff, inspect
from clustertrain.plan.layout import Layout
from clustertrain.run.run_dir import RunDir
from tests.harness.parity.measure import one_thread
from tests.harness.reshape.cells import (
    DATA,
    GLOBAL_BATCH,
    MODEL,
    RESAVED_AT,
    SAVED_AT,
    STEPS,
    Cell,
    Source,
    Target,
    micro_batch,
)
from tests.ranks.rank_pool import CONTEXT, DEVICE, write_plan

SCRIPT = Path(__file__).with_name("script.py")
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Outcome:
    """Outcome of a cell: ``loss`` is the largest relative deviation of a loss after the restore."""

    cell: Cell
    loss: float | None = None
    failure: str = ""

    @property
    def ok(self) -> bool:
        return not self.failure


@dataclass(frozen=True)
class Job:
    """One session of a group of ranks, in ``folder``."""

    folder: Path
    layout: Layout
    precision: str
    load: Path | None = None  # checkpoint to start from
    store: dist.TCPStore = field(
        default_factory=lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    )

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder / "run")

    @property
    def rank_dir(self) -> Path:
        return self.folder / "ranks"

    def environ(self, rank: int) -> dict[str, str]:
        ranks = str(self.layout.world_size)
        return {
            "CLUSTERTRAIN_RUN_DIR": str(self.run.path),
            "CLUSTERTRAIN_ATTEMPT": "1",
            "CLUSTERTRAIN_RANK_DIR": str(self.rank_dir),
            "CLUSTERTRAIN_DEVICE": DEVICE,
            "CLUSTERTRAIN_NODE": "here",
            "CLUSTERTRAIN_NODE_RANK": "0",
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def prepare(self) -> None:
        """Create the run folder as submit does, with the checkpoint."""
        (self.run.path / "attempts" / "1").mkdir(parents=True)
        self.rank_dir.mkdir()
        parallel: dict[str, Any] = {"sequence_parallel": self.layout.sequence_parallel}
        if self.layout.schedule is not None:
            parallel["schedule"] = self.layout.schedule
        recipe = {
            "model": MODEL,
            "data": DATA,
            "train": {"steps": STEPS, "global_batch": GLOBAL_BATCH},
            "optim": {"lr": 3e-3},
            "parallel": parallel,
        }
        self.run.spec.write_text(tomli_w.dumps({"recipe": recipe}))
        write_plan(
            self.run,
            self.layout,
            self.layout.world_size,
            global_batch=GLOBAL_BATCH,
            micro_batch=micro_batch(self.layout),
            precision=self.precision,
        )
        if self.load is not None:
            shutil.copytree(self.load, self.run.checkpoints / self.load.name)

    def failure(self) -> str:
        """Return why the ranks failed, or an empty string."""
        results = [fsio.read_json(self.rank_dir / f"rank-{r}.json") for r in range(self.layout.world_size)]
        errors = [r["error"] for r in results if r and r["error"]]
        # The peers of the rank that failed first report only a broken connection.
        errors.sort(key=lambda e: "peer" in e["message"] or e["type"] == "DistBackendError")
        if errors:
            return f"{errors[0]['type']}: {errors[0]['message']}"
        return "" if all(r and r["ending"] == "completed" for r in results) else f"endings {results}"

    def losses(self) -> dict[int, float]:
        return {r["step"]: r["loss"] for r in self._rows()}

    def schedule(self) -> dict[int, tuple[float, float | None]]:
        """Return the learning rate and, in fp16, the loss scale of each step."""
        return {r["step"]: (r["lr"], r["scale"]) for r in self._rows()}

    def _rows(self) -> list[dict[str, Any]]:
        return list(fsio.read_jsonl(self.run.metrics_path(1)))

    def samples(self) -> dict[int, list[int]]:
        """Return the sorted samples of all ranks, by step."""
        by_part: dict[int, set[tuple[int, tuple[int, ...]]]] = {}
        for path in self.rank_dir.glob("samples-*.jsonl"):
            part = int(path.name.split("-")[1])
            for row in fsio.read_jsonl(path):
                # Ranks that share a part of the batch, as in a pipeline, read the same samples.
                by_part.setdefault(row["step"], set()).add((part, tuple(row["samples"])))
        return {
            step: sorted(s for _, part_samples in parts_of_step for s in part_samples)
            for step, parts_of_step in by_part.items()
        }


def run_jobs(jobs: Sequence[Job]) -> list[str]:
    """Run jobs with the same number of ranks one after another in the same processes, and return why each failed.

    Most of the time of a short job is spent on imports and on the sharding of operations, which a process caches.
    """
    failures: list[str] = []
    for job in jobs:
        job.prepare()
    while len(failures) < len(jobs):
        remaining = jobs[len(failures) :]
        with one_thread():
            ranks = [_start([job.environ(rank) for job in remaining]) for rank in range(remaining[0].layout.world_size)]
        until = clock.monotonic() + TIMEOUT_S * len(remaining)
        for process in ranks:
            process.join(max(0.0, until - clock.monotonic()))
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
        succeeded = list(itertools.takewhile(lambda job: not job.failure(), remaining))
        failures += [""] * len(succeeded)
        if len(succeeded) < len(remaining):  # the processes have ended with this job; new ones continue after it
            failures.append(remaining[len(succeeded)].failure())
    return failures


def _start(environs: list[dict[str, str]]) -> Any:
    process = CONTEXT.Process(target=_begin, args=(environs,))
    process.start()
    return process


def _begin(environs: list[dict[str, str]]) -> None:
    multiprocessing.set_start_method("fork", force=True)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    from clustertrain.train.core import result
    from clustertrain.train.main import main

    for environ in environs:
        os.environ.update(environ)
        result.current.cache_clear()
        code = main([str(SCRIPT)])
        if code:
            sys.exit(code)


def sources(requested: Iterable[Source], folder: Path) -> dict[Source, Job]:
    """Run each source to its end."""
    jobs = {s: Job(folder / s.id, s.shape, s.precision) for s in dict.fromkeys(requested)}
    failures = run_jobs(list(jobs.values()))
    failed = [f"{s.id}: {reason}" for s, reason in zip(jobs, failures, strict=True) if reason]
    if failed:
        raise AssertionError("\n".join(failed))
    return jobs


def targets(cells: Sequence[Cell], saved: dict[Source, Job], folder: Path) -> list[Outcome]:
    """Load each cell's source into its target; all cells have the same number of ranks."""
    jobs = []
    for cell in cells:
        checkpoint = index.step_folder(saved[cell.source].run.checkpoints, SAVED_AT)
        jobs.append(Job(folder / cell.id.replace("/", "-into-"), cell.target.shape, cell.source.precision, checkpoint))
    failures = run_jobs(jobs)
    return [
        Outcome(cell, failure=reason) if reason else compare(cell, saved[cell.source], job)
        for cell, job, reason in zip(cells, jobs, failures, strict=True)
    ]


def compare(cell: Cell, whole: Job, part: Job) -> Outcome:
    """Compare the steps of a target after the restore with those of its uninterrupted source."""
    restored = [e for e in fsio.read_jsonl(part.run.attempt(1).events_path("rank-0")) if e["event"] == "restored"]
    after = range(SAVED_AT + 1, STEPS + 1)
    expected, actual = whole.losses(), part.losses()
    if [(e["step"], e["skipped"]) for e in restored] != [(SAVED_AT, [])] or list(actual) != list(after):
        return Outcome(cell, failure=f"restored {restored}, then did steps {list(actual)}")
    loss = max(abs(actual[s] - expected[s]) / abs(expected[s]) for s in after)
    failures = [
        "" if loss <= cell.limit and math.isfinite(loss) else f"a loss is off by {loss:.1e}",
        "" if part.samples() == {s: whole.samples()[s] for s in after} else "other samples",
        "" if part.schedule() == {s: whole.schedule()[s] for s in after} else "another learning rate or scale",
        find_lost_state(whole, part),
    ]
    return Outcome(cell, loss, "; ".join(f for f in failures if f))


def find_lost_state(whole: Job, part: Job) -> str:
    """Return the differences between the loaded checkpoint and the one that the target has saved from it."""
    a, b = (index.step_folder(j.run.checkpoints, s) for j, s in ((whole, SAVED_AT), (part, RESAVED_AT)))
    difference = diff.compare_checkpoints(a, b)
    names = [
        *difference.only_a,
        *difference.only_b,
        *(f.name for f in difference.forms),
        *(f.name for f in difference.bytes),
    ]
    names += [v.name for v in difference.values if v.name != "step"]
    if not names and inspect.digest(a) != inspect.digest(b):
        names = ["the digest"]
    return f"differs when saved again: {', '.join(names[:5])}" if names else ""


def by_ranks(cells: Iterable[Cell]) -> list[list[Cell]]:
    groups: dict[int, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.target.ranks, []).append(cell)
    return list(groups.values())


def by_target(cells: Iterable[Cell]) -> list[list[Cell]]:
    groups: dict[Target, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.target, []).append(cell)
    return list(groups.values())
