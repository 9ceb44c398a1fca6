"""The exporter of an agent: a page in Prometheus's text format over HTTP, a file for node_exporter, or both.

Each has a thread of its own. Whatever goes wrong in them ends in an event and not in the run, and the sampler, which
calls :meth:`Exporter.observe`, never waits for them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from clustertrain.config.telemetry import ExporterSpec
from clustertrain.telemetry.export import http_server, textfile
from clustertrain.telemetry.export.feed import Feed, Labels
from clustertrain.telemetry.snapshot import Snapshot

OnEvent = Callable[..., Any]


class Exporter:
    """Does nothing, and imports nothing, where ``spec`` has neither a port nor a folder.

    Args:
        spec: the recipe's ``[telemetry.prometheus]``.
        labels: of every metric.
        on_event: called as ``on_event(name, **fields)`` from the exporter's threads: ``exporter_started`` with
            ``address`` and ``port``, or with ``textfile``; ``exporter_failed`` with ``reason``, and for a port ``fix``.
        interval_s: between two snapshots; one that is missing is counted.
    """

    def __init__(
        self, spec: ExporterSpec, labels: Labels, on_event: OnEvent | None = None, interval_s: float = 1.0
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
        """Returns at once: a name to be resolved and a folder that hangs are the threads' affair. Never raises."""
        for endpoint in self._endpoints:
            try:
                threading.Thread(target=endpoint.run, name="exporter", daemon=True).start()
                self._running.append(endpoint)
            except RuntimeError as e:  # the limit on processes is reached
                self._write_event("exporter_failed", reason=f"no thread could be started: {e}")

    def observe(self, snapshot: Snapshot) -> None:
        """The newest figures, from the sampler's thread. The snapshot is kept, and must not change afterwards."""
        self._feed.observe(snapshot)

    def watch_xids(self, uuids: Iterable[str]) -> None:
        """The driver tells the errors of these devices, so that none is a 0. From the sampler's thread."""
        self._feed.watch_xids(uuids)

    def record_xid(self, uuid: str, xid: int, count: int = 1) -> None:
        """The driver reported this error of that device, so often since the last time. From the sampler's thread."""
        self._feed.record_xid(uuid, xid, count)

    def stop(self, timeout_s: float = 2.0) -> bool:
        """Give the port back and take the file away. False where the disk held a thread longer than that."""
        stopped = [endpoint.stop(timeout_s) for endpoint in self._running]
        return all(stopped)

    def _write_event(self, name: str, **fields: Any) -> None:
        if self._on_event is not None:
            with contextlib.suppress(OSError):  # a full disk
                self._on_event(name, **fields)
