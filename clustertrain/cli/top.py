"""``clustertrain top``: watch a run's GPUs and ranks in the terminal. It only reads; leaving it never ends the run."""

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
    from rich.text import Text

    from clustertrain.report.terminal import Glyphs
    from clustertrain.report.top.screen import ViewOptions
    from clustertrain.report.top.state import RunMonitor
    from clustertrain.report.top.view import RunView
    from clustertrain.run.run_dir import RunDir

_UP, _DOWN = ("\x1b[A", "\x1bOA", "k"), ("\x1b[B", "\x1bOB", "j")
_PAGE_UP, _PAGE_DOWN = ("\x1b[5~", "b"), ("\x1b[6~", " ")
_ENTER, _BACKSPACE, _ESCAPE = ("\r", "\n"), ("\x7f", "\b"), "\x1b"
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO.|.", re.DOTALL)


@click.command()
@run_argument
@json_option
@click.option("--once", is_flag=True, help="Print one frame and exit.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2),
    metavar="S",
    default=1.0,
    show_default=True,
    help="Seconds between frames.",
)
def top(name: str, as_json: bool, once: bool, interval: float) -> int:
    """Watch RUN's GPUs, ranks, speed, loss and events live, problems first.

    \b
    q          quit; the run continues
    h or ?     all keys
    up, down   select a row
    Enter      its values and the end of its log
    s          sort by problems, node, utilization, memory, power, ...
    /          show only rows of a node, a rank (5) or a GPU (gpu 3)

    On a pipe it prints plain text, one frame per --interval until the run ends. With --json it prints one line per
    frame, or with --once one formatted document.
    """
    return watch_run(find_run(name), lambda live: _display(live, as_json, once, interval))


def show_until(run: RunDir, interval: float, has_ended: Callable[[], bool]) -> int:
    """Show the screen of a run on the terminal until a key or ``has_ended`` ends it; return the exit code."""
    from clustertrain.report.terminal import make_console

    return watch_run(run, lambda live: _run_interactive(live, make_console(), interval, has_ended))


def watch_run(run: RunDir, display: Callable[[RunMonitor], int]) -> int:
    """Pass the state of a run to ``display`` and return its exit code; 0 after Ctrl-C."""
    # Not at the top: numpy and rich cost more than the rest of the command line together.
    from clustertrain.report.top.state import RunMonitor
    from clustertrain.run.run_dir import explain_permission_errors

    live, code = RunMonitor(run), 0
    try:
        with explain_permission_errors():
            code = display(live)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # `top | head`
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's last flush would complain
    if not live.close():
        # The scheduler does not answer. Its thread must not be in native code, which may be loading a library, while
        # the interpreter shuts down: that once ended this command with a segmentation fault.
        sys.stdout.flush()
        os._exit(code)
    return code


def _display(live: RunMonitor, as_json: bool, once: bool, interval: float) -> int:
    if as_json:
        return _print_json_frames(live, once, interval)
    from clustertrain.report.terminal import make_console

    console = make_console()
    if once or not console.is_terminal:
        return _print_text_frames(live, console, once, interval)
    return _run_interactive(live, console, interval)


def _print_json_frames(live: RunMonitor, once: bool, interval: float) -> int:
    from clustertrain.run import state

    while True:
        view = live.poll(wait=True)
        if once:
            print_json("top", view)
            return 0
        print_json_line("top", view)
        if view.state in state.FINAL:
            return 0
        clock.sleep(interval)


def _print_text_frames(live: RunMonitor, console: Console, once: bool, interval: float) -> int:
    from clustertrain.report.terminal import emit, glyphs
    from clustertrain.report.top.screen import ViewOptions, render_frame
    from clustertrain.run import state

    while True:
        view = live.poll(wait=True)
        frame = render_frame(view, console.width, None, glyphs(console), ViewOptions(), live.history())
        emit(console, *frame)
        console.file.flush()
        if once or view.state in state.FINAL:
            return 0
        emit(console, "")
        clock.sleep(interval)


