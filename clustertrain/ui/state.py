"""What all pages share."""

from __future__ import annotations

import os

from clustertrain import settings
from clustertrain.errors import NotFound
from clustertrain.run.run_dir import RunDir, explain_permission_errors, open_run, runs_folder
from clustertrain.ui.live import Hub
from clustertrain.ui.pages import Pages
from clustertrain.ui.runs_table import RunsTable


class UiState:
    """The state of one server."""

    def __init__(self) -> None:
        """Raise ConfigError if the installation is incomplete."""
        self.pages = Pages()
        self.hub = Hub()
        self.table = RunsTable(self.hub.changed)

    def close(self) -> None:
        """End all streams and threads. Safe in a signal handler."""
        self.table.close()
        self.hub.close()


def is_file_name(name: str) -> bool:
    """Return whether ``name`` can be that of a run or sweep: with a slash, or `..`, it would leave their folder."""
    is_short = len(os.fsencode(name)) <= settings.MAX_NAME_BYTES
    return is_short and not name.startswith(".") and "/" not in name and "\0" not in name


def find_run(run_id: str) -> RunDir:
    """Return the run with exactly this id.

    Raises:
        NotFound: there is no such run, or it has been deleted.
        PermissionDenied: the user may not read it.
    """
    if not is_file_name(run_id):
        raise NotFound(f"no run {run_id!r}", fix="open it from the table of runs")
    try:
        with explain_permission_errors():
            return open_run(runs_folder() / run_id)
    except NotFound as e:
        raise NotFound(
            f"there is no run {run_id!r} in {runs_folder()}: it was deleted, or is in another home",
            fix="open it from the table of runs",
        ) from e
