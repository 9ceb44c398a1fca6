"""Draws what each command prints on a terminal, for a person to look at.

    python -m docs.terminal_pictures [FOLDER] [SHEET…]     default: all sheets, in site/terminal

Each sheet shows several commands, at 80 or 160 columns, on a light or a dark background. The commands run in a
pseudo-terminal, on made-up runs and on real ones on this machine and on Slurm, and Chromium draws the sheets. Without
Slurm, the sheet that needs it is left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import html
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, TerminalTheme
from rich.text import Text

from benchmarks.cluster import cluster
from benchmarks.measure import CannotRun
from benchmarks.telemetry import build_stub
from docs.picture import ROOT, Screen, clean_environment, record_output
from docs.terminal_scenes import MADE_UP, NEEDS, SLURM, SLURM_VARIABLES, list_sheets, prepare_folder, prepare_runs

WIDTHS, ROWS = (80, 160), 40
FULL_SCREEN = "\x1b[?1049h"  # what a program writes that takes the whole terminal
START_S, KEY_S = 60.0, 3.0  # until the first frame, and between two keys
LINES, LIMIT_S = 70, 300  # of a command
DARK = TerminalTheme(
    (30, 30, 30),
    (220, 220, 220),
    [(0, 0, 0), (204, 0, 0), (78, 154, 6), (196, 160, 0), (52, 101, 164), (117, 80, 123), (6, 152, 154),
     (211, 215, 207)],
    [(85, 87, 83), (239, 41, 41), (138, 226, 52), (252, 233, 79), (114, 159, 207), (173, 127, 168), (52, 226, 226),
     (238, 238, 236)],
)  # fmt: skip
THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": DARK}


def record_line(line: str, columns: int, env: dict[str, str], folder: Path) -> str:
    """Return what stands on the terminal after a shell line, or before its last key, with its colors."""
    command, _, keys = line.partition(" | KEYS ")
    argv = ["timeout", "--foreground", f"{LIMIT_S}", "/bin/sh", "-c", f"{command}; true"]
    if keys:
        pressed = [key.encode().decode("unicode_escape") for key in keys.split(" ")]
        text = _press_keys(argv, columns, env, folder, pressed)
    else:
        text = "".join(part for _, part in record_output(argv, env, columns, ROWS, folder))
    if FULL_SCREEN in text:
        shown = re.sub(r"\x1b\[\?\d+[hl]|\r", "", re.split(r"\x1b\[H|\x1b\[\?1049h", text)[-1]).split("\n")
    else:  # lines, of which some are replaced as a progress bar moves
        screen = Screen()
        screen.feed(text)
        shown = screen.ansi().split("\n")
    cut = [f"… {len(shown) - LINES} more lines"] if len(shown) > LINES else []
    return "\n".join(shown[:LINES] + cut)


def _press_keys(argv: Sequence[str], columns: int, env: dict[str, str], folder: Path, keys: Sequence[str]) -> str:
    """Return what a program wrote until its last key was pressed. A key comes every ``KEY_S``."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    # With a controlling terminal, so that Ctrl-C is a signal.
    argv = ["setsid", "--ctty", "--wait", *argv]
    child = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, env=env, cwd=folder)
    os.close(slave)
    output, deadline = b"", time.monotonic() + START_S
    while time.monotonic() < deadline:  # until it has taken the screen, or waits
        part = _read_for(master, KEY_S if output else START_S, first_only=True)
        output += part
        if not part or FULL_SCREEN.encode() in output:
            break
    for key in keys:
        output += _read_for(master, KEY_S)
        os.write(master, key.encode())
    last = _read_for(master, 30.0)
    os.close(master)
    child.wait()
    return (output if FULL_SCREEN.encode() in output else output + last).decode()


def _read_for(terminal: int, seconds: float, *, first_only: bool = False) -> bytes:
    """Return what is written to a terminal in some seconds, or until its last program has ended."""
    output, deadline = b"", time.monotonic() + seconds
    while (remaining := deadline - time.monotonic()) > 0 and not (first_only and output):
        if select.select([terminal], [], [], remaining)[0]:
            try:
                output += os.read(terminal, 1 << 16)
            except OSError:  # EIO: nobody has it open
                break
    return output


