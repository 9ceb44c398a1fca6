"""Names of weights: a path, a run, one of its checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clustertrain.checkpoint.format import model_tensors
from clustertrain.checkpoint.format.manifest import COMMITTED
from clustertrain.checkpoint.offline.start_weights import read_model_table, resolve_weights
from clustertrain.errors import CheckpointError, NotFound
from tests.unit.checkpoint.saved import decoder, make_run, recipe_of


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    return make_run(tmp_path / "runs" / "first-abc123", decoder(recipe_of(layers=1)), (10, 20), layers=1)


def test_run_step_and_folders_name_a_checkpoint(tmp_path: Path, run: Path) -> None:
    newest, older = (run / "checkpoints" / f"step-000000{step}" for step in (20, 10))
    for name in ("first-abc123", "latest", str(run), "runs/first-abc123", str(run / "checkpoints"), str(newest)):
        assert resolve_weights(name, tmp_path) == newest
    assert resolve_weights("first-abc123@10", tmp_path) == resolve_weights(str(older), tmp_path) == older
    assert read_model_table(newest)["layers"] == 1


def test_tensors_have_the_names_of_the_module(run: Path) -> None:
    files = model_tensors.read_weights(run / "checkpoints" / "step-00000020")
    expected = {name: tuple(p.shape) for name, p in decoder(recipe_of(layers=1)).state_dict().items()}
    assert {name: tensor.shape for name, tensor in files.tensors.items()} == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "no such file or folder, and no such run"),
        ("no/where", "no such file or folder"),
        ("first-abc123@30", "no committed checkpoint of step 30"),
        ("first-abc123@best", "no checkpoint records a value"),
        ("first-abc123@worst", "no such file or folder"),
    ],
)
def test_unknown_name_is_refused(tmp_path: Path, run: Path, name: str, message: str) -> None:
    with pytest.raises(NotFound, match=re.escape(message)):
        resolve_weights(name, tmp_path)


def test_uncommitted_checkpoint_is_refused(run: Path) -> None:
    folder = run / "checkpoints" / "step-00000020"
    (folder / COMMITTED).unlink()
    with pytest.raises(CheckpointError):
        model_tensors.read_weights(folder)
