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
    """``loss``: the largest relative deviation of the loss from one process in any step, ``norm``: that of the gradient
    norm; None where it was ``refused``."""

    layout: str
    optimizer: str
    loss: float | None = None
    norm: float | None = None
    refused: str = ""

    @property
    def ok(self) -> bool:
        return self.loss is not None and self.loss <= LIMITS[self.optimizer]


def under(layout: str, names: Sequence[str], folder: Path) -> list[Outcome]:
    """``folder`` must not exist yet; the run and its logs are left in it."""
    found = _run(LAYOUTS[layout], names, folder)
    reference = alone(tuple(names))
    return [_judged(layout, name, found[name], reference[name]) for name in names]


@functools.cache
def alone(names: tuple[str, ...]) -> dict[str, Any]:
    """On one process."""
    with tempfile.TemporaryDirectory(prefix="alone-") as folder:
        return _run(Layout(), names, Path(folder, "run"))


def _judged(layout: str, name: str, found: dict[str, Any], wanted: dict[str, Any]) -> Outcome:
    if "refused" in found:
        return Outcome(layout, name, refused=found["refused"])
    assert len(found["losses"]) == STEPS and wanted["losses"][-1] < wanted["losses"][0], (name, wanted)
    return Outcome(layout, name, _apart(found["losses"], wanted["losses"]), _apart(found["norms"], wanted["norms"]))


def _apart(found: Sequence[float], wanted: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


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
    out = folder / "found.json"
    with one_thread():
        ranks = Ranks(run, layout.world_size, argv=(str(SCRIPT), str(out), *names))
        assert not any(ranks.wait(300.0)), ranks.logs()
    return json.loads(out.read_text())  # type: ignore[no-any-return]