def _render_sheet(outputs: Mapping[tuple[int, str], str], columns: int, theme: TerminalTheme) -> str:
    figures = []
    for (_, command), text in outputs.items():
        console = Console(width=columns, record=True, file=io.StringIO(), force_terminal=True, legacy_windows=False)
        for line in Text.from_ansi(text).split("\n", allow_blank=True):
            # As a terminal does, in the middle of a word.
            for part in line.divide(range(columns, line.cell_len, columns)):
                console.print(part, soft_wrap=True)
        code = console.export_html(theme=theme, inline_styles=True, code_format="<pre>{code}</pre>")
        figures.append(f"<figure><figcaption>$ {html.escape(command)}</figcaption>{code}</figure>")
    background, foreground = theme.background_color.hex, theme.foreground_color.hex
    style = f"""
body {{ margin: 16px; background: {background}; color: {foreground}; columns: {3 if columns < 100 else 2}; gap: 24px }}
figure {{ margin: 0 0 24px; break-inside: avoid }}
figcaption {{ font: bold 13px monospace; border-bottom: 1px solid gray; margin-bottom: 6px }}
pre {{ font: 13px/1.25 'DejaVu Sans Mono', monospace; margin: 0; width: {columns}ch }}
"""
    return f"<!doctype html><meta charset=utf-8><style>{style}</style>{''.join(figures)}"


@contextlib.contextmanager
def _slurm(scratch: Path) -> Iterator[dict[str, str]]:
    """Yield the environment in which Slurm answers and a bare job with stub GPUs runs; an empty one without Slurm."""
    with contextlib.ExitStack() as stack:
        try:
            slurm = stack.enter_context(cluster())
            stub = build_stub(scratch)
        except CannotRun as e:
            print(f"without the sheet {SLURM}: {e}", file=sys.stderr)
            yield {}
            return
        env = {**slurm.env, "LD_LIBRARY_PATH": str(stub.folder), "NVML_STUB_DEVICES": "8"}
        argv = ["sbatch", "--parsable", "-N4", "--ntasks-per-node=2", "--gres=gpu:2", "--mem=4000", "-o", "/dev/null"]
        argv += ["--job-name=their-training", "--wrap", f"srun {sys.executable} -c 'import time; time.sleep(3600)'"]
        job = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.strip()
        stack.callback(slurm.cancel, job)
        yield {**env, "JOB": job}


def main(target: Path, names: Sequence[str]) -> None:
    """Write one PNG per sheet, width and background."""
    target.mkdir(parents=True, exist_ok=True)
    all_sheets = list_sheets()
    if unknown := set(names) - all_sheets.keys():
        sys.exit(f"there is no sheet {', '.join(sorted(unknown))}; known: {', '.join(all_sheets)}")
    # What a sheet needs comes before it.
    needed = {need for name in names for need in (name, *NEEDS.get(name, ()))}
    sheets = {name: lines for name, lines in all_sheets.items() if name in needed or not names}
    with contextlib.ExitStack() as stack:
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        stack.callback(browser.close)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="clustertrain-")))
        slurm = stack.enter_context(_slurm(scratch)) if SLURM in sheets else {}
        for columns in WIDTHS:
            _draw_sheets(browser, target, sheets, columns, scratch / str(columns), slurm)
    print(f"{len(list(target.glob('*.png')))} pictures in {target}")


def _draw_sheets(
    browser: Browser,
    target: Path,
    sheets: Mapping[str, Sequence[str]],
    columns: int,
    scratch: Path,
    slurm: dict[str, str],
) -> None:
    home, folder = scratch / "home", scratch / "work"
    folder.mkdir(parents=True)
    prepare_runs(home)
    prepare_folder(folder)
    with contextlib.ExitStack() as stack:
        stack.callback(_cancel_runs, scratch / "real", slurm)  # if the line that cancels a run is not reached
        view = browser.new_page(viewport={"width": 2100 if columns < 100 else 2700, "height": 400})
        stack.callback(view.close)
        for name, lines in sheets.items():
            if name == SLURM and not slurm:
                continue
            # The sheets about made-up runs have no other runs, and those about real ones no made-up ones.
            env = _environ(home if name in MADE_UP else scratch / "real", slurm if name == SLURM else {})
            outputs: dict[tuple[int, str], str] = {}
            for line in lines:
                print(f"{columns} {name}: {line}", file=sys.stderr)
                outputs[len(outputs), line] = record_line(line, columns, env, folder)
            for scheme, theme in THEMES.items():
                view.set_content(_render_sheet(outputs, columns, theme))
                view.screenshot(path=target / f"{name}-{columns}-{scheme}.png", full_page=True)


def _cancel_runs(home: Path, slurm: Mapping[str, str]) -> None:
    for run in sorted((home / "runs").glob("*")):
        argv = [sys.executable, "-m", "clustertrain", "cancel", run.name]
        subprocess.run(argv, env=_environ(home, slurm), capture_output=True, check=False)


def _environ(home: Path, slurm: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a user with runs in ``home``, and with Slurm if ``slurm`` has its variables."""
    env = {**clean_environment(str(home)), "PYTHONPATH": str(ROOT), "SHELL": "/bin/sh", "PS1": "$ "}
    return env | {"XDG_CONFIG_HOME": str(home.parent / "config")} | {k: slurm[k] for k in SLURM_VARIABLES if k in slurm}


if __name__ == "__main__":
    arguments = sys.argv[1:] or [str(ROOT / "site" / "terminal")]
    main(Path(arguments[0]), arguments[1:])
