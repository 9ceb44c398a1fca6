"""``clustertrain checkpoint`` on a folder with checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from clustertrain.checkpoint import blocks
from clustertrain.checkpoint.agree import Ranks
from clustertrain.checkpoint.manager import CheckpointManager
from clustertrain.cli.checkpoint import checkpoint


@pytest.fixture
def root(tmp_path: Path) -> Path:
    manager = CheckpointManager(
        tmp_path / "kept", Ranks(), attempt="1", layout={"strategy": "single"}, background=False
    )
    for step in (3, 6):
        manager.save(step, {"weights": torch.arange(100)})
    return tmp_path / "kept"


def call(*words: str) -> Result:
    return CliRunner().invoke(checkpoint, list(words), catch_exceptions=False)


def rows(*words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(call(*words, "--json").stdout)
    return found


def test_list_reads_no_data_unless_asked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = os.preadv
    monkeypatch.setattr(blocks.os, "preadv", lambda *args: read.append(1) or original(*args))
    quick = rows("list", str(root))
    assert (read, [r["verified"] for r in quick]) == ([], [None, None])
    keys = {"step", "path", "bytes", "committed", "verified", "engine", "layout", "world_size"}
    assert set(quick[0]) == keys
    assert [line.split()[-1] for line in call("list", str(root)).stdout.splitlines()[1:]] == ["committed", "committed"]
    whole = rows("list", str(root), "--verify")
    assert ([r["verified"] for r in whole], bool(read), set(whole[0])) == ([True, True], True, keys)


def test_the_quick_list_sees_a_file_that_was_cut_short(root: Path) -> None:
    os.truncate(root / "step-00000006" / "rank-0.bin", 5)
    assert [r["verified"] for r in rows("list", str(root))] == [None, False]
    assert "DAMAGED" in call("list", str(root)).stdout
