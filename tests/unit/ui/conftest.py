"""A home of its own for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain import settings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(settings.HOME, str(tmp_path / "home"))
    monkeypatch.setenv(settings.XDG_CACHE_HOME, str(tmp_path / "cache"))
    return tmp_path / "home"
