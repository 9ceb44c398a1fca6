"""Runs with two checkpoints, and ``clustertrain checkpoint`` as a function."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from clustertrain.checkpoint.format import manifest as index
from clustertrain.cli.main import main
from tests.unit.checkpoint.saved import decoder, make_run, recipe_of

STEPS = (3, 6)
SIZES: dict[str, Any] = {"layers": 1}


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document, without the version of its schema."""
        document = json.loads(self.out)
        assert document.pop("schema_version") == 1
        return document


class Command(Protocol):
    def __call__(self, *words: object) -> Said: ...


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["clustertrain", "checkpoint", *map(str, words)])
        code = main()
        return Said(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("home") / "net-abcdef", decoder(recipe_of(**SIZES)), STEPS, **SIZES)


@pytest.fixture
def run(saved_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run net-abcdef with the checkpoints of STEPS."""
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("COLUMNS", raising=False)
    return Path(shutil.copytree(saved_run, tmp_path / "home" / "runs" / saved_run.name))


def folder_of(run: Path, step: int) -> Path:
    return index.step_folder(run / "checkpoints", step)


def flip(run: Path, step: int, file: str = "rank-0.bin") -> Path:
    """Change one byte of a file; of the shards it is one of the model's."""
    path = folder_of(run, step) / file
    data = bytearray(path.read_bytes())
    tensors = index.read_manifest(folder_of(run, step)).tensors
    at = next(t.shards[0].offset for t in tensors if t.kind == "model") if file == "rank-0.bin" else 100
    data[at] ^= 1
    path.write_bytes(data)
    return path
