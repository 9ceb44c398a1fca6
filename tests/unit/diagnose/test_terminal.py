"""The progress bar of ``diagnose``, which names the check that runs."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from clustertrain.diagnose import terminal


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_names_the_check_and_returns_after_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Tty()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(terminal, "make_console", lambda file: Console(file=file, force_terminal=True, width=80))
    with terminal.CheckProgressBar(2) as bar:
        assert "starting" in out.getvalue()  # while the process starts
        bar("data", 0, 0)
        bar.hide()
        assert "data (1 of 2)" in out.getvalue()
        out.truncate(0)
        bar("overfit", 0, 0)
        assert "overfit (2 of 2)" in out.getvalue() and "starting" not in out.getvalue()


def test_bar_shows_the_time_left_of_the_check_and_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = Tty(), [100.0]
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(terminal, "make_console", lambda file: Console(file=file, force_terminal=True, width=80))
    monkeypatch.setattr("clustertrain.clock.monotonic", lambda: now[0])
    with terminal.CheckProgressBar(2) as bar:
        now[0] = 110.0
        bar("overfit", 0, 400)
        now[0] = 140.0
        bar("overfit", 100, 400)
        bar.hide()  # draws the last state
    assert "overfit (1 of 2)" in out.getvalue() and "25%" in out.getvalue()
    assert "1m30s left, 40s so far" in out.getvalue()


def test_no_bar_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    with terminal.CheckProgressBar(1) as bar:
        bar("data", 1, 2)
    assert out.getvalue() == ""
