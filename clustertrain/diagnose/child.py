"""``python -m clustertrain.diagnose.child CHECK…``: the process that runs the checks, with torch and the user's code.

The run folder in the environment is a scratch folder. Each check builds a new model, so checks are independent.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import traceback
from pathlib import Path

import torch

from clustertrain import settings
from clustertrain.config.recipe import Recipe
from clustertrain.diagnose.child_output import MessageWriter, ProgressCallback
from clustertrain.diagnose.registry import CHECKS, Finding
from clustertrain.diagnose.subject import Subject
from clustertrain.errors import EXIT_CONFIG, ClusterTrainError, ConfigError
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.train.core import context, result
from clustertrain.train.data.streams.source import as_map_style
from clustertrain.train.models import build

_MODULES = {name: f"clustertrain.diagnose.checks.{name.replace('-', '_')}" for name in CHECKS}


def format_error(error: BaseException) -> str:
    """Return the error's type and message, with the file and line that raised it."""
    message = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{message} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else message


def subject_from_env() -> Subject:
    """Load the recipe and plan of the run folder named in the environment."""
    run = RunDir(Path(os.environ[settings.RUN_DIR]))
    rank = context.context_from_environment()
    return Subject(load_spec(run).recipe, context.load_plan(run)[1], run, rank.device)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def run_check(check: str, subject: Subject, on_progress: ProgressCallback) -> Finding:
    """Run ``check``; an exception becomes a failed finding."""
    module = importlib.import_module(_MODULES[check])
    try:
        finding: Finding = module.check(subject, on_progress)
    except ClusterTrainError as e:
        return Finding(check=check, verdict="fail", text=e.message, fix=e.fix or "")
    except (Exception, SystemExit) as e:  # the user's model or data may raise anything; the other checks still run
        traceback.print_exc()
        return _finding_from_exception(check, e)
    return finding


def _finding_from_exception(check: str, error: BaseException) -> Finding:
    if result.classify_failure(error) == "out_of_memory":
        return Finding(
            check=check,
            verdict="fail",
            text=f"out of memory on this machine: {format_error(error)}",
            fix="scale down for the checks: --set train.micro_batch=1, or a smaller model with --set model.…",
        )
    return Finding(
        check=check,
        verdict="fail",
        text=f"raised {format_error(error)}",
        fix="fix this error first: training would raise it too",
    )


def main() -> int:
    writer = MessageWriter()
    recipe = Recipe()
    try:
        subject = subject_from_env()
        recipe = subject.recipe
        writer(device=device_name(subject.device))
        task = subject.build_task()
        if len(as_map_style(task.dataset)) < 1:
            raise ConfigError("the dataset is empty", fix="provide a dataset with at least one sample")
    except ClusterTrainError as e:
        writer(error=e.message, fix=e.fix, exit_code=e.exit_code)
        return e.exit_code
    except (Exception, SystemExit) as e:  # the user's module may raise anything
        traceback.print_exc()
        fix = "fix this error first: every rank of the job would raise it"
        writer(error=_describe_build_error(recipe, e), fix=fix, exit_code=EXIT_CONFIG)
        return EXIT_CONFIG
    subject = dataclasses.replace(subject, has_model_loss=build.find_model_loss(recipe, task.model) is not None)
    del task
    for check in sys.argv[1:]:
        writer(progress=[check, 0, 0])
        writer.write_finding(run_check(check, subject, writer.progress_callback(check)))
    writer(done=True)
    return 0


def _describe_build_error(recipe: Recipe, error: BaseException) -> str:
    keys = [f"{table}.entry = {spec.entry!r}" for table, spec in (("model", recipe.model), ("data", recipe.data))
            if spec.entry]  # fmt: skip
    return f"{' or '.join(keys) or 'model or data'}: {format_error(error)}"


if __name__ == "__main__":
    sys.exit(main())
