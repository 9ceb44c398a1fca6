"""What the sub-commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clustertrain.errors import NotFound

if TYPE_CHECKING:
    from clustertrain.run.folder import RunDir

run_argument = click.argument("name", metavar="[RUN]", default="latest")
# For what cannot be taken back there is no default.
named_run_argument = click.argument("name", metavar="RUN")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


def find_run(name: str) -> RunDir:
    """RUN as a folder: among my own runs, else, for a job id, through the job's working directory in Slurm.

    Raises:
        NotFound, Ambiguous: as :func:`clustertrain.run.resolve.resolve`.
    """
    from clustertrain.run.folder import open_run
    from clustertrain.run.resolve import resolve

    try:
        return resolve(name)
    except NotFound:
        if not name.isdigit():
            raise
        from clustertrain.launch.slurm import work_dir

        folder = work_dir(name)
        if folder is None:
            raise
        return open_run(Path(folder))


def print_json(value: Any) -> None:
    """One document, keys in the order of the struct; numbers of any kind that msgspec knows."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
