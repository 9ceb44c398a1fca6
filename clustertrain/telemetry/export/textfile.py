"""File of the exporter, for the textfile collector of the site's node_exporter."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

from clustertrain import clock, extras, fsio
from clustertrain.errors import UnsuitableEnvironment
from clustertrain.telemetry.export.feed import Feed, Labels

WRITE_INTERVAL_S = 15.0
STALE_FILE_S = 600.0  # a file not replaced for this long belongs to a killed agent


def file_name(labels: Labels) -> str:
    """Return ``clustertrain-<job or run>-<node>.prom``, the same for all attempts of a job on a node."""
    stem = f"clustertrain-{labels.job_id or labels.run}-{labels.node}"
    return re.sub(r"[^A-Za-z0-9._-]", "_", stem) + ".prom"


class TextfileWriter:
    """Periodic writer of the metrics file, run in a thread."""

    def __init__(
        self, feed: Feed, path: Path, on_event: Callable[..., None], interval_s: float = WRITE_INTERVAL_S
    ) -> None:
        self._feed = feed
        self._path = path
        self._on_event = on_event
        self._interval_s = interval_s
        self._last_event = ""
        self._stopping = threading.Event()
        self._finished = threading.Event()

    def run(self) -> None:
        """Write until :meth:`stop`; a write that fails is retried after each interval."""
        try:
            _remove_stale_files(self._path.parent)
            # The first snapshot arrives one tick after the start.
            wait_s = min(1.0, self._interval_s)
            while not self._stopping.wait(wait_s):
                if self._feed.newest is not None:
                    self._write()
                    wait_s = self._interval_s
        except UnsuitableEnvironment as e:
            self._on_event("exporter_failed", reason=e.message, fix=e.fix)
        except Exception as e:  # the thread's edge: an exporter must not end the run
            self._on_event("exporter_failed", reason=f"{type(e).__name__}: {e}")
        finally:
            with contextlib.suppress(OSError):  # the folder is missing or not writable, already reported
                self._path.unlink(missing_ok=True)
            self._finished.set()

    def stop(self, timeout_s: float) -> bool:
        """Stop writing and remove the file; return whether the thread ended within ``timeout_s``."""
        self._stopping.set()
        return self._finished.wait(timeout_s)

    def _write(self) -> None:
        # Imported here because it costs 60 ms and 11 MB, only for runs that export.
        extras.require("prometheus_client", "telemetry.prometheus")
        from clustertrain.telemetry.export.prometheus import render

        try:
            # node_exporter runs as another user, so the mode must not depend on the umask. The values are useless after
            # a crash of the machine, so the write is not durable.
            with fsio.atomic_write(self._path, durable=False) as f:
                os.fchmod(f.fileno(), 0o644)
                f.write(render(self._feed))
        except OSError as e:
            self._report("exporter_failed", reason=f"{self._path}: {e.strerror or e}")
        else:
            self._report("exporter_started", textfile=str(self._path))

    def _report(self, name: str, **fields: str) -> None:
        """Write an event unless it repeats the last one: a full disk stays full."""
        event = f"{name} {fields}"
        if event != self._last_event:
            self._last_event = event
            self._on_event(name, **fields)


def _remove_stale_files(folder: Path) -> None:
    """Remove files of this user's killed agents, which node_exporter would export forever."""
    for path in folder.glob("clustertrain-*.prom"):
        try:
            stat = path.stat()
            if stat.st_uid == os.getuid() and clock.now() - stat.st_mtime > STALE_FILE_S:
                path.unlink()
        except OSError:
            continue  # another agent was faster
