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
from tests.cuda_emulation.trace import use_host_random_numbers
from tests.harness.parity import reference
from tests.harness.parity.cells import DATA, GLOBAL_BATCH, LIMITS, MAX_SKIPPED, MODEL, OPTIMIZERS, SEQ_LEN, STEPS, Cell
from tests.ranks.rank_pool import DEVICE, Ranks

SCRIPT = Path(__file__).with_name("script.py")
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Outcome:
    """Outcome of a cell.

    Attributes:
        loss: largest relative deviation of the loss in any step, None after a failure of the ranks.
        norm: the same for the gradient norm.
        skipped: number of steps that overflowed in fp16.
        failure: why the cell failed, or empty.
    """

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
        return self.loss <= limit.loss and self.norm <= limit.norm and self.skipped <= MAX_SKIPPED

    @property
    def verdict(self) -> str:
        if self.failure:
            return "failed"
        if self.skipped > MAX_SKIPPED:
            return "skips"
        return "ok" if self.ok else "OFF"


def run(cell: Cell, folder: Path, steps: int = STEPS) -> Outcome:
    """Run ``cell`` in ``folder``, which must not exist and keeps the run folder with the ranks' logs."""
    with one_thread():
        started = clock.monotonic()
        run_dir = _make_run(cell, folder / "run", steps)
        # The reference draws the initial values on the CPU.
        setup = use_host_random_numbers if DEVICE == "cuda" else None
        ranks = Ranks(
            run_dir,
            cell.shape.world_size,
            setup=setup,
            argv=(str(SCRIPT), cell.optimizer, "documents" if cell.documents else "text"),
        )
        failure = _wait(ranks)
        seconds = clock.monotonic() - started
        if failure:
            return Outcome(cell, seconds, failure=failure)
        rows = list(fsio.read_jsonl(ranks.run.metrics_path(1)))
        if [r["step"] for r in rows] != list(range(1, steps + 1)):
            return Outcome(cell, seconds, failure=f"recorded steps {[r['step'] for r in rows]}")
        return _compare(cell, seconds, rows)


def _compare(cell: Cell, seconds: float, rows: list[dict[str, Any]]) -> Outcome:
    skipped = frozenset(r["step"] for r in rows if r["skipped"])
    trained = [(r["loss"], r["grad_norm"]) for r in rows if not r["skipped"]]
    try:
        expected = reference.losses_and_norms(
            cell.policy, cell.setting, skipped, cell.micro_batch, documents=cell.documents
        )[: len(trained)]
    except reference.NeedlessSkip as e:
        return Outcome(cell, seconds, skipped=len(skipped), failure=str(e))
    loss, norm = reference.largest_deviations(trained, expected)
    failure = ""
    if cell.precision != "fp16" and skipped:
        failure = f"skipped steps {sorted(skipped)} without a loss scale"
    # A run in fp32 would also be within the limits of bf16, so check that it was not in fp32.
    if cell.precision != "fp32":
        fp32 = reference.losses_and_norms("fp32", cell.setting, skipped, documents=cell.documents)[: len(trained)]
        from_fp32 = reference.largest_deviations(trained, fp32)
        if from_fp32[1] <= LIMITS["fp32"].norm:
            failure = f"computed in fp32: the norm is within {from_fp32[1]:.1e} of fp32's"
    return Outcome(cell, seconds, loss, norm, len(skipped), failure)


def _make_run(cell: Cell, path: Path, steps: int) -> RunDir:
    """Create a run folder as submit does."""
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
    """Wait for the ranks and return why they failed, or an empty string."""
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
    # The peers of the rank that failed first report only a broken connection.
    errors.sort(key=lambda e: "peer" in e["message"] or e["type"] == "DistBackendError")
    return f"{errors[0]['type']}: {errors[0]['message']}" if errors else f"exit codes {codes}"


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one CPU thread per rank and for the reference: the matrices are small, and threads that wait spin."""
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
