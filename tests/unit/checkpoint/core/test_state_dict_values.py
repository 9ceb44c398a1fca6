"""State other than tensors round-trips through a real save, and errors in it are reported."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clustertrain import settings
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager
from clustertrain.checkpoint.save.staging import StagingBuffer
from clustertrain.checkpoint.save.writer_client import WriterClient
from clustertrain.errors import CheckpointError


class Text(str):
    pass


class Count(int):
    pass


@pytest.mark.parametrize("async_save", [True, False])
def test_values_beyond_json_round_trip(tmp_path: Path, async_save: bool) -> None:
    saved: dict[str, Any] = {
        "best": math.inf,
        "worst": -math.inf,
        "none": math.nan,
        "of numpy": np.float64("inf"),
        "bits": np.random.PCG64(7).state,
        "text": Text("a"),
        "count": Count(3),
        "flag": np.bool_(True),
        "tagged": {"__float__": 1},
    }
    manager = CheckpointManager(
        tmp_path / "c", Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=async_save)
    )
    manager.save(1, {"state": saved}, wait=True)
    manager.close()
    restored_state: dict[str, Any] = {"state": None}
    assert CheckpointManager(
        tmp_path / "c", Ranks(), CheckpointConfig(attempt="2", layout={}, async_save=False)
    ).restore(restored_state)
    values = restored_state["state"]
    assert math.isnan(values.pop("none")) and math.isnan(saved.pop("none"))
    assert values == saved
    assert values["flag"] is True


def test_scheduler_saved_before_first_step_resumes(tmp_path: Path) -> None:
    def make_state() -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    manager = CheckpointManager(tmp_path / "c", Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=False))
    manager.save(1, make_state())
    restored = make_state()
    manager.restore(restored)
    restored["scheduler"].step(1.0)
    assert restored["scheduler"].best == 1.0


def test_invalid_unicode_is_refused_with_its_path(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "c", Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=False))
    with pytest.raises(CheckpointError, match=r"state note: the text .* is not valid Unicode"):
        manager.save(1, {"note": "\ud800"})


@pytest.mark.long
def test_finished_part_is_not_written_again(tmp_path: Path) -> None:
    """The writer dies after its done file but before reporting it: rank 0 may already be reading the part."""
    manager = CheckpointManager(tmp_path / "c", Ranks(), CheckpointConfig(attempt="1", layout={}))
    os.environ[settings.FAULT_AT] = "after_part_done_marker:0:1:KILL"
    try:
        manager.start()
    finally:
        del os.environ[settings.FAULT_AT]
    manager.save(3, {"x": torch.ones(5)})
    saved = manager.wait_for_saves()
    manager.close()
    assert saved is not None
    manifest = index.read_manifest(saved.path)
    assert "rank-0.bin" in manifest.files


def test_missing_marker_counts_as_damage(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "c", Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=False))
    for step in (3, 6):
        manager.save(step, {"x": torch.ones(5)})
    (index.step_folder(tmp_path / "c", 6) / "COMMITTED").unlink()
    restored = manager.restore({"x": torch.zeros(5)})
    assert restored is not None
    assert (restored.step, [s["step"] for s in restored.skipped]) == (3, [6])
    (index.step_folder(tmp_path / "c", 3) / "COMMITTED").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint is valid"):
        manager.restore({"x": torch.zeros(5)})


def test_manifest_without_its_data_is_damaged(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "c", Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=False))
    saved = manager.save(3, {"x": torch.ones(5)})
    assert saved is not None
    manifest = index.read_manifest(saved.path)
    (saved.path / "rank-0.bin").unlink()
    files = {name: size for name, size in manifest.files.items() if name != "rank-0.bin"}
    with pytest.raises(index.DamagedCheckpoint, match=r"rank-0\.bin: is too short for the bytes of x"):
        index.check_manifest(
            saved.path,
            index.Manifest(**{f: getattr(manifest, f) for f in manifest.__struct_fields__} | {"files": files}),
        )


def test_unencodable_job_fails_immediately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: WriterClient, *args: Any) -> None:
        raise TypeError("cannot be encoded")

    monkeypatch.setattr(WriterClient, "submit", refuse)
    manager = CheckpointManager(tmp_path / "c", Ranks(), CheckpointConfig(attempt="1", layout={}))
    with pytest.raises(CheckpointError, match="cannot be encoded"):
        manager.save(3, {"x": torch.ones(5)}, wait=True)


def test_free_memory_is_divided_among_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from clustertrain.checkpoint.core.state_dict import to_local_shard
    from clustertrain.checkpoint.save import staging

    monkeypatch.setattr(staging, "available_memory", lambda: 10_000_000)
    state = [to_local_shard("a", "other", torch.zeros(750_000))]
    only_buffer, one_of_four = (
        StagingBuffer(tmp_path, torch.device("cpu")),
        StagingBuffer(tmp_path, torch.device("cpu"), 4),
    )
    only_buffer.stage(state)
    one_of_four.stage(state)
    assert (only_buffer.in_memory, one_of_four.in_memory) == (True, False)
    only_buffer.close()
    one_of_four.close()
