"""Count the training samples of a recipe before submission, for its keys in epochs.

Where an index or a header has the number, it is read here; otherwise a process with the job's Python builds the
dataset.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from clustertrain import proc, settings
from clustertrain.config.checks import epochs
from clustertrain.config.recipe import Recipe
from clustertrain.config.telemetry import TelemetrySpec
from clustertrain.errors import CommandFailed, ConfigError
from clustertrain.plan.decide import decide
from clustertrain.plan.request import PlanRequest
from clustertrain.submit.preflight import data
from clustertrain.submit.prepared_run import ResolvedRun
from clustertrain.submit.snapshot import python_path

TIMEOUT_S = 180.0  # importing torch takes a minute on a busy network filesystem
_FIX = "set data.samples, the number of training samples, or use keys in steps"


def resolve_epochs(run: ResolvedRun) -> ResolvedRun:
    """Return ``run`` with the steps of the keys in epochs; unchanged without such keys.

    Raises:
        ConfigError: the samples cannot be counted here, or the steps contradict each other.
    """
    recipe = run.spec.recipe
    if run.spec.script is not None or not epochs.has_epoch_keys(recipe):
        return run
    samples = recipe.data.samples or count_training_samples(run)
    global_batch = recipe.train.global_batch
    if not global_batch:
        global_batch = decide(PlanRequest(run.spec, run.spec.job.device, run.profile)).batch.global_batch
    resolved = epochs.resolve_epochs(recipe, samples, global_batch)
    return dataclasses.replace(run, spec=msgspec.structs.replace(run.spec, recipe=resolved))


def count_training_samples(run: ResolvedRun) -> int:
    """Return the training samples in an epoch of ``run``, without those held out for validation.

    Raises:
        ConfigError: the data is missing or unsuitable, or no process on this machine can count it.
    """
    recipe = run.spec.recipe
    for key, path in recipe.data_files.items():
        if not path.exists():
            raise ConfigError(
                f"{_name_keys(recipe)}: data.{key} = {str(path)!r} does not exist on this machine, so its samples "
                "cannot be counted",
                fix=_FIX,
            )
    samples = _count_without_building(recipe)
    if samples is not None:
        return samples
    if run.spec.job.container:
        raise _build_error(recipe, "the ranks' Python, which would count them, is in the image")
    if (problem := run.python.ranks.find_trainer_problem()) is not None:
        raise _build_error(recipe, f"{problem.message} ({problem.fix})")
    env = {**settings.strip_allocation_env(run.parsed.request.environ), **run.spec.env}
    content = msgspec.json.encode((recipe.data, recipe.model, recipe.objective))
    return _count_in_process(_Count(content, run.python.ranks.path, run.code, tuple(sorted(env.items())), recipe))


@dataclass(frozen=True)
class _Count:
    """A number of samples to count. Two are equal if the numbers are."""

    content: bytes
    """What decides the number."""
    python: str
    package: Path | None
    environ: tuple[tuple[str, str], ...]
    recipe: Recipe = field(compare=False)


def _count_without_building(recipe: Recipe) -> int | None:
    """Return the exact number of training samples from indexes, headers and sizes; None if that takes more."""
    path, kind = recipe.data_path, recipe.data_kind
    is_text_folder = kind in ("text", "pairs") and (path is None or path.is_dir())
    is_split_by_label = bool(recipe.data.validation) and kind not in ("text", "tokens")
    samples = None if is_text_folder or is_split_by_label else data.count_samples(recipe)
    return None if samples is None else samples - round(samples * recipe.data.validation)


@functools.lru_cache(maxsize=64)  # the runs of a sweep have the same data
def _count_in_process(count: _Count) -> int:
    # Every user of the machine can read the arguments, so they must not contain the webhook.
    request = json.dumps(msgspec.to_builtins(msgspec.structs.replace(count.recipe, telemetry=TelemetrySpec())))
    argv = proc.python_module_argv(count.python, "clustertrain.train.tools.data_size", request)
    env = python_path.build_environment(count.package, dict(count.environ))
    keys = _name_keys(count.recipe)
    try:
        result = proc.run(argv, timeout_s=TIMEOUT_S, env=env, check=False)
    except CommandFailed as e:
        # The message of a timeout contains the request: leave it out.
        reason = f"no answer in {TIMEOUT_S:g} s" if Path(count.python).exists() else e.message
        raise ConfigError(f"{keys}: the samples cannot be counted: {count.python}: {reason}", fix=_FIX) from e
    try:
        answer = json.loads(result.stdout)
    except ValueError as e:
        last_line = (result.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ConfigError(f"{keys}: the samples cannot be counted: {last_line}", fix=_FIX) from e
    if "error" in answer:
        raise ConfigError(answer["error"], fix=answer["fix"])
    samples: int = answer["samples"]
    return samples


def _build_error(recipe: Recipe, reason: str) -> ConfigError:
    return ConfigError(f"{_name_keys(recipe)}: the samples cannot be counted here: {reason}", fix=_FIX)


def _name_keys(recipe: Recipe) -> str:
    return " and ".join(epochs.list_epoch_keys(recipe))
