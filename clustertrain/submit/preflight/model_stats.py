"""Count a user-defined model before submission, in a process that imports torch and the user's code."""

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
from clustertrain.plan.cost.user_model import ModelStats
from clustertrain.plan.decide import ModelSplit
from clustertrain.submit.snapshot import python_path

TIMEOUT_S = 180.0  # importing torch takes a minute on a busy network filesystem


class ModelCountError(ClusterTrainError):
    """The model cannot be counted on this machine; the recipe may be valid."""


def count_model(
    spec: RunSpec, split: ModelSplit, python: str, package: Path | None, environ: Mapping[str, str], *, trace: bool
) -> ModelStats:
    """Return the parameters, buffers and traced memory of the model of ``spec``.

    Args:
        split: how the model is trained.
        python: the job's interpreter.
        package: the file or folder of ``model.entry`` if it is not installed.
        trace: also trace a step, unless the layout splits the model.

    Raises:
        ConfigError: the user's code cannot be imported or fails, or the model cannot be split as planned.
        ModelCountError: the interpreter or its torch does not exist here, or does not answer in time.
    """
    layout = split.layout
    trace_step = _build_trace_step(split) if trace and not layout.is_model_parallel else None
    degrees = {"tp": layout.tp, "stages": pipeline_schedules.num_stages(layout)}
    # Every user of the machine can read the arguments, so they must not contain the webhook.
    recipe = msgspec.structs.replace(spec.recipe, telemetry=TelemetrySpec())
    request = {"recipe": msgspec.to_builtins(recipe), "step": trace_step, "split": degrees}
    argv = proc.python_module_argv(python, "clustertrain.train.tools.model_stats", json.dumps(request))
    env = {**settings.strip_allocation_env(environ), **spec.env}
    try:
        result = proc.run(argv, timeout_s=TIMEOUT_S, env=python_path.build_environment(package, env), check=False)
    except CommandFailed as e:
        # The message of a timeout contains the request: leave it out.
        raise ModelCountError(f"{python}: no answer in {TIMEOUT_S:g} s" if Path(python).exists() else e.message) from e
    try:
        answer = json.loads(result.stdout)
    except ValueError as e:
        raise _build_process_error(spec, result) from e
    if "error" in answer:
        raise ConfigError(answer["error"], fix=answer["fix"])
    stats = schema.convert(answer["stats"], ModelStats)
    if trace and trace_step is None:
        reason = f"a trace covers one process, and {layout.describe()} splits the model"
        return msgspec.structs.replace(stats, trace_error=reason)
    return stats


def _build_trace_step(split: ModelSplit) -> dict[str, object]:
    return {
        "micro_batch": split.batch.micro_batch,
        "precision": split.precision,
        "activation_checkpointing": split.layout.activation_checkpointing,
        "sharded": split.layout.is_fully_sharded,
    }


def _build_process_error(spec: RunSpec, result: proc.CommandResult) -> ClusterTrainError:
    """Return the error for a process without a result: torch or clustertrain is missing, or user code ended it."""
    last_line = (result.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    if "No module named" in last_line:
        return ModelCountError(last_line)
    return ConfigError(
        f"model.entry = {spec.recipe.model.entry!r}: its process ended with exit code {result.returncode}: {last_line}",
        fix="fix the code, which would fail on every rank too; --no-count-model skips the count",
    )
