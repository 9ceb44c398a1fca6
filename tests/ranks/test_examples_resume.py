"""Each example has the same training and validation curves after a kill at a random step as without it."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from clustertrain.run import metrics
from clustertrain.run.run_dir import RunDir
from tests.paths import ROOT
from tests.ranks.rank_pool import Ranks, make_run, write_plan

pytestmark = pytest.mark.ranks

EXAMPLES = ROOT / "examples"
STEPS, EVERY, EVALUATE = 12, 3, 4
# Keys that depend on time or on the attempt.
TIME_KEYS = re.compile(r"^(t|attempt)$|_s$|_per_s|_gib$|^sum_")
SCRIPTS = {
    "text_script.py": ("--steps", "32", "--checkpoint-every", "3"),  # its warmup takes 20 steps
    "digits_script.py": ("--steps", "12", "--checkpoint-every", "3"),
    "digit_halves_script.py": ("--steps", "12", "--checkpoint-every", "3"),
}


def recipe_run(folder: Path, name: str) -> RunDir:
    """Create a run of the recipe with fewer steps and a smaller evaluation."""
    run = make_run(folder, "ddp", 2)
    recipe = tomllib.loads((EXAMPLES / name).read_text())
    strategy = recipe.pop("job").get("layout", "ddp")
    recipe["train"]["steps"] = STEPS
    recipe["evaluation"] |= {"every": EVALUATE, "samples": 32}
    recipe["checkpoint"]["every"] = EVERY
    run.spec.write_text(tomli_w.dumps({"recipe": recipe}))
    write_plan(run, strategy, 2, global_batch=recipe["train"]["global_batch"], micro_batch=8)
    return run


def script_run(folder: Path, name: str) -> RunDir:
    return make_run(folder, "ddp", 2, script=(EXAMPLES / name, SCRIPTS[name]))


def kill_at(step: int) -> None:
    """Setup: kill all ranks with SIGKILL in step ``step``."""
    from clustertrain.train.session.session import Session

    one_thread()
    original = Session.train_step

    def train_step(self: Session, *args: Any, **kw: Any) -> Any:
        if self.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args, **kw)

    Session.train_step = train_step  # type: ignore[method-assign]


def one_thread() -> None:
    """Setup: use one thread, and the import path that job.sh sets for modules next to a recipe."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(EXAMPLES))


def curves(run: RunDir) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not TIME_KEYS.search(k)} for row in metrics.load_rows(run)]


@pytest.mark.parametrize("name", ["text.toml", "digits.toml", "digit_halves.toml", *SCRIPTS])
def test_killed_and_resumed_example_has_the_same_curves(name: str, tmp_path: Path) -> None:
    make = script_run if name in SCRIPTS else recipe_run
    reference = make(tmp_path / "whole" / "run", name)
    Ranks(reference, 2, setup=one_thread).expect(0)
    step = random.randrange(1, STEPS)
    run = make(tmp_path / "parts" / "run", name)
    assert all(code != 0 for code in Ranks(run, 2, setup=kill_at, args=(step,)).wait())
    Ranks(run, 2, 2, setup=one_thread).expect(0)
    resumed, expected = curves(run), curves(reference)
    total = 32 if name == "text_script.py" else STEPS
    assert [row["step"] for row in expected] == list(range(1, total + 1))
    assert resumed == expected, f"killed in step {step}"
    assert all("loss" in row for row in expected)
    if name.endswith(".toml"):
        assert sum("validation_loss" in row for row in expected) == STEPS // EVALUATE
