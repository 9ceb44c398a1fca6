"""``clustertrain exec`` and ``shell``: run a command on a node of a running run, inside its job."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

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


@click.command("exec", context_settings={"ignore_unknown_options": False})
@_rank_option
@_node_option
@_run_argument
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD ARGS")
def exec_(name: str, rank: int | None, node: str | None, command: tuple[str, ...]) -> None:
    """Run CMD on a node of a running RUN, beside its ranks: `nvidia-smi`, `py-spy dump --pid …`.

    On Slurm it is a step of the same job (`srun --overlap`), which ends with the job. The exit code is the command's.
    """
    _replace_process(name, rank, node, command[1:] if command[0] == "--" else command)


@click.command(context_settings={"allow_interspersed_args": False})
@_rank_option
@_node_option
@_run_argument
def shell(name: str, rank: int | None, node: str | None) -> None:
    """Open a shell on a node of a running RUN, beside its ranks."""
    _replace_process(name, rank, node, (os.environ.get("SHELL") or "/bin/sh",))


def _replace_process(name: str, rank: int | None, node: str | None, command: Sequence[str]) -> None:
    """Replace this process by ``command`` on a node of the run."""
    from clustertrain.run.run_dir import explain_permission_errors
    from clustertrain.scheduler.run_status import run_status

    if rank is not None and node is not None:
        raise UsageError("--rank and --node exclude each other", fix="use one of them")
    with explain_permission_errors():
        status = run_status(find_run(name))
        if status.state != "running" or not status.history or status.job_id is None:
            raise ClusterTrainError(
                f"{status.run.id} is {status.state}: there is no job to enter", fix="wait until it runs"
            )
        chosen = _choose_node(status, rank, node)
    if status.backend == "slurm":
        terminal = ["--pty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
        argv = [
            "srun",
            "--overlap",
            f"--jobid={status.job_id}",
            f"--nodelist={chosen}",
            "--nodes=1",
            "--ntasks=1",
            *terminal,
        ]
        argv += ["--", *command]
    else:
        argv = list(command)  # a local run uses this machine
    program = shutil.which(argv[0])
    if program is None:
        raise NotFound(f"{argv[0]} is not installed on this machine", fix="check the name")
    sys.stdout.flush()
    os.execv(program, argv)


def _choose_node(status: RunStatus, rank: int | None, node: str | None) -> str:
    """Return the name of the node that was asked for, among those of the last attempt."""
    from clustertrain.run.run_spec import load_spec

    nodes, gpus = status.history[-1].nodes, load_spec(status.run).job.gpus
    if node is not None and node not in nodes:
        raise NotFound(f"{status.run.id} has no node {node!r}: it has {', '.join(nodes)}", fix="name one of them")
    index = (rank or 0) // gpus
    if node is None and index >= len(nodes):
        raise NotFound(f"{status.run.id} has no rank {rank}: it has {len(nodes) * gpus}", fix="name one of them")
    return node if node is not None else nodes[index]
