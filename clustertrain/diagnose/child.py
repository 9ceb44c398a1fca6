"""``python -m clustertrain.diagnose.child CHECK…``: the checks, in a process that imports torch and the user's code.

The run directory in the environment is a scratch one. Each check makes its model anew, so that none spoils another.
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
from clustertrain.diagnose.child_output import Tell, Teller
from clustertrain.diagnose.registry import CHECKS, Finding
from clustertrain.diagnose.subject import Subject
from clustertrain.errors import EXIT_CONFIG, ClusterTrainError, ConfigError
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.train.core import context, result
from clustertrain.train.models import build

_MODULES = {name: f"clustertrain.diagnose.checks.{name.replace('-', '_')}" for name in CHECKS}


def said(error: BaseException) -> str:
    """The last line of a traceback, and where it comes from."""
    last = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{last} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else last


def of_environment() -> Subject:
    run = RunDir(Path(os.environ[settings.RUN_DIR]))
    rank = context.of_environment()
    return Subject(load_spec(run).recipe, context.read_plan(run)[1], run, rank.device)


def words_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def one(check: str, subject: Subject, tell: Tell) -> Finding:
    """What ``check`` finds. Whatever it raises is a finding too."""
    module = importlib.import_module(_MODULES[check])
    try:
        found: Finding = module.check(subject, tell)
    except ClusterTrainError as e:
        return Finding(check=check, verdict="fail", text=e.message, fix=e.fix or "")
    except (Exception, SystemExit) as e:  # of the user's model or data: whatever it is, the other checks go on
        traceback.print_exc()
        return _raised(check, e)
    return found


def _raised(check: str, error: BaseException) -> Finding:
    if result.kind_of(error) == "out_of_memory":
        return Finding(
            check=check,
            verdict="fail",
            text=f"it does not fit into the memory of this machine: {said(error)}",
            fix="scale it down for the checks: --set train.micro_batch=1, or a smaller model with --set model.…",
        )
    return Finding(
        check=check, verdict="fail", text=f"it raised {said(error)}", fix="training would end so too: mend that first"
    )


def main() -> int:
    tell = Teller()
    recipe = Recipe()
    try:
        subject = of_environment()
        recipe = subject.recipe
        tell(device=words_of(subject.device))
        made = subject.task()
        if len(made.dataset) < 1:
            raise ConfigError("the data set is empty", fix="give it samples")
    except ClusterTrainError as e:
        tell(error=e.message, fix=e.fix, exit_code=e.exit_code)
        return e.exit_code
    except (Exception, SystemExit) as e:  # of the user's module: whatever it is
        traceback.print_exc()
        tell(error=_blamed(recipe, e), fix="it would fail so on every rank", exit_code=EXIT_CONFIG)
        return EXIT_CONFIG
    subject = dataclasses.replace(subject, own_loss=build.own_loss(recipe, made.model) is not None)
    del made
    for check in sys.argv[1:]:
        tell(progress=[check, 0, 0])
        tell.finding(one(check, subject, tell.progress_of(check)))
    tell(done=True)
    return 0


def _blamed(recipe: Recipe, error: BaseException) -> str:
    keys = [f"{table}.entry = {spec.entry!r}" for table, spec in (("model", recipe.model), ("data", recipe.data))
            if spec.entry]  # fmt: skip
    return f"{' or '.join(keys) or 'model or data'}: {said(error)}"


if __name__ == "__main__":
    sys.exit(main())
