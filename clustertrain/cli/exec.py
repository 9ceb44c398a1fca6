"""``clustertrain exec`` and ``shell``: run a command on a node of a running run, inside its job."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from clustertrain import proc, settings
from clustertrain.cli.common import find_run
from clustertrain.cli.completion import complete_runs
from clustertrain.errors import ClusterTrainError, NotFound, UsageError

if TYPE_CHECKING:
    from clustertrain.scheduler.run_status import RunStatus

_run_argument = click.argument("name", metavar="RUN", shell_complete=complete_runs)
_rank_option = click.option(
    "--rank", type=click.IntRange(min=0), metavar="R", help="Use the node of this rank.  [default: 0]"
)
_node_option = click.option("--node", metavar="NAME", help="Use this node.")


class _CommandAfterRun(click.Command):
    """A command line ``[OPTIONS] RUN [OPTIONS] [--] CMD ARGS``: what follows the first word of CMD belongs to CMD."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        index, has_run = 0, False
        while index < len(args) and args[index] != "--":
            if args[index].startswith("-"):
                index += 1 if "=" in args[index] or args[index] in ("-h", "--help") else 2
            elif has_run:
                args = [*args[:index], "--", *args[index:]]
                break
            else:
                has_run, index = True, index + 1
        return super().parse_args(ctx, args)


@click.command("exec", cls=_CommandAfterRun)
@_rank_option
@_node_option
@_run_argument
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] CMD ARGS")
def exec_(name: str, rank: int | None, node: str | None, command: tuple[str, ...]) -> None:
    """Run CMD on a node of a running RUN, alongside its ranks: `nvidia-smi`, `py-spy dump --pid …`.

    On Slurm it is a step of the same job (`srun --overlap`), which ends with the job. The exit code is the command's.
    In a run with a container, CMD runs on the node, outside the container.

    \b
    clustertrain exec RUN -- nvidia-smi
    clustertrain exec RUN --rank 5 -- py-spy dump --pid 4711
    """
    _replace_process(name, rank, node, command)


@click.command()
@_rank_option
@_node_option
@_run_argument
def shell(name: str, rank: int | None, node: str | None) -> None:
    """Open a shell on a node of a running RUN, alongside its ranks."""
    _replace_process(name, rank, node, (os.environ.get("SHELL") or "/bin/sh",))


def _replace_process(name: str, rank: int | None, node: str | None, command: Sequence[str]) -> None:
    """Replace this process by ``command`` on a node of the run."""
    from clustertrain.run.run_dir import explain_permission_errors
    from clustertrain.scheduler.run_status import run_status

    if rank is not None and node is not None:
        raise UsageError("--rank and --node exclude each other", fix="use one of them")
    with explain_permission_errors():
        status = run_status(find_run(name))
        chosen = _choose_node(status, rank or 0, node)
    environ = settings.strip_allocation_env(os.environ)
    argv = _build_step(status, chosen, command) if status.backend == "slurm" else list(command)
    program = shutil.which(argv[0])
    if program is None:
        raise NotFound(f"{argv[0]} is not installed on this machine", fix="check the name")
    sys.stdout.flush()
    os.execve(program, argv, environ)


def _build_step(status: RunStatus, node: str, command: Sequence[str]) -> list[str]:
    """Return the srun command of a step on ``node``, with a terminal if this process has one."""
    terminal = ["--pty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    options = [f"--jobid={_resolve_job_id(str(status.job_id))}", f"--nodelist={node}", "--nodes=1", "--ntasks=1"]
    return ["srun", "--overlap", *options, *terminal, "--", *command]


def _resolve_job_id(job_id: str) -> str:
    """Return the number of a job. Before Slurm 24, srun does not take the id of a task of an array."""
    if "_" not in job_id:
        return job_id
    result = proc.run(["squeue", "--noheader", f"--jobs={job_id}", "--format=%A"], timeout_s=20.0, check=False)
    number = result.stdout.strip()
    if not number.isdigit():
        raise ClusterTrainError(f"Slurm does not know job {job_id}: {result.stderr.strip() or 'it has ended'}")
    return number


def _choose_node(status: RunStatus, rank: int, node: str | None) -> str:
    """Return the requested node, or the node of ``rank``, after checking that the running attempt has it."""
    from clustertrain.run.run_spec import load_spec

    run = status.run.id
    if status.scheduler_error:
        raise ClusterTrainError(f"{run}: whether it runs here is not known: {status.scheduler_error}")
    if status.is_final:
        raise ClusterTrainError(f"{run} has ended ({status.state}): there is no job to run in")
    nodes = status.history[-1].nodes if status.history else ()
    if status.state != "running" or not nodes:
        raise ClusterTrainError(f"{run} is {status.state}: there is no job to run in yet", fix="wait until it runs")
    gpus = load_spec(status.run).job.gpus
    if node is not None and node not in nodes:
        raise NotFound(f"{run} has no node {node!r}: it has {', '.join(nodes)}", fix="name one of them")
    if node is None and rank // gpus >= len(nodes):
        raise NotFound(f"{run} has no rank {rank}: it has {len(nodes) * gpus}", fix="count ranks from 0")
    return node if node is not None else nodes[rank // gpus]
