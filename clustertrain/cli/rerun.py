"""``clustertrain rerun``: submit a run's command again, with other options."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clustertrain import settings
from clustertrain.cli.common import find_run
from clustertrain.cli.completion import complete_runs
from clustertrain.errors import ClusterTrainError, NotFound, UsageError
from clustertrain.printable import printable
from clustertrain.submit.provenance import redact_argv

if TYPE_CHECKING:
    from clustertrain.run.run_dir import RunDir


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("name", metavar="RUN", shell_complete=complete_runs)
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF SUBMIT]")
def rerun(name: str, options: tuple[str, ...]) -> Any:
    """Submit the command of RUN again, in the same folder, with the files as they are now.

    Options of `submit` after RUN, such as `--set optim.lr=1e-4` or `--nodes 8`, override those of RUN.

    \b
    clustertrain rerun RUN --set optim.lr=1e-4
    clustertrain rerun RUN --nodes 8 --time 12:00:00
    """
    from clustertrain.cli.submit import submit
    from clustertrain.run.watched import refuse_watched

    run = find_run(name)
    refuse_watched(run, "rerun", "submit its program: clustertrain submit -- COMMAND")
    _check_options(options)
    argv, folder = _load_command(run)
    args = insert_options(argv, options)
    shown = redact_argv(args)
    click.echo(printable(f"{folder}$ clustertrain submit {shlex.join(shown)}"), err=True)
    os.environ[settings.HOME] = str(settings.home().resolve())  # a relative one is relative to the folder so far
    os.chdir(folder)
    sys.argv = [sys.argv[0], "submit", *args]  # what the new run records as its command
    return submit.main(args, prog_name="clustertrain submit", standalone_mode=False)


def _check_options(options: Sequence[str]) -> None:
    """Raise UsageError if ``options`` are not complete options of `submit` and nothing else."""
    from clustertrain.cli.submit import submit

    parser = submit.make_parser(click.Context(submit))
    parser.allow_interspersed_args = False
    try:
        values, _, _ = parser.parse_args(list(options))
    except click.UsageError as e:
        raise UsageError(f"rerun: {e.format_message()}", fix="`clustertrain submit --help` lists the options") from e
    word = "--" if "--" in options else values.get("target")
    if isinstance(word, str):  # click has an object for what is absent
        raise UsageError(f"rerun: {word!r} is not an option of submit", fix="submit another program with `submit`")


def _load_command(run: RunDir) -> tuple[list[str], Path]:
    """Return the arguments of `submit` that made ``run``, and the folder in which it was called."""
    from clustertrain.run import json_files

    if run.path.stat().st_uid != os.geteuid():
        raise ClusterTrainError(
            f"{run.id} belongs to another user, whose command would run as yours", fix="read its record.json"
        )
    record, error = json_files.load_document(run.record, {"argv": list, "cwd": str})
    argv = record.get("argv", [])
    is_complete = len(argv) > 1 and all(isinstance(arg, str) and "\ufffd" not in arg for arg in argv)
    if error is not None or "cwd" not in record or not is_complete:
        raise ClusterTrainError(
            f"{run.id}: its command is not recorded: {error or run.record}", fix="submit it yourself"
        )
    if argv[1] != "submit":
        raise ClusterTrainError(
            f"{run.id} was created by `{argv[1]}`, not by `submit`", fix=f"run `clustertrain {argv[1]}` again"
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
    """Return the arguments of `submit` with ``options`` after its own, which they override.

    Options may follow a recipe; what follows a script or ``--`` belongs to the program.
    """
    from clustertrain.cli.submit import submit

    flags = {
        n for p in submit.params if isinstance(p, click.Option) and p.is_flag for n in (*p.opts, *p.secondary_opts)
    }
    index = 0
    while index < len(args) and args[index].startswith("-") and args[index] not in {"--", "-m"}:
        index += 1 if args[index] in flags or "=" in args[index] else 2
    if index < len(args) and args[index].endswith(".toml"):
        index = len(args)
    return [*args[:index], *options, *args[index:]]
