"""``clustertrain completion``, and the values that shells complete: runs, keys, GPU types, profiles and checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

from clustertrain.errors import ClusterTrainError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_Complete = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]
COMPLETION_VARIABLE = "_CLUSTERTRAIN_COMPLETE"  # click's, from the name of the program
_FILES = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/config.fish"}


@click.command()
@click.argument("shell", type=click.Choice(list(_FILES)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script with which a shell completes commands, options, runs, recipe keys and GPU types.

    \b
    eval "$(clustertrain completion bash)"       in ~/.bashrc
    eval "$(clustertrain completion zsh)"        in ~/.zshrc, after compinit
    clustertrain completion fish | source        in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    cls = get_completion_class(shell)
    assert cls is not None
    script = cls(ctx.find_root().command, {}, "clustertrain", COMPLETION_VARIABLE).source()
    for old, new in _CHANGES[shell]:
        script = script.replace(old, new)
    click.echo(script)


# To click's scripts. A value follows KEY= without a blank in between, and a comma does not end a description. Where
# another version of click has other lines, its script stays as it is.
_CHANGES = {
    "bash": [
        (
            "    return 0\n}",
            """    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]]; then
        compopt -o nospace 2>/dev/null
    fi

    return 0
}""",
        )
    ],
    "zsh": [
        (
            """            if [[ "$descr" == "_" ]]; then""",
            """            if [[ "$key" == *= ]]; then
                compadd -U -V unsorted -S '' -- "$key"
            elif [[ "$descr" == "_" ]]; then""",
        )
    ],
    "fish": [('string split ","', 'string split -m 1 ","')],
}


# Parameters with one of these in their help complete files or folders.
_FILE_METAVARS = frozenset(
    {"FILE", "PATH", "SCRIPT", "IMAGE", "IN.csv", "OUT.csv", "FILE.html|.svg", "PRESET|PATH|RUN", "SRC[:DST[:ro|rw]]"}
    | {"[RECIPE.toml]", "[RECIPE.toml | SCRIPT.py ARGS…]", "", "-- COMMAND ARGS", "[--] CMD ARGS"}
)
_FOLDER_METAVARS = frozenset({"DIR", "DIRECTORY"})


def complete_files(command: click.Command) -> None:
    """Let a command that is about to be completed complete files and folders: for a text, click completes nothing."""
    for param in command.params:
        if param.type in (click.STRING, click.UNPROCESSED):
            if param.metavar in _FILE_METAVARS:
                param.type = click.Path()
            elif param.metavar in _FOLDER_METAVARS:
                param.type = click.Path(file_okay=False)
    for inner in {**getattr(command, "commands", {}), **getattr(command, "subcommands", {})}.values():
        complete_files(inner)


def _completing(values: Callable[[], Iterable[tuple[str, str | None]]], *, or_files: bool = False) -> _Complete:
    """Return a callback that completes ``values``, pairs of value and help, or nothing if they cannot be read.

    Args:
        or_files: complete files if no value matches.
    """

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        try:
            found = [
                CompletionItem(v, help=text) for v, text in values() if v.startswith(incomplete) and v.isprintable()
            ]
        except (ClusterTrainError, OSError):
            found = []
        return found if found or not or_files else [CompletionItem(incomplete, type="file")]

    return complete


def _runs() -> Iterable[tuple[str, str | None]]:
    from clustertrain.run.lookup import list_runs

    return [("latest", "the newest run"), *((run.id, None) for run in list_runs())]


def _sweeps() -> Iterable[tuple[str, str | None]]:
    from clustertrain.run.run_dir import sweeps_folder

    return [("latest", "the newest sweep"), *((path.name, None) for path in sweeps_folder().iterdir())]


def _keys() -> Iterable[tuple[str, str | None]]:
    from clustertrain.config.parsing.documents import list_keys
    from clustertrain.config.recipe import Recipe

    keys = list_keys(Recipe)
    tables = {key.rpartition(".")[0] for key in keys}
    return [(f"{key}=", None) for key in keys if key not in tables]


def _gpu_types() -> Iterable[tuple[str, str | None]]:
    from clustertrain.config.hardware import CATALOG

    return [(gpu.name, f"{gpu.capacity_gib:g} GiB") for gpu in CATALOG]


def _profiles() -> Iterable[tuple[str, str | None]]:
    from clustertrain.config.cluster import list_profiles

    return [(name, str(path)) for name, path in list_profiles().items()]


def _checks() -> Iterable[tuple[str, str | None]]:
    from clustertrain.diagnose import registry

    return [(name, None) for name in registry.select_checks(registry.ALL)]


complete_runs = _completing(_runs)
complete_keys = _completing(_keys)
complete_gpu_types = _completing(_gpu_types)
complete_profiles = _completing(_profiles)
complete_sweeps = _completing(_sweeps)
complete_checks = _completing(_checks, or_files=True)
