"""Resume only on the data that the run was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clustertrain.config.data import DataSpec
from clustertrain.errors import CheckpointError
from clustertrain.train.data.loader import Loader
from clustertrain.train.data.text import BytePairs, ByteText


def make_loader(dataset: ByteText | BytePairs | list[int]) -> Loader:
    return Loader(
        dataset,  # type: ignore[arg-type]
        global_batch=2,
        micro_batch=None,
        workers=0,
        seed=1,
        rank=0,
        ranks=1,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("dataset_type", [ByteText, BytePairs])
def test_other_text_of_the_same_length_raises_on_resume(
    tmp_path: Path, dataset_type: type[ByteText] | type[BytePairs]
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("a" * 4000)
    spec = DataSpec(path=str(file), seq_len=16)
    saved = make_loader(dataset_type(spec)).state_dict()
    make_loader(dataset_type(spec)).load_state_dict(saved)
    file.write_text("a" * 3999 + "b")
    with pytest.raises(CheckpointError, match="the dataset has version xxh3"):
        make_loader(dataset_type(spec)).load_state_dict(saved)


def test_dataset_without_version_is_not_compared() -> None:
    one, other = make_loader([1, 2, 3]), make_loader([4, 5, 6])
    other.load_state_dict(one.state_dict())
    versioned = {**one.state_dict(), "version": "of 2026"}
    other.load_state_dict(versioned)
