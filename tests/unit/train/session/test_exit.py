from __future__ import annotations

import dataclasses
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import clustertrain as ct
from clustertrain.plan.layout import Batch, Layout
from clustertrain.train.core.result import RankResultWriter
from clustertrain.train.distributed import mesh
from clustertrain.train.session.exit import add_memory_note
from tests.unit.train.single_process import ALONE, single_process_group

CONTEXT = dataclasses.replace(
    ALONE, world_size=2, layout=Layout(strategy="ddp", dp_replicate=2), batch=Batch(micro_batch=4, global_batch=8)
)


def test_out_of_memory_note_has_peak_and_fixes(tmp_path: Path) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    add_memory_note(error, CONTEXT)
    text = "".join(traceback.format_exception(error))
    assert "measured peak: " in text and " GiB of host memory in this process, with ddp" in text
    assert "  1. train.micro_batch = 2: " in text and "  2. parallel.activation_checkpointing" in text
    result = RankResultWriter({"CLUSTERTRAIN_RANK_DIR": str(tmp_path), "RANK": "0", "LOCAL_RANK": "0"})
    result.record_failure(error)
    assert "train.micro_batch = 2" in (tmp_path / "rank-0.json").read_text()


def test_other_errors_get_no_memory_note() -> None:
    error = ValueError("no")
    add_memory_note(error, CONTEXT)
    assert not hasattr(error, "__notes__")


def test_session_adds_memory_note_to_script_error() -> None:
    with pytest.raises(MemoryError) as caught, ct.session(device="cpu"):
        raise MemoryError("no room")
    assert any("measured peak" in note for note in caught.value.__notes__)


def test_second_initialization_of_torch_distributed_is_explained() -> None:
    with single_process_group(), pytest.raises(ValueError, match="twice") as caught:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh.explain_second_init(caught.value)
    (note,) = caught.value.__notes__
    assert note.startswith("ct.session() has already initialized") and "delete the script's call" in note
    with pytest.raises(ValueError, match="RANK expected") as caught, ct.session(device="cpu"):
        dist.init_process_group("gloo")
    (note,) = caught.value.__notes__
    assert note.startswith("a session of one process") and "delete the script's call" in note
