"""Tests of which checkpoints retention keeps: the policy, and deletion on disk."""

from __future__ import annotations

import itertools
import math
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clustertrain.checkpoint.core import retention
from clustertrain.checkpoint.core.retention import CheckpointInfo, RetentionPolicy, select_for_deletion
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format import storage_errors
from clustertrain.checkpoint.format.manifest import CheckpointMetric, DamagedCheckpoint, Manifest
from clustertrain.checkpoint.format.storage_errors import StorageError


def kept_steps(checkpoints: list[CheckpointInfo], policy: RetentionPolicy, newest_good: int | None = None) -> list[int]:
    deleted_steps = select_for_deletion(checkpoints, policy, newest_good)
    return [c.step for c in checkpoints if c.step not in deleted_steps]


def regular_checkpoints(*steps: int) -> list[CheckpointInfo]:
    return [CheckpointInfo(s) for s in steps]


def checkpoints_with_metrics(**metrics: float | None) -> list[CheckpointInfo]:
    return [CheckpointInfo(int(name[1:]), metric=value) for name, value in metrics.items()]


def test_newest_are_kept_and_oldest_deleted_first() -> None:
    assert kept_steps(regular_checkpoints(1, 2, 3, 4, 5), RetentionPolicy(keep=2)) == [4, 5]
    assert select_for_deletion(regular_checkpoints(3, 1, 5, 2, 4), RetentionPolicy(keep=2), None) == [1, 2, 3]


def test_milestones_are_kept_in_addition_to_newest() -> None:
    assert kept_steps(regular_checkpoints(50, 100, 150, 200, 250, 300), RetentionPolicy(keep=2, keep_every=100)) == [
        100,
        200,
        250,
        300,
    ]


def test_newest_valid_is_kept_below_damaged_ones() -> None:
    assert kept_steps(regular_checkpoints(1, 2, 3, 4, 5), RetentionPolicy(keep=2), newest_good=2) == [2, 4, 5]


@pytest.mark.parametrize(("mode", "steps"), [("min", [2, 4, 9]), ("max", [1, 6, 9])])
def test_best_by_metric_are_kept(mode: Any, steps: list[int]) -> None:
    checkpoints = checkpoints_with_metrics(s1=5.0, s2=1.0, s3=3.0, s4=2.0, s5=math.nan, s6=4.0, s7=None, s9=3.5)
    assert kept_steps(checkpoints, RetentionPolicy(keep=1, keep_best=2, best="loss", best_mode=mode)) == steps


@pytest.mark.parametrize("mode", ["min", "max"])
def test_newer_is_kept_on_equal_metric(mode: Any) -> None:
    checkpoints = checkpoints_with_metrics(s1=2.0, s2=2.0, s3=2.0, s9=None)
    assert kept_steps(checkpoints, RetentionPolicy(keep=1, keep_best=1, best="loss", best_mode=mode)) == [3, 9]


def test_stop_checkpoint_is_kept_until_next_regular_one() -> None:
    checkpoints = [*regular_checkpoints(10, 20, 30), CheckpointInfo(33, "stop")]
    assert kept_steps(checkpoints, RetentionPolicy(keep=2)) == [20, 30, 33]
    assert kept_steps([*checkpoints, CheckpointInfo(40)], RetentionPolicy(keep=2)) == [30, 40]
    assert kept_steps([*checkpoints, CheckpointInfo(40, "end")], RetentionPolicy(keep=2)) == [30, 40]


def test_best_checkpoints_do_not_count_as_newest() -> None:
    policy = RetentionPolicy(keep=2, keep_best=1, best="loss")
    best = [CheckpointInfo(s, "best", metric=100.0 - s) for s in (12, 14, 26, 28)]
    assert kept_steps([*best, *regular_checkpoints(10, 20, 30)], policy) == [28, 20, 30]
    assert kept_steps([*best, *regular_checkpoints(10)], policy) == [28, 10]
    assert kept_steps(best, RetentionPolicy(keep=2)) == [26, 28]
    assert kept_steps([CheckpointInfo(20, "best")], RetentionPolicy(keep=1, keep_every=20), newest_good=None) == [20]


def test_number_of_stop_checkpoints_is_bounded() -> None:
    checkpoints = [CheckpointInfo(10), *(CheckpointInfo(s, "stop") for s in range(11, 20))]
    assert kept_steps(checkpoints, RetentionPolicy(keep=2)) == [10, 18, 19]


def test_stop_checkpoint_is_kept_for_other_reasons() -> None:
    stop = CheckpointInfo(20, "stop", metric=0.5)
    assert kept_steps([CheckpointInfo(10), stop, CheckpointInfo(30)], RetentionPolicy(keep=1, keep_every=20)) == [
        20,
        30,
    ]
    assert kept_steps(
        [CheckpointInfo(10), stop, CheckpointInfo(30)], RetentionPolicy(keep=1, keep_best=1, best="loss")
    ) == [
        20,
        30,
    ]
    assert kept_steps([CheckpointInfo(10), stop, CheckpointInfo(30)], RetentionPolicy(keep=1), newest_good=20) == [
        20,
        30,
    ]


