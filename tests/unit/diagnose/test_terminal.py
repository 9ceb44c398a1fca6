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


def test_no_bar_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    with terminal.CheckProgressBar(1) as bar:
        bar("data", 1, 2)
    assert out.getvalue() == ""
