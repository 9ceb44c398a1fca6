"""The hash of a recipe: equal for runs that train the same, and different for all others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from clustertrain.config.job import JobSpec, RunSpec, ScriptSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.run.recipe_hash import hash_run_spec

DEFAULT_JOB = JobSpec()


def hash_of(job: JobSpec = DEFAULT_JOB, script: ScriptSpec | None = None, **tables: Any) -> str:
    return hash_run_spec(RunSpec(job=job, recipe=build(tables, Recipe, "test"), script=script))


def test_job_telemetry_and_tracking_do_not_change_the_hash() -> None:
    assert hash_of() == hash_of(JobSpec(name="other", nodes=4, partition="gpu"))
    assert hash_of() == hash_of(
        telemetry={"interval_s": 5.0}, tracking={"trackers": ["wandb"]}, preemption_test={"preempt_at_steps": [3]}
    )


def test_explicit_default_does_not_change_the_hash() -> None:
    assert hash_of(optim={"lr": 3e-4}) == hash_of() and hash_of(optim={"lr": 1e-3}) != hash_of()


@pytest.mark.parametrize("tables", [{"train": {"seed": 2}}, {"contract": {"metric": "loss"}}, {"model": {"layers": 2}}])
def test_training_keys_change_the_hash(tables: dict[str, Any]) -> None:
    assert hash_of(**tables) != hash_of() and hash_of(**tables) == hash_of(**tables)


def test_script_path_and_arguments_change_the_hash() -> None:
    script = ScriptSpec(path="train.py", args=("--lr", "1"), cwd="/home/me")
    assert hash_of(script=script) != hash_of()
    assert hash_of(script=script) == hash_of(script=msgspec.structs.replace(script, cwd="/elsewhere"))
    assert hash_of(script=script) != hash_of(script=msgspec.structs.replace(script, args=("--lr", "2")))
