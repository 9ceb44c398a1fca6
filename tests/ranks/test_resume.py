"""A run that was stopped and resumed is bitwise equal to an uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertrain import clock
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.offline import inspect
from clustertrain.plan.layout import Layout
from tests.ranks.rank_pool import Ranks, digest, layout_of, make_run, touch_stop_at, write_plan

pytestmark = pytest.mark.ranks

STOP_AT = 4  # a stop requested in step 4 takes effect after the following step
STOPPED_AT = STOP_AT + 2


def uninterrupted(folder: Path, strategy: str, ranks: int, **kw: Any) -> Ranks:
    return Ranks(make_run(folder / "whole", strategy, ranks, **kw), ranks).expect(0)


@pytest.mark.parametrize(
    ("strategy", "ranks", "kw"),
    [
        ("ddp", 4, {}),
        ("zero1", 4, {}),
        ("fsdp", 4, {}),
        ("ddp", 8, {"model": {"dim": 64, "layers": 4}}),
        ("fsdp", 8, {}),
        ("ddp", 4, {"micro_batch": 4, "model": {"dropout": 0.2}}),
        ("ddp", 4, {"precision": "bf16"}),
        ("fsdp", 4, {"precision": "bf16"}),
        ("fsdp", 4, {"data": {"workers": 1}, "model": {"dropout": 0.2, "tie_embeddings": True}}),
    ],
)
def test_stopped_and_resumed_equals_uninterrupted(tmp_path: Path, strategy: str, ranks: int, kw: Any) -> None:
    reference = uninterrupted(tmp_path, strategy, ranks, **kw)
    run = make_run(tmp_path / "parts", strategy, ranks, **kw)
    first = Ranks(run, ranks, 1, setup=touch_stop_at, args=(STOP_AT,)).expect(0)
    assert {(r["ending"], r["step"], r["committed_step"]) for r in first.results()} == {
        ("stopped", STOPPED_AT, STOPPED_AT)
    }
    assert len(first.results()) == ranks
    second = Ranks(run, ranks, 2).expect(0)
    assert {(r["ending"], r["step"], r["committed_step"]) for r in second.results()} == {("completed", 8, 8)}
    assert second.events("restored")[0]["step"] == STOPPED_AT
    assert [e["step"] for e in second.events("first_step")] == [STOPPED_AT + 1]
    assert {**first.losses(), **second.losses()} == reference.losses()
    assert list(reference.losses()) == list(range(1, 9))
    assert digest(run) == digest(reference.run)
    # The checkpoint of the stop was removed after the next one was committed.
    assert [c["step"] for c in inspect.list_checkpoints(run.checkpoints)] == [4, 8]


def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    reference = uninterrupted(tmp_path, "ddp", 4)
    run = make_run(tmp_path / "parts", "ddp", 4)
    first = Ranks(run, 4, 1, setup=kill_at, args=(5,))
    assert all(code != 0 for code in first.wait())
    # The writer processes outlive their ranks and complete what they have received.
    assert clock.wait_until(lambda: index.has_commit_marker(index.step_folder(run.checkpoints, 4)), 60.0)
    second = Ranks(run, 4, 2).expect(0)
    assert second.events("restored")[0]["step"] == 4
    assert digest(run) == digest(reference.run)
    assert {**first.losses(), **second.losses()} == reference.losses()


def kill_at(step: int) -> None:
    """Setup: kill all ranks with SIGKILL in step ``step``."""
    import os
    import signal

    from clustertrain.train.session.session import Session

    def train_step(self: Session, *args: Any, **kw: Any) -> Any:
        if self.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args, **kw)

    original = Session.train_step
    Session.train_step = train_step  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("zero1", 3), ("ddp", 4)),
        (("zero1", 2), ("fsdp", 2)),
        (("fsdp", 2), ("zero1", 3)),
        ((Layout(pp=2, schedule="zbv", virtual_stages=2), 2), ("fsdp", 2)),
        (("ddp", 2), (Layout(pp=2, schedule="1f1b", strategy="fsdp", dp_shard=2), 4)),
    ],
    ids=lambda value: f"{layout_of(*value).describe()} on {value[1]}",
)
def test_another_layout_restores_the_same_tensors(tmp_path: Path, old: Any, new: Any) -> None:
    tied = {"tie_embeddings": True}  # two pipeline stages hold the table
    run = make_run(tmp_path / "run", *old, steps=4, every=2, global_batch=24, model=tied)
    Ranks(run, old[1], 1).expect(0)
    before = digest(run, 4)
    write_plan(run, *new, global_batch=24)
    saved_again = Ranks(run, new[1], 2, setup=save_restored_state).expect(0)
    assert saved_again.events("restored")[0]["step"] == 4
    # Saved by the other layout as step 5: the logical tensors are the same.
    rows = {r["step"]: r for r in inspect.list_checkpoints(run.checkpoints)}
    assert rows[5]["world_size"] == new[1]
    assert rows[5]["layout"]["strategy"] == layout_of(*new).strategy
    assert digest(run, 5) == before


def save_restored_state() -> None:
    """Setup: save the restored state again, as the next step."""
    from clustertrain.train.session.checkpointing import SessionCheckpointer

    original = SessionCheckpointer.restore

    def restore(self: SessionCheckpointer, state: Any, seed: int) -> int:
        step = original(self, state, seed)
        self.save(step + 1, state, "end", {})
        return step

    SessionCheckpointer.restore = restore  # type: ignore[method-assign]


def test_completed_run_does_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "ddp", 2, steps=3)
    Ranks(run, 2, 1).expect(0)
    before = digest(run)
    resumed = Ranks(run, 2, 2).expect(0)
    assert [r["ending"] for r in resumed.results()] == ["completed"] * 2
    assert resumed.losses() == {}
    assert digest(run) == before
