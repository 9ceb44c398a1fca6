"""`clustertrain ui` as a user starts it, for tests in a browser."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from clustertrain import settings
from tests.runs import CLI


@contextlib.contextmanager
def serve(home: Path) -> Iterator[str]:
    """Serve the runs of ``home`` on a free port; yield the address that the command prints, with its token."""
    env = {**os.environ, settings.HOME: str(home), "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen([*CLI, "ui", "--no-browser"], env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), f"it printed {address!r}, exit code {server.poll()}"
        yield address
    finally:
        server.terminate()
        server.communicate(timeout=30)


def address_of(server: str, path: str) -> str:
    """Return the address of a page, for a browser that has opened the printed one; ``path`` begins with a slash."""
    return server.partition("/?")[0] + path
