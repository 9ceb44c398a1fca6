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

from clustertrain import settings
from clustertrain.checkpoint import offline
from clustertrain.run.folder import RunDir

pytestmark = pytest.mark.ranks


def fault_at(point: str, rank: int, nth: int, what: str) -> None:
    """Setup: see :mod:`clustertrain.checkpoint.points`."""
    os.environ[settings.FAULT_AT] = f"{point}:{rank}:{nth}:{what}"


# The second save is that of step 6.
@pytest.mark.parametrize(
    ("point", "rank", "nth"),
    [
        ("before staging", 1, 2),
        ("staged", 0, 2),
        ("staged", 1, 2),
    ],
)
def test_a_rank_killed_during_a_save_leaves_the_older_checkpoint_in_force(
    tmp_path: Path, point: str, rank: int, nth: int
) -> None:
    run = make_run(tmp_path / "run", "fsdp", 2, steps=6, every=3)
    first = Ranks(run, 2, 1, setup=fault_at, args=(point, rank, nth, "KILL"))
    assert first.wait()[rank] == -signal.SIGKILL, first.logs()
    _goes_on(run, 3)


# Of a process that writes for step 6, which is killed again when another one has taken over.
@pytest.mark.parametrize(
    ("point", "rank", "nth", "committed"),
    [
        ("while writing", 1, 5, 3),
        ("written", 1, 1, 3),
        ("before the marker", 0, 1, 3),
    ],
)
def test_a_writer_killed_twice_ends_all_ranks_and_leaves_the_older_checkpoint(
    tmp_path: Path, point: str, rank: int, nth: int, committed: int
) -> None:
    run = make_run(tmp_path / "run", "fsdp", 2, steps=6, every=3)
    ranks = Ranks(run, 2, 1, setup=fault_from, args=(6, point, rank, nth)).expect(1)
    for result in ranks.results():
        assert (result["ending"], result["kind"], result["committed_step"]) == ("failed", "storage", 3)
        assert "step 6 was not saved" in result["error"]["message"]
        assert "was killed by SIGKILL, twice" in result["error"]["message"]
    _goes_on(run, committed)


def fault_from(step: int, point: str, rank: int, nth: int) -> None:
    """Setup: another process writes from ``step`` on, and that one meets the fault."""
    from clustertrain.checkpoint.manager import CheckpointManager

    save = CheckpointManager.save

    def with_fault(self: CheckpointManager, at: int, *args: Any, **kw: Any) -> Any:
        if at == step:
            self.settle()
            self._worker.close()
            self._worker = type(self._worker)("raw")  # type: ignore[call-arg]
            fault_at(point, rank, nth, "KILL")
        return save(self, at, *args, **kw)

    CheckpointManager.save = with_fault  # type: ignore[method-assign]


def _goes_on(run: RunDir, step: int) -> None:
    """From the checkpoint of ``step``, and to the end."""
    committed = [c["step"] for c in offline.list_checkpoints(run.checkpoints) if c["committed"]]
    assert committed == [step]
    second = Ranks(run, 2, 2).expect(0)
    assert second.events("restored")[0]["step"] == step
    assert second.events("restored")[0]["skipped"] == []
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step-00000003", "step-00000006"]
    assert all(c["verified"] for c in offline.list_checkpoints(run.checkpoints, verify=True))


def no_writes(rank: int, nth: int, what: str) -> None:
    fault_at("before writing", rank, nth, what)


@pytest.mark.parametrize(("number", "code", "kind"), [(errno.ENOSPC, 78, "environment"), (errno.EIO, 1, "storage")])
def test_a_disk_that_fails_one_rank_fails_all_together(tmp_path: Path, number: int, code: int, kind: str) -> None:
    run = make_run(tmp_path / "run", "ddp", 3, global_batch=12, steps=8, every=4)
    ranks = Ranks(run, 3, 1, setup=no_writes, args=(1, 2, errno.errorcode[number])).expect(code)
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
    assert {(r["ending"], r["exit_code"]) for r in results} == {("failed", 1)}
    assert max(r["committed_step"] or 0 for r in results) == 4


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
