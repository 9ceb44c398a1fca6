"""The weights that a recipe names: paths become absolute, and runs become checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertrain.errors import NotFound
from clustertrain.submit.start_weights import apply_init
from tests.unit.checkpoint.saved import decoder, make_run, recipe_of


def entry(**parts: str) -> dict[str, Any]:
    return {"model": {"entry": "nets:Net", "init_parts": parts}}


def test_parts_are_named_as_the_whole_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    run = make_run(tmp_path / "runs" / "first-abc123", decoder(recipe_of(layers=1)), (10, 20), layers=1)
    (tmp_path / "weights").mkdir()
    parts = apply_init(entry(tower="weights", decoder="first-abc123@10"), tmp_path)["model"]["init_parts"]
    assert parts == {"tower": str(tmp_path / "weights"), "decoder": str(run / "checkpoints" / "step-00000010")}


def test_missing_part_is_refused_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"model\.init_parts\.decoder = nowhere: no such file or folder"):
        apply_init(entry(decoder="nowhere"), tmp_path)
