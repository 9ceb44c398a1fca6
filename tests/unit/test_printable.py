"""Text from others, printed to a terminal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import click
import pytest
from rich.console import Group
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from clustertrain.cli.common import print_json, print_json_line
from clustertrain.printable import PrintableStream, printable, sanitized_output
from clustertrain.report.documents.tools import CheckResult, Diagnosis
from clustertrain.report.terminal import emit, make_console

OSC_52 = "\x1b]52;c;Y2FuYXJ5\x07"
CONTROL_TEXTS = [OSC_52, "\x9b31m", "\x7f", "\r", "\x08", "\0", "\u202egpj.exe", "\u2066x", "\ud800", "\x85"]


@pytest.mark.parametrize("text", CONTROL_TEXTS, ids=repr)
def test_control_characters_are_escaped(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printable(f"a{text}b")
    assert shown.startswith("a\\") and shown.isprintable()
    with sanitized_output():
        click.echo(f"a{text}b")
        print(f"a{text}b", file=sys.stderr)
    assert capsys.readouterr() == (f"{shown}\n", f"{shown}\n")


def test_closed_stream_stays_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with sanitized_output():
        click.echo("a")
        assert sys.stdout is None


def test_harmless_text_is_unchanged() -> None:
    text = "a\tb\nmüde 漢字 🙂 \\x1b"
    assert printable(text) == text
    assert printable("1 %\r2 %\n", keep="\r") == "1 %\r2 %\n"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("file", [io.StringIO, Terminal])
def test_report_escapes_text_and_keeps_its_colors(file: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    out = file()
    table = Table()
    table.add_column(OSC_52)
    table.add_row(Text(OSC_52, "red"))
    emit(make_console(PrintableStream(out)), Group(table, Text(OSC_52)), OSC_52)  # type: ignore[arg-type]
    shown = out.getvalue()
    assert shown.count("\\x1b]52;c;") == 4 and "\x1b]" not in shown and "\x07" not in shown
    assert ("\x1b[31m" in shown) == (file is Terminal)


def test_progress_bar_escapes_its_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    console = make_console(out)
    with Progress(console=console) as bar:
        bar.add_task(OSC_52)
        bar.console.print(OSC_52)
    assert "\x1b]52" not in out.getvalue() and "\x1b[?25l" in out.getvalue()
    assert "\\x1b]52" in out.getvalue()


@pytest.mark.parametrize("text", CONTROL_TEXTS, ids=repr)
def test_json_is_printable_and_has_the_same_value(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = {"a": [text], text: 1.5}
    with sanitized_output():
        check = CheckResult(check="data", verdict="pass", evidence=value, text="", fix="")
        document = Diagnosis(recipe="", device="cpu", checks=(check,), verdict="pass")
        print_json("diagnose", document)
        print_json_line("diagnose", document)
    for output in (capsys.readouterr().out,):
        assert all(c == "\n" or c.isprintable() for c in output)
        whole, line = output[: output.rindex("\n{")], output[output.rindex("\n{") :]
        shown = {"a": [printable(text)], printable(text): 1.5} if text == "\ud800" else value
        assert json.loads(whole) == json.loads(line)
        assert json.loads(whole)["checks"][0]["evidence"] == shown


def test_ascii_terminal_gets_no_control_characters() -> None:
    """click replaces an ASCII stream with another one over the same buffer."""
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    argv = [sys.executable, "-m", "clustertrain", "cluster", "show", "x\x1b]52;c;aGk=\x07y"]
    done = subprocess.run(argv, env=env, capture_output=True, check=False, timeout=60)
    assert done.returncode and b"52;c" in done.stderr
    assert b"\x1b" not in done.stderr + done.stdout and b"\x07" not in done.stderr + done.stdout
