"""`clustertrain top` as a process: in a real terminal, in a pipe, and as JSON."""

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
    live_runs.create_job("local-1", run)
    for k, node in enumerate(NODES):
        live_runs.record(run, node, now, first=8 * k)
    return {**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1", "PYTHONWARNINGS": "error"}


def run_top(env: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *argv], env=env, capture_output=True, text=True, check=True, timeout=60)


class Terminal:
    """A process in its own terminal."""

    def __init__(self, env: dict[str, str], columns: int, rows: int, *argv: str, command: Sequence[str] = CLI) -> None:
        self.fd, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.initial_settings = termios.tcgetattr(child)
        self.output, self.child = "", child
        env = {k: v for k, v in env.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            ["setsid", "-c", "-w", *INTERRUPTIBLE, *command, *argv], stdin=child, stdout=child, stderr=child, env=env
        )

    def read(self, timeout_s: float = 0.1) -> bool:
        """Read what the terminal shows; false when there was nothing."""
        if not select.select([self.fd], [], [], timeout_s)[0]:
            return False
        try:
            self.output += os.read(self.fd, 1 << 16).decode(errors="replace")
        except OSError as e:
            assert e.errno == errno.EIO
            return False
        return True

    def wait_for(self, text: str, *, after: int = 0) -> str:
        def is_shown() -> bool:
            self.read()
            return text in _ESCAPES.sub("", self.output[after:])

        assert clock.wait_until(is_shown, 60, 0.0), f"{text!r} not in {self.output[after:][-3000:]!r}"
        return _ESCAPES.sub("", self.output[after:])

    def press(self, keys: str) -> int:
        """Press the keys and return the offset of the output that follows."""
        self.read(0.0)
        os.write(self.fd, keys.encode())
        return len(self.output)

    def wait_for_exit(self) -> int:
        def has_exited() -> bool:
            self.read()
            return self.process.poll() is not None

        assert clock.wait_until(has_exited, 30, 0.0), self.output[-2000:]
        while self.read(0.0):  # it may have written after the last read, before it ended
            pass
        return self.process.returncode

    def is_restored(self) -> bool:
        return termios.tcgetattr(self.child)[:4] == self.initial_settings[:4] and "\x1b[?1049l" in self.output

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


def test_keys_sort_scroll_and_quit(small: Terminal) -> None:
    screen = small.wait_for("below)")
    assert "llama-abc234" in screen and "gpu-node-00" in screen and "gpu-node-03" not in screen
    assert max(len(line) for line in screen.splitlines()) <= 80
    offset = small.press("s")
    small.wait_for("s sort: node", after=offset)
    offset = small.press("ssssss")
    small.wait_for("s sort: problems", after=offset)
    offset = small.press("\x1b[6~" * 4)
    assert "gpu-node-03" in small.wait_for(", 0 below)", after=offset)
    offset = small.press("\x1b[A" * 24)
    small.wait_for(", 1 below)", after=offset)
    small.press("q")
    assert small.wait_for_exit() == 0
    assert small.is_restored()


def test_filter_details_and_help(small: Terminal) -> None:
    small.wait_for("below)")
    offset = small.press("/qx\x7f\x7frank 13")  # q does not quit here
    small.wait_for("/rank 13_", after=offset)
    offset = small.press("\r")
    screen = small.wait_for("/ filter: rank 13 (1 of 32)", after=offset)
    assert re.findall(r"(gpu-node-\d+) +\d+ ", screen)[-1:] == ["gpu-node-01"]
    assert "gpu-node-00 " not in screen
    offset = small.press("\r")
    small.wait_for("GPU 5 of gpu-node-01 (rank 13)", after=offset)
    small.wait_for("rank-13.log", after=offset)
    offset = small.press("\x1b")
    small.wait_for("(1 of 32)", after=offset)
    offset = small.press("\x1b")
    small.wait_for("below)", after=offset)
    offset = small.press("?")
    assert "select a row" in small.wait_for("any key: back", after=offset)
    offset = small.press("x")
    small.wait_for("below)", after=offset)
    small.press("q")
    assert small.wait_for_exit() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_top_but_not_the_run(small: Terminal, env: dict[str, str], number: signal.Signals) -> None:
    small.wait_for("gpu-node-00")
    if number == signal.SIGINT:
        small.press("\x03")
    else:
        small.process.send_signal(number)
    assert small.wait_for_exit() == 0
    assert small.is_restored()
    assert "Traceback" not in small.output
    assert json.loads(run_top(env, "--once", "--json").stdout)["state"] == "running"


# `top` with a scheduler that takes the given seconds. Prints the threads that are left when the interpreter exits.
SLOW_TOP = """
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
def test_exit_waits_for_a_scheduler_query_but_not_long(env: dict[str, str], answer_s: float, left: list[str]) -> None:
    terminal = Terminal(env, 80, 24, command=[sys.executable, "-c", SLOW_TOP, str(answer_s), "top"])
    try:
        terminal.wait_for("gpu-node-00")
        terminal.press("q")
        assert terminal.wait_for_exit() == 0
        assert terminal.is_restored()
        assert re.findall(r"left: .*\]", terminal.output) == left
    finally:
        terminal.close()


def test_large_terminal_shows_all_rows_and_follows_a_resize(env: dict[str, str]) -> None:
    terminal = Terminal(env, 160, 50, "--interval", "0.2")
    try:
        screen = terminal.wait_for("q quit")
        assert all(node in screen for node in NODES)
        assert "scroll" not in screen
        fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 100, 0, 0))
        terminal.wait_for("below)", after=terminal.press("x"))
        terminal.press("q")
        assert terminal.wait_for_exit() == 0
    finally:
        terminal.close()


def test_once_prints_plain_text_to_a_pipe(env: dict[str, str]) -> None:
    done = run_top({**env, "COLUMNS": "160"}, "llama", "--once")
    assert "\x1b" not in done.stdout and done.stderr == ""
    assert sum(" train " in line for line in done.stdout.splitlines()) == 32
    assert max(map(len, done.stdout.splitlines())) <= 160


def test_ascii_encoding_gets_ascii_bars(env: dict[str, str]) -> None:
    done = run_top({**env, "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}, "--once")
    assert done.stdout.isascii() and "####" in done.stdout


def test_json_prints_one_line_per_frame(env: dict[str, str]) -> None:
    process = subprocess.Popen([*CLI, "--json", "--interval", "0.2"], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    frames = [json.loads(process.stdout.readline()) for _ in range(2)]
    assert frames[1]["time_unix_s"] > frames[0]["time_unix_s"]
    assert len(frames[0]["rows"]) == 32
    process.stdout.close()  # like `| head`
    assert process.wait(60) == 0


def test_top_in_a_pipe_ends_with_the_run(env: dict[str, str]) -> None:
    run = Path(env["CLUSTERTRAIN_HOME"]) / "runs" / "llama-abc234"
    log = fsio.JsonlAppender(run / "attempts" / "1" / "events" / "batch.jsonl")
    log.append({"t": clock.now(), "event": "ended", "ending": "completed", "reason": "done", "last_step": 1200})
    log.close()
    done = run_top(env)
    assert "the run has ended (completed)" in done.stdout


def test_unknown_run_is_an_error(env: dict[str, str]) -> None:
    done = subprocess.run([*CLI, "lama"], env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "no run 'lama'" in done.stderr and "Traceback" not in done.stderr
