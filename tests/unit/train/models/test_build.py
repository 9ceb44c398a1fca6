"""Models other than the decoder, with their data and losses."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from clustertrain.config.data import DataSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.parsing.presets import apply_preset
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.train.data.datasets import build_image_dataset
from clustertrain.train.data.images import Shapes
from clustertrain.train.distributed.data_parallel import repeated_layers
from clustertrain.train.models import losses
from clustertrain.train.models.build import TrainingTask, build_task
from clustertrain.train.optim.param_groups import groups_for_unsharded
from clustertrain.train.trainer import build_evaluations
from tests.unit.train.single_process import build_on_cpu

CONVNET = {"kind": "convnet", "convnet": {"width": 8, "blocks": [1, 1], "groups": 4}}
TWO_TOWER = {"kind": "two-tower", "dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "two_tower": {"embedding": 16}}
SMALL = {"seq_len": 32, "max_bytes": 200_000, "image_size": 16}
UNINFORMED_LOSS = {"convnet": math.log(10), "two-tower": math.log(64)}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: OpenMP threads spin while waiting, which on busy cores takes many times longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_task(model: dict[str, Any], **data: Any) -> TrainingTask:
    return build_task(build(apply_preset({"model": model, "data": {**SMALL, **data}}), Recipe, "recipe"))


def sample_batch(dataset: Any, first: int, count: int = 16) -> Any:
    """Return a batch of samples scattered over the dataset, as the loader's order does."""
    return default_collate([dataset[(first + i) * 7919 % len(dataset)] for i in range(count)])


def compute_loss(task: TrainingTask, model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, target = batch
    value = task.loss(model(*inputs) if isinstance(inputs, list) else model(inputs), target)
    assert isinstance(value, tuple)
    return value[0] / value[1]


@pytest.mark.parametrize("spec", [CONVNET, TWO_TOWER], ids=lambda s: s["kind"])
def test_initial_loss_equals_uniform_guessing(spec: dict[str, Any]) -> None:
    task = make_task(spec)
    assert all(p.is_meta for p in task.model.parameters())
    with torch.no_grad():
        loss = compute_loss(task, build_on_cpu(task.model), sample_batch(task.dataset, 0, 64))
    assert loss.item() == pytest.approx(UNINFORMED_LOSS[spec["kind"]], rel=0.05)


def training_losses(spec: dict[str, Any], steps: int, lr: float, *, same: bool) -> list[float]:
    """Train and return the loss of each step, on the ``same`` samples or on new ones."""
    task = make_task(spec)
    model = build_on_cpu(task.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    seen = []
    for step in range(steps):
        loss = compute_loss(task, model, sample_batch(task.dataset, 0 if same else 16 * step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


@pytest.mark.long
def test_convnet_generalizes_to_new_images() -> None:
    seen = training_losses(CONVNET, 50, 1e-2, same=False)
    assert sum(seen[-10:]) / 10 < 0.8 * UNINFORMED_LOSS["convnet"]


@pytest.mark.long
def test_two_tower_learns_matching_passages() -> None:
    assert training_losses(TWO_TOWER, 40, 3e-3, same=True)[-1] < 0.3 * UNINFORMED_LOSS["two-tower"]


@pytest.mark.parametrize(
    "spec",
    [CONVNET, {"kind": "convnet"}, TWO_TOWER, {**TWO_TOWER, "two_tower": {"learn_temperature": False}}],
    ids=str,
)
def test_parameter_count_matches_the_plan(spec: dict[str, Any]) -> None:
    recipe = build({"model": spec, "data": SMALL}, Recipe, "recipe")
    model = build_task(recipe).model
    assert sum(p.numel() for p in model.parameters()) == recipe.model.parameters()


def test_405b_model_is_built_on_meta() -> None:
    model = make_task({"preset": "llama3.1-405b"}).model
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(405.85e9, rel=1e-3)
    assert all(p.is_meta for p in model.parameters())


def test_initial_values_depend_only_on_name_and_seed() -> None:
    a, b = (
        build_on_cpu(make_task({**CONVNET, "convnet": {**CONVNET["convnet"], "blocks": n}}).model)
        for n in ([1], [1, 1])
    )
    assert torch.equal(a.blocks[0].conv2.weight, b.blocks[0].conv2.weight)
    assert not torch.equal(
        a.blocks[0].conv2.weight, build_on_cpu(make_task(CONVNET).model, seed=4).blocks[0].conv2.weight
    )


def test_repeated_layers_of_built_in_models() -> None:
    assert [name for name, _ in repeated_layers(make_task(CONVNET).model)] == ["blocks.0", "blocks.1"]
    assert [name for name, _ in repeated_layers(make_task(TWO_TOWER).model)] == ["first.layers.0", "second.layers.0"]


def test_repeated_layers_inside_a_module_dict() -> None:
    parts = {"wte": nn.Embedding(8, 4), "h": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), "ln_f": nn.LayerNorm(4)}
    model = nn.Module()
    model.transformer = nn.ModuleDict(parts)
    assert [name for name, _ in repeated_layers(model)] == ["transformer.h.0", "transformer.h.1"]


def test_activations_stay_channels_last() -> None:
    task = make_task(CONVNET)
    model = build_on_cpu(task.model)
    seen = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
            module.register_forward_hook(
                lambda _, args, out: seen.extend(
                    t.is_contiguous(memory_format=torch.channels_last) for t in (*args, out)
                )
            )
    model(sample_batch(task.dataset, 0)[0])
    assert len(seen) == 10 and all(seen)


def test_passages_of_a_pair_are_adjacent_in_the_text() -> None:
    (first, second), i = make_task(TWO_TOWER).dataset[3]
    text = make_task({}, seq_len=64).dataset[3][0]
    assert i == 3 and torch.equal(torch.cat((first, second)), text)


def test_temperature_has_no_weight_decay() -> None:
    model = build_on_cpu(make_task(TWO_TOWER).model)
    with_decay, without_decay = groups_for_unsharded(model, 0.1)
    assert any(p is model.log_scale for p in without_decay["params"])  # type: ignore[attr-defined]
    assert not any(p is model.log_scale for p in with_decay["params"])  # type: ignore[attr-defined]


# -- images


def test_shapes_are_a_function_of_the_index_only() -> None:
    a, b = Shapes(16), Shapes(16)
    image, label = a[123]
    assert torch.equal(image, b[123][0]) and label == 3
    assert image.shape == (16, 16, 3) and image.dtype == torch.uint8
    assert not torch.equal(image, a[133][0])


def test_images_from_an_npz_file(tmp_path: Path) -> None:
    pictures = np.arange(2 * 4 * 5 * 1, dtype=np.uint8).reshape(2, 4, 5, 1)
    np.savez(tmp_path / "a.npz", images=pictures, labels=np.array([1, 0]))
    dataset = build_image_dataset(DataSpec(path=str(tmp_path / "a.npz")))
    assert (len(dataset), dataset.classes, dataset.channels) == (2, 2, 1)
    image, label = dataset[1]
    assert label == 0 and torch.equal(image, torch.from_numpy(pictures[1]))
    with pytest.raises(ConfigError, match=r"channels = 1"):
        make_task(CONVNET, path=str(tmp_path / "a.npz"))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros((2, 4, 4, 3), np.float32), "labels": np.zeros(2, int)}, "store uint8"),
        ({"images": np.zeros((2, 4, 4, 3), np.uint8), "labels": np.zeros(3, int)}, "for 2 images"),
        ({"images": np.zeros((2, 4, 4, 3), np.uint8)}, "labels"),
        ({"images": np.array([{}, {}]), "labels": np.zeros(2, int)}, "pickle"),
    ],
    ids=["float images", "too many labels", "no labels", "objects"],
)
def test_npz_with_other_arrays_raises(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ConfigError, match=message):
        build_image_dataset(DataSpec(path=str(tmp_path / "a.npz")))


