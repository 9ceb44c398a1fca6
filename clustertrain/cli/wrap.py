"""``clustertrain wrap``: a program inside the user's own batch script."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from clustertrain import proc
from clustertrain.cli.completion import complete_profiles
from clustertrain.cli.job_options import POSITIVE, build_job, command_options
from clustertrain.errors import ClusterTrainError, UsageError


@click.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@click.option("--name", metavar="NAME", help="First part of the run id (default: the script's name).")
@click.option(
    "--gpus",
    type=POSITIVE,
    metavar="G",
    help="Ranks per node with one task per node (default: the launcher's, otherwise the GPUs of the node or 1).",
)
@click.option(
    "--cluster",
    metavar="PROFILE",
    shell_complete=complete_profiles,
    help="Cluster profile (default: $CLUSTERTRAIN_CLUSTER).",
)
@click.option(
    "--max-requeues",
    type=click.IntRange(min=0),
    metavar="N",
    help="Maximum number of requeues; 0 disables them (default: 50).",
)
@command_options
@click.option("--share", is_flag=True, default=None, help="Let the group read the run (mode 0750, not 0700).")
@click.option("--snapshot-limit-mib", type=POSITIVE, metavar="MIB", help="Maximum size of the code snapshot.")
@click.option(
    "--snapshot-include",
    multiple=True,
    metavar="PATTERN",
    help="Also copy matching files that look like secrets or are links out of the repository.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND ARGS")
def wrap(
    command: tuple[str, ...], snapshot_limit_mib: int | None, snapshot_include: tuple[str, ...], **job: Any
) -> int:
    """Run COMMAND as a run inside your own batch script, in place of `srun COMMAND`.

    Write `srun clustertrain wrap -- torchrun train.py`, and submit the script with sbatch as before. After a preemption
    and at the time limit the job is requeued, and the run resumes. The other commands find the run by its job id.
    """
    from clustertrain.scheduler.slurm_step import is_in_step, is_printing_task, read_step_task, start_step
    from clustertrain.submit.request import SubmitRequest
    from clustertrain.submit.snapshot.code_snapshot import DEFAULT_LIMIT_MIB

    try:
        if not command:
            raise UsageError("no command", fix="name the program: srun clustertrain wrap -- COMMAND ARGS")
        if not is_in_step(os.environ):
            start_step(os.environ, proc.python_module_argv(sys.executable, "clustertrain", *sys.argv[1:]))
        task = read_step_task(os.environ)
    except ClusterTrainError as e:
        if is_printing_task(os.environ):
            raise
        return e.exit_code  # every task of the step finds the same
    request = SubmitRequest(
        command=command,
        job=build_job(job),
        snapshot_limit_mib=snapshot_limit_mib or DEFAULT_LIMIT_MIB,
        snapshot_include=snapshot_include,
        argv=tuple(sys.argv),
    )
    from clustertrain.agent.wrap.main import run_task

    return run_task(request, task)
