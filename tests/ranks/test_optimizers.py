"""Every optimizer under sharded layouts: the update of shards is that of whole parameters, training is that of one
process, and what one layout saves another one goes on with. The whole table is behind ``make optimizers``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustertrain.plan.layout import Layout
from clustertrain.plan.optimizer_state import WHOLE
from tests.optimizers.cells import CELLS, LAYOUTS, LIMITS, MODEL, THAW_STEP
from tests.optimizers.measure import Outcome, under
from tests.parity.measure import one_thread
from tests.ranks.rank_pool import Ranks, make_run

pytestmark = pytest.mark.ranks

HERE = Path(__file__).parent.parent / "optimizers"


@pytest.mark.parametrize("layout", ["fsdp", "fsdp-tp"])
def test_the_update_of_shards_is_that_of_whole_parameters(layout: str, tmp_path: Path) -> None:
    """Uneven and empty shards, one element, a tied table, a parameter without gradient in one of the steps."""
    shape, out = LAYOUTS[layout], tmp_path / "out"
    with one_thread():
        run = make_run(tmp_path / "run", shape, 4)
        Ranks(run, 4, argv=(str(HERE / "shards_script.py"), str(out))).expect(0)
    for rank in range(4):
        found = json.loads(out.with_suffix(f".{rank}").read_text())
        assert found.keys() == CELLS.keys()
        for name, (apart, where) in found.items():
            allowed = 0.0 if CELLS[name]["name"] in WHOLE else 1e-6
            assert apart <= allowed, (name, rank, where)


SUBSET = {
    "hsdp": ("muon", "lars", "lion"),
    "tp": ("muon", "adafactor", "soap", "sgd-nesterov"),
    "pp": ("muon", "shampoo", "lamb"),
}


@pytest.mark.parametrize("layout", SUBSET)
def test_training_is_that_of_one_process(layout: str, tmp_path: Path) -> None:
    outcomes: list[Outcome] = under(layout, SUBSET[layout], tmp_path / "run")
    assert all(o.ok for o in outcomes), outcomes


# What each goes on from where the one before has ended, after so many steps.
CHAIN = (("fsdp", THAW_STEP - 1), ("fsdp", 4), ("zero1", 5), ("one", 6), ("fsdp-pp", 7))
SHAPES = {**LAYOUTS, "zero1": Layout(strategy="zero1", dp_replicate=2, zero1=True), "one": Layout()}
OF_CHAIN = ("muon", "lamb", "soap", "adamw8bit")


def test_what_one_layout_saves_another_one_goes_on_with(tmp_path: Path) -> None:
    """With layers that are frozen until a step: the run is stopped just before it and just after it."""
    whole = losses(tmp_path / "whole", "one", CHAIN[-1][1])
    sharded = losses(tmp_path / "sharded", "fsdp", 4)
    done = 0
    for n, (layout, total) in enumerate(CHAIN):
        found = losses(tmp_path / "chain", layout, total, n)
        for name, by_step in found.items():
            assert list(by_step) == [str(step) for step in range(done + 1, total + 1)]
            for step, (loss, norm) in by_step.items():
                wanted = whole[name][step]
                assert loss == pytest.approx(wanted[0], rel=LIMITS[name]), (layout, name, step)
                if layout == "fsdp":
                    assert [loss, norm] == sharded[name][step], (name, step)
        done = total


def losses(folder: Path, layout: str, total: int, n: int = 0) -> dict[str, dict[str, Any]]:
    shape, out = SHAPES[layout], folder / f"out-{n}.json"
    with one_thread():
        run = make_run(
            folder / f"run-{n}",
            shape,
            shape.world_size,
            global_batch=8,
            micro_batch=1,
            model=MODEL,
            parallel={"schedule": "1f1b"} if shape.pp > 1 else {},
        )
        argv = (str(HERE / "resume_script.py"), str(folder / "saved"), str(total), str(out), *OF_CHAIN)
        Ranks(run, shape.world_size, argv=argv).expect(0)
    return json.loads(out.read_text())  # type: ignore[no-any-return]
