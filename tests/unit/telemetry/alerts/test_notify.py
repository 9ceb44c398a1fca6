"""Delivery of alerts with a real server and real commands, and their failures."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from clustertrain import clock
from clustertrain.config.telemetry import AlertsSpec
from clustertrain.telemetry.alerts import notify
from clustertrain.telemetry.alerts.gate import Alert
from clustertrain.telemetry.alerts.notify import Notifier

SECRET = "T000/B000/very-secret"
LOST = Alert(
    t=1.79e9, code="gpu_lost", severity="critical", text="GPU 3 of n1 no longer responds", fix="leave <n1> out",
    node="n1", uuid="GPU-3", rank=3,
)  # fmt: skip


class Server(ThreadingHTTPServer):
    """Server that responds with ``codes`` in turn, repeating the last one; 0 means no response."""

    daemon_threads = True

    def __init__(self, *codes: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.codes = list(codes)
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{SECRET}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, dict(self.headers), json.loads(body)))
        code = self.server.codes.pop(0) if len(self.server.codes) > 1 else self.server.codes[0]
        if not code:
            self.server.closing.wait(30)
            return
        self.send_response(code)
        if 300 <= code < 400:
            self.send_header("Location", "file:///etc/passwd")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(*getattr(request, "param", (200,)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    thread.join()
    server.server_close()


class Events(list[dict[str, Any]]):
    def __call__(self, name: str, **fields: Any) -> None:
        self.append({"event": name, **fields})

    def named(self, name: str) -> list[dict[str, Any]]:
        return [e for e in self if e["event"] == name]

    def wait_for(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        assert clock.wait_until(lambda: len(self.named(name)) >= count, 20, 0.01), self
        return self.named(name)


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "RETRY_DELAY_S", 0.01)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def make_notifier(events: Events, **spec: Any) -> Notifier:
    return Notifier(AlertsSpec(**spec), events, run="gpt-abc234", job_id="4711")


def test_alert_without_channels_is_event_and_log_line(events: Events, capsys: pytest.CaptureFixture[str]) -> None:
    notifier = make_notifier(events)
    notifier.send([LOST])
    assert notifier.stop()
    (event,) = events
    assert event == {
        "event": "alert", "code": "gpu_lost", "severity": "critical", "text": LOST.text, "fix": LOST.fix, "node": "n1",
        "uuid": "GPU-3", "rank": 3, "state": "raised", "suppressed": 0,
    }  # fmt: skip
    assert capsys.readouterr().err == f"clustertrain agent: critical: {LOST.text}\n"
    assert not [t for t in threading.enumerate() if t.name == "alerts"]


def test_webhook_gets_json_with_text(events: Events, server: Server) -> None:
    notifier = make_notifier(events, webhook=server.url)
    notifier.send([LOST])
    assert clock.wait_until(lambda: len(server.requests) > 0, 20, 0.01)
    notifier.stop()
    path, headers, body = server.requests[0]
    assert path == f"/{SECRET}"
    assert headers["Content-Type"].startswith("application/json")
    assert body["text"] == f"gpt-abc234: critical: {LOST.text}\nfix: leave &lt;n1&gt; out"
    assert (body["run"], body["job_id"], body["code"], body["rank"]) == ("gpt-abc234", "4711", "gpu_lost", 3)
    assert events.named("alert_not_delivered") == []


def test_webhook_from_variable(events: Events, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_HOOK", f"{server.url}\n")
    notifier = make_notifier(events, webhook_env="MY_HOOK")
    notifier.send([LOST])
    assert clock.wait_until(lambda: len(server.requests) > 0, 20, 0.01)
    notifier.stop()
    assert server.requests[0][0] == f"/{SECRET}"
    assert events.named("alert_not_delivered") == []


def test_webhook_from_changing_file(events: Events, server: Server, tmp_path: Path) -> None:
    file = tmp_path / "hook"
    file.write_text(f"{server.url}/old\nmore\n")
    notifier = make_notifier(events, webhook_file=str(file))
    for number, end in enumerate(("old", "new"), 1):
        file.write_text(f"{server.url}/{end}\nmore\n")
        notifier.send([LOST])
        assert clock.wait_until(lambda number=number: len(server.requests) == number, 20, 0.01)
        assert server.requests[-1][0] == f"/{SECRET}/{end}"
    notifier.stop()


@pytest.mark.parametrize(
    ("content", "word"), [(None, "No such file"), ("very-secret words", "no URL"), ("", "no URL"), ("\0\xff", "no URL")]
)
@pytest.mark.parametrize("kind", ["webhook_env", "webhook_file"])
def test_missing_webhook_is_reported(
    events: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str,
    content: str | None, word: str,
) -> None:  # fmt: skip
    file = tmp_path / "hook"
    if content is not None:
        file.write_text(content)
        monkeypatch.setenv("MY_HOOK", content.replace("\0", ""))
    source = "MY_HOOK" if kind == "webhook_env" else str(file)
    notifier = make_notifier(events, **{kind: source})
    notifier.send([LOST])
    (failed,) = events.wait_for("alert_not_delivered")
    notifier.stop()
    assert failed["channel"] == "webhook" and failed["to"] == ("$MY_HOOK" if kind == "webhook_env" else source)
    assert (word if kind == "webhook_file" or content is not None else "is not set") in failed["reason"]
    assert source in failed["reason"]
    assert "secret" not in json.dumps(events) + capsys.readouterr().err


@pytest.mark.parametrize("server", [(503, 200), (429, 200)], indirect=True, ids=str)
def test_webhook_is_retried_once(events: Events, server: Server) -> None:
    notifier = make_notifier(events, webhook=server.url)
    notifier.send([LOST])
    assert clock.wait_until(lambda: len(server.requests) == 2, 20, 0.01)
    notifier.stop()
    assert events.named("alert_not_delivered") == []


@pytest.mark.parametrize(
    ("server", "tries", "word"),
    [((500,), 2, "500"), ((404,), 1, "404"), ((302,), 1, "redirect")],
    indirect=["server"],
    ids=["error", "not-found", "redirect"],
)
def test_refusal_is_one_event_without_secret(
    events: Events, server: Server, tries: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    notifier = make_notifier(events, webhook=server.url)
    notifier.send([LOST])
    (failed,) = events.wait_for("alert_not_delivered")
    notifier.send([LOST])
    assert clock.wait_until(lambda: len(server.requests) == 2 * tries, 20, 0.01)
    notifier.stop()
    assert word in failed["reason"]
    assert (failed["channel"], failed["to"]) == ("webhook", "http://127.0.0.1/…")
    assert len(events.named("alert_not_delivered")) == 1
    assert "secret" not in json.dumps(events) + capsys.readouterr().err


def test_closed_port_is_reported(events: Events) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    notifier = make_notifier(events, webhook=f"http://me:pass@127.0.0.1:{port}/{SECRET}")
    notifier.send([LOST])
    (failed,) = events.wait_for("alert_not_delivered")
    notifier.stop()
    assert "refused" in failed["reason"]
    assert "pass" not in json.dumps(failed) and "secret" not in json.dumps(failed)


def test_unknown_or_invalid_host(events: Events) -> None:
    for url in ("http://no-such-host.invalid/secret", "http://127.0.0.1:99999/secret", "http://[::1/secret"):
        with pytest.raises((notify._DeliveryError, ValueError)) as e:
            notify.post(url, b"{}", 5.0)
        assert "secret" not in str(e.value)


def test_credentials_in_url_are_sent_as_header(events: Events, server: Server) -> None:
    notify.post(server.url.replace("http://", "http://me:p%40ss@"), b"{}")
    assert server.requests[0][1]["Authorization"] == "Basic bWU6cEBzcw=="


@pytest.mark.parametrize("server", [(0,)], indirect=True, ids=["silent"])
def test_server_without_response(events: Events, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify.post, "__defaults__", (0.2,))
    notifier = make_notifier(events, webhook=server.url)
    notifier.send([LOST])
    assert events.wait_for("alert_not_delivered")[0]["reason"] == "no response in 0.2 s"
    assert notifier.stop()


@pytest.mark.long
@pytest.mark.parametrize("server", [(0,)], indirect=True, ids=["silent"])
def test_full_queue_drops_and_stop_does_not_wait(
    events: Events, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "STOP_TIMEOUT_S", 0.05)
    notifier = make_notifier(events, webhook=server.url)
    notifier.send([LOST])
    assert clock.wait_until(lambda: len(server.requests) > 0, 20, 0.01)
    notifier.send([LOST] * (notify.QUEUE_SIZE + 10))
    assert [e["channel"] for e in events.named("alert_not_delivered")] == ["queue"]
    assert len(events.named("alert")) == notify.QUEUE_SIZE + 11
    assert not notifier.stop()  # the thread hangs in the server


def test_command_gets_alert_on_stdin(events: Events, tmp_path: Path) -> None:
    out = tmp_path / "a file; with $odd 'signs'"
    program = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())"
    notifier = make_notifier(events, command=[sys.executable, "-c", program, str(out)])
    notifier.send([LOST])
    assert clock.wait_until(lambda: out.exists() and out.read_text().endswith("\n"), 20, 0.01)
    notifier.stop()
    assert json.loads(out.read_text())["message"] == LOST.text
    assert events.named("alert_not_delivered") == []


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["no-such-program-at-all"], "No such file"),
        ([sys.executable, "-c", "import sys; sys.exit('it broke')"], "exit code 1: it broke"),
        (["/"], "denied"),
    ],
    ids=["missing", "fails", "a-folder"],
)
def test_failing_command_is_one_event(events: Events, command: list[str], reason: str) -> None:
    notifier = make_notifier(events, command=command)
    notifier.send([LOST, LOST])
    (failed,) = events.wait_for("alert_not_delivered")
    assert clock.wait_until(notifier._queue.empty, 20, 0.01)
    notifier.stop()
    assert reason in failed["reason"]
    assert failed["to"] == command[0]
    assert len(events.named("alert_not_delivered")) == 1


def test_hanging_command_is_killed_with_children(
    events: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "COMMAND_TIMEOUT_S", 0.5)
    notifier = make_notifier(events, command=["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; wait"])
    notifier.send([LOST])
    assert "did not end within 0.5 s" in events.wait_for("alert_not_delivered")[0]["reason"]
    notifier.stop()
    wait_for_exit(int((tmp_path / "pid").read_text()))


def test_quiet_ends_running_command(events: Events, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    notifier = make_notifier(events, command=["sh", "-c", f"echo $$ > {pid}; exec sleep 600"])
    notifier.send([LOST])
    assert clock.wait_until(lambda: pid.exists() and bool(pid.read_text()), 20, 0.01)
    notifier.quiet()
    notifier.send([LOST])
    assert notifier.stop()
    wait_for_exit(int(pid.read_text()))
    assert len(events.named("alert")) == 2
    assert events.named("alert_not_delivered") == []


def wait_for_exit(pid: int) -> None:
    def ended() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    assert clock.wait_until(ended, 20, 0.01)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/x", "hooks.example.org/x", "https://"])
def test_invalid_webhook_in_recipe_raises(url: str) -> None:
    with pytest.raises(ValueError, match="webhook"):
        AlertsSpec(webhook=url)
