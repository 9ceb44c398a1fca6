"""Runs with checkpoint tiers on node-local disks and at a URL."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from clustertrain import clock, settings
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.storage import RemoteFolder
from clustertrain.checkpoint.offline import inspect
from clustertrain.run.run_dir import RunDir
from tests.ranks.rank_pool import Ranks, digest, make_run, touch_stop_at, write_plan

pytestmark = pytest.mark.ranks


def make_run_with_tiers(folder: Path, ranks: int, **tiers: Any) -> RunDir:
    run = make_run(folder, "fsdp", ranks, steps=6, every=2, keep=2)
    table = "".join(f"{k} = {v!r}\n" for k, v in tiers.items())
    text = run.spec.read_text()
    assert "[recipe.checkpoint]\n" in text
    run.spec.write_text(text.replace("[recipe.checkpoint]\n", f"[recipe.checkpoint]\n{table}"))
    return run


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the undisturbed run."""
    run = make_run(tmp_path_factory.mktemp("plain") / "run", "fsdp", 2, steps=6, every=2, keep=2)
    Ranks(run, 2).expect(0)
    return digest(run)


def fault_at(point: str, rank: int, nth: int, fault: str) -> None:
    """Setup: inject a fault as described in :mod:`clustertrain.checkpoint.core.fault_points`."""
    os.environ[settings.FAULT_AT] = f"{point}:{rank}:{nth}:{fault}"


def test_killed_run_reads_local_disk_and_repairs_damage(tmp_path: Path, expected: str) -> None:
    run = make_run_with_tiers(tmp_path / "run", 2, local=f"{tmp_path}/disk")
    first = Ranks(run, 2, 1, setup=fault_at, args=("before_staging", 1, 3, "KILL"))
    assert first.wait()[1] == -signal.SIGKILL
    local_disk = tmp_path / "disk" / "run"
    (damaged,) = local_disk.glob("step-00000004-1-*")
    shutil.copytree(local_disk, tmp_path / "copy")
    with (damaged / "rank-1.bin").open("r+b") as file:
        file.write(b"\xff" * 64)
    second = Ranks(run, 2, 2).expect(0)
    (restored,) = second.events("restored")
    total = sum(index.read_manifest(inspect.find_checkpoint(run.checkpoints, 4)).files.values())
    assert (restored["step"], restored["skipped"]) == (4, [])
    assert 0 < restored["from_local"] < total
    assert "rank-1.bin: checksum of bytes" in second.logs()
    assert digest(run) == expected
    assert not local_disk.exists()  # removed because the run has completed


def test_killed_writer_and_missing_disk_cost_nothing(tmp_path: Path, expected: str) -> None:
    run = make_run_with_tiers(tmp_path / "run", 2, local="$OWN_DISK/x")
    first = Ranks(run, 2, 1, setup=local_disk_on_rank_0, args=(str(tmp_path / "disk"),)).expect(0)
    assert "$OWN_DISK/x: $OWN_DISK is not set here; checkpoints of this node go straight" in first.logs()
    assert [c["step"] for c in first.events("checkpoint")] == [2, 4, 6]
    assert digest(run) == expected


def local_disk_on_rank_0(folder: str) -> None:
    """Setup: only rank 0 has a local disk; its writer process is killed while it copies to the shared tier."""
    fault_at("during_copy_to_shared", 0, 2, "KILL")
    if os.environ["RANK"] == "0":
        os.environ["OWN_DISK"] = folder


def test_run_resumes_from_copies_on_other_number_of_ranks(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "plain", "fsdp", 4, steps=6, every=2)
    expected_losses = Ranks(plain, 4).expect(0).losses()
    run = make_run_with_tiers(tmp_path / "run", 4, remote=f"file://{tmp_path}/store", remote_keep=1)
    remote_folder = RemoteFolder(f"file://{tmp_path}/store/run")
    # A stopped run does not wait for copies; the next attempt makes them.
    Ranks(run, 4, 1, setup=touch_stop_at, args=(0,)).expect(0)
    stopped_at = inspect.list_checkpoints(run.checkpoints)[-1]["step"]
    Ranks(run, 4, 2, setup=stop_when_copied, args=(str(remote_folder / f"step-{stopped_at:08d}"),)).expect(0)
    shutil.rmtree(run.checkpoints)

    write_plan(run, "ddp", 2)
    third = Ranks(run, 2, 3).expect(0)
    (restored,) = third.events("restored")
    assert restored["path"] == str(index.step_folder(remote_folder, restored["step"]))
    assert stopped_at <= restored["step"] < 6
    for step in range(restored["step"] + 1, 7):
        assert third.losses()[step][0] == pytest.approx(expected_losses[step][0], abs=1e-5)
    assert [p.name for p in index.list_checkpoint_folders(remote_folder)] == ["step-00000006"]
    assert inspect.find_damage(inspect.find_checkpoint(remote_folder)) == []
    assert inspect.digest(inspect.find_checkpoint(remote_folder)) == digest(run)
    assert third.events("copied")[-1]["step"] == 6


def stop_when_copied(url: str) -> None:
    """Setup: request a stop when the checkpoint at ``url`` exists."""
    from clustertrain.train.session.session import Session

    original = Session.log

    def log(self: Session, **scalars: Any) -> None:
        original(self, **scalars)
        if self.rank == 0:
            assert clock.wait_until(lambda: index.has_commit_marker(RemoteFolder(url)), 60.0)
            Path(os.environ["CLUSTERTRAIN_RANK_DIR"], "stop").touch()

    Session.log = log  # type: ignore[method-assign]


def test_permanently_failing_store_does_not_fail_run(tmp_path: Path, expected: str) -> None:
    (tmp_path / "store").write_text("a file, not a folder")
    run = make_run_with_tiers(tmp_path / "run", 2, remote=f"file://{tmp_path}/store")
    ranks = Ranks(run, 2, 1, setup=short_wait_for_copies).expect(0)
    assert [r["ending"] for r in ranks.results()] == ["completed"] * 2
    failures = ranks.events("copy_failed")
    assert str(tmp_path / "store") in failures[0]["reason"]
    # Usually the last event, but a copy in progress may fail after it.
    assert any(f["reason"].startswith("the run did not wait for it any longer") for f in failures)
    assert digest(run) == expected
    # When the store works again, the next attempt copies the missing checkpoints.
    (tmp_path / "store").unlink()
    Ranks(run, 2, 2).expect(0)
    remote_folder = RemoteFolder(f"file://{tmp_path}/store/run")
    assert [p.name for p in index.list_checkpoint_folders(remote_folder)] == ["step-00000004", "step-00000006"]
    assert inspect.digest(inspect.find_checkpoint(remote_folder)) == expected


def short_wait_for_copies() -> None:
    """Setup: limit the wait for failing copies at the end of a run to half a second."""
    from clustertrain.checkpoint.save import pending_saves

    pending_saves.COPY_FAILURE_TIMEOUT_S = 0.5
