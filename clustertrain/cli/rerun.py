"""``clustertrain rerun``: submit a run's command again, with other options."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clustertrain.cli.common import find_run
from clustertrain.cli.completion import complete_runs
from clustertrain.errors import ClusterTrainError, NotFound
from clustertrain.printable import printable

if TYPE_CHECKING:
    from clustertrain.run.run_dir import RunDir


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("name", metavar="RUN", shell_complete=complete_runs)
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS]")
def rerun(name: str, options: tuple[str, ...]) -> Any:
    """Submit the command of RUN again, in the same folder, with the files as they are now.

    OPTIONS are those of `submit`, such as `--set optim.lr=1e-4` or `--nodes 8`, and win over those of RUN.
    """
    from clustertrain.cli.submit import submit

    run = find_run(name)
    argv, folder = _load_command(run)
    args = insert_options(argv, options)
    click.echo(printable(f"{folder}$ clustertrain submit {shlex.join(args)}"), err=True)
    os.chdir(folder)
    sys.argv = [sys.argv[0], "submit", *args]  # what the new run records as its command
    return submit.main(args, prog_name="clustertrain submit", standalone_mode=False)


def _load_command(run: RunDir) -> tuple[list[str], Path]:
    """Return the arguments of `submit` that made ``run``, and the folder in which it was called."""
    from clustertrain.run import json_files

    record, error = json_files.load_document(run.record, {"argv": list, "cwd": str})
    argv = [arg for arg in record.get("argv", []) if isinstance(arg, str)]
    if error is not None or "cwd" not in record or len(argv) < 2:
        raise ClusterTrainError(
            f"{run.id}: its command is not recorded: {error or run.record}", fix="submit it yourself"
        )
    if argv[1] != "submit":
        raise ClusterTrainError(
            f"{run.id} was not made by `submit` but by `{' '.join(argv[1:2])}`", fix="call that command again"
        )
    if hidden := [arg for arg in argv if arg.endswith("=***")]:
        raise ClusterTrainError(
            f"{run.id}: the value of {hidden[0].removesuffix('=***')} is a secret, which is not recorded",
            fix=f"submit it yourself: cd {shlex.quote(record['cwd'])}; clustertrain submit {shlex.join(argv[2:])}",
        )
    folder = Path(record["cwd"])
    if not folder.is_dir():
        raise NotFound(
            f"{run.id}: {folder}, where it was submitted, no longer exists",
            fix="submit it yourself from another folder",
        )
    return argv[2:], folder


def insert_options(args: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the arguments of `submit` with ``options`` after its own, which they override, and before the target."""
    from clustertrain.cli.submit import submit

    parsed = [p for p in submit.params if isinstance(p, click.Option) and p.is_flag]
    flags = {name for option in parsed for name in (*option.opts, *option.secondary_opts)}
    index = 0
    while index < len(args) and args[index].startswith("-") and args[index] not in ("--", "-m"):
        index += 1 if args[index] in flags or "=" in args[index] else 2
    return [*args[:index], *options, *args[index:]]
