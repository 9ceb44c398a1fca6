"""Training and validation datasets built from recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import CheckpointError, ConfigError
from clustertrain.train.data.augmentation import AugmentedImages
from clustertrain.train.data.loader import Loader
from clustertrain.train.models.build import TrainingTask, build_task

SOURCE = """
import torch
from torch import nn

class Points:
    def __init__(self, count, path=None):
        self.count, self.path = count, path
    def __len__(self):
        return self.count
    def __getitem__(self, i):
        return torch.tensor([float(i)]), i % 5
    def where(self, i):
        return f"point {i}"

class Named(Points):
    version = "of 2026"

def nothing():
    return 7

class SmallModel(nn.Linear):
    classes, vocab_size, max_seq_len = 3, 100, 16
    def __init__(self):
        super().__init__(1, 3)

class ModelWithLoss(SmallModel):
    def loss(self, output, target):
        return output.sum()
"""
DIGITS = {"kind": "convnet", "convnet": {"channels": 1, "width": 8, "blocks": [1], "groups": 4}}


@pytest.fixture(autouse=True)
def _importable_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "points_of_mine.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)


def make_task(**tables: Any) -> Any:
    """Build the :class:`TrainingTask` of a recipe; untyped, because tests use attributes of particular datasets."""
    return build_task(build(tables, Recipe, "recipe"))


def make_loader(task: TrainingTask, size: int = 4) -> Loader:
    return Loader(
        task.dataset,
        global_batch=size,
        micro_batch=None,
        workers=0,
        seed=1,
        rank=0,
        ranks=1,
        device=torch.device("cpu"),
        limits=task.limits,
    )


def entry_tables(entry: str, **data: Any) -> dict[str, Any]:
    return {
        "model": {"entry": "points_of_mine:SmallModel"},
        "data": {"kind": "custom", "entry": f"points_of_mine:{entry}", **data},
    }


def test_entry_dataset_is_split_and_versioned() -> None:
    task = make_task(**entry_tables("Points", args={"count": 30}, path="somewhere", validation=0.2))
    assert (len(task.dataset), len(task.validation)) == (24, 6)
    seen = [int(d[i][0]) for d in (task.dataset, task.validation) for i in range(len(d))]
    assert sorted(seen) == list(range(30))
    unsplit = make_task(**entry_tables("Points", args={"count": 30}, path="somewhere")).dataset
    assert unsplit.version == "points_of_mine:Points {'count': 30, 'path': 'somewhere'}"
    assert unsplit.path == "somewhere" and unsplit.where(3) == "point 3"
    assert make_task(**entry_tables("Named", args={"count": 30})).dataset.version == "of 2026"


def test_entry_is_called_again_with_validation_path() -> None:
    task = make_task(**entry_tables("Points", args={"count": 30}, path="a", validation_path="b"))
    assert (task.dataset.path, task.validation.path) == ("a", "b")


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (entry_tables("Nowhere"), "data.entry = 'points_of_mine:Nowhere'.*no attribute"),
        (entry_tables("nothing"), "data.entry = .* returned int"),
        (entry_tables("Points", args={"number": 3}), "data.args = { number = 3 }.*missing a required argument"),
        (entry_tables("Points", args={"count": 0}), "data.entry = .*: the dataset is empty"),
        (entry_tables("Points", args={"count": 3}, validation=0.1), "validation = 0.1 of the 3 samples of data.entry"),
    ],
    ids=["no such name", "not a dataset", "wrong argument", "empty", "nothing left to validate on"],
)
def test_bad_entry_dataset_raises(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_task(**tables)


def test_label_out_of_range_names_the_sample() -> None:
    task = make_task(**entry_tables("Points", args={"count": 30}))
    with pytest.raises(
        ConfigError, match=r"sample \d+ \(point \d+\): target is [34]: .*classes of points_of_mine:SmallModel = 3"
    ):
        for _ in range(8):
            next(make_loader(task, 20))


def test_model_loss_disables_target_limit() -> None:
    tables = entry_tables("Points", args={"count": 30})
    tables["model"] = {"entry": "points_of_mine:ModelWithLoss"}
    limits = make_task(**tables).limits
    assert limits.classes is None and limits.vocab_size == 100
    assert len(next(make_loader(make_task(**tables), 20))[1]) == 20


def test_sequences_longer_than_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.seq_len = 32 exceeds the model's max_seq_len = 16"):
        make_task(model={"entry": "points_of_mine:SmallModel"}, data={"seq_len": 32, "max_bytes": 10_000})
    with pytest.raises(ConfigError, match=r"data.seq_len = 256 exceeds model.max_seq_len = 128"):
        make_task(model={"max_seq_len": 128})


def test_byte_beyond_vocab_size_raises() -> None:
    task = make_task(model={"vocab_size": 90, "dim": 32, "layers": 1}, data={"seq_len": 32, "max_bytes": 10_000})
    with pytest.raises(ConfigError, match=r"sample \d+ \(from byte \d+ on\): inputs at .*model.vocab_size = 90"):
        next(make_loader(task))


@pytest.mark.long
def test_validation_split_ignores_the_seed() -> None:
    parts = [
        make_task(model=DIGITS, train={"seed": seed}, data={"path": "digits", "validation": 0.2}) for seed in (1, 2)
    ]
    one, other = ([int(i) for i in (p.validation.row(j) for j in range(len(p.validation)))] for p in parts)
    assert one == other
    assert parts[0].dataset.version == parts[1].dataset.version


@pytest.mark.long
def test_only_training_images_are_augmented() -> None:
    task = make_task(model=DIGITS, data={"path": "digits", "validation": 0.2, "augment": {"flip": True, "mixup": 0.2}})
    assert isinstance(task.dataset, AugmentedImages)
    image, target = task.dataset[0]
    assert image.shape == (8, 8, 1) and image.dtype == torch.uint8 and target.shape == (10,)
    assert isinstance(task.validation[0][1], int)
    assert task.validation.slice_names[3] == "class-3"
    inputs, targets = next(make_loader(task))
    assert inputs.shape == (4, 8, 8, 1) and targets.shape == (4, 10)


@pytest.mark.long
def test_digit_halves_for_two_towers() -> None:
    two_tower = {"kind": "two-tower", "vocab_size": 17, "dim": 32, "layers": 1, "heads": 2, "kv_heads": 1}
    task = make_task(model=two_tower, data={"path": "digits", "seq_len": 32})
    image = make_task(model=DIGITS, data={"path": "digits"}).dataset[5][0]
    (upper, lower), i = task.dataset[5]
    assert i == 5 and torch.equal(torch.cat((upper, lower)), (image.flatten().double() * 16 / 255).round().long())
    with pytest.raises(ConfigError, match="must be 32, the pixels of half a digit"):
        make_task(model=two_tower, data={"path": "digits"})


def write_images(path: Path, labels: list[int]) -> str:
    np.savez(path, images=np.zeros((len(labels), 4, 4, 1), np.uint8), labels=np.array(labels))
    return str(path)


def test_changed_images_raise_on_resume(tmp_path: Path) -> None:
    path = write_images(tmp_path / "a.npz", [0, 1, 2, 3])
    saved = make_loader(make_task(model=DIGITS, data={"path": path})).state_dict()
    make_loader(make_task(model=DIGITS, data={"path": path})).load_state_dict(saved)
    write_images(tmp_path / "a.npz", [0, 1, 3, 2])
    with pytest.raises(CheckpointError, match="the dataset has version xxh3"):
        make_loader(make_task(model=DIGITS, data={"path": path})).load_state_dict(saved)


def test_validation_classes_with_other_numbers_raise(tmp_path: Path) -> None:
    path, other = write_images(tmp_path / "a.npz", [0, 1, 0, 1]), write_images(tmp_path / "b.npz", [0, 1, 2])
    with pytest.raises(ConfigError, match="their class numbers would differ"):
        make_task(model=DIGITS, data={"path": path, "validation_path": other})
    task = make_task(model=DIGITS, data={"path": other, "validation_path": path})
    assert len(task.validation) == 4
