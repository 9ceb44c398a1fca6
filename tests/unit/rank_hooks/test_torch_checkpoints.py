"""Checkpoints of ``torch.distributed.checkpoint``: which calls are recorded, and with which step."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import state_dict as torch_state
from torch.distributed.checkpoint import state_dict_loader as loader
from torch.distributed.checkpoint import state_dict_saver as saver

from clustertrain.rank_hooks.clustertrain_hooks import calls, heartbeat, torch_checkpoints, torch_steps
from clustertrain.rank_hooks.clustertrain_hooks.checkpoints import find_step, list_saved
from clustertrain.rank_hooks.clustertrain_hooks.progress import Progress
from clustertrain.rank_hooks.clustertrain_hooks.rank import Rank

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is:UserWarning", "ignore:Detected an existing")


def build_rank(folder: Path, attempt: int = 1) -> Rank:
    return Rank(rank=0, world_size=1, attempt=attempt, run_dir=str(folder / "run"), rank_dir=str(folder))


def read_events(folder: Path, attempt: int = 1) -> list[dict[str, Any]]:
    path = folder / "run" / "attempts" / str(attempt) / "events" / "hooks-rank-0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Progress:
    """The progress of a program whose calls of torch are hooked, after three steps."""
    for module, names in ((saver, ("save", "async_save")), (loader, ("load",)), (torch_state, ("_init_optim_state",))):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))  # restores it after the test
    progress = Progress(build_rank(tmp_path))
    for module in (calls, torch_steps):
        monkeypatch.setattr(module, "get_progress", lambda: progress)
    torch_checkpoints.install_save(saver)
    torch_checkpoints.install_load(loader)
    torch_steps.install_initialization(torch_state)
    for step in (1, 2, 3):
        progress.end_step(step)
    return progress


STATE = {"w": torch.ones(4)}


def test_saved_folder_is_recorded_with_the_step(tmp_path: Path, progress: Progress) -> None:
    saver.save(STATE, checkpoint_id=tmp_path / "a")
    progress.end_step(4)
    saver.save(STATE, storage_writer=FileSystemWriter(tmp_path / "b"))
    later = build_rank(tmp_path, attempt=2)
    assert list_saved(later) == [str(tmp_path / "b"), str(tmp_path / "a")]
    assert [find_step(later, str(tmp_path / name)) for name in ("a", "b", "c")] == [3, 4, 0]


def test_what_a_framework_saves_itself_is_not_recorded(tmp_path: Path, progress: Progress) -> None:
    outer = SimpleNamespace(save_state=lambda folder: saver.save(STATE, checkpoint_id=folder / "model"))
    calls.hook(outer, "save_state", lambda result, began, folder: progress.record_checkpoint(str(folder), 0.0))
    outer.save_state(tmp_path / "a")
    progress.framework = "transformers"
    saver.save(STATE, checkpoint_id=tmp_path / "b")
    assert list_saved(build_rank(tmp_path, attempt=2)) == [str(tmp_path / "a")]


def test_failed_save_is_not_recorded(tmp_path: Path, progress: Progress) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):  # the hook works after the first error
        with pytest.raises(CheckpointException):
            saver.save(STATE, checkpoint_id=tmp_path / "file" / "a")
    assert [event["event"] for event in read_events(tmp_path)] == ["first_step"]
    assert progress._heartbeat.phase == heartbeat.CHECKPOINT  # until the next step: the save may still be handled
    saver.save(STATE, checkpoint_id=tmp_path / "a")
    assert progress._heartbeat.phase == heartbeat.TRAIN
    assert read_events(tmp_path)[-1]["path"] == str(tmp_path / "a")


def test_save_in_the_background_counts_when_it_is_whole(tmp_path: Path, progress: Progress) -> None:
    future = saver.async_save(STATE, checkpoint_id=tmp_path / "a", no_dist=True)
    future.result(60)
    progress.end_step(4)
    event = read_events(tmp_path)[-1]
    assert (event["event"], event["step"], event["path"]) == ("checkpoint", 3, str(tmp_path / "a"))
    assert 0 <= event["stall_s"] <= event["save_s"]
    assert len(read_events(tmp_path)) == 2  # and once


def test_save_counts_as_soon_as_its_future_is_done(tmp_path: Path, progress: Progress) -> None:
    """Who waits for a future can go on before its callbacks have run."""

    class WithoutCallbacks(Future[None]):
        def add_done_callback(self, fn: Any) -> None:
            pass

    future = WithoutCallbacks()
    module = ModuleType("saver")
    module.save, module.async_save = saver.save, lambda *_, **__: future  # type: ignore[attr-defined]
    torch_checkpoints.install_save(module)
    module.async_save(STATE, checkpoint_id=tmp_path)
    (tmp_path / ".metadata").touch()
    progress.end_step(4)
    assert all(event["event"] != "checkpoint" for event in read_events(tmp_path))
    future.set_result(None)
    progress.end_step(5)
    event = read_events(tmp_path)[-1]
    assert (event["event"], event["step"], event["path"]) == ("checkpoint", 3, str(tmp_path))
    assert 0 <= event["stall_s"] <= event["save_s"]


def test_save_that_replaces_a_checkpoint_does_not_count_until_its_end(
    tmp_path: Path, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch leaves the old metadata there until then."""
    saver.save(STATE, checkpoint_id=tmp_path / "old")
    saver.save(STATE, checkpoint_id=tmp_path / "latest")
    later = build_rank(tmp_path, attempt=2)
    with monkeypatch.context() as patch, pytest.raises(CheckpointException):
        patch.setattr(FileSystemWriter, "finish", lambda *_, **__: 1 / 0)  # as a kill before it
        saver.save(STATE, checkpoint_id=tmp_path / "latest")
    assert list_saved(later) == [str(tmp_path / "old")]
    saver.save(STATE, checkpoint_id=tmp_path / "latest")
    assert list_saved(later) == [str(tmp_path / "latest"), str(tmp_path / "old")]


def test_resumed_program_continues_the_steps_of_its_checkpoint(
    tmp_path: Path, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGD counts no steps, and torch steps once to fill the state of the optimizer that it loads."""
    saver.save(STATE, checkpoint_id=tmp_path / "a")
    second = Progress(build_rank(tmp_path, attempt=2))
    monkeypatch.setattr(torch_steps, "get_progress", lambda: second)
    monkeypatch.setattr(calls, "get_progress", lambda: second)
    optimizers: list[Any] = []
    hook = ModuleType("optimizer")
    hook.register_optimizer_step_post_hook = optimizers.append  # type: ignore[attr-defined]
    torch_steps.install(hook)
    (count,) = optimizers
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_step_post_hook(count)
    torch_state.get_optimizer_state_dict(model, optimizer)
    loader.load({"w": torch.zeros(4)}, storage_reader=FileSystemReader(tmp_path / "a"))
    assert second.step == 0
    optimizer.step()
    assert second.step == 4
    restored, first = read_events(tmp_path, attempt=2)
    assert (restored["step"], restored["path"], first["step"]) == (3, str(tmp_path / "a"), 4)
