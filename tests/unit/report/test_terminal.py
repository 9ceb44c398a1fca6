"""The console, glyphs and formatting of the terminal reports."""

from __future__ import annotations

import io

import pytest

from clustertrain.durations import format_duration
from clustertrain.report import terminal
from clustertrain.report.terminal import ASCII, UNICODE


def test_rows_are_not_wrapped_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    out = io.StringIO()
    terminal.emit(terminal.make_console(out, rows=True), "word " * 1000)
    assert out.getvalue() == ("word " * 1000).rstrip() + "\n"
    monkeypatch.setenv("COLUMNS", "100")
    assert terminal.make_console(out, rows=True).width == 100


def test_pipe_gets_plain_text_and_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    console = terminal.make_console(out)
    assert console.width == 80
    terminal.emit(console, "a", terminal.meter(0.5, 10, "red", UNICODE))
    assert out.getvalue() == "a\n█████·····\n"


@pytest.mark.parametrize(("columns", "width"), [("160", 160), ("9999", 200), ("3", 50), ("wide", 80)])
def test_columns_sets_the_width(monkeypatch: pytest.MonkeyPatch, columns: str, width: int) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal.make_console(io.StringIO()).width == width


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_color_can_be_disabled(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    for known in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(known, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    colored, plain = Tty(), Tty()
    terminal.emit(terminal.make_console(colored, 80), terminal.meter(1, 4, "red", UNICODE))
    assert "\x1b[31m" in colored.getvalue()
    monkeypatch.setenv(name, value)
    terminal.emit(terminal.make_console(plain, 80), terminal.meter(1, 4, "red", UNICODE))
    assert "\x1b[31m" not in plain.getvalue()


def test_ascii_encoding_replaces_characters() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    console = terminal.make_console(out)
    assert terminal.glyphs(console) == ASCII
    terminal.emit(console, "größer …")
    out.flush()
    assert raw.getvalue() == b"gr??er ?\n"


def test_sparkline() -> None:
    assert terminal.sparkline([0.0, 0.5, 1.0, None, 0.99], 10, UNICODE) == "▁▄▇ ▇"
    assert terminal.sparkline([0.0] * 50 + [1.0] * 50, 4, UNICODE) == "▁▁▇▇"
    assert terminal.sparkline([None, 1.0, None, None], 2, UNICODE) == "▇ "
    assert terminal.sparkline([], 10, UNICODE) == ""


def test_meter_does_not_overflow() -> None:
    assert terminal.meter(1.7, 4, "", ASCII).plain == "####"
    assert terminal.meter(None, 4, "", ASCII).plain == "...."


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59, "59s"), (725, "12m05s"), (11220, "3h07m"), (187200, "2d04h")]
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("joules", "text"), [(None, "–"), (900, "900 J"), (36000, "10.0 Wh"), (7.2e6, "2.00 kWh")])
def test_format_energy(joules: float | None, text: str) -> None:
    assert terminal.format_energy(joules, UNICODE) == text


def test_format_used() -> None:
    assert terminal.format_used(61.4, 80.0, UNICODE) == "61/80"
    assert terminal.format_used(0.5, 5.0, UNICODE) == "0.5/5.0"
    assert terminal.format_used(None, 80.0, UNICODE) == "–/80"
    assert terminal.format_used(None, None, UNICODE) == "–"
