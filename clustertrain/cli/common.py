"""What the sub-commands share."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clustertrain import clock
from clustertrain.cli.completion import complete_keys, complete_runs
from clustertrain.errors import AmbiguousName, NotFound
from clustertrain.printable import printable, printable_json

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from clustertrain.run.run_dir import RunDir

run_argument = click.argument("name", metavar="[RUN]", default="latest", shell_complete=complete_runs)
# No default: these commands cannot be undone.
required_run_argument = click.argument("name", metavar="RUN", shell_complete=complete_runs)
set_option = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY.PATH=VALUE",
    help="Set a recipe key.",
    shell_complete=complete_keys,
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


class CommandWithSubcommands(click.Command):
    """A command whose first argument may be a subcommand: ``sweep TARGET`` and ``sweep show SWEEP``.

    A subcommand wins over a file of the same name; ``./show`` is the file.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.subcommands: dict[str, click.Command] = {}

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        subcommand = self.subcommands.get(args[0]) if args else None
        if subcommand is None:
            return super().make_context(info_name, args, parent, **extra)
        return subcommand.make_context(f"{info_name} {subcommand.name}", args[1:], parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, subcommand.get_short_help_str(100)) for name, subcommand in self.subcommands.items()]
            )


def watch(console: Console, interval_s: float, show: Callable[[], tuple[RenderableType, bool]]) -> int:
    """Show in place what ``show`` returns, every ``interval_s``, until it says that this was the last time.

    Ctrl-C stops the watching, not what is watched. Returns the exit code.
    """
    from rich.live import Live

    try:
        with Live(console=console, auto_refresh=False, vertical_overflow="visible") as screen:
            while True:
                content, is_last = show()
                screen.update(content, refresh=True)
                if is_last:
                    return 0
                clock.sleep(interval_s)
    except KeyboardInterrupt:
        return 130


def echo_next_steps(run: RunDir) -> None:
    """Print the commands that say why ``run`` failed, if a person reads standard error."""
    if sys.stderr.isatty():
        click.echo(f"  clustertrain logs {run.id} --errors   why it failed\n  clustertrain status {run.id}", err=True)


def find_run(name: str) -> RunDir:
    """Find RUN among the user's own runs or, for a job id, through the job's working directory in Slurm.

    Raises:
        NotFound, AmbiguousName, PermissionDenied: see :func:`clustertrain.run.lookup.resolve_run`.
    """
    from clustertrain.run.lookup import require_single, resolve_run
    from clustertrain.run.run_dir import explain_permission_errors

    with explain_permission_errors():
        try:
            return resolve_run(name)
        except AmbiguousName:
            raise
        except NotFound as e:
            return require_single(name, _find_runs_of_any_user(name, e))


def find_runs(names: Sequence[str]) -> list[RunDir]:
    """Find all of RUN…, each once; a sweep or a job array stands for all its runs. Raise as :func:`find_run`."""
    from clustertrain.run.lookup import resolve_runs
    from clustertrain.run.run_dir import explain_permission_errors

    runs_by_path: dict[Path, RunDir] = {}
    for name in names:
        with explain_permission_errors():
            try:
                runs = resolve_runs(name)
            except AmbiguousName:
                raise
            except NotFound as e:
                runs = _find_runs_of_any_user(name, e)
        runs_by_path.update((run.path, run) for run in runs)
    return list(runs_by_path.values())


def _find_runs_of_any_user(name: str, not_found: NotFound) -> list[RunDir]:
    """Return the runs of any user's job, several for an array. Raise ``not_found`` if Slurm knows no such job."""
    from clustertrain.run.lookup import list_sweep_runs
    from clustertrain.run.run_dir import open_run

    if not re.fullmatch(r"\d+(_\d+)?", name):
        raise not_found
    from clustertrain.scheduler.slurm import find_work_dir

    folder, task = find_work_dir(name), name.partition("_")[2]
    if folder is None:
        raise not_found
    if task and (folder / task).is_dir():
        folder = (folder / task).resolve()
    return list_sweep_runs(folder) or [open_run(folder)]


def print_json(name: str, value: Any) -> None:
    """Print a struct as the JSON document ``name`` of :mod:`clustertrain.report.documents.registry`."""
    from clustertrain.report.documents.encode import to_document

    print_formatted(to_document(name, value))


def print_json_line(name: str, value: Any) -> None:
    """Print a struct as the JSON document ``name``, on one line."""
    from clustertrain.report.documents.encode import to_document

    _print_document(_encode(to_document(name, value)))


def print_formatted(value: Any) -> None:
    """Print JSON that is not a document of clustertrain, such as a JSON Schema, with keys in their order."""
    import msgspec

    _print_document(msgspec.json.format(_encode(value), indent=2))


def _print_document(document: bytes) -> None:
    click.echo(printable_json(document.decode(), getattr(sys.stdout, "encoding", None)))


def _encode(value: Any) -> bytes:
    import msgspec

    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # half of a surrogate pair, as JSON written by others may contain
        return msgspec.json.encode(_make_encodable(msgspec.to_builtins(value)))


def _make_encodable(value: Any) -> Any:
    if isinstance(value, dict):
        return {_make_encodable(key): _make_encodable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_make_encodable(inner) for inner in value]
    return printable(value) if isinstance(value, str) else value
