"""Count a model of the user's own before it waits in a queue, in a process that imports torch and the user's code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from clustertrain import proc, schema, settings
from clustertrain.config.job import RunSpec
from clustertrain.config.telemetry import TelemetrySpec
from clustertrain.errors import ClusterTrainError, CommandFailed, ConfigError
from clustertrain.plan import pipeline_schedules
from clustertrain.plan.cost.user_model import Counted
from clustertrain.plan.planner import Plan
from clustertrain.submit import python_path

TIMEOUT_S = 180.0  # the import of torch takes a minute over a busy network file system


class NotCounted(ClusterTrainError):
    """It cannot be done on this machine, which says nothing of the recipe."""


def count(
    spec: RunSpec, chosen: Plan, python: str, package: Path | None, environ: Mapping[str, str], *, trace: bool
) -> Counted:
    """What the model of ``spec`` is made of.

    Args:
        python: the job's interpreter.
        package: the file or folder of ``model.entry`` where it is not installed.
        trace: also trace a step, as far as a trace knows the layout.

    Raises:
        ConfigError: the user's code cannot be imported, or fails; the model is none that can be split as planned.
        NotCounted: there is no such interpreter here, or no torch for it, or no answer in time.
    """
    step = _step(chosen) if trace and not chosen.layout.model_parallel else None
    layout = chosen.layout
    split = {"tp": layout.tp, "stages": pipeline_schedules.stages(layout)}
    # Everybody on the machine sees the arguments, so no webhook is among them.
    recipe = msgspec.structs.replace(spec.recipe, telemetry=TelemetrySpec())
    request = {"recipe": msgspec.to_builtins(recipe), "step": step, "split": split}
    argv = proc.python_module(python, "clustertrain.train.tools.model_stats", json.dumps(request))
    env = {**settings.without_allocation(environ), **spec.env}
    try:
        done = proc.run(argv, timeout_s=TIMEOUT_S, env=python_path.environment_in_place(package, env), check=False)
    except CommandFailed as e:
        # Without the request, which is in the words of the timeout.
        raise NotCounted(f"{python}: no answer in {TIMEOUT_S:g} s" if Path(python).exists() else e.message) from e
    try:
        answer = json.loads(done.stdout)
    except ValueError as e:
        raise _silent(spec, done) from e
    if "error" in answer:
        raise ConfigError(answer["error"], fix=answer["fix"])
    found = schema.convert(answer["counted"], Counted)
    if trace and step is None:
        why = f"a trace is of one process, and {chosen.layout.words()} splits the model"
        return msgspec.structs.replace(found, untraced=why)
    return found


def _step(chosen: Plan) -> dict[str, object]:
    return {
        "micro_batch": chosen.batch.micro_batch,
        "precision": chosen.precision,
        "activation_checkpointing": chosen.layout.activation_checkpointing,
        "sharded": chosen.layout.fully_sharded,
    }


def _silent(spec: RunSpec, done: proc.Completed) -> ClusterTrainError:
    """Of a process that gave no document: it lacks torch or clustertrain, or the user's code has ended it."""
    last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    if "No module named" in last:
        return NotCounted(last)
    return ConfigError(
        f"model.entry = {spec.recipe.model.entry!r}: its process ended with exit code {done.returncode}: {last}",
        fix="it would fail so on every rank; --no-count-model leaves it to them",
    )
