"""The record of roll-backs: what it condemns, what is left out, and when it is once too often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.storage import RemoteFolder
from clustertrain.checkpoint.load import rollback
from clustertrain.checkpoint.load.rollback import Wanted
from clustertrain.checkpoint.offline import inspect
from clustertrain.errors import CheckpointError, Diverged, NotFound


def committed(root: Path, *steps: int, mark: str = "a") -> None:
    for step in steps:
        folder = index.step_folder(root, step)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / index.COMMITTED).write_text(f"{mark}-{step}")


def steps(root: Any) -> list[int]:
    return [index.step_of(p) or 0 for p in index.folders(root) if index.is_committed(p)]


def wanted(**changes: Any) -> Wanted:
    fields = {"last": 20, "most": 19, "why": "a spike", "left_out": {"data": [[152, 160]]}, "most_often": 2}
    return Wanted(**{**fields, **changes})


def test_what_is_newer_does_not_count_and_stays_away_whenever_it_is_asked(tmp_path: Path) -> None:
    committed(tmp_path, 6, 12, 18, 24)
    rollback.begin(tmp_path, None, wanted(most=12))
    assert steps(tmp_path) == [6, 12, 18, 24]  # only written down so far
    for _ in range(2):
        rollback.enforce(tmp_path, None)
        assert steps(tmp_path) == [6, 12]
    committed(tmp_path, 18, mark="b")  # made on the way back: another one
    rollback.enforce(tmp_path, None)
    assert steps(tmp_path) == [6, 12, 18]
    assert rollback.left_out(tmp_path) == {"data": [[152, 160]]}


def test_what_looks_offline_does_not_see_what_is_condemned_and_still_there(tmp_path: Path) -> None:
    """As after a stop at the step of the way back: the next attempt deletes them, and may never come."""
    committed(tmp_path, 6, 12)
    for step, value in ((12, 2.0), (18, 1.0)):
        folder = index.step_folder(tmp_path, step)
        folder.mkdir(exist_ok=True)
        fields: dict[str, Any] = {"layout": {}, "files": {}, "tensors": (), "values": {}}
        metric = index.Metric(name="loss", value=value)
        about: dict[str, Any] = {"format": index.FORMAT, "torch": "2", "world_size": 1, "engine": "buffered"}
        index.write_manifest(folder, index.Manifest(step=step, metric=metric, **about, **fields))
    rollback.begin(tmp_path, None, wanted(most=12))
    assert steps(tmp_path) == [6, 12, 18]
    assert [row["step"] for row in inspect.list_checkpoints(tmp_path)] == [6, 12]
    assert inspect.find(tmp_path) == inspect.best(tmp_path) == index.step_folder(tmp_path, 12)
    with pytest.raises(NotFound, match=r"of step 18; steps there: 6, 12$"):
        inspect.find(tmp_path, 18)
    # Deleted by hand must not be what the run goes back to.
    assert inspect.prunable(tmp_path, 1, good=lambda _: True) == [index.step_folder(tmp_path, 6)]
    remote = RemoteFolder(tmp_path.as_uri())  # has no record beside it
    assert index.step_of(inspect.find(remote)) == 18


def test_copies_behind_a_url_lose_their_marker(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    committed(here, 6, 18)
    committed(there, 6, 18)
    committed(there, 24, mark="b")
    remote = RemoteFolder(there.as_uri())
    rollback.begin(here, remote, wanted())
    assert rollback.counts(here, index.step_folder(remote, 6), 6)
    assert rollback.counts(here, index.step_folder(remote, 18), 18)
    assert not rollback.counts(here, index.step_folder(remote, 24), 24)
    rollback.enforce(here, remote)
    assert steps(here) == [6, 18] and steps(there) == [6, 18]


def test_with_no_older_checkpoint_there_is_no_way_back(tmp_path: Path) -> None:
    committed(tmp_path, 18)
    with pytest.raises(Diverged, match="no checkpoint of step 12 or before"):
        rollback.begin(tmp_path, None, wanted(most=12))
    assert rollback.read(tmp_path) == [] and steps(tmp_path) == [18]


def test_once_too_often_without_getting_further(tmp_path: Path) -> None:
    committed(tmp_path, 18)
    for _ in range(2):
        rollback.begin(tmp_path, None, wanted())
    with pytest.raises(Diverged, match=r"gone back 2 times since it last got further than step 20"):
        rollback.begin(tmp_path, None, wanted())
    committed(tmp_path, 24)
    rollback.begin(tmp_path, None, wanted(last=30, most=29))
    assert [r.count for r in rollback.read(tmp_path)] == [1, 2, 1]
    other = tmp_path / "other"
    committed(other, 1)
    with pytest.raises(Diverged, match="max_roll_backs = 0"):
        rollback.begin(other, None, wanted(most_often=0))


def test_a_record_that_does_not_read_is_no_empty_one(tmp_path: Path) -> None:
    (tmp_path / rollback.FILE).write_text('[{"last": ')
    with pytest.raises(CheckpointError, match="cannot be read"):
        rollback.left_out(tmp_path)
