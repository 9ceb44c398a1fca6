"""Run one cell with real gloo ranks and compare it with the reference."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch

from clustertrain import clock, fsio
from clustertrain.plan.layout import Layout
from clustertrain.run.run_dir import RunDir
from tests.harness.parity import reference
from tests.harness.parity.cells import DATA, GLOBAL_BATCH, LIMITS, MODEL, MOST_SKIPPED, OPTIMIZERS, SEQ_LEN, STEPS, Cell
from tests.ranks.rank_pool import Ranks

SCRIPT = Path(__file__).with_name("script.py")
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Outcome:
    """``loss`` and ``norm`` are the largest relative deviations of any step, None where the ranks did not get through:
    ``failure`` then says why. ``skipped`` counts the steps that overflowed in fp16."""

    cell: Cell
    seconds: float
    loss: float | None = None
    norm: float | None = None
    skipped: int = 0
    failure: str = ""

    @property
    def ok(self) -> bool:
        if self.failure or self.loss is None or self.norm is None:
            return False
        limit = self.cell.limit
        return self.loss <= limit.loss and self.norm <= limit.norm and self.skipped <= MOST_SKIPPED

    @property
    def verdict(self) -> str:
        if self.failure:
            return "failed"
        if self.skipped > MOST_SKIPPED:
            return "skips"
        return "ok" if self.ok else "OFF"


def run(cell: Cell, folder: Path, steps: int = STEPS) -> Outcome:
    """``folder`` must not exist yet; the run directory and the ranks' logs are left in it."""
    with one_thread():
        started = clock.monotonic()
        made = _make_run(cell, folder / "run", steps)
        ranks = Ranks(made, cell.shape.world_size, argv=(str(SCRIPT), cell.optimizer))
        failure = _wait(ranks)
        seconds = clock.monotonic() - started
        if failure:
            return Outcome(cell, seconds, failure=failure)
        rows = list(fsio.read_jsonl(ranks.run.metrics_path(1)))
        if [r["step"] for r in rows] != list(range(1, steps + 1)):
            return Outcome(cell, seconds, failure=f"steps {[r['step'] for r in rows]} on record")
        return _judged(cell, seconds, rows)


def _judged(cell: Cell, seconds: float, rows: list[dict[str, Any]]) -> Outcome:
    skipped = frozenset(r["step"] for r in rows if r["skipped"])
    taken = [(r["loss"], r["grad_norm"]) for r in rows if not r["skipped"]]
    try:
        wanted = reference.losses_and_norms(cell.policy, cell.setting, skipped, cell.micro_batch)[: len(taken)]
    except reference.NeedlessSkip as e:
        return Outcome(cell, seconds, skipped=len(skipped), failure=str(e))
    loss, norm = reference.apart(taken, wanted)
    failure = ""
    if cell.precision != "fp16" and skipped:
        failure = f"skipped steps {sorted(skipped)} without a loss scale"
    # bf16's limits are wide enough for fp32 to be within them: that it was bf16 must be seen elsewhere.
    if cell.precision != "fp32":
        fp32 = reference.losses_and_norms("fp32", cell.setting, skipped)[: len(taken)]
        from_fp32 = reference.apart(taken, fp32)
        if from_fp32[1] <= LIMITS["fp32"].norm:
            failure = f"computed in fp32: the norm is within {from_fp32[1]:.1e} of fp32's"
    return Outcome(cell, seconds, loss, norm, len(skipped), failure)


def _make_run(cell: Cell, path: Path, steps: int) -> RunDir:
    """A run directory as submit leaves it."""
    run = RunDir(path)
    (run.path / "attempts").mkdir(parents=True)
    layout = cell.shape
    parallel: dict[str, Any] = {
        "activation_checkpointing": layout.activation_checkpointing,
        "sequence_parallel": layout.sequence_parallel,
    }
    if layout.schedule is not None:
        parallel.update(schedule=layout.schedule, virtual_stages=layout.virtual_stages)
    recipe = {
        "model": MODEL,
        "data": DATA,
        "train": {"steps": steps, "global_batch": GLOBAL_BATCH, "log_every": steps},
        "optim": OPTIMIZERS[cell.setting],
        "parallel": parallel,
    }
    run.spec.write_text(tomli_w.dumps({"recipe": recipe}))
    batch = {
        "micro_batch": cell.micro_batch,
        "grad_accum": cell.micro_batches,
        "global_batch": GLOBAL_BATCH,
        "tokens_per_step": GLOBAL_BATCH * SEQ_LEN,
    }
    fields = {f: getattr(layout, f) for f in Layout.__struct_fields__}
    fsio.write_json(run.plan, {"layout": fields, "batch": batch, "precision": cell.precision})
    return run


def _wait(ranks: Ranks) -> str:
    """Why the ranks failed, empty if they did not."""
    try:
        codes = ranks.wait(TIMEOUT_S)
    except AssertionError as e:
        return str(e).splitlines()[0]
    if not any(codes):
        return ""
    killed = [f"rank {rank} by signal {-code}" for rank, code in enumerate(codes) if code < 0]
    if killed:
        return f"killed: {', '.join(killed)}"
    errors = [r["error"] for r in ranks.results() if r.get("error")]
    # The peers of the rank that failed first only report that it has gone.
    errors.sort(key=lambda e: "peer" in e["message"] or e["type"] == "DistBackendError")
    return f"{errors[0]['type']}: {errors[0]['message']}" if errors else f"exit codes {codes}"


@contextmanager
def one_thread() -> Iterator[None]:
    """One CPU thread a rank and for the reference: these matrices are too small to share, and threads that wait for
    each other on busy cores spin."""
    name, threads = "OMP_NUM_THREADS", torch.get_num_threads()
    before = os.environ.get(name)
    os.environ[name] = "1"
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