def _run_interactive(
    live: RunMonitor, console: Console, interval: float, has_ended: Callable[[], bool] = lambda: False
) -> int:
    """Refresh the screen until a key or ``has_ended`` ends it."""
    from rich.console import Group
    from rich.live import Live as Screen

    from clustertrain.report.terminal import glyphs
    from clustertrain.report.top.screen import ViewOptions

    options, glyph_set = ViewOptions(), glyphs(console)
    screen = Screen(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with _key_reader() as read_key, _interrupt_on_signals(), screen:
        while not has_ended():
            view = live.poll()
            deadline = clock.monotonic() + interval
            while True:
                width, height = console.size = os.get_terminal_size(
                    console.file.fileno()
                )  # the window may have been resized
                screen.update(Group(*_render_page(live, view, width, height, glyph_set, options)), refresh=True)
                key = read_key(max(0.0, deadline - clock.monotonic()))
                if not key:
                    break
                if _handle_key(key, options, height):
                    return 0
    return 0


def _render_page(
    live: RunMonitor, view: RunView, width: int, height: int, signs: Glyphs, options: ViewOptions
) -> list[Text]:
    """Return the lines of the table, or of what is shown instead of it."""
    from clustertrain.report.top.dialogs import render_details, render_help
    from clustertrain.report.top.screen import render_frame
    from clustertrain.report.top.table import row_key

    # Also for the other pages: it follows the selected row.
    frame = render_frame(view, width, height, signs, options, live.history())
    if options.dialog == "help":
        return render_help(width, height)
    row = next((r for r in view.rows if row_key(r) == options.selected_key), None)
    if options.dialog == "details" and row is not None:
        log, path = live.read_log(row.rank) if row.rank is not None else ([], None)
        return render_details(view, row, log, str(path or ""), width, height, signs)
    return frame


def _handle_key(key: str, options: ViewOptions, height: int) -> bool:
    """Change the options; return whether the key quits."""
    from clustertrain.report.top.table import SORTS

    if options.typing is not None:
        _type_filter(key, options)
        return False
    moves = ((_UP, -1), (_DOWN, 1), (_PAGE_UP, -height // 2), (_PAGE_DOWN, height // 2))
    rows = next((rows for keys, rows in moves if key in keys), 0)
    if rows:
        options.move(rows)
    elif key == "q":
        return True
    elif options.dialog is not None:
        options.dialog = None
    elif key == "s":
        options.sort = SORTS[(SORTS.index(options.sort) + 1) % len(SORTS)]
        options.go_to_top()
    elif key == "/":
        options.typing = options.filter
    elif key == _ESCAPE:
        options.filter = ""
    elif key in ("h", "?"):
        options.dialog = "help"
    elif key in (*_ENTER, "l"):
        options.dialog, options.follows_row = "details", True
    return False


def _type_filter(key: str, options: ViewOptions) -> None:
    """Change the filter; the rows follow while it is typed."""
    typed = options.typing or ""
    if key in _BACKSPACE:
        typed = typed[:-1]
    elif len(key) == 1 and key.isprintable():
        typed += key
    options.filter = "" if key == _ESCAPE else typed.strip()
    options.typing = None if key in (_ESCAPE, *_ENTER) else typed
    options.go_to_top()


@contextlib.contextmanager
def _key_reader() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits up to the given seconds for a key and returns it, or an empty string.

    Without a terminal on stdin it only waits.
    """
    import termios
    import tty

    try:
        fd = sys.stdin.fileno()
        terminal_attributes = termios.tcgetattr(fd)
    except (OSError, ValueError, termios.error):
        yield _wait
        return
    pending_keys: list[str] = []

    def read_key(seconds: float) -> str:
        if not pending_keys and select.select([fd], [], [], seconds)[0]:
            data = os.read(fd, 64)
            if not data:  # the terminal was closed
                raise KeyboardInterrupt
            pending_keys.extend(_KEY.findall(data.decode(errors="replace")))
        return pending_keys.pop(0) if pending_keys else ""

    try:
        tty.setcbreak(fd)  # Ctrl-C and Ctrl-Z keep their meaning
        yield read_key
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, terminal_attributes)


def _wait(seconds: float) -> str:
    clock.sleep(seconds)
    return ""


@contextlib.contextmanager
def _interrupt_on_signals() -> Iterator[None]:
    """Restore the terminal on exit, even if its window is closed."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous_handlers = {s: signal.signal(s, interrupt) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
