"""environment.json: the Python environment that a run takes to its nodes. Written by submit, read by the agents."""

from __future__ import annotations

from pathlib import Path

import msgspec

from clustertrain import settings
from clustertrain.run import json_files
from clustertrain.run.run_dir import RunDir

# The folders in an archive, and so in each copy.
PREFIX, BASE = "environment", "base"
END = "end"
"""The last file of an archive: tar does not notice that files are missing after a whole one."""


class ShippedEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """An environment that was packed, and its archive."""

    hash: str
    """Identifies the content: :func:`clustertrain.submit.shipping.files.hash_files`."""
    prefixes: tuple[str, ...]
    """The folder of the environment, under each name that its files and variables may have for it."""
    archive: str
    """Path of the tar file."""
    base_python: str = ""
    """Name of the base interpreter in ``base/bin``, which is packed too; empty: it is not."""


def archives_folder() -> Path:
    """Return the folder of all archives, on the filesystem that the nodes share."""
    return settings.home() / "environments"


def load_shipped_environment(run: RunDir) -> ShippedEnvironment | None:
    """Return the environment that the run takes along; None if there is none, or if the file cannot be read."""
    return json_files.convert_leniently(json_files.poll_document(run.environment), ShippedEnvironment)
