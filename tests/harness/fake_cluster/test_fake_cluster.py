"""A small part of ``make fake-cluster`` and ``make fake-memory``, with planted faults that they must see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.harness.fake_cluster.memory_categories import category_errors
from tests.harness.fake_cluster.suite import LAYOUTS
from tests.paths import ROOT

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def result() -> Any:
    # A process of its own: the device must be there before torch is imported.
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.fake_cluster.suite"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 77 and os.environ.get("CLUSTERTRAIN_REQUIRE_CUDA_EMULATION") != "1":
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_accepted_layouts_run_a_step(result: Any) -> None:
    assert result["layouts"] == [["traced", ""]] * len(LAYOUTS)


def test_wrong_groups_and_shapes_are_seen(result: Any) -> None:
    """Degrees in the wrong dimensions of the mesh, and a projection split in the wrong direction."""
    assert "is invalid for input of size" in result["wrong_groups"]
    assert "must have same reduction dim" in result["wrong_shapes"]


def test_trainer_refuses_what_the_planner_refuses(result: Any) -> None:
    of_plan, of_trainer = result["refused"]
    assert "does not divide model.vocab_size" in of_plan
    assert of_trainer.startswith("ConfigError: model.vocab_size = 50257 does not divide")


def test_traced_peaks_match_the_plan_by_category(result: Any) -> None:
    assert len(result["peaks"]) == 2
    for name, (predicted, at_peak) in result["peaks"].items():
        traced = {category: n / 1024**3 for category, n in at_peak.items()}
        allocated = sum(n for category, n in predicted.items() if category != "overhead")
        assert allocated == pytest.approx(sum(traced.values()), rel=0.08), name
        assert max(map(abs, category_errors(predicted, traced).values())) < 0.08, name
