"""What stays of a run's checkpoints: the policy, and the same on a disk."""

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


def kept(checkpoints: list[CheckpointInfo], policy: RetentionPolicy, newest_good: int | None = None) -> list[int]:
    gone = select_for_deletion(checkpoints, policy, newest_good)
    return [c.step for c in checkpoints if c.step not in gone]


def regular(*steps: int) -> list[CheckpointInfo]:
    return [CheckpointInfo(s) for s in steps]


def valued(**metrics: float | None) -> list[CheckpointInfo]:
    return [CheckpointInfo(int(name[1:]), metric=value) for name, value in metrics.items()]


def test_the_newest_stay_and_the_oldest_goes_first() -> None:
    assert kept(regular(1, 2, 3, 4, 5), RetentionPolicy(keep=2)) == [4, 5]
    assert select_for_deletion(regular(3, 1, 5, 2, 4), RetentionPolicy(keep=2), None) == [1, 2, 3]


def test_milestones_stay_besides_the_newest() -> None:
    assert kept(regular(50, 100, 150, 200, 250, 300), RetentionPolicy(keep=2, keep_every=100)) == [100, 200, 250, 300]


def test_the_newest_good_one_stays_below_damaged_ones() -> None:
    assert kept(regular(1, 2, 3, 4, 5), RetentionPolicy(keep=2), newest_good=2) == [2, 4, 5]


@pytest.mark.parametrize(("mode", "steps"), [("min", [2, 4, 9]), ("max", [1, 6, 9])])
def test_the_best_stay_by_the_metric(mode: Any, steps: list[int]) -> None:
    checkpoints = valued(s1=5.0, s2=1.0, s3=3.0, s4=2.0, s5=math.nan, s6=4.0, s7=None, s9=3.5)
    assert kept(checkpoints, RetentionPolicy(keep=1, keep_best=2, best="loss", best_mode=mode)) == steps


@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_equal_values_the_newer_stays(mode: Any) -> None:
    checkpoints = valued(s1=2.0, s2=2.0, s3=2.0, s9=None)
    assert kept(checkpoints, RetentionPolicy(keep=1, keep_best=1, best="loss", best_mode=mode)) == [3, 9]


def test_an_emergency_pushes_out_nothing_and_goes_after_the_next_regular_one() -> None:
    checkpoints = [*regular(10, 20, 30), CheckpointInfo(33, "stop")]
    assert kept(checkpoints, RetentionPolicy(keep=2)) == [20, 30, 33]
    assert kept([*checkpoints, CheckpointInfo(40)], RetentionPolicy(keep=2)) == [30, 40]
    assert kept([*checkpoints, CheckpointInfo(40, "end")], RetentionPolicy(keep=2)) == [30, 40]


def test_one_that_was_made_for_its_metric_is_none_of_the_newest() -> None:
    policy = RetentionPolicy(keep=2, keep_best=1, best="loss")
    best = [CheckpointInfo(s, "best", metric=100.0 - s) for s in (12, 14, 26, 28)]
    assert kept([*best, *regular(10, 20, 30)], policy) == [28, 20, 30]
    assert kept([*best, *regular(10)], policy) == [28, 10]
    assert kept(best, RetentionPolicy(keep=2)) == [26, 28]
    assert kept([CheckpointInfo(20, "best")], RetentionPolicy(keep=1, keep_every=20), newest_good=None) == [20]


def test_emergencies_without_end_do_not_fill_the_disk() -> None:
    checkpoints = [CheckpointInfo(10), *(CheckpointInfo(s, "stop") for s in range(11, 20))]
    assert kept(checkpoints, RetentionPolicy(keep=2)) == [10, 18, 19]


def test_an_emergency_is_held_by_the_other_grounds_too() -> None:
    stop = CheckpointInfo(20, "stop", metric=0.5)
    assert kept([CheckpointInfo(10), stop, CheckpointInfo(30)], RetentionPolicy(keep=1, keep_every=20)) == [20, 30]
    assert kept([CheckpointInfo(10), stop, CheckpointInfo(30)], RetentionPolicy(keep=1, keep_best=1, best="loss")) == [
        20,
        30,
    ]
    assert kept([CheckpointInfo(10), stop, CheckpointInfo(30)], RetentionPolicy(keep=1), newest_good=20) == [20, 30]


