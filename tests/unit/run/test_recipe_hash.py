"""The hash of a recipe: the same for what trains the same, and another one for everything else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from clustertrain.config.job import JobSpec, RunSpec, ScriptSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.run.recipe_hash import hash_run_spec

HERE = JobSpec()


def of(job: JobSpec = HERE, script: ScriptSpec | None = None, **tables: Any) -> str:
    return hash_run_spec(RunSpec(job=job, recipe=build(tables, Recipe, "test"), script=script))


def test_where_and_how_it_is_watched_does_not_count() -> None:
    assert of() == of(JobSpec(name="other", nodes=4, partition="gpu"))
    assert of() == of(
        telemetry={"interval_s": 5.0}, tracking={"trackers": ["wandb"]}, preemption_test={"preempt_at_steps": [3]}
    )


def test_a_default_that_is_written_out_is_the_same_recipe() -> None:
    assert of(optim={"lr": 3e-4}) == of() and of(optim={"lr": 1e-3}) != of()


@pytest.mark.parametrize("a", [{"train": {"seed": 2}}, {"contract": {"metric": "loss"}}, {"model": {"layers": 2}}])
def test_what_is_trained_counts(a: dict[str, Any]) -> None:
    assert of(**a) != of() and of(**a) == of(**a)


def test_a_script_is_told_by_its_name_and_arguments() -> None:
    script = ScriptSpec(path="train.py", args=("--lr", "1"), cwd="/home/me")
    assert of(script=script) != of()
    assert of(script=script) == of(script=msgspec.structs.replace(script, cwd="/elsewhere"))
    assert of(script=script) != of(script=msgspec.structs.replace(script, args=("--lr", "2")))
