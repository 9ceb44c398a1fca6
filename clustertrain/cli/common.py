"""What the sub-commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from clustertrain.errors import NotFound
from clustertrain.run.folder import RunDir, open_run
from clustertrain.run.resolve import resolve

run_argument = click.argument("name", metavar="RUN", default="latest")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


def find_run(name: str) -> RunDir:
    """RUN as a folder: among my own runs, else, for a job id, through the job's working directory in Slurm.

    Raises:
        NotFound, Ambiguous: as :func:`clustertrain.run.resolve.resolve`.
    """
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