def draw_case(rng: random.Random) -> tuple[list[CheckpointInfo], RetentionPolicy, int | None]:
    steps = sorted(rng.sample(range(1, 40), rng.randint(0, 12)))
    metrics = [None, math.nan, -math.inf, math.inf, 0.0, 1.0, 1.0, 2.0]
    checkpoints = [
        CheckpointInfo(s, rng.choice(["interval", "interval", "stop", "end"]), rng.choice(metrics)) for s in steps
    ]
    policy = RetentionPolicy(
        keep=rng.randint(1, 4),
        keep_every=rng.choice([0, 1, 5, 7]),
        keep_best=rng.randint(0, 3),
        best="loss",
        best_mode=rng.choice(["min", "max"]),
    )
    return checkpoints, policy, rng.choice([*steps, None])


@pytest.mark.parametrize("seed", range(40))
def test_policy_invariants_on_random_runs(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        checkpoints, policy, newest_good = draw_case(rng)
        kept = set(kept_steps(checkpoints, policy, newest_good))
        steps = [c.step for c in checkpoints]
        regular_steps = [c.step for c in checkpoints if c.reason != "stop"]
        assert newest_good is None or newest_good in kept
        assert not steps or steps[-1] in kept
        if policy.keep_every:
            assert {s for s in steps if s % policy.keep_every == 0} <= kept
        else:
            assert set(regular_steps[-policy.keep :]) <= kept
            older_stops = {
                c.step for c in checkpoints if c.reason == "stop" and regular_steps and c.step < regular_steps[-1]
            }
            best = {c.step for c in checkpoints if c.metric is not None and not math.isnan(c.metric)}
            assert not older_stops & kept - best - {newest_good}
            assert len(kept) <= 2 * policy.keep + policy.keep_best + 1
        deleted_metrics = [c.metric for c in checkpoints if c.step not in kept and c.metric is not None]
        sign = 1 if policy.best_mode == "min" else -1
        for deleted in deleted_metrics:
            if not math.isnan(deleted):
                as_good = [c for c in checkpoints if c.metric is not None and sign * c.metric <= sign * deleted]
                assert len([c for c in as_good if c.step in kept]) >= policy.keep_best
        # A second pass deletes nothing more; otherwise a run would lose a checkpoint per pass.
        remaining = [c for c in checkpoints if c.step in kept]
        assert select_for_deletion(remaining, policy, newest_good) == []


# -- on disk


def commit(root: Path, step: int) -> Path:
    folder = index.step_folder(root, step)
    folder.mkdir(parents=True)
    manifest = Manifest(
        format=index.FORMAT_VERSION,
        torch="",
        step=step,
        world_size=1,
        engine="raw",
        layout={},
        files={},
        tensors=(),
        values={},
    )
    index.write_manifest(folder, manifest)
    return folder


def always_valid(folder: Path) -> bool:
    return True


def list_names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


@pytest.fixture
def manifest_fields(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """Return a dict of manifest fields to override, by step."""
    overrides: dict[int, Any] = {}
    original = retention.read_manifest

    def read(folder: Path) -> Any:
        manifest = original(folder)
        return SimpleNamespace(**{"reason": "interval", "metric": None, **overrides.get(manifest.step, {})})

    monkeypatch.setattr(retention, "read_manifest", read)
    return overrides


def test_reason_and_metric_come_from_manifest(tmp_path: Path, manifest_fields: dict[int, Any]) -> None:
    for step in (1, 2, 3, 4):
        commit(tmp_path, step)
    manifest_fields[1] = {"metric": CheckpointMetric(name="loss", value=0.5)}
    # The metric before the recipe was changed.
    manifest_fields[2] = {"metric": CheckpointMetric(name="accuracy", value=0.1)}
    manifest_fields[4] = {"reason": "stop"}
    policy = RetentionPolicy(keep=1, keep_best=2, best="loss")
    assert [p.name for p in retention.list_expired(tmp_path, policy, is_valid=always_valid)] == ["step-00000002"]
    assert len(list_names(tmp_path)) == 4
    retention.delete_expired(tmp_path, policy, is_valid=always_valid)
    assert list_names(tmp_path) == ["step-00000001", "step-00000003", "step-00000004"]


def test_milestone_counts_among_the_best(tmp_path: Path, manifest_fields: dict[int, Any]) -> None:
    for step, value in ((90, 0.7), (100, 0.5), (110, 0.9)):
        commit(tmp_path, step)
        manifest_fields[step] = {"metric": CheckpointMetric(name="loss", value=value)}
    policy = RetentionPolicy(keep=1, keep_every=100, keep_best=1, best="loss")
    assert [index.parse_step(p) for p in retention.list_expired(tmp_path, policy, is_valid=always_valid)] == [90]


def test_manifest_is_read_once_and_never_for_milestones(tmp_path: Path, manifest_fields: dict[int, Any]) -> None:
    reads: list[str] = []
    original = retention.read_manifest

    def counted(folder: Path) -> Any:
        reads.append(folder.name)
        return original(folder)

    for step in (100, 150, 200, 250):
        commit(tmp_path, step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention, "read_manifest", counted)
        for _ in range(2):
            retention.delete_expired(tmp_path, RetentionPolicy(keep=3, keep_every=100), is_valid=always_valid)
        assert reads == ["step-00000150", "step-00000250"]
        # A save of the same step replaces the folder.
        shutil.rmtree(index.step_folder(tmp_path, 250))
        commit(tmp_path, 250)
        retention.delete_expired(tmp_path, RetentionPolicy(keep=3, keep_every=100), is_valid=always_valid)
        assert reads[2:] == ["step-00000250"]


def test_damaged_manifest_counts_as_regular(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        commit(tmp_path, step)
    (index.step_folder(tmp_path, 3) / index.MANIFEST).write_bytes(b"{}")
    with pytest.raises(DamagedCheckpoint):
        index.read_manifest(index.step_folder(tmp_path, 3))
    deleted = retention.delete_expired(tmp_path, RetentionPolicy(keep=1), is_valid=lambda p: index.parse_step(p) != 3)
    assert [p.name for p in deleted] == ["step-00000001"]


def test_uncommitted_and_staging_folders_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        commit(tmp_path, step)
    (index.step_folder(tmp_path, 1) / index.COMMITTED).unlink()
    index.staging_folder(tmp_path, 2, "7").mkdir()
    retention.delete_expired(tmp_path, RetentionPolicy(keep=1), is_valid=always_valid)
    assert list_names(tmp_path) == [".step-00000002-7", "step-00000001", "step-00000003"]


def test_damaged_folder_is_kept_until_its_step_is_valid_again(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    for step in (2, 3):
        folder = commit(tmp_path, step)
        folder.rename(index.damaged_folder(folder))
    assert retention.delete_expired(tmp_path, RetentionPolicy(keep=1), is_valid=always_valid) == []
    commit(tmp_path, 2)
    assert retention.delete_expired(tmp_path, RetentionPolicy(keep=1), is_valid=lambda p: False) == [
        tmp_path / "step-00000001"
    ]
    assert list_names(tmp_path) == ["damaged-step-00000002", "damaged-step-00000003", "step-00000002"]
    retention.delete_expired(tmp_path, RetentionPolicy(keep=1), is_valid=always_valid)
    assert list_names(tmp_path) == ["damaged-step-00000003", "step-00000002"]


def test_file_system_error_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        commit(tmp_path, step)
    monkeypatch.setattr(storage_errors, "RETRY_TIMEOUT_S", 0.0)

    def broken(folder: Path) -> Manifest:
        raise StorageError(f"{folder}: Input/output error")

    monkeypatch.setattr(retention, "read_manifest", broken)
    with pytest.raises(StorageError):
        retention.delete_expired(tmp_path, RetentionPolicy(keep=1), is_valid=always_valid)
    assert len(list_names(tmp_path)) == 3


class Killed(BaseException):
    pass


def test_kill_during_deletion_leaves_no_partial_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in itertools.count():
        root = tmp_path / str(n)
        for step in (1, 2):
            (commit(root, step) / "rank-0.bin").write_bytes(b"data")
        remaining = [n]

        def raise_after(original: Any, remaining: list[int] = remaining) -> Any:
            def call(*args: Any, **kw: Any) -> Any:
                remaining[0] -= 1
                if remaining[0] < 0:
                    raise Killed
                return original(*args, **kw)

            return call

        with monkeypatch.context() as patch:
            for name in ("rename", "unlink", "rmdir", "fsync"):
                patch.setattr(os, name, raise_after(getattr(os, name)))
            try:
                retention.delete_expired(root, RetentionPolicy(keep=1), is_valid=always_valid)
            except Killed:
                pass
            else:
                break
        for folder in index.list_checkpoint_folders(root):
            assert len(list_names(folder)) == 3, n
        # Deleting again finishes what the kill interrupted.
        retention.delete_expired(root, RetentionPolicy(keep=1), is_valid=always_valid)
        assert [p.name for p in index.list_checkpoint_folders(root)] == ["step-00000002"]
    assert n > 4
    assert list_names(root) == ["step-00000002"]


def test_leftover_of_earlier_deletion_is_replaced(tmp_path: Path) -> None:
    for step in (1, 2):
        commit(tmp_path, step)
    leftover = index.staging_folder(tmp_path, 1, "removed")
    leftover.mkdir()
    (leftover / "rank-0.bin").write_bytes(b"half")
    retention.delete_expired(tmp_path, RetentionPolicy(keep=1), is_valid=always_valid)
    assert list_names(tmp_path) == ["step-00000002"]
