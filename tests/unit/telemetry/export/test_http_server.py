"""The exporter's HTTP page and file, with real sockets and folders."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import stat
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertrain.config.telemetry import ExporterSpec
from clustertrain.telemetry.export import http_server, textfile
from clustertrain.telemetry.export.exporter import Exporter
from clustertrain.telemetry.export.feed import Feed, Labels
from clustertrain.telemetry.export.http_server import MAX_CLIENTS, PORT_ATTEMPTS
from tests.unit.telemetry.snapshots import LABELS, full, snapshot

WAIT_S = 30.0


class WatchedExporter:
    """An exporter and its events, in order."""

    def __init__(self, spec: ExporterSpec, labels: Labels = LABELS) -> None:
        self.events: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self.exporter = Exporter(spec, labels, lambda name, **fields: self.events.put((name, fields)))

    def next_event(self) -> tuple[str, dict[str, Any]]:
        return self.events.get(timeout=WAIT_S)

    def start(self) -> int:
        """Start the exporter and return its port."""
        self.exporter.start()
        name, fields = self.next_event()
        assert name == "exporter_started", fields
        return int(fields.get("port", 0))


@pytest.fixture
def export() -> Iterator[Callable[..., WatchedExporter]]:
    exporters: list[WatchedExporter] = []

    def make(labels: Labels = LABELS, **spec: Any) -> WatchedExporter:
        exporters.append(WatchedExporter(ExporterSpec(**spec), labels))
        return exporters[-1]

    yield make
    for watched in exporters:
        assert watched.exporter.stop(WAIT_S)


def free_port(count: int = 1) -> int:
    """Return the first of ``count`` consecutive free ports, below the range of client ports."""
    slots = 440
    for slot in range(slots):
        first = 10000 + 50 * ((os.getpid() + slot) % slots)
        try:
            for port in range(first, first + count):
                with socket.create_server(("127.0.0.1", port)):
                    pass
        except OSError:
            continue
        return first
    raise AssertionError("no free port")


def get(port: int, host: str = "127.0.0.1") -> str:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=WAIT_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text: str = answer.read().decode()
        return text


def test_scrape_has_newest_snapshot(export: Callable[..., WatchedExporter]) -> None:
    watched = export(port=free_port(PORT_ATTEMPTS))
    port = watched.start()
    assert get(port) == ""  # before the first tick
    for value in (0.25, 0.75):
        watched.exporter.observe(snapshot({"host.cpu": value}))
        assert f'node="node1",run="demo-abcdef"}} {value}' in get(port)


def test_no_metrics_of_agent_process(export: Callable[..., WatchedExporter]) -> None:
    watched = export(port=free_port(PORT_ATTEMPTS))
    port = watched.start()
    watched.exporter.observe(snapshot(full()))
    lines = [line for line in get(port).splitlines() if not line.startswith("#")]
    assert lines and all(line.startswith("clustertrain_") for line in lines)


def test_taken_port_moves_to_next(export: Callable[..., WatchedExporter]) -> None:
    first = free_port(PORT_ATTEMPTS)
    with socket.create_server(("127.0.0.1", first)):
        assert export(port=first).start() == first + 1
        assert export(port=first).start() == first + 2


def test_all_ports_taken_is_event(export: Callable[..., WatchedExporter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clustertrain.telemetry.export.http_server.PORT_ATTEMPTS", 1)
    first = free_port()
    with socket.create_server(("127.0.0.1", first)):
        watched = export(port=first)
        watched.exporter.start()
        name, fields = watched.next_event()
        assert name == "exporter_failed" and f"127.0.0.1 port {first}: Address already in use" in fields["reason"]
        assert "telemetry.prometheus.port" in fields["fix"]
        watched.exporter.observe(snapshot(full()))


def test_missing_package_is_event(
    export: Callable[..., WatchedExporter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    watched = export(port=free_port())
    watched.exporter.start()
    files = TextfileThread(tmp_path / "x.prom")
    files.begin()
    assert files.file.stop(WAIT_S)
    for name, fields in (watched.next_event(), files.events[0]):
        assert name == "exporter_failed" and "the package prometheus_client is not installed" in fields["reason"]
        assert "pip install 'clustertrain[prometheus]'" in fields["fix"]


@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-host.invalid"])
def test_foreign_address_is_event(address: str, export: Callable[..., WatchedExporter]) -> None:
    watched = export(port=free_port(), address=address)
    watched.exporter.start()
    name, fields = watched.next_event()
    assert name == "exporter_failed" and fields["reason"].startswith(f"{address} port")


def test_ipv6(export: Callable[..., WatchedExporter]) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    watched = export(port=free_port(PORT_ATTEMPTS), address="::1")
    port = watched.start()
    watched.exporter.observe(snapshot(full()))
    assert "clustertrain_gpu_info" in get(port, "[::1]")


def test_server_listens_only_on_loopback(export: Callable[..., WatchedExporter]) -> None:
    port = export(port=free_port(PORT_ATTEMPTS)).start()
    with socket.create_server(("127.0.0.2", port)):  # otherwise "address already in use"
        pass


def test_port_is_released(export: Callable[..., WatchedExporter]) -> None:
    first = free_port(PORT_ATTEMPTS)
    for _ in range(2):
        watched = export(port=first)
        assert watched.start() == first
        watched.exporter.observe(snapshot(full()))
        get(first)
        assert watched.exporter.stop(WAIT_S)


def test_stop_before_start_completes(export: Callable[..., WatchedExporter]) -> None:
    watched = export(port=free_port(PORT_ATTEMPTS))
    watched.exporter.start()
    assert watched.exporter.stop(WAIT_S)
    unstarted = export(port=free_port(PORT_ATTEMPTS))
    assert unstarted.exporter.stop(0.0)


def test_silent_clients_do_not_block(export: Callable[..., WatchedExporter]) -> None:
    watched = export(port=free_port(PORT_ATTEMPTS))
    port = watched.start()
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
    try:
        silent[0].sendall(b"GET /metrics HTT")
        watched.exporter.observe(snapshot({"host.cpu": 0.125}))
        assert "0.125" in get(port)
        assert watched.exporter.stop(WAIT_S)
    finally:
        for client in silent:
            client.close()


@pytest.mark.parametrize("partial_request", [b"", b"GET /metrics HTT", b"GET /metrics HTTP/1.0\r\nX: "])
def test_scrape_with_twenty_slow_clients(partial_request: bytes, export: Callable[..., WatchedExporter]) -> None:
    watched = export(port=free_port(PORT_ATTEMPTS))
    port = watched.start()
    watched.exporter.observe(snapshot({"host.cpu": 0.125}))
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    try:
        for client in slow:
            with contextlib.suppress(OSError):  # already dropped
                client.sendall(partial_request)
        for _ in range(3):
            assert "0.125" in get(port)
    finally:
        for client in slow:
            client.close()


def test_clients_at_once_wait_for_no_retransmission() -> None:
    """None is accepted here: those that the kernel does not queue cannot connect."""
    with http_server._bind("127.0.0.1", free_port(PORT_ATTEMPTS)) as server, contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(server.server_address[:2], timeout=5.0))


def test_number_of_clients_is_limited(export: Callable[..., WatchedExporter]) -> None:
    watched = export(port=free_port(PORT_ATTEMPTS))
    port = watched.start()
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(MAX_CLIENTS + 4)]
    try:
        for client in clients[:4]:
            client.settimeout(WAIT_S)
            assert client.recv(1) == b""  # the oldest are dropped
        for client in clients[4:]:
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.recv(1)
    finally:
        for client in clients:
            client.close()


@pytest.mark.long
def test_no_imports_without_exporter() -> None:
    program = (
        "import sys; from clustertrain.telemetry.export.exporter import Exporter;"
        "from clustertrain.telemetry.export.feed import Labels; from clustertrain.config.telemetry import ExporterSpec;"
        "e = Exporter(ExporterSpec(), Labels('r', '', 1, 'n')); e.start(); assert e.stop();"
        "print('prometheus_client' in sys.modules, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == ["False", "False"]


class TextfileThread:
    """A TextfileWriter with a short interval, run in a thread."""

    def __init__(self, path: Path) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.written = threading.Semaphore(0)
        self.feed = Feed(LABELS, 1.0)
        self.feed.observe(snapshot(full()))
        self.file = textfile.TextfileWriter(self.feed, path, self._record_event, interval_s=0.01)
        self.thread = threading.Thread(target=self.file.run, daemon=True)

    def _record_event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))
        self.written.release()

    def begin(self) -> None:
        self.thread.start()
        assert self.written.acquire(timeout=WAIT_S)


def test_textfile_is_readable_and_removed_at_end(tmp_path: Path) -> None:
    path = tmp_path / textfile.file_name(LABELS)
    files = TextfileThread(path)
    before = os.umask(0o077)
    try:
        files.begin()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert path.name == "clustertrain-4711-node1.prom"
    for _ in range(50):  # while it is replaced
        assert path.read_text().rstrip().splitlines()[-1].startswith("clustertrain_sampler_last_sample")
        # node_exporter reads every file that ends in .prom.
        assert [p for p in tmp_path.iterdir() if p.suffix == ".prom"] == [path]
    assert files.file.stop(WAIT_S)
    assert list(tmp_path.iterdir()) == []
    assert files.events == [("exporter_started", {"textfile": str(path)})]


def test_missing_folder_is_reported_once_and_retried(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    files = TextfileThread(folder / "x.prom")
    files.begin()
    assert files.events[0] == ("exporter_failed", {"reason": f"{folder / 'x.prom'}: No such file or directory"})
    folder.mkdir()
    assert files.written.acquire(timeout=WAIT_S)
    assert [name for name, _ in files.events] == ["exporter_failed", "exporter_started"]
    assert files.file.stop(WAIT_S)


def test_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    files = TextfileThread(tmp_path / "file" / "x.prom")
    files.begin()
    assert files.events[0][0] == "exporter_failed" and "Not a directory" in files.events[0][1]["reason"]
    assert files.file.stop(WAIT_S)


def test_files_of_killed_agents_are_removed(tmp_path: Path) -> None:
    old, fresh, others = (tmp_path / f"clustertrain-{n}-n.prom" for n in ("1", "2", "3"))
    foreign = tmp_path / "node.prom"
    for path in (old, fresh, others, foreign):
        path.write_text("")
    for path in (old, foreign):
        os.utime(path, (1.0, 1.0))
    files = TextfileThread(tmp_path / "x.prom")
    files.begin()
    assert files.file.stop(WAIT_S)
    assert {p.name for p in tmp_path.iterdir()} == {fresh.name, others.name, foreign.name}


@pytest.mark.long
def test_http_and_textfile_together(tmp_path: Path, export: Callable[..., WatchedExporter]) -> None:
    watched = export(port=free_port(PORT_ATTEMPTS), textfile=str(tmp_path))
    watched.exporter.start()
    watched.exporter.observe(snapshot(full()))
    events = [watched.next_event() for _ in range(2)]
    assert sorted(next(iter(fields)) for _, fields in events) == ["address", "textfile"]


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        (Labels("gpt-abcdef", "12_3", 1, "n1.site.org"), "clustertrain-12_3-n1.site.org.prom"),
        (Labels("gpt-abcdef", "", 1, "a/../b c"), "clustertrain-gpt-abcdef-a_.._b_c.prom"),
    ],
    ids=["job-id", "no-job-id"],
)
def test_textfile_names(labels: Labels, name: str) -> None:
    assert textfile.file_name(labels) == name
