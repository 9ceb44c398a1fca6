"""`clustertrain top` as a process: in a real terminal, on a pipe, as JSON."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from clustertrain import clock, fsio
from tests.runs import INTERRUPTIBLE
from tests.unit.report import live_runs

pytestmark = pytest.mark.long
CLI = [sys.executable, "-m", "clustertrain", "top"]
NODES = [f"gpu-node-{i:02}" for i in range(4)]
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|[()][A-Z0-9]|[=>])")


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    now = clock.now()
    run = live_runs.new_run(tmp_path, now)
    live_runs.begin(run, now, NODES)
    live_runs.alive("local-1", run)
    for k, node in enumerate(NODES):
        live_runs.record(run, node, now, first=8 * k)
    return {**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1", "PYTHONWARNINGS": "error"}


def called(env: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *argv], env=env, capture_output=True, text=True, check=True, timeout=60)


class Terminal:
    """A process in a terminal of its own."""

    def __init__(self, env: dict[str, str], columns: int, rows: int, *argv: str, command: Sequence[str] = CLI) -> None:
        self.fd, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(child)
        self.seen, self.child = "", child
        env = {k: v for k, v in env.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            ["setsid", "-c", "-w", *INTERRUPTIBLE, *command, *argv], stdin=child, stdout=child, stderr=child, env=env
        )

    def read(self, timeout_s: float = 0.1) -> None:
        if select.select([self.fd], [], [], timeout_s)[0]:
            try:
                self.seen += os.read(self.fd, 1 << 16).decode(errors="replace")
            except OSError as e:
                assert e.errno == errno.EIO

    def wait_for(self, text: str, *, after: int = 0) -> str:
        def there() -> bool:
            self.read()
            return text in _ESCAPES.sub("", self.seen[after:])

        assert clock.wait_until(there, 60, 0.0), f"{text!r} not in {self.seen[after:][-3000:]!r}"
        return _ESCAPES.sub("", self.seen[after:])

    def press(self, keys: str) -> int:
        """Returns where what is shown from here on begins."""
        self.read(0.0)
        os.write(self.fd, keys.encode())
        return len(self.seen)

    def ended(self) -> int:
        def over() -> bool:
            self.read()
            return self.process.poll() is not None

        assert clock.wait_until(over, 30, 0.0), self.seen[-2000:]
        return self.process.returncode

    def left_as_found(self) -> bool:
        return termios.tcgetattr(self.child)[:4] == self.before[:4] and "\x1b[?1049l" in self.seen

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.fd)
        os.close(self.child)


@pytest.fixture
def small(env: dict[str, str]) -> Iterator[Terminal]:
    terminal = Terminal(env, 80, 24, "--interval", "0.2")
    yield terminal
    terminal.close()


def test_keys_in_a_terminal(small: Terminal) -> None:
    screen = small.wait_for("below)")
    assert "llama-abc234" in screen and "gpu-node-00" in screen and "gpu-node-03" not in screen
    assert max(len(line) for line in screen.splitlines()) <= 80
    at = small.press("s")
    small.wait_for("s sort: utilization", after=at)
    at = small.press("sssss")
    small.wait_for("s sort: node", after=at)
    at = small.press("\x1b[6~" * 4)
    assert "gpu-node-03" in small.wait_for(", 0 below)", after=at)
    at = small.press("\x1b[A")
    small.wait_for(", 1 below)", after=at)
    small.press("q")
    assert small.ended() == 0
    assert small.left_as_found()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_and_the_run_goes_on(small: Terminal, env: dict[str, str], number: signal.Signals) -> None:
    small.wait_for("gpu-node-00")
    if number == signal.SIGINT:
        small.press("\x03")
    else:
        small.process.send_signal(number)
    assert small.ended() == 0
    assert small.left_as_found()
    assert "Traceback" not in small.seen
    assert json.loads(called(env, "--once", "--json").stdout)["state"] == "running"


# `top` with a scheduler that takes so many seconds; says which threads it leaves to the interpreter's end.
SLOW = """
import atexit, sys, threading, time
from clustertrain.cli.main import main
from clustertrain.report.top import state

def slow(run, seconds=float(sys.argv.pop(1)), status=state.run_status):
    time.sleep(seconds)
    return status(run)

state.run_status = slow
atexit.register(lambda: print("left:", [t.name for t in threading.enumerate()]))
sys.exit(main())
"""


@pytest.mark.parametrize(("answer_s", "left"), [(0.5, ["left: ['MainThread']"]), (60, [])])
def test_the_interpreter_does_not_end_under_a_question_to_the_scheduler(
    env: dict[str, str], answer_s: float, left: list[str]
) -> None:
    terminal = Terminal(env, 80, 24, command=[sys.executable, "-c", SLOW, str(answer_s), "top"])
    try:
        terminal.wait_for("gpu-node-00")
        terminal.press("q")
        assert terminal.ended() == 0
        assert terminal.left_as_found()
        assert re.findall(r"left: .*\]", terminal.seen) == left
    finally:
        terminal.close()


def test_a_large_terminal_shows_all_and_follows_its_size(env: dict[str, str]) -> None:
    terminal = Terminal(env, 160, 50, "--interval", "0.2")
    try:
        screen = terminal.wait_for("q quit")
        assert all(node in screen for node in NODES)
        assert "scroll" not in screen
        fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 100, 0, 0))
        terminal.wait_for("below)", after=terminal.press("x"))
        terminal.press("q")
        assert terminal.ended() == 0
    finally:
        terminal.close()


def test_once_on_a_pipe_is_plain_text(env: dict[str, str]) -> None:
    done = called({**env, "COLUMNS": "160"}, "llama", "--once")
    assert "\x1b" not in done.stdout and done.stderr == ""
    assert sum(" train " in line for line in done.stdout.splitlines()) == 32
    assert max(map(len, done.stdout.splitlines())) <= 160


def test_where_the_encoding_is_ascii_nothing_fails(env: dict[str, str]) -> None:
    done = called({**env, "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}, "--once")
    assert done.stdout.isascii() and "####" in done.stdout


def test_a_frame_of_json_is_a_line_until_the_run_has_ended(env: dict[str, str]) -> None:
    process = subprocess.Popen([*CLI, "--json", "--interval", "0.2"], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    frames = [json.loads(process.stdout.readline()) for _ in range(2)]
    assert frames[1]["t"] > frames[0]["t"]
    assert len(frames[0]["rows"]) == 32
    process.stdout.close()  # as `| head` does
    assert process.wait(60) == 0


def test_it_ends_by_itself_on_a_pipe_when_the_run_has_ended(env: dict[str, str]) -> None:
    run = Path(env["CLUSTERTRAIN_HOME"]) / "runs" / "llama-abc234"
    log = fsio.JsonlAppender(run / "attempts" / "1" / "events" / "batch.jsonl")
    log.append({"t": clock.now(), "event": "ended", "ending": "completed", "reason": "done", "last_step": 1200})
    log.close()
    done = called(env)
    assert "the run has ended (completed)" in done.stdout


def test_an_unknown_run(env: dict[str, str]) -> None:
    done = subprocess.run([*CLI, "lama"], env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "no run 'lama'" in done.stderr and "Traceback" not in done.stderr