def test_not_an_npz_file_raises(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 something else")
    np.save(tmp_path / "b.npy", np.zeros(3))
    for name in ("a.npz", "b.npy"):
        with pytest.raises(ConfigError, match=r"not an \.npz file"):
            build_image_dataset(DataSpec(path=str(tmp_path / name)))
    with pytest.raises(ConfigError, match="no such file"):
        build_image_dataset(DataSpec(path=str(tmp_path / "c.npz")))


def test_images_from_class_folders(tmp_path: Path) -> None:
    import PIL.Image as pillow

    for name, color in (("cats", (255, 0, 0)), ("dogs", (0, 0, 255))):
        (tmp_path / name).mkdir()
        pillow.new("RGB", (20, 10), color).save(tmp_path / name / "1.png")
    (tmp_path / "dogs" / "notes.txt").write_text("none")
    dataset = build_image_dataset(DataSpec(path=str(tmp_path), image_size=8))
    assert (len(dataset), dataset.classes) == (2, 2)
    image, label = dataset[1]
    assert label == 1 and image.shape == (8, 8, 3) and image[4, 4].tolist() == [0, 0, 255]
    (tmp_path / "cats" / "1.png").write_bytes(b"no image")
    with pytest.raises(ConfigError, match="not an image"):
        dataset[0]


# -- entries

SOURCE = """
import torch
from torch import nn

class Bigram(nn.Module):
    def __init__(self, vocab=256):
        super().__init__()
        self.table = nn.Embedding(vocab, vocab)
    def forward(self, tokens):
        return self.table(tokens)

class Filled(Bigram):
    def init_parameter(self, name, tensor, generator):
        tensor.fill_(1.0)
    def loss(self, output, target):
        return output.sum() * 0

def computes(n):
    return nn.Linear(int(torch.ones(n).sum()), 1)

def nothing():
    return "nothing"

seven = 7

class Output(dict):
    # as transformers returns it: a mapping with attributes
    __getattr__ = dict.get

class Config:
    use_cache, vocab_size, max_position_embeddings = True, 256, 64

class Wrapped(Bigram):
    def __init__(self, name="logits"):
        super().__init__()
        self.config, self.name = Config(), name
    def forward(self, tokens):
        return Output({self.name: super().forward(tokens), "past_key_values": None})
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    (tmp_path / "mine" / "net.py").write_text(SOURCE)
    (tmp_path / "mine" / "lame.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] == "mine"]:  # otherwise other tests would import it
        del sys.modules[name]


@pytest.mark.usefixtures("mine")
def test_entry_is_built_and_trained_on_text() -> None:
    task = make_task({"entry": "mine.net:Bigram", "args": {"vocab": 300}})
    assert not task.model.table.weight.is_meta and task.model.table.weight.shape == (300, 300)
    assert task.loss.func is losses.cross_entropy  # type: ignore[attr-defined]
    loss = compute_loss(task, task.model, sample_batch(task.dataset, 0))
    assert loss.item() == pytest.approx(math.log(300) + 0.5, rel=0.1)  # a table with unit variance adds 1/2


@pytest.mark.usefixtures("mine")
def test_entry_with_init_parameter_and_loss() -> None:
    task = make_task({"entry": "mine.net:Filled"}, kind="images")
    assert task.model.table.weight.is_meta and task.loss == task.model.loss
    assert isinstance(task.dataset, Shapes)
    assert build_on_cpu(task.model).table.weight.unique().tolist() == [1.0]


@pytest.mark.usefixtures("mine")
def test_output_of_transformers_stands_for_its_logits() -> None:
    task = make_task({"entry": "mine.net:Wrapped"})
    batch = sample_batch(task.dataset, 0)
    assert task.model(batch[0]).shape == (*batch[0].shape, 256) and compute_loss(task, task.model, batch).isfinite()
    assert not task.model.config.use_cache
    assert task.limits is not None and (task.limits.vocab_size, task.limits.max_seq_len) == (256, 64)
    hidden = make_task({"entry": "mine.net:Wrapped", "args": {"name": "last_hidden_state"}})
    with pytest.raises(ConfigError, match="returned Output with last_hidden_state, past_key_values, but the loss"):
        compute_loss(hidden, hidden.model, batch)


@pytest.mark.usefixtures("mine")
def test_label_smoothing_with_model_loss_raises() -> None:
    tables: dict[str, Any] = {"model": {"entry": "mine.net:Filled"}, "data": {**SMALL}}
    with pytest.raises(ConfigError, match=r"label_smoothing = 0.1 has no effect with the loss of mine\.net:Filled"):
        build_task(build({**tables, "objective": {"label_smoothing": 0.1}}, Recipe, "recipe"))
    named = {"label_smoothing": 0.1, "kind": "cross-entropy"}
    assert build_task(build({**tables, "objective": named}, Recipe, "recipe")).loss.keywords["smoothing"] == 0.1  # type: ignore[attr-defined]


@pytest.mark.usefixtures("mine")
def test_named_objective_overrides_the_model_loss() -> None:
    tables: dict[str, Any] = {"model": {"entry": "mine.net:Filled"}, "data": {**SMALL, "validation": 0.1}}
    named = {"objective": {"kind": "cross-entropy"}, "contract": {"metric": "validation_accuracy"}}

    def metrics(recipe: Recipe) -> Any:
        session = mock.Mock()
        build_evaluations(session, build_task(recipe), recipe)
        return session.evaluations.call_args.kwargs["metrics"]

    assert "accuracy" in metrics(build({**tables, **named}, Recipe, "recipe"))
    assert metrics(build(tables, Recipe, "recipe")) == ()


@pytest.mark.usefixtures("mine")
def test_entry_that_computes_in_its_constructor() -> None:
    assert make_task({"entry": "mine.net:computes", "args": {"n": 3}}).model.weight.shape == (1, 3)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"entry": "not_mine:Net"}, "no module 'not_mine'"),
        ({"entry": "mine.not_net:Net"}, "no module 'mine.not_net'"),
        ({"entry": "mine.net:Net"}, "no attribute 'Net'"),
        ({"entry": "mine.net:seven"}, "is int"),
        ({"entry": "mine.net:nothing"}, "returned str"),
        ({"entry": "mine.net:Bigram", "args": {"words": 3}}, "unexpected keyword argument 'words'"),
    ],
    ids=["no package", "no module", "no attribute", "not callable", "not a module", "wrong argument"],
)
def test_bad_model_entry_raises(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_task(model)


@pytest.mark.usefixtures("mine")
def test_import_error_inside_an_entry_is_raised_unchanged() -> None:
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        make_task({"entry": "mine.lame:Net"})


def test_data_kind_that_does_not_fit_the_model_raises() -> None:
    with pytest.raises(ConfigError, match="a convnet trains on images"):
        make_task(CONVNET, kind="text")
