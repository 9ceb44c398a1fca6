"""The per-job report as one HTML file that opens offline: ``clustertrain telemetry RUN --html FILE``."""

from __future__ import annotations

from pathlib import Path

from clustertrain import fsio
from clustertrain.errors import ConfigError
from clustertrain.report.html import page
from clustertrain.report.html.context import PageContext
from clustertrain.telemetry.analysis.curves import Curves
from clustertrain.telemetry.report_schema import Summary

_PATH_FIX = "name a file in a writable folder with space on its disk"


def check_path(path: Path) -> None:
    """Raise ConfigError if ``path`` must not be replaced or its folder is missing.

    Called early, because reading the run can take minutes.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file and will not be replaced", fix=_PATH_FIX)
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: no such folder: {path.parent}", fix=_PATH_FIX)


def write(summary: Summary, curves: Curves, path: Path, context: PageContext | None = None) -> int:
    """Write the page atomically and return its size in bytes.

    Raises:
        ConfigError: ``path`` cannot be written, or is a folder or a device; the installation is incomplete.
    """
    check_path(path)
    return write_page(path, page.render(summary, curves, context))


def write_page(path: Path, text: str) -> int:
    """Write a rendered page as :func:`write` does."""
    check_path(path)
    data = text.encode("utf-8", "replace")  # file names may contain lone surrogates
    try:
        # The umask decides who else may read the file, as for any other program.
        with fsio.atomic_write(path, mode=0o666) as f:
            f.write(data)
    except OSError as e:
        raise ConfigError(f"{path} cannot be written: {e.strerror}", fix=_PATH_FIX) from e
    return len(data)