def draw(rng: random.Random) -> tuple[list[CheckpointInfo], RetentionPolicy, int | None]:
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
def test_what_must_hold_for_any_run(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        checkpoints, policy, newest_good = draw(rng)
        stay = set(kept(checkpoints, policy, newest_good))
        steps = [c.step for c in checkpoints]
        plain = [c.step for c in checkpoints if c.reason != "stop"]
        assert newest_good is None or newest_good in stay
        assert not steps or steps[-1] in stay
        if policy.keep_every:
            assert {s for s in steps if s % policy.keep_every == 0} <= stay
        else:
            assert set(plain[-policy.keep :]) <= stay
            overtaken = {c.step for c in checkpoints if c.reason == "stop" and plain and c.step < plain[-1]}
            best = {c.step for c in checkpoints if c.metric is not None and not math.isnan(c.metric)}
            assert not overtaken & stay - best - {newest_good}
            assert len(stay) <= 2 * policy.keep + policy.keep_best + 1
        worse = {c.step: c.metric for c in checkpoints if c.step not in stay and c.metric is not None}
        sign = 1 if policy.best_mode == "min" else -1
        for lost in worse.values():
            if not math.isnan(lost):
                better = [c for c in checkpoints if c.metric is not None and sign * c.metric <= sign * lost]
                assert len([c for c in better if c.step in stay]) >= policy.keep_best
        # Another look at what stays finds nothing more to delete, or a run that is looked at often loses more.
        again = [c for c in checkpoints if c.step in stay]
        assert select_for_deletion(again, policy, newest_good) == []


# -- on a disk


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


def good(folder: Path) -> bool:
    return True


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """What the index of each step says, by step, besides what it has."""
    says: dict[int, Any] = {}
    original = retention.read_manifest

    def read(folder: Path) -> Any:
        found = original(folder)
        return SimpleNamespace(**{"reason": "interval", "metric": None, **says.get(found.step, {})})

    monkeypatch.setattr(retention, "read_manifest", read)
    return says


def test_reason_and_metric_are_those_of_the_index(tmp_path: Path, told: dict[int, Any]) -> None:
    for step in (1, 2, 3, 4):
        commit(tmp_path, step)
    told[1] = {"metric": CheckpointMetric(name="loss", value=0.5)}
    told[2] = {"metric": CheckpointMetric(name="accuracy", value=0.1)}  # what decided before the recipe was changed
    told[4] = {"reason": "stop"}
    policy = RetentionPolicy(keep=1, keep_best=2, best="loss")
    assert [p.name for p in retention.list_expired(tmp_path, policy, is_valid=good)] == ["step-00000002"]
    assert len(names(tmp_path)) == 4
    retention.delete_expired(tmp_path, policy, is_valid=good)
    assert names(tmp_path) == ["step-00000001", "step-00000003", "step-00000004"]


def test_a_milestone_is_one_of_the_best_too(tmp_path: Path, told: dict[int, Any]) -> None:
    for step, value in ((90, 0.7), (100, 0.5), (110, 0.9)):
        commit(tmp_path, step)
        told[step] = {"metric": CheckpointMetric(name="loss", value=value)}
    policy = RetentionPolicy(keep=1, keep_every=100, keep_best=1, best="loss")
    assert [index.parse_step(p) for p in retention.list_expired(tmp_path, policy, is_valid=good)] == [90]


def test_an_index_is_read_once_and_that_of_a_milestone_not_at_all(tmp_path: Path, told: dict[int, Any]) -> None:
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
            retention.delete_expired(tmp_path, RetentionPolicy(keep=3, keep_every=100), is_valid=good)
        assert reads == ["step-00000150", "step-00000250"]
        # A save of the same step replaces the folder.
        shutil.rmtree(index.step_folder(tmp_path, 250))
        commit(tmp_path, 250)
        retention.delete_expired(tmp_path, RetentionPolicy(keep=3, keep_every=100), is_valid=good)
        assert reads[2:] == ["step-00000250"]


def test_a_damaged_index_counts_as_regular(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        commit(tmp_path, step)
    (index.step_folder(tmp_path, 3) / index.MANIFEST).write_bytes(b"{}")
    with pytest.raises(DamagedCheckpoint):
        index.read_manifest(index.step_folder(tmp_path, 3))
    gone = retention.delete_expired(tmp_path, RetentionPolicy(keep=1), is_valid=lambda p: index.parse_step(p) != 3)
    assert [p.name for p in gone] == ["step-00000001"]


def test_what_was_never_committed_or_is_being_saved_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        commit(tmp_path, step)
    (index.step_folder(tmp_path, 1) / index.COMMITTED).unlink()
    index.staging_folder(tmp_path, 2, "7").mkdir()
    retention.delete_expired(tmp_path, RetentionPolicy(keep=1), is_valid=good)
    assert names(tmp_path) == [".step-00000002-7", "step-00000001", "step-00000003"]


def test_what_was_set_aside_stays_until_a_good_one_has_overtaken_it(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    for step in (2, 3):
        folder = commit(tmp_path, step)
        folder.rename(index.damaged_folder(folder))
    assert retention.delete_expired(tmp_path, RetentionPolicy(keep=1), is_valid=good) == []
    commit(tmp_path, 2)
    assert retention.delete_expired(tmp_path, RetentionPolicy(keep=1), is_valid=lambda p: False) == [
        tmp_path / "step-00000001"
    ]
    assert names(tmp_path) == ["damaged-step-00000002", "damaged-step-00000003", "step-00000002"]
    retention.delete_expired(tmp_path, RetentionPolicy(keep=1), is_valid=good)
    assert names(tmp_path) == ["damaged-step-00000003", "step-00000002"]


def test_a_file_system_that_does_not_answer_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        commit(tmp_path, step)
    monkeypatch.setattr(storage_errors, "RETRY_TIMEOUT_S", 0.0)

    def broken(folder: Path) -> Manifest:
        raise StorageError(f"{folder}: Input/output error")

    monkeypatch.setattr(retention, "read_manifest", broken)
    with pytest.raises(StorageError):
        retention.delete_expired(tmp_path, RetentionPolicy(keep=1), is_valid=good)
    assert len(names(tmp_path)) == 3


class Killed(BaseException):
    pass


def test_killed_while_deleting_no_half_has_a_whole_ones_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in itertools.count():
        root = tmp_path / str(n)
        for step in (1, 2):
            (commit(root, step) / "rank-0.bin").write_bytes(b"data")
        left = [n]

        def dying(original: Any, left: list[int] = left) -> Any:
            def call(*args: Any, **kw: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return original(*args, **kw)

            return call

        with monkeypatch.context() as patch:
            for name in ("rename", "unlink", "rmdir", "fsync"):
                patch.setattr(os, name, dying(getattr(os, name)))
            try:
                retention.delete_expired(root, RetentionPolicy(keep=1), is_valid=good)
            except Killed:
                pass
            else:
                break
        for folder in index.list_checkpoint_folders(root):
            assert len(names(folder)) == 3, n
        # The same once more, after a restore has cleared away or before.
        retention.delete_expired(root, RetentionPolicy(keep=1), is_valid=good)
        assert [p.name for p in index.list_checkpoint_folders(root)] == ["step-00000002"]
    assert n > 4
    assert names(root) == ["step-00000002"]


def test_a_rest_of_the_same_name_is_not_in_the_way(tmp_path: Path) -> None:
    for step in (1, 2):
        commit(tmp_path, step)
    rest = index.staging_folder(tmp_path, 1, "removed")
    rest.mkdir()
    (rest / "rank-0.bin").write_bytes(b"half")
    retention.delete_expired(tmp_path, RetentionPolicy(keep=1), is_valid=good)
    assert names(tmp_path) == ["step-00000002"]
