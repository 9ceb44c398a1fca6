"""What goes wrong on one rank ends cleanly on all, and never costs an older checkpoint."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import Ranks, digest, make_run

from clustertrain.checkpoint import offline

pytestmark = pytest.mark.ranks


def kill_at_change(step: int, rank: int, nth: int) -> None:
    """Setup: SIGKILL to ``rank`` at its ``nth`` change to the disk while it saves ``step``."""
    from clustertrain.checkpoint import writer
    from clustertrain.checkpoint.manager import CheckpointManager

    if int(os.environ["RANK"]) != rank:
        return
    count = {"n": -1}
    save = CheckpointManager.save

    def counting_save(self: CheckpointManager, at: int, *args: Any) -> Any:
        count["n"] = 0 if at == step else -1
        return save(self, at, *args)

    def guard(target: Any, name: str) -> None:
        original = getattr(target, name)

        def call(*args: Any, **kw: Any) -> Any:
            if count["n"] >= 0:
                if count["n"] == nth:
                    os.kill(os.getpid(), signal.SIGKILL)
                count["n"] += 1
            return original(*args, **kw)

        setattr(target, name, call)

    CheckpointManager.save = counting_save  # type: ignore[method-assign]
    guard(writer, "_write_all")
    for name in ("mkdir", "fsync", "rename", "replace"):
        guard(os, name)


# Rank 0: 0 makes the folder, then tensors and fsync of its file, then index, marker and the renames.
@pytest.mark.parametrize(("rank", "nth"), [(1, 0), (1, 5), (0, 0), (0, 3), (0, "last-4"), (0, "last-2"), (0, "last-1")])
def test_kill_9_during_a_save_leaves_the_older_checkpoint_in_force(tmp_path: Path, rank: int, nth: int | str) -> None:
    run = make_run(tmp_path / "run", "fsdp", 2, steps=6, every=3)
    if isinstance(nth, str):
        nth = _changes_of_rank_0(tmp_path) - int(nth.removeprefix("last-"))
    first = Ranks(run, 2, 1, setup=kill_at_change, args=(6, rank, nth))
    assert first.wait()[rank] == -signal.SIGKILL, first.logs()
    committed = [c["step"] for c in offline.list_checkpoints(run.checkpoints) if c["committed"]]
    assert committed[0] == 3
    second = Ranks(run, 2, 2).expect(0)
    assert second.events("restored")[0]["step"] == committed[-1]
    assert second.events("restored")[0]["skipped"] == []
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step-00000003", "step-00000006"]
    assert all(c["verified"] for c in offline.list_checkpoints(run.checkpoints, verify=True))


_known: list[int] = []


def _changes_of_rank_0(tmp_path: Path) -> int:
    """How many changes to the disk rank 0 makes in one save."""
    if not _known:
        run = make_run(tmp_path / "counted", "fsdp", 2, steps=6, every=6)
        ranks = Ranks(run, 2, 1, setup=count_changes).expect(0)
        _known.append(int((ranks.rank_dir / "changes").read_text()))
    return _known[0]


def count_changes() -> None:
    """Setup: leave in a file how many changes rank 0's save makes."""
    from clustertrain.checkpoint import writer
    from clustertrain.checkpoint.manager import CheckpointManager

    if os.environ["RANK"] != "0":
        return
    done: list[str] = []
    save = CheckpointManager.save

    def counting_save(self: CheckpointManager, *args: Any) -> Any:
        done.clear()
        saved = save(self, *args)
        Path(os.environ["CLUSTERTRAIN_RANK_DIR"], "changes").write_text(str(len(done)))
        return saved

    def guard(target: Any, name: str) -> None:
        original = getattr(target, name)

        def call(*args: Any, **kw: Any) -> Any:
            done.append(name)
            return original(*args, **kw)

        setattr(target, name, call)

    CheckpointManager.save = counting_save  # type: ignore[method-assign]
    guard(writer, "_write_all")
    for name in ("mkdir", "fsync", "rename", "replace"):
        guard(os, name)


def no_writes_from(step: int, number: int) -> None:
    """Setup: from the save of ``step`` on rank 1 fails to write, with errno ``number``."""
    from clustertrain.checkpoint import writer
    from clustertrain.checkpoint.manager import CheckpointManager

    if os.environ["RANK"] != "1":
        return
    save = CheckpointManager.save

    def refuse(fd: int, data: memoryview) -> None:
        raise OSError(number, os.strerror(number))

    def limited_save(self: CheckpointManager, at: int, *args: Any) -> Any:
        if at == step:
            writer._write_all = refuse
        return save(self, at, *args)

    CheckpointManager.save = limited_save  # type: ignore[method-assign]


