"""Which checkpoints of other frameworks count as complete."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertrain.rank_hooks.clustertrain_hooks.checkpoint_checks import find_problem
from tests.unit.rank_hooks.checkpoint_files import (
    cut,
    write_accelerate_state,
    write_distributed,
    write_safetensors,
    write_torch,
    write_trainer_checkpoint,
)

SHARDS = "pytorch_model_fsdp_0"
Damage = Callable[[Path], object]


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def empty(name: str) -> Damage:
    return lambda folder: os.truncate(folder / name, 0)


def cut_file(name: str, count: int) -> Damage:
    return lambda folder: cut(folder / name, count)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_trainer_checkpoint(tmp_path / "checkpoint-7")


def test_complete_checkpoints_have_no_problem(tmp_path: Path, folder: Path) -> None:
    state = write_accelerate_state(tmp_path / "step_5")
    shards = write_distributed(tmp_path / "dcp-5", ranks=12)
    for path in (folder, folder / "optimizer.pt", state, shards):
        assert find_problem(str(path), 2) == ""


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (cut_file("model-00001-of-00002.safetensors", 1), "model-00001-of-00002.safetensors: it has"),
        (cut_file("model-00001-of-00002.safetensors", 100), "it ends within its header"),
        (empty("model-00001-of-00002.safetensors"), "it ends within its header"),
        (remove("model-00002-of-00002.safetensors"), "1 of its files are missing, such as model"),
        (cut_file("optimizer.pt", 30), "optimizer.pt: it ends too early"),
        (empty("optimizer.pt"), "optimizer.pt: it is empty"),
        (lambda f: (f / "trainer_state.json").write_text('{"global_step"'), "trainer_state.json: JSONDecodeError"),
        (lambda f: (f / "checkpoint-is-incomplete.txt").touch(), "its save was interrupted"),
        (remove("trainer_state.json"), "it has no trainer_state.json, which the Trainer writes last"),
        (remove("rng_state_1.pth"), "it has no rng_state_1.pth: each rank writes one"),
        (remove("rng_state_0.pth"), "it has no rng_state_0.pth: each rank writes one"),
        (remove(f"{SHARDS}/.metadata"), f"{SHARDS}: it has no .metadata"),
    ],
)  # fmt: skip
def test_damage_is_found(folder: Path, damage: Damage, problem: str) -> None:
    damage(folder)
    assert problem in find_problem(str(folder), 2)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (remove(".metadata"), "it has no .metadata"),
        (empty(".metadata"), ".metadata: it ends too early"),
        (cut_file(".metadata", 1), ".metadata: it ends too early"),
        (empty("__1_0.distcp"), "__1_0.distcp: it is empty"),
        (remove("__1_0.distcp"), "1 of its files are missing, such as __1_0.distcp"),
        (lambda f: (remove("__0_0.distcp")(f), remove("__1_0.distcp")(f)), "2 of its files are missing"),
        (
            lambda f: [(f / ".metadata").write_bytes(pickle.dumps(1)), *(p.unlink() for p in f.glob("*.distcp"))],
            "it has no .distcp file",
        ),
    ],
)
def test_distributed_checkpoint_needs_its_metadata_and_the_files_in_it(
    tmp_path: Path, damage: Damage, problem: str
) -> None:
    shards = write_distributed(tmp_path / "step-5")
    damage(shards)
    assert problem in find_problem(str(shards))


@pytest.mark.parametrize("written", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["step_5", "checkpoint-5"])
def test_state_of_accelerate_counts_once_all_ranks_have_written(tmp_path: Path, name: str, written: int) -> None:
    """``save_state`` writes no marker: the last file of each rank is that of its random states."""
    state = write_accelerate_state(tmp_path / name)
    files = ["model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "random_states_1.pkl"]
    for missing in files[written:]:
        (state / missing).unlink()
    expected = "random_states_1.pkl: each rank writes one" if written == 4 else "random_states_0.pkl, which"
    assert expected in find_problem(str(state), 2)


def test_half_written_checkpoint_of_one_process_is_not_complete(tmp_path: Path) -> None:
    """The Trainer writes the configuration and the model first, before anything that is only its own."""
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_safetensors(folder / "model.safetensors")
    assert "neither trainer_state.json nor random_states_0.pkl" in find_problem(str(folder))


@pytest.mark.parametrize(
    "names",
    [
        ("model.safetensors", "optimizer.pt"),
        ("model.pt",),
        ("config.json", "model.safetensors"),
        ("model.safetensors", "COMPLETE.json"),  # of ct.attach
    ],
)
def test_layout_of_the_programs_own_is_complete(tmp_path: Path, names: tuple[str, ...]) -> None:
    folder = tmp_path / "step-5"
    folder.mkdir()
    for name in names:
        path = folder / name
        if name.endswith(".json"):
            path.write_text("{}")
        else:
            (write_safetensors if name.endswith("safetensors") else write_torch)(path)
    assert find_problem(str(folder), 2) == ""


def test_kind_of_file_that_all_older_checkpoints_have_is_not_missing(tmp_path: Path) -> None:
    def save(step: int, *names: str) -> str:
        (tmp_path / f"step-{step}").mkdir()
        for name in names:
            write_torch(tmp_path / f"step-{step}" / name)
        return str(tmp_path / f"step-{step}")

    whole = ("model.pt", "optimizer.pt", "rank-0.pt", "rank-1.pt")
    lacks = "it has no optimizer.pt, and step-8 has one"
    assert find_problem(save(8, *whole)) == ""
    assert find_problem(save(9, "model.pt")) == lacks
    save(100, *whole, "of-another-run.pt")  # a newer one
    assert find_problem(save(10, "model.pt", "optimizer.pt", "rank-0.pt")) == ""
    assert find_problem(save(11, "model.pt")) == lacks
    assert find_problem(save(12, "model.pt", "optimizer.pt", "ema.pt", "rank-0.pt")) == ""


def test_optimizer_of_a_trainer_that_older_checkpoints_have_is_not_missing(tmp_path: Path, folder: Path) -> None:
    newer = write_trainer_checkpoint(tmp_path / "checkpoint-12", ranks=1)
    assert find_problem(str(newer), 1) == ""
    (newer / "optimizer.pt").unlink()
    assert find_problem(str(newer), 1) == "it has no optimizer.pt, and checkpoint-7 has one"


@pytest.mark.parametrize("content", [b"", b"\x80", b"\xff" * 100], ids=["empty", "cut", "noise"])
def test_file_that_is_no_checkpoint_is_not_complete(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(content)
    assert find_problem(str(path))
    assert find_problem(str(tmp_path / "missing"))


def test_entry_beyond_the_end_of_an_archive_is_found(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write_torch(path)
    with zipfile.ZipFile(path) as archive:
        start, data = archive.start_dir, path.read_bytes()
    path.write_bytes(data[: start - 2000] + data[start:])  # the end is there, and a part of the last entry is not
    assert zipfile.is_zipfile(path)
    assert find_problem(str(path))
