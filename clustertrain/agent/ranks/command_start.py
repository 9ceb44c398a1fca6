"""What the ranks of a command execute: its arguments, and the variables that only commands get."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import clustertrain
from clustertrain import settings
from clustertrain.config.command_options import CHECKPOINT, fill, split_arguments, uses_placeholder
from clustertrain.config.job import JobSpec, ScriptSpec
from clustertrain.run.run_dir import AttemptDir, RunDir

RANK_HOOKS = Path(clustertrain.__file__).with_name("rank_hooks")


def build_command(script: ScriptSpec, run: RunDir) -> list[str]:
    """Return the program and its arguments in the first attempt."""
    command = list(script.command)
    if script.path_index is not None:
        command[script.path_index] = str(run.code / script.path)
    return command


def build_resume_arguments(job: JobSpec, run: RunDir, attempt: AttemptDir, checkpoint: str) -> list[str]:
    """Return the further arguments of a resumed attempt. ``checkpoint``: the newest whole one; empty without one."""
    arguments = split_arguments(job.resume_args)
    needs_checkpoint = bool(job.checkpoints) or uses_placeholder(arguments, CHECKPOINT)
    if attempt.n == 1 or (needs_checkpoint and not checkpoint):
        return []
    values = {CHECKPOINT: checkpoint, "run_dir": str(run.path), "attempt": str(attempt.n)}
    return [fill(argument, values) for argument in arguments]


def build_environment(
    env: Mapping[str, str],
    script: ScriptSpec,
    job: JobSpec,
    *,
    checkpoint: str,
    grace_s: float | None,
    hooks: str = str(RANK_HOOKS),
) -> dict[str, str]:
    """Return ``env`` with the variables of a command.

    Args:
        grace_s: from the warning of a preemption to the kill.
        hooks: the folder of the hooks.
    """
    built = {**env, settings.STOP_SIGNAL: job.stop_signal.partition(":")[0]}
    for name, value in ((settings.CHECKPOINT, checkpoint), (settings.GRACE, "" if grace_s is None else f"{grace_s:g}")):
        built.pop(name, None)
        if value:
            built[name] = value
    if job.hooks:
        built["PYTHONPATH"] = os.pathsep.join(filter(None, (hooks, env.get("PYTHONPATH"))))
    if script.is_package:
        built["PYTHONSAFEPATH"] = "1"  # otherwise Python imports from the current folder before the snapshot
    return built
