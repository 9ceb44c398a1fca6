"""Checks of the data at submission."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustertrain.errors import ConfigError
from clustertrain.submit.preflight import data as data_here
from clustertrain.submit.prepare import prepare
from clustertrain.submit.prepared_run import PreparedRun
from clustertrain.submit.request import SubmitRequest
from clustertrain.train.data.tokenize import write
from tests.fakes.slurm.fixture import FakeSlurm
from tests.saved_dataset import save_dataset
from tests.unit.config.parsing.test_foreign_shards import write_megatron

pytestmark = [pytest.mark.usefixtures("fake_slurm"), pytest.mark.long]


def prepare_run(cwd: Path, target: str = "", **tables: Any) -> PreparedRun:
    assignments = tuple(f"{table}.{key}={value}" for table, pairs in tables.items() for key, value in pairs.items())
    return prepare(SubmitRequest(target=target, cwd=cwd, assignments=assignments))


def test_paths_are_relative_to_submit_folder(tmp_path: Path) -> None:
    data = prepare_run(tmp_path, data={"path": "a.txt", "validation_path": "more/b.txt"}).spec.recipe.data
    assert (data.path, data.validation_path) == (str(tmp_path / "a.txt"), str(tmp_path / "more" / "b.txt"))
    custom = {"kind": "custom", "entry": "mine:make", "path": "cifar"}
    assert prepare_run(tmp_path, data=custom).spec.recipe.data.path == "cifar"


def test_missing_validation_data_is_noted_or_refused_locally(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    (tmp_path / "a.txt").write_text("a" * 1000)
    prepared = prepare_run(tmp_path, data={"path": "a.txt", "validation_path": "b.txt"})
    note = data_here.check_data(prepared)
    assert note is not None and note.startswith(f"data.validation_path = '{tmp_path}/b.txt' does not exist")
    local = prepare(SubmitRequest(cwd=tmp_path, assignments=("data.validation_path=b.txt",), job={"backend": "local"}))
    with pytest.raises(ConfigError, match=r"data.validation_path = .*no such file or folder"):
        data_here.check_data(local)


def test_training_data_as_validation_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 1000)
    (tmp_path / "b.txt").symlink_to("a.txt")
    with pytest.raises(ConfigError, match=r"data.validation_path = '.*b.txt' is the training data"):
        data_here.check_data(prepare_run(tmp_path, data={"path": "a.txt", "validation_path": "b.txt"}))


def shards(tmp_path: Path, count: int = 300) -> dict[str, str]:
    write(tmp_path / "shards", [np.arange(count)], dtype="uint16")
    return {"kind": "tokens", "path": "shards"}


def test_saved_dataset_is_checked(tmp_path: Path) -> None:
    save_dataset(tmp_path / "set", [{"input_ids": [1, 299]}])
    data = {"kind": "tokens", "path": "set"}
    assert data_here.check_data(prepare_run(tmp_path, data=data, model={"vocab_size": 300})) is None
    with pytest.raises(ConfigError, match=r"the token 299, but model.vocab_size = 299 allows tokens up to 298"):
        data_here.check_data(prepare_run(tmp_path, data=data, model={"vocab_size": 299}))
    with pytest.raises(ConfigError, match="no column text; its columns: input_ids"):
        data_here.check_data(prepare_run(tmp_path, data={"kind": "text", "path": "set"}))


def test_tokens_outside_vocabulary_are_refused(tmp_path: Path) -> None:
    data = shards(tmp_path)
    assert data_here.check_data(prepare_run(tmp_path, data=data, model={"vocab_size": 300})) is None
    with pytest.raises(ConfigError, match=r"tokens up to 299, but model.vocab_size = 256"):
        data_here.check_data(prepare_run(tmp_path, data=data))
    # The vocabulary of a custom model is not known yet.
    assert data_here.check_data(prepare_run(tmp_path, data=data, model={"entry": "mine:make"})) is None


def test_fewer_tokens_than_sample_are_refused(tmp_path: Path) -> None:
    data = shards(tmp_path, 200)
    with pytest.raises(ConfigError, match=r"200 tokens are less than one sample of data.seq_len = 256"):
        data_here.check_data(prepare_run(tmp_path, data=data))
    assert data_here.check_data(prepare_run(tmp_path, data={**data, "pack": "true"})) is None


def test_files_of_megatron_are_checked_by_their_headers(tmp_path: Path) -> None:
    write_megatron(tmp_path / "text", [range(200)], [0, 1])
    data = {"kind": "tokens", "path": "text.idx"}
    with pytest.raises(ConfigError, match=r"200 tokens are less than one sample of data.seq_len = 256"):
        data_here.check_data(prepare_run(tmp_path, data=data))
    assert data_here.check_data(prepare_run(tmp_path, data={**data, "seq_len": 64})) is None
    note = data_here.check_epoch_size(prepare_run(tmp_path, data={**data, "seq_len": 64}, train={"global_batch": 8}))
    assert note is not None and "3" in note
    keys = ("data.kind=tokens", "data.path=text")
    prefix = prepare(SubmitRequest(cwd=tmp_path, assignments=keys, job={"backend": "local"}))
    with pytest.raises(ConfigError, match=r"text': no such file or folder(.|\n)*add .idx"):
        data_here.check_data(prefix)


def test_folder_without_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    with pytest.raises(ConfigError, match=r"neither index.json nor .npy, .idx or .ds files"):
        data_here.check_data(prepare_run(tmp_path, data={"kind": "tokens", "path": "shards"}))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"data": {"path": "long.txt", "max_bytes": 99}}, "data.max_bytes = 99 is less than one sample of 257 bytes"),
        ({"data": {"path": "short.txt"}}, "data.path = .*: 99 bytes are less than one sample of 257"),
        ({"model": {"kind": "two-tower"}, "data": {"path": "short.txt"}}, "99 bytes are less than one sample of 512"),
        ({"data": {"path": "texts"}}, "no file fits data.pattern = '[*].py'"),
        ({"data": {"validation_path": "texts"}}, "data.validation_path = .*: no file fits"),
        ({"model": {"kind": "convnet"}, "data": {"path": "texts"}}, "no images in folders of classes"),
    ],
)
def test_empty_data_is_refused(tables: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("b" * 999)
    (tmp_path / "short.txt").write_text("a" * 99)
    (tmp_path / "long.txt").write_text("a" * 999)
    with pytest.raises(ConfigError, match=message):
        data_here.check_data(prepare_run(tmp_path, **tables))
    assert data_here.check_data(prepare_run(tmp_path, data={"path": "texts", "pattern": "*.txt"})) is None


def test_image_folder_slices_are_folder_names(tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        (tmp_path / "pets" / name).mkdir(parents=True)
    data = {"path": "pets", "validation": "0.1"}
    tables = {"model": {"kind": "convnet"}, "data": data}
    assert data_here.check_data(prepare_run(tmp_path, **tables, contract={"slices": '["dogs"]'})) is None
    with pytest.raises(ConfigError, match="no slice 'cows'; it has cats, dogs"):
        data_here.check_data(prepare_run(tmp_path, **tables, contract={"slices": '["cows"]'}))


def test_images_that_do_not_match_convnet_are_refused(tmp_path: Path) -> None:
    for name in ("cats", "dogs", "owls"):
        (tmp_path / "pets" / name).mkdir(parents=True)
    np.savez(tmp_path / "grey.npz", images=np.zeros((5, 8, 8, 1), np.uint8), labels=np.zeros(5, int))
    (tmp_path / "text.npz").write_text("no arrays")
    damaged = tmp_path / "damaged.npz"
    np.savez_compressed(damaged, images=np.zeros((50, 8, 8, 3), np.uint8), labels=np.zeros(50, int))
    content = damaged.read_bytes()
    offset = content.index(b"images.npy") + len(b"images.npy") + 20  # after the extra field, where the data starts
    damaged.write_bytes(content[:offset] + b"\xff" * 40 + content[offset + 40 :])
    net = {"kind": "convnet", "convnet.classes": 2}
    with pytest.raises(ConfigError, match=r"pets' and model.convnet: the images have classes 3, not 2"):
        data_here.check_data(prepare_run(tmp_path, data={"path": "pets"}, model=net))
    with pytest.raises(ConfigError, match=r"data.validation_path = .*grey.npz' .* channels 1, not 3"):
        data_here.check_data(prepare_run(tmp_path, data={"validation_path": "grey.npz"}, model={"kind": "convnet"}))
    with pytest.raises(ConfigError, match=r"text.npz': not an .npz file with images"):
        data_here.check_data(prepare_run(tmp_path, data={"path": "text.npz"}, model=net))
    with pytest.raises(ConfigError, match=r"data.validation_path = .*damaged.npz': not an .npz file with images"):
        data_here.check_data(prepare_run(tmp_path, data={"validation_path": "damaged.npz"}, model={"kind": "convnet"}))
    assert (
        data_here.check_data(prepare_run(tmp_path, data={"path": "grey.npz"}, model={**net, "convnet.channels": 1}))
        is None
    )


@pytest.mark.parametrize(
    ("tables", "samples"),
    [
        ({"model": {"kind": "convnet", "convnet.channels": 1}, "data": {"path": "digits"}}, "1797"),
        (
            {"model": {"kind": "convnet", "convnet.channels": 1}, "data": {"path": "digits", "validation": 0.5}},
            "about 898",
        ),
        ({"model": {"kind": "convnet"}, "data": {"path": "few.npz"}}, "5"),
        ({"model": {"kind": "two-tower"}, "data": {"path": "digits", "seq_len": 32}}, "1797"),
        ({"data": {"path": "a.txt", "seq_len": 100}}, "40"),
        ({"data": {"kind": "tokens", "path": "shards", "seq_len": 100}, "model": {"vocab_size": 300}}, "2"),
        ({"data": {"path": "texts", "seq_len": 100, "max_bytes": 8000}}, "at most 79"),
        ({"data": {"seq_len": 100, "max_bytes": 8000}}, "at most 79"),
    ],
)
def test_global_batch_above_dataset_size_is_noted(tables: dict[str, Any], samples: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "few.npz", images=np.zeros((5, 8, 8, 3), np.uint8), labels=np.zeros(5, int))
    (tmp_path / "a.txt").write_text("a" * 4096)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.py").write_text("a" * 4096)
    shards(tmp_path)
    note = data_here.check_epoch_size(prepare_run(tmp_path, **tables, train={"global_batch": 2048}))
    assert note is not None and note.startswith("train.global_batch = 2048 is more than all samples of data.path")
    assert f", {samples}: each step" in note
    if samples not in ("2", "5"):
        assert data_here.check_epoch_size(prepare_run(tmp_path, **tables, train={"global_batch": 32})) is None


def test_global_batch_above_the_given_number_of_samples_is_noted(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.py").write_text("a" * 4096)
    tables: dict[str, Any] = {"data": {"path": "texts", "seq_len": 16, "samples": 60}}
    note = data_here.check_epoch_size(prepare_run(tmp_path, **tables, train={"global_batch": 64, "epochs": 20}))
    assert note is not None and ", 60: each step" in note
    assert data_here.check_epoch_size(prepare_run(tmp_path, **tables, train={"global_batch": 60, "epochs": 20})) is None


def test_unknown_dataset_size_is_not_noted(tmp_path: Path) -> None:
    (tmp_path / "classes" / "one").mkdir(parents=True)
    tables = {"model": {"kind": "convnet"}, "data": {"path": "classes"}, "train": {"global_batch": 2**20}}
    assert data_here.check_epoch_size(prepare_run(tmp_path, **tables)) is None


def package(folder: Path, name: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("def make(): ...\n")


BOTH: dict[str, Any] = {"model": {"entry": "nets:make"}, "data": {"kind": "custom", "entry": "sets:make"}}


def test_data_entry_is_in_snapshot_of_model(tmp_path: Path) -> None:
    package(tmp_path, "sets")
    data_only = {"data": BOTH["data"], "model": {"entry": "installed:make"}}
    assert prepare_run(tmp_path, **data_only).code == tmp_path / "sets"
    package(tmp_path, "nets")
    assert prepare_run(tmp_path, **BOTH).code == tmp_path / "nets"


def test_packages_in_two_folders_of_one_repository(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    package(tmp_path / "src", "nets")
    package(tmp_path / "work", "sets")
    # A snapshot from `work` also finds the packages of the root and of `src`, but not vice versa.
    assert prepare_run(tmp_path / "work", **BOTH).code == tmp_path / "work" / "sets"


def test_packages_in_two_snapshots_are_refused(tmp_path: Path) -> None:
    package(tmp_path / "a", "nets")
    package(tmp_path / "b", "sets")
    (tmp_path / "a" / "run.toml").write_text("")
    with pytest.raises(ConfigError, match=r"cannot contain both: model.entry in .*/a, data.entry in .*/b"):
        prepare_run(tmp_path / "b", "../a/run.toml", **BOTH)
