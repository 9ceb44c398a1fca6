"""HTTP endpoint of the exporter, in a thread that waits without polling."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from clustertrain import extras
from clustertrain.config.telemetry import PORT_ATTEMPTS
from clustertrain.errors import UnsuitableEnvironment
from clustertrain.telemetry.export.feed import Feed

CLIENT_TIMEOUT_S = 10.0  # per request and response, Prometheus's default scrape timeout
MAX_CLIENTS = 8  # served at a time; one more drops the oldest, as anybody may connect to the port and send nothing


class MetricsServer:
    """HTTP server of the metrics page, run in a thread."""

    def __init__(self, feed: Feed, address: str, port: int, on_event: Callable[..., None]) -> None:
        self._feed = feed
        self._address = address
        self._port = port
        self._on_event = on_event
        self._stopping = threading.Event()
        self._finished = threading.Event()
        self._server: _Server | None = None

    def run(self) -> None:
        """Serve until :meth:`stop`."""
        try:
            self._serve()
        except UnsuitableEnvironment as e:
            self._on_event("exporter_failed", reason=e.message, fix=e.fix)
        except Exception as e:  # the thread's edge: an exporter must not end the run
            self._on_event("exporter_failed", reason=f"{type(e).__name__}: {e}")
        finally:
            self._finished.set()

    def stop(self, timeout_s: float) -> bool:
        """Stop serving; return whether the thread ended within ``timeout_s``."""
        self._stopping.set()
        if self._server is not None:
            self._server.wake()
        return self._finished.wait(timeout_s)

    def _serve(self) -> None:
        try:
            server = _bind(self._address, self._port)
        except OSError as e:
            self._on_event(
                "exporter_failed",
                reason=f"{self._address} port {self._port}: {e.strerror or e}",
                fix=_FIXES.get(e.errno or 0),
            )
            return
        with server:
            # Imported here because it costs 60 ms and 11 MB, only for runs that export.
            extras.require("prometheus_client", "telemetry.prometheus")
            from prometheus_client import make_wsgi_app

            from clustertrain.telemetry.export.prometheus import build_registry

            server.set_app(make_wsgi_app(build_registry(self._feed)))
            self._server = server  # before `_stopping` is read, so that stop() or this thread sees the other
            if not self._stopping.is_set():
                address, port = server.server_address[:2]
                self._on_event("exporter_started", address=str(address), port=port)
            while not self._stopping.is_set():
                server.handle_request()


_FIXES = {
    errno.EADDRINUSE: f"set telemetry.prometheus.port to the first of {PORT_ATTEMPTS} ports with a free one",
    errno.EACCES: "set telemetry.prometheus.port to 1024 or more",
    errno.EADDRNOTAVAIL: "set telemetry.prometheus.address to an address of the node, or to 0.0.0.0",
}


def _bind(address: str, port: int) -> _Server:
    """Bind a server to the first free port from ``port`` on.

    Raises:
        OSError: no port is free, or the address does not belong to this machine.
    """
    family, _, _, _, sockaddr = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    last_port = min(port + PORT_ATTEMPTS - 1, 65535)
    for candidate in range(port, last_port + 1):
        try:
            return _Server(family, str(sockaddr[0]), candidate)
        except OSError as e:
            if e.errno != errno.EADDRINUSE or candidate == last_port:
                raise
    raise AssertionError("not reached")


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a scrape every 15 s would fill the agent's log."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128  # the default is 5: one more client at once would try again only after a second

    def __init__(self, family: int, address: str, port: int) -> None:
        self.address_family = family
        self._clients: dict[Any, None] = {}  # sockets, oldest first
        self._lock = threading.Lock()
        super().__init__((address, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer.server_bind queries DNS for the host name, which takes seconds without an answer. SO_REUSEADDR
        # frees the port as soon as it is released; a second listener is still refused.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def wake(self) -> None:
        """Make ``handle_request``, which waits for a client, return."""
        with contextlib.suppress(OSError):  # closed already
            self.socket.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._clients[request] = None
            dropped = list(self._clients)[:-MAX_CLIENTS]
        for client in dropped:
            with contextlib.suppress(OSError):  # closed in the meantime
                client.shutdown(socket.SHUT_RDWR)  # ends the wait of its thread
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the process limit is reached: no thread was started
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that disconnect."""
