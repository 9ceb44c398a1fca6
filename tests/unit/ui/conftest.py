"""A home of its own for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain import settings
from clustertrain.ui.runs_table import RunsTable


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(settings.HOME, str(tmp_path / "home"))
    monkeypatch.setenv(settings.XDG_CACHE_HOME, str(tmp_path / "cache"))
    return tmp_path / "home"


@pytest.fixture
def computes_details() -> None:
    """For tests whose table of runs starts the child process that computes the details."""


@pytest.fixture(autouse=True)
def without_details(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare other tests that process, which takes a third of a second."""
    if "computes_details" not in request.fixturenames:
        monkeypatch.setattr(RunsTable, "_start_details", lambda _: None)
