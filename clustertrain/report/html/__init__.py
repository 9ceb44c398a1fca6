"""The per-job report as one HTML file that opens offline: what ``clustertrain telemetry RUN --html FILE`` writes."""

from __future__ import annotations

from pathlib import Path

from clustertrain import fsio
from clustertrain.errors import ConfigError
from clustertrain.report.html import page
from clustertrain.telemetry.analysis.curves import Curves
from clustertrain.telemetry.report_schema import Summary

_PATH_FIX = "give --html the name of a file in a folder of yours"


def check_path(path: Path) -> None:
    """Raises ConfigError when ``path`` is something that must not be replaced, or its folder is missing: worth asking
    before minutes of reading."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file, and would be replaced", fix=_PATH_FIX)
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}", fix=_PATH_FIX)


def write(summary: Summary, curves: Curves, path: Path) -> int:
    """Write the page, whole or not at all; returns its bytes.

    Raises:
        ConfigError: ``path`` cannot be written, or is a folder or a device; the installation is incomplete.
    """
    check_path(path)
    return write_page(path, page.render(summary, curves))


def write_page(path: Path, text: str) -> int:
    """As :func:`write`, of a page that is rendered."""
    check_path(path)
    data = text.encode("utf-8", "replace")  # a lone surrogate of a file's name
    try:
        # As any program of the user's would: as open to others as the umask says.
        with fsio.atomic_write(path, mode=0o666) as f:
            f.write(data)
    except OSError as e:
        raise ConfigError(f"{path} cannot be written: {e.strerror}", fix=_PATH_FIX) from e
    return len(data)
