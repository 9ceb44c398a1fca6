"""Two attempts of one run at once: the older one must not change the newer one's checkpoints."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertrain import clock, settings
from clustertrain.checkpoint.core import fault_points, retention
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.retention import RetentionPolicy
from clustertrain.checkpoint.format import folders
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.fence import AttemptSuperseded, Fence
from clustertrain.checkpoint.load import rollback
from clustertrain.checkpoint.load.rollback import RollbackTarget
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager
from clustertrain.checkpoint.save import remote
from clustertrain.checkpoint.save.remote import Uploader
from clustertrain.checkpoint.save.writer_jobs import UploadJob
from clustertrain.run.run_dir import RunDir
from tests.unit.checkpoint.saved import state_of


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "run")
    run_dir.attempt(1).path.mkdir(parents=True)
    return run_dir


def manager_of(run: RunDir, attempt: int, *, async_save: bool = False, keep: int = 100) -> CheckpointManager:
    return CheckpointManager(
        run.checkpoints,
        Ranks(),
        CheckpointConfig(
            attempt=str(attempt),
            layout={},
            policy=RetentionPolicy(keep=keep),
            async_save=async_save,
            fence=Fence(run=str(run.path), attempt=attempt),
        ),
    )


def take_over(run: RunDir, attempt: int = 2) -> CheckpointManager:
    """Let a newer attempt claim the run and restore."""
    run.attempt(attempt).path.mkdir()
    newer = manager_of(run, attempt)
    newer.restore(state_of(0.0))
    return newer


def at(monkeypatch: pytest.MonkeyPatch, point: str, act: Callable[[], object]) -> None:
    """Call ``act`` once, when a save reaches ``point``."""
    pending = [act]
    monkeypatch.setattr(
        fault_points, "fault_point", lambda name, _rank: pending.pop()() if name == point and pending else None
    )


def names(run: RunDir) -> list[str]:
    return sorted(p.name for p in run.checkpoints.iterdir())


def markers(run: RunDir) -> dict[int, str | None]:
    return {index.parse_step(p) or 0: retention.read_marker(p) for p in index.list_checkpoint_folders(run.checkpoints)}


def test_superseded_attempt_commits_nothing(run: RunDir) -> None:
    old = manager_of(run, 1)
    old.restore(state_of(0.0))
    assert old.save(5, state_of(1.0))
    newer = take_over(run)
    with pytest.raises(AttemptSuperseded, match=r"step 10 was not saved: .*taken over by attempt 2"):
        old.save(10, state_of(2.0))
    assert names(run) == ["step-00000005"]
    assert newer.save(10, state_of(3.0)) and names(run) == ["step-00000005", "step-00000010"]


# From the start of a save to just before the rename of its folder.
POINTS = (
    "after_staging",
    "before_write",
    "after_part_done_marker",
    "before_commit_marker",
    "after_commit_marker",
    "before_fence_check",
)


@pytest.mark.parametrize("point", [*POINTS, "after_fence_check"])
def test_claim_at_any_point_stops_the_older_save(run: RunDir, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    old = manager_of(run, 1)
    old.restore(state_of(0.0))
    at(monkeypatch, point, lambda: take_over(run))
    with pytest.raises(AttemptSuperseded, match="taken over by attempt 2"):
        old.save(5, state_of(1.0))
    assert names(run) == []


def test_older_save_does_not_replace_newer_of_same_step(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    old = manager_of(run, 1)
    old.restore(state_of(0.0))
    at(monkeypatch, "after_fence_check", lambda: take_over(run).save(5, state_of(2.0)))
    with pytest.raises(AttemptSuperseded):
        old.save(5, state_of(1.0))
    assert names(run) == ["step-00000005"]
    restored = state_of(0.0)
    assert manager_of(run, 2).restore(restored) and float(restored["weights"][0]) == 2.0


@pytest.mark.long
def test_writer_process_of_superseded_attempt_cannot_commit(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops in the middle of a commit, as on a node that hangs, and continues after a newer attempt has saved."""
    monkeypatch.setenv(settings.FAULT_AT, "before_fence_check:0:1:STOP")
    old = manager_of(run, 1, async_save=True)
    old.restore(state_of(0.0))
    assert old.save(5, state_of(1.0)) is None
    process = old._pending.worker._process  # type: ignore[attr-defined]
    assert process is not None
    stopped = Path(f"/proc/{process.pid}/stat")
    assert clock.wait_until(lambda: stopped.read_text().rsplit(")", 1)[1].split()[0] == "T", 60.0)
    monkeypatch.delenv(settings.FAULT_AT)
    newer = take_over(run)
    assert newer.save(5, state_of(2.0))
    newer_markers = markers(run)
    os.kill(process.pid, signal.SIGCONT)
    with pytest.raises(AttemptSuperseded, match="taken over by attempt 2"):
        old.wait_for_saves()
    old.close()
    assert markers(run) == newer_markers and names(run) == ["step-00000005"]


