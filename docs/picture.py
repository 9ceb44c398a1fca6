"""Records commands in a pseudo-terminal of 100 columns and draws what stands on it at the end as an SVG.

    python docs/picture.py        the demo's run, preempted once, and its status

`moving_picture.py` draws the same run as it goes. Nothing is typed in by hand: the commands are run, and each letter
and color is what they wrote.
"""

from __future__ import annotations

import codecs
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME, TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, ROWS = 100, 60
COMMANDS = (("clustertrain", "submit", "--follow", "templates/demo.toml"), ("clustertrain", "status"))
_CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\r|\n|[^\x1b\r\n]")


class Screen:
    """What a terminal would show: as much of one as rich's progress bar and plain lines need."""

    def __init__(self) -> None:
        self.lines: list[list[tuple[str, str]]] = [[]]
        self.row, self.column = 0, 0
        self.style = ""

    def feed(self, text: str) -> None:
        """Raises ValueError for a control sequence that is not known here, rather than drawing something untrue."""
        for found in _CONTROL.finditer(text):
            if found[0] == "\n":
                self.row += 1
                self.lines += [[] for _ in range(self.row + 1 - len(self.lines))]
            elif found[0] == "\r":
                self.column = 0
            elif found[2] is not None:
                self._control(found[1], found[2])
            else:
                self._put(found[0])

    def _put(self, character: str) -> None:
        line = self.lines[self.row]
        line += [(" ", "")] * (self.column - len(line))
        line[self.column : self.column + 1] = [(character, self.style)]
        self.column += 1

    def _control(self, argument: str, kind: str) -> None:
        if kind == "m":
            self.style = "" if argument in ("", "0") else f"{self.style}\x1b[{argument}m"
        elif kind == "A":
            self.row = max(0, self.row - int(argument or 1))
        elif kind == "K" and argument == "2":
            self.lines[self.row] = []
        elif kind not in "hl":  # showing and hiding the cursor
            raise ValueError(f"unknown control sequence ESC [ {argument} {kind}")

    def ansi(self) -> str:
        """The lines, each character with its colours."""
        rows = ["".join(f"{style}{c}\x1b[0m" if style else c for c, style in line).rstrip() for line in self.lines]
        return "\n".join(rows).rstrip()


def record(argv: Sequence[str], env: dict[str, str]) -> str:
    """Run ``argv`` to its end on a terminal of its own; returns what stood on it.

    Raises:
        RuntimeError: it failed.
    """
    screen = Screen()
    for _, text in record_output(argv, env, COLUMNS, ROWS):
        screen.feed(text)
    return screen.ansi()


def record_output(
    argv: Sequence[str], env: dict[str, str], columns: int, rows: int, folder: Path = ROOT
) -> list[tuple[float, str]]:
    """Run ``argv`` to its end on a terminal of its own; returns what it wrote, each part after so many seconds.

    Raises:
        RuntimeError: it failed.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    start = time.monotonic()
    child = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, env=env, cwd=folder)
    os.close(slave)
    decoder = codecs.getincrementaldecoder("utf-8")()
    parts: list[tuple[float, str]] = []
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # Linux says EIO when the last process has left the terminal
            break
        if not chunk:
            break
        parts.append((time.monotonic() - start, decoder.decode(chunk)))
    os.close(master)
    if child.wait() != 0:
        raise RuntimeError(f"{' '.join(argv)} failed: {''.join(text for _, text in parts)}")
    return parts


def draw(title: str, text: Text, columns: int = COLUMNS, theme: TerminalTheme = SVG_EXPORT_THEME) -> str:
    """An SVG that carries its own background, and asks for no font from outside."""
    console = Console(width=columns, record=True, file=io.StringIO(), force_terminal=True)
    console.print(text, soft_wrap=True)
    template = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    template = template.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace")
    return console.export_svg(title=title, code_format=template, unique_id="terminal", theme=theme)


def clean_environment(home: str) -> dict[str, str]:
    """The variables of a user who has set nothing, with runs in ``home``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_"))}
    env = {**kept, "CLUSTERTRAIN_HOME": home, "TERM": "xterm-256color", "PATH": _path()}
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS", "LINES"):
        env.pop(name, None)
    return env


def main() -> int:
    target = ROOT / "docs" / "pictures" / "preempted-run.svg"
    picture = Text()
    with tempfile.TemporaryDirectory(prefix="clustertrain-") as home:
        env = clean_environment(home)
        for argv in COMMANDS:
            picture.append(f"$ {' '.join(argv)}\n", style="bold")
            picture.append_text(Text.from_ansi(record(argv, env)))
            picture.append("\n\n")
    picture.rstrip()
    target.parent.mkdir(exist_ok=True)
    target.write_text(draw("a preempted run", picture))
    print(target.relative_to(ROOT))
    return 0


def _path() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


if __name__ == "__main__":
    sys.exit(main())
