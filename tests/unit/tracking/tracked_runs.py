"""Runs with metric rows, for the tests of trackers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clustertrain import fsio
from clustertrain.config.job import JobSpec, RunSpec, ScriptSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.run.run_dir import RunDir
from clustertrain.submit.transaction import format_spec

T0 = 1_800_000_000.0


def make(
    folder: Path, run_id: str = "lm-abcdef", *, script: ScriptSpec | None = None, **recipe: dict[str, Any]
) -> RunDir:
    """Create a run without attempts; ``recipe`` holds the tables of its recipe."""
    run = RunDir(folder / run_id)
    for subfolder in ("attempts", "events", "metrics", "checkpoints"):
        (run.path / subfolder).mkdir(parents=True)
    job = JobSpec(name="lm", backend="local")
    spec = RunSpec(job=job, recipe=build(recipe, Recipe, "test"), script=script)
    run.spec.write_text(format_spec(spec))
    fsio.write_json(run.record, {"user": "someone", "git": {"commit": "c0ffee"}})
    return run


def write(run: RunDir, attempt: int, first: int, last: int, **values: Any) -> None:
    """Append rows of the steps ``first`` to ``last`` to the attempt."""
    folder = run.attempt(attempt)
    for path in (folder.events, folder.logs):
        path.mkdir(parents=True, exist_ok=True)
    fsio.write_json(folder.record, {"job_id": f"77{attempt}"})
    with run.metrics_path(attempt).open("a") as f:
        for step in range(first, last + 1):
            f.write(json.dumps(row(step, attempt) | values) + "\n")


def row(step: int, attempt: int = 1) -> dict[str, Any]:
    return {
        "step": step, "t": T0 + step, "loss": loss(step, attempt), "lr": 1e-3, "sum_tokens": 64 * step, "note": "words"
    }  # fmt: skip


def loss(step: int, attempt: int = 1) -> float:
    """Return a loss that is exact in float32 and differs between attempts."""
    return 8.0 - step / 64 + attempt