def test_superseded_attempt_does_not_restore(run: RunDir) -> None:
    newer = take_over(run)
    assert newer.save(5, state_of(2.0))
    staging = folders.staging_folder_for(run.checkpoints, 10, "2", b"abcd")
    folders.create_exclusive(staging)
    with pytest.raises(AttemptSuperseded, match="taken over by attempt 2"):
        manager_of(run, 1).restore(state_of(0.0))
    assert staging.is_dir()


def test_sweep_keeps_staging_folder_of_newer_attempt(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the claim came just after the sweep had looked for one."""
    older, newer = (folders.staging_folder_for(run.checkpoints, 10, n, b"abcd") for n in ("1", "2"))
    for folder in (older, newer):
        run.checkpoints.mkdir(exist_ok=True)
        folders.create_exclusive(folder)
    folders.sweep(run.checkpoints, Fence(run=str(run.path), attempt=1))
    assert newer.is_dir() and not older.exists()


def test_superseded_attempt_prunes_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    old = manager_of(run, 1, keep=1)
    old.restore(state_of(0.0))
    old.save(5, state_of(1.0))
    at(monkeypatch, "during_prune", run.attempt(2).path.mkdir)
    assert old.save(10, state_of(2.0))
    assert names(run) == ["step-00000005", "step-00000010"]


def test_deletion_spares_a_newer_save_of_the_step(run: RunDir) -> None:
    """The deletion was decided before a newer attempt saved the step again."""
    newer = take_over(run)
    newer.save(5, state_of(1.0))
    folder = index.step_folder(run.checkpoints, 5)
    marker = retention.read_marker(folder)
    newer.save(5, state_of(2.0))
    retention.delete_checkpoint(folder, marker)
    assert names(run) == ["step-00000005"]
    retention.delete_checkpoint(folder, retention.read_marker(folder))
    assert names(run) == []


def test_superseded_attempt_cannot_roll_back(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    old = manager_of(run, 1)
    old.restore(state_of(0.0))
    for step in (5, 10):
        old.save(step, state_of(1.0))
    at(monkeypatch, "before_rollback_record", lambda: take_over(run))
    with pytest.raises(AttemptSuperseded, match="taken over by attempt 2"):
        old.roll_back(
            state_of(0.0), RollbackTarget(last_step=10, max_step=5, reason="a spike", excluded={}, max_rollbacks=3)
        )
    assert names(run) == ["step-00000005", "step-00000010"] and rollback.read_records(run.checkpoints) == []


def test_superseded_attempt_commits_no_remote_copy(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = manager_of(run, 1)
    old.restore(state_of(0.0))
    old.save(5, state_of(1.0))
    at(monkeypatch, "before_remote_commit_marker", run.attempt(2).path.mkdir)
    store = tmp_path / "store"
    store.mkdir()
    outcomes: list[Any] = []
    job = UploadJob(
        url=f"file://{store}",
        root=str(run.checkpoints),
        rank=0,
        world_size=1,
        attempt="1",
        policy=RetentionPolicy(),
        fence=Fence(run=str(run.path), attempt=1),
    )
    uploader = Uploader(job, outcomes.append, lambda: None)
    uploader._run()  # it ends on its own
    assert not (store / "step-00000005" / "COMMITTED").exists() and outcomes == []
    (run.checkpoints / remote.ANNOUNCEMENT_FILE).unlink()
    uploader.announce_end()
    assert not (run.checkpoints / remote.ANNOUNCEMENT_FILE).exists()
