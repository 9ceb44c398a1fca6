"""Run the optimizers under a layout with real gloo ranks and compare them with one process."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from clustertrain import fsio
from clustertrain.plan.layout import Layout
from clustertrain.run.run_dir import RunDir
from tests.harness.optimizers.cells import DATA, GLOBAL_BATCH, LAYOUTS, LIMITS, MODEL, SEQ_LEN, STEPS
from tests.harness.parity.measure import one_thread
from tests.ranks.rank_pool import Ranks

SCRIPT = Path(__file__).with_name("script.py")


@dataclass(frozen=True)
class Outcome:
    """Outcome of a cell.

    Attributes:
        loss: largest relative deviation of the loss from one process in any step, None if refused.
        norm: the same for the gradient norm.
        refused: why the layout was refused, or empty.
    """

    layout: str
    optimizer: str
    loss: float | None = None
    norm: float | None = None
    refused: str = ""

    @property
    def ok(self) -> bool:
        return self.loss is not None and self.loss <= LIMITS[self.optimizer]


def run_layout(layout: str, names: Sequence[str], folder: Path) -> list[Outcome]:
    """Run the optimizers ``names`` under ``layout`` in ``folder``, which must not exist and keeps the run."""
    results = _run(LAYOUTS[layout], names, folder)
    reference = run_single(tuple(names))
    return [_compare(layout, name, results[name], reference[name]) for name in names]


@functools.cache
def run_single(names: tuple[str, ...]) -> dict[str, Any]:
    """Run the optimizers ``names`` on one process."""
    with tempfile.TemporaryDirectory(prefix="single-") as folder:
        return _run(Layout(), names, Path(folder, "run"))


def _compare(layout: str, name: str, actual: dict[str, Any], expected: dict[str, Any]) -> Outcome:
    if "refused" in actual:
        return Outcome(layout, name, refused=actual["refused"])
    assert len(actual["losses"]) == STEPS and expected["losses"][-1] < expected["losses"][0], (name, expected)
    return Outcome(
        layout,
        name,
        _largest_deviation(actual["losses"], expected["losses"]),
        _largest_deviation(actual["norms"], expected["norms"]),
    )


def _largest_deviation(actual: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True))


def _run(layout: Layout, names: Sequence[str], folder: Path) -> dict[str, Any]:
    run = RunDir(folder)
    (run.path / "attempts").mkdir(parents=True)
    recipe = {"model": MODEL, "data": DATA, "train": {"steps": STEPS, "global_batch": GLOBAL_BATCH}}
    if layout.schedule is not None:
        recipe["parallel"] = {"schedule": layout.schedule, "virtual_stages": layout.virtual_stages}
    run.spec.write_text(tomli_w.dumps({"recipe": recipe}))
    micro_batch = 1 if layout.pp > 1 else 2
    batch = {
        "micro_batch": micro_batch,
        "grad_accum": GLOBAL_BATCH // layout.data_parallel // micro_batch,
        "global_batch": GLOBAL_BATCH,
        "tokens_per_step": GLOBAL_BATCH * SEQ_LEN,
    }
    fields = {f: getattr(layout, f) for f in Layout.__struct_fields__}
    fsio.write_json(run.plan, {"layout": fields, "batch": batch, "precision": "fp32"})
    out = folder / "results.json"
    with one_thread():
        ranks = Ranks(run, layout.world_size, argv=(str(SCRIPT), str(out), *names))
        assert not any(ranks.wait(300.0)), ranks.logs()
    return json.loads(out.read_text())  # type: ignore[no-any-return]
