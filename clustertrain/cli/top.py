"""``clustertrain top``: a run's GPUs and ranks, live in the terminal. It only reads: leaving it never ends the run."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from clustertrain import clock
from clustertrain.cli.common import find_run, json_option, print_json, print_json_line, run_argument

if TYPE_CHECKING:
    from rich.console import Console

    from clustertrain.report.top.screen import Shown
    from clustertrain.report.top.state import Live

_UP, _DOWN = ("\x1b[A", "\x1bOA", "k"), ("\x1b[B", "\x1bOB", "j")
_PAGE_UP, _PAGE_DOWN = ("\x1b[5~", "b"), ("\x1b[6~", " ")
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO.|.", re.DOTALL)
_ENDED = ("completed", "failed", "cancelled")


@click.command()
@run_argument
@json_option
@click.option("--once", is_flag=True, help="One frame, and exit.")
@click.option(
    "--interval", type=click.FloatRange(min=0.2), default=1.0, show_default=True, help="Seconds between frames."
)
def top(name: str, as_json: bool, once: bool, interval: float) -> int:
    """RUN's GPUs, ranks, rate and events, as they are now.

    Keys: q leaves (so does Ctrl-C; the run goes on), s sorts by another column, up and down scroll. On a pipe: plain
    text, a frame every --interval until the run has ended. With --json: a document a frame, on one line each unless
    --once is given.
    """
    run = find_run(name)
    # Not at the top: numpy and rich cost more than the rest of the command line together.
    from clustertrain.report.top.state import Live
    from clustertrain.run.run_dir import readable

    live, code = Live(run), 0
    try:
        with readable():
            code = _shown(live, as_json, once, interval)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # `top | head`
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's own last flush complains
    if not live.close():
        # The scheduler gives no answer. Its thread must not be in native code, which may be loading a library, while
        # the interpreter is taken down: a segmentation fault was once the end of this command.
        sys.stdout.flush()
        os._exit(code)
    return code


def _shown(live: Live, as_json: bool, once: bool, interval: float) -> int:
    if as_json:
        return _json(live, once, interval)
    from clustertrain.report.terminal import make_console

    console = make_console()
    if once or not console.is_terminal:
        return _plain(live, console, once, interval)
    return _screen(live, console, interval)


def _json(live: Live, once: bool, interval: float) -> int:
    while True:
        view = live.view(wait=True)
        if once:
            print_json(view)
            return 0
        print_json_line(view)
        if view.state in _ENDED:
            return 0
        clock.sleep(interval)


def _plain(live: Live, console: Console, once: bool, interval: float) -> int:
    from clustertrain.report.terminal import emit, glyphs
    from clustertrain.report.top.screen import Shown, lines

    while True:
        view = live.view(wait=True)
        emit(console, *lines(view, console.width, None, glyphs(console), Shown()))
        console.file.flush()
        if once or view.state in _ENDED:
            return 0
        emit(console, "")
        clock.sleep(interval)


def _screen(live: Live, console: Console, interval: float) -> int:
    """Until a key says so."""
    from rich.console import Group
    from rich.live import Live as Screen

    from clustertrain.report.terminal import glyphs
    from clustertrain.report.top.screen import Shown, lines

    shown, signs = Shown(), glyphs(console)
    screen = Screen(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with _keys() as pressed, _leaving_on_signals(), screen:
        while True:
            view = live.view()
            until = clock.monotonic() + interval
            while True:
                width, height = console.size = os.get_terminal_size(console.file.fileno())  # it may have been resized
                screen.update(Group(*lines(view, width, height, signs, shown)), refresh=True)
                key = pressed(max(0.0, until - clock.monotonic()))
                if key == "q":
                    return 0
                if not key:
                    break
                _heed(key, shown, height)


def _heed(key: str, shown: Shown, height: int) -> None:
    from clustertrain.report.top.screen import SORTS

    if key == "s":
        shown.sort, shown.skip = SORTS[(SORTS.index(shown.sort) + 1) % len(SORTS)], 0
    for keys, rows in ((_UP, -1), (_DOWN, 1), (_PAGE_UP, -height // 2), (_PAGE_DOWN, height // 2)):
        if key in keys:
            shown.skip = max(0, shown.skip + rows)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key; empty where none came. Without a terminal to read from it only
    waits."""
    import termios
    import tty

    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (OSError, ValueError, termios.error):
        yield _wait
        return
    waiting: list[str] = []

    def pressed(seconds: float) -> str:
        if not waiting and select.select([fd], [], [], seconds)[0]:
            data = os.read(fd, 64)
            if not data:  # the terminal is gone
                raise KeyboardInterrupt
            waiting.extend(_KEY.findall(data.decode(errors="replace")))
        return waiting.pop(0) if waiting else ""

    try:
        tty.setcbreak(fd)  # Ctrl-C and Ctrl-Z keep their meaning
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _wait(seconds: float) -> str:
    clock.sleep(seconds)
    return ""


@contextlib.contextmanager
def _leaving_on_signals() -> Iterator[None]:
    """The terminal is left as it was found, also when the shell's window is closed."""

    def leave(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {s: signal.signal(s, leave) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
