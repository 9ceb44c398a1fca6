"""What a recipe learns from and validates on."""

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

class Few(nn.Linear):
    classes, vocab_size, max_seq_len = 3, 100, 16
    def __init__(self):
        super().__init__(1, 3)

class OwnLoss(Few):
    def loss(self, output, target):
        return output.sum()
"""
DIGITS = {"kind": "convnet", "convnet": {"channels": 1, "width": 8, "blocks": [1], "groups": 4}}


@pytest.fixture(autouse=True)
def _mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "points_of_mine.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)


def made(**tables: Any) -> Any:
    """The :class:`TrainingTask`; its data sets have what their own classes have."""
    return build_task(build(tables, Recipe, "recipe"))


def loader(found: TrainingTask, size: int = 4) -> Loader:
    return Loader(
        found.dataset,
        global_batch=size,
        micro_batch=None,
        workers=0,
        seed=1,
        rank=0,
        ranks=1,
        device=torch.device("cpu"),
        limits=found.limits,
    )


def own(entry: str, **data: Any) -> dict[str, Any]:
    return {
        "model": {"entry": "points_of_mine:Few"},
        "data": {"kind": "own", "entry": f"points_of_mine:{entry}", **data},
    }


def test_a_data_set_of_ones_own() -> None:
    found = made(**own("Points", args={"count": 30}, path="somewhere", validation=0.2))
    assert (len(found.dataset), len(found.validation)) == (24, 6)
    seen = [int(d[i][0]) for d in (found.dataset, found.validation) for i in range(len(d))]
    assert sorted(seen) == list(range(30))
    whole = made(**own("Points", args={"count": 30}, path="somewhere")).dataset
    assert whole.version == "points_of_mine:Points {'count': 30, 'path': 'somewhere'}"
    assert whole.path == "somewhere" and whole.where(3) == "point 3"
    assert made(**own("Named", args={"count": 30})).dataset.version == "of 2026"


def test_it_is_called_once_more_with_the_other_path() -> None:
    found = made(**own("Points", args={"count": 30}, path="a", validation_path="b"))
    assert (found.dataset.path, found.validation.path) == ("a", "b")


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (own("Nowhere"), "data.entry = 'points_of_mine:Nowhere'.*no attribute"),
        (own("nothing"), "data.entry = .* returned int"),
        (own("Points", args={"number": 3}), "data.args = { number = 3 }.*missing a required argument"),
        (own("Points", args={"count": 0}), "data.entry = .*: the data set is empty"),
        (own("Points", args={"count": 3}, validation=0.1), "validation = 0.1 of the 3 samples of data.entry"),
    ],
)
def test_one_that_cannot_be_is_named(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(**tables)


def test_a_label_out_of_range_is_named_with_its_sample_before_the_step() -> None:
    found = made(**own("Points", args={"count": 30}))
    with pytest.raises(
        ConfigError, match=r"sample \d+ \(point \d+\): target is [34], .*classes of points_of_mine:Few = 3"
    ):
        for _ in range(8):
            next(loader(found, 20))


def test_of_a_loss_of_ones_own_the_targets_are_not_known() -> None:
    tables = own("Points", args={"count": 30})
    tables["model"] = {"entry": "points_of_mine:OwnLoss"}
    limits = made(**tables).limits
    assert limits.classes is None and limits.vocab_size == 100
    assert len(next(loader(made(**tables), 20))[1]) == 20


def test_sequences_longer_than_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.seq_len = 32 is more than the model takes: max_seq_len = 16"):
        made(model={"entry": "points_of_mine:Few"}, data={"seq_len": 32, "max_bytes": 10_000})
    with pytest.raises(ConfigError, match=r"data.seq_len = 256 exceeds model.max_seq_len = 128"):
        made(model={"max_seq_len": 128})


def test_a_byte_that_the_model_does_not_know() -> None:
    found = made(model={"vocab_size": 90, "dim": 32, "layers": 1}, data={"seq_len": 32, "max_bytes": 10_000})
    with pytest.raises(ConfigError, match=r"sample \d+ \(from byte \d+ on\): inputs at .*model.vocab_size = 90"):
        next(loader(found))


def test_the_validation_split_is_the_same_whatever_the_seed() -> None:
    parts = [made(model=DIGITS, train={"seed": seed}, data={"path": "digits", "validation": 0.2}) for seed in (1, 2)]
    one, other = ([int(i) for i in (p.validation.row(j) for j in range(len(p.validation)))] for p in parts)
    assert one == other
    assert parts[0].dataset.version == parts[1].dataset.version


def test_only_what_is_learned_is_augmented() -> None:
    found = made(model=DIGITS, data={"path": "digits", "validation": 0.2, "augment": {"flip": True, "mixup": 0.2}})
    assert isinstance(found.dataset, AugmentedImages)
    image, target = found.dataset[0]
    assert image.shape == (8, 8, 1) and image.dtype == torch.uint8 and target.shape == (10,)
    assert isinstance(found.validation[0][1], int)
    assert found.validation.slice_names[3] == "class-3"
    inputs, targets = next(loader(found))
    assert inputs.shape == (4, 8, 8, 1) and targets.shape == (4, 10)


def test_halves_of_digits_for_two_towers() -> None:
    two_tower = {"kind": "two-tower", "vocab_size": 17, "dim": 32, "layers": 1, "heads": 2, "kv_heads": 1}
    found = made(model=two_tower, data={"path": "digits", "seq_len": 32})
    image = made(model=DIGITS, data={"path": "digits"}).dataset[5][0]
    (upper, lower), i = found.dataset[5]
    assert i == 5 and torch.equal(torch.cat((upper, lower)), (image.flatten().double() * 16 / 255).round().long())
    with pytest.raises(ConfigError, match="must be 32, the pixels of half a digit"):
        made(model=two_tower, data={"path": "digits"})


def images(path: Path, labels: list[int]) -> str:
    np.savez(path, images=np.zeros((len(labels), 4, 4, 1), np.uint8), labels=np.array(labels))
    return str(path)


def test_other_images_have_another_version_and_resume_nothing(tmp_path: Path) -> None:
    path = images(tmp_path / "a.npz", [0, 1, 2, 3])
    saved = loader(made(model=DIGITS, data={"path": path})).state_dict()
    loader(made(model=DIGITS, data={"path": path})).load_state_dict(saved)
    images(tmp_path / "a.npz", [0, 1, 3, 2])
    with pytest.raises(CheckpointError, match="the data set is of version xxh3"):
        loader(made(model=DIGITS, data={"path": path})).load_state_dict(saved)


def test_validation_data_with_other_classes(tmp_path: Path) -> None:
    path, other = images(tmp_path / "a.npz", [0, 1, 0, 1]), images(tmp_path / "b.npz", [0, 1, 2])
    with pytest.raises(ConfigError, match="their numbers would not be the same"):
        made(model=DIGITS, data={"path": path, "validation_path": other})
    found = made(model=DIGITS, data={"path": other, "validation_path": path})
    assert len(found.validation) == 4