@pytest.mark.parametrize(("number", "code", "kind"), [(errno.ENOSPC, 78, "environment"), (errno.EIO, 1, "storage")])
def test_a_disk_that_fails_one_rank_fails_all_together(tmp_path: Path, number: int, code: int, kind: str) -> None:
    run = make_run(tmp_path / "run", "ddp", 3, global_batch=12, steps=8, every=4)
    ranks = Ranks(run, 3, 1, setup=no_writes_from, args=(8, number)).expect(code)
    for result in ranks.results():
        assert result["ending"] == "failed"
        assert result["kind"] == kind
        assert result["committed_step"] == 4
        assert result["error"]["type"] == "StorageError"
        assert "step 8 was not saved: rank 1" in result["error"]["message"]
    assert [p.name for p in run.checkpoints.iterdir()] == ["step-00000004"]
    offline.verify(offline.find(run.checkpoints))
    Ranks(run, 3, 2).expect(0)


@pytest.mark.parametrize("how", ["flipped", "truncated"])
def test_damage_falls_back_to_the_older_checkpoint_and_says_so(tmp_path: Path, how: str) -> None:
    run = make_run(tmp_path / "run", "fsdp", 4)
    Ranks(run, 4, 1).expect(0)
    whole = digest(run)
    # Only rank 2 reads this file; the others must follow it back.
    victim = run.checkpoints / "step-00000008" / "rank-2.bin"
    if how == "flipped":
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 16
        victim.write_bytes(data)
    else:
        os.truncate(victim, 100)
    second = Ranks(run, 4, 2).expect(0)
    restored = second.events("restored")[0]
    assert restored["step"] == 4
    assert [s["step"] for s in restored["skipped"]] == [8]
    assert "rank-2.bin" in restored["skipped"][0]["why"]
    assert digest(run) == whole
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step-00000004", "step-00000008"]


def no_reads(number: int) -> None:
    """Setup: rank 1 fails to read shards, with errno ``number``."""
    from clustertrain.checkpoint import storage

    storage.PATIENCE_S = 0.2
    if os.environ["RANK"] == "1":

        def refuse(*args: Any) -> int:
            raise OSError(number, os.strerror(number))

        os.preadv = refuse


def test_a_checkpoint_that_one_rank_cannot_read_stays_in_force(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "fsdp", 2)
    Ranks(run, 2, 1).expect(0)
    second = Ranks(run, 2, 2, setup=no_reads, args=(errno.ESTALE,)).expect(1)
    assert [(r["ending"], r["kind"]) for r in second.results()] == [("failed", "storage")] * 2
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step-00000004", "step-00000008"]
    third = Ranks(run, 2, 3).expect(0)
    assert [(e["step"], e["skipped"]) for e in third.events("restored")] == [(8, [])]


def raise_at(step: int, rank: int, kind: str) -> None:
    """Setup: an exception in the training loop of one rank."""
    from clustertrain.train.session import Session

    errors: dict[str, BaseException] = {"value": ValueError("bad value"), "memory": torch.OutOfMemoryError("no room")}

    def log(self: Session, **scalars: Any) -> None:
        if self.step == step and self.rank == rank:
            raise errors[kind]

    Session.log = log  # type: ignore[method-assign]


@pytest.mark.parametrize(("kind", "said"), [("value", "user_error"), ("memory", "out_of_memory")])
def test_an_exception_on_one_rank_is_told_apart_from_what_it_causes(tmp_path: Path, kind: str, said: str) -> None:
    run = make_run(tmp_path / "run", "ddp", 2)
    ranks = Ranks(run, 2, setup=raise_at, args=(5, 1, kind)).expect(1)
    results = ranks.results()
    assert [r["kind"] for r in results] == ["communication", said]
    assert results[1]["error"]["traceback"].startswith("Traceback")
    assert {(r["ending"], r["exit_code"], r["committed_step"]) for r in results} == {("failed", 1, 4)}


def test_cuda_without_a_gpu_is_said_clearly(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    run = make_run(tmp_path / "run", "single", 1)
    ranks = Ranks(run, 1, setup=want_cuda).expect(78)
    result = ranks.results()[0]
    assert (result["kind"], result["exit_code"]) == ("environment", 78)
    assert "cuda was asked for" in result["error"]["message"]
    assert "fix:" in ranks.logs()


def want_cuda() -> None:
    os.environ["CLUSTERTRAIN_DEVICE"] = "cuda"


def test_a_plan_for_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "ddp", 4)
    ranks = Ranks(run, 2).expect(78)
    assert "the plan is for 4 ranks and 2 were started" in ranks.results()[0]["error"]["message"]
