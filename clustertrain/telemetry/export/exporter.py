"""Prometheus exporter of an agent: over HTTP, as a file for node_exporter, or both.

Each endpoint has a separate thread. A failure becomes an event and never affects the run, and the sampler, which calls
:meth:`Exporter.observe`, never waits for them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from pathlib import Path

from clustertrain.config.telemetry import ExporterSpec
from clustertrain.run.events import WriteEvent
from clustertrain.telemetry.export import http_server, textfile
from clustertrain.telemetry.export.feed import Feed, Labels
from clustertrain.telemetry.snapshot import Snapshot


class Exporter:
    """Exporter of the newest snapshot. Without a port and a folder in ``spec``, it does and imports nothing.

    Args:
        spec: the recipe's ``[telemetry.prometheus]``.
        labels: labels of every metric.
        on_event: called as ``on_event(name, **fields)`` from the exporter's threads: ``exporter_started`` with
            ``address`` and ``port``, or with ``textfile``; ``exporter_failed`` with ``reason``, and for a port ``fix``.
        interval_s: seconds between snapshots, to count missed ones.
    """

    def __init__(
        self, spec: ExporterSpec, labels: Labels, on_event: WriteEvent | None = None, interval_s: float = 1.0
    ) -> None:
        self._feed = Feed(labels, interval_s)
        self._on_event = on_event
        self._endpoints: list[http_server.MetricsServer | textfile.TextfileWriter] = []
        self._running: list[http_server.MetricsServer | textfile.TextfileWriter] = []
        if spec.port:
            self._endpoints.append(http_server.MetricsServer(self._feed, spec.address, spec.port, self._write_event))
        if spec.textfile:
            path = Path(spec.textfile) / textfile.file_name(labels)
            self._endpoints.append(textfile.TextfileWriter(self._feed, path, self._write_event))

    def start(self) -> None:
        """Start the threads without waiting for name resolution or a hanging folder. Never raises."""
        for endpoint in self._endpoints:
            try:
                threading.Thread(target=endpoint.run, name="exporter", daemon=True).start()
                self._running.append(endpoint)
            except RuntimeError as e:  # the process limit is reached
                self._write_event("exporter_failed", reason=f"cannot start a thread: {e}")

    def observe(self, snapshot: Snapshot) -> None:
        """Store the newest snapshot, which must not change afterwards. Called in the sampler's thread."""
        self._feed.observe(snapshot)

    def watch_xids(self, uuids: Iterable[str]) -> None:
        """Start the error counts of these devices at 0. Called in the sampler's thread."""
        self._feed.watch_xids(uuids)

    def record_xid(self, uuid: str, xid: int, count: int = 1) -> None:
        """Count ``count`` new occurrences of an error on a device. Called in the sampler's thread."""
        self._feed.record_xid(uuid, xid, count)

    def stop(self, timeout_s: float = 2.0) -> bool:
        """Release the port and remove the file; return False if a thread does not end within ``timeout_s``."""
        stopped = [endpoint.stop(timeout_s) for endpoint in self._running]
        return all(stopped)

    def _write_event(self, name: str, **fields: object) -> None:
        if self._on_event is not None:
            with contextlib.suppress(OSError):  # a full disk
                self._on_event(name, **fields)
