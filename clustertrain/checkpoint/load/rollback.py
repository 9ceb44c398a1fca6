"""The record of a run's roll-backs, beside its checkpoints: which of these do not count any more, and which samples are
left out from then on.

Written before anything is done, durably and as a whole: from then on every attempt that begins sees to the rest, so
the run may be killed at any point of it. A checkpoint is told by its marker: the one of the same step that the run
makes on its way back is another one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from clustertrain import fsio, schema
from clustertrain.checkpoint.core import fault_points, retention
from clustertrain.checkpoint.format import fence as fences
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.fence import Fence
from clustertrain.checkpoint.format.storage import F, Folder, RemoteFolder
from clustertrain.checkpoint.format.storage_errors import patiently
from clustertrain.errors import CheckpointError, Diverged
from clustertrain.run.run_dir import ROLLED_BACK

log = logging.getLogger(__name__)

FILE = ROLLED_BACK

Ranges = dict[str, list[list[int]]]


class RollBack(msgspec.Struct, frozen=True, kw_only=True):
    """Because of the steps up to ``last`` the run went back to a checkpoint of ``most`` steps or fewer. ``left_out``:
    by name in the state the ranges of positions of a loader. ``count``: the how manieth without progress between."""

    last: int
    most: int
    why: str
    count: int
    left_out: Ranges = {}
    condemned: tuple[tuple[int, str], ...] = ()  # (step, marker) of the checkpoints that do not count any more


def read(root: Path) -> list[RollBack]:
    """The oldest first. Raises CheckpointError where the record does not read: without it the run would train on what
    it has left out, from a checkpoint that does not count."""
    path = root / FILE
    try:
        data = patiently(path.read_bytes, path)
    except FileNotFoundError:
        return []
    try:
        return schema.decode(data, list[RollBack])
    except msgspec.MsgspecError as e:
        raise CheckpointError(f"{path}: cannot be read: {e}", fix="restore the file from a copy") from e


def left_out(root: Path) -> Ranges:
    """All that is left out, by name in the state."""
    found: Ranges = {}
    for record in read(root):
        for name, ranges in record.left_out.items():
            found.setdefault(name, []).extend(ranges)
    return found


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Go back to a checkpoint of at most ``most`` steps, because of those up to ``last``, if the run has not gone back
    ``most_often`` times since it last got further."""

    last: int
    most: int
    why: str
    left_out: Ranges
    most_often: int


def begin(root: Path, remote: RemoteFolder | None, wanted: Wanted, fence: Fence | None = None) -> int:
    """Write down that the run goes back, before anything is done for it; returns the newest step that is left.

    Raises:
        TakenOver: a newer attempt owns the run, and what it goes back behind.
        Diverged: there is no such checkpoint, or the run has gone back too often.
    """
    before, why, most = read(root), wanted.why, wanted.most
    markers = _markers(root)
    if remote is not None:
        try:
            markers += [pair for pair in _markers(remote) if pair not in markers]
        except CheckpointError as e:
            log.warning("%s; not looked at for checkpoints", e.message)
    left = [step for step, _ in markers if step <= most]
    if not left:
        raise Diverged(
            f"{why}: there is no checkpoint of step {most} or before to go back to",
            fix="save more often with checkpoint.every, or keep more of them",
        )
    progress = not before or any(step > before[-1].last for step, _ in markers)
    count = 1 if progress else before[-1].count + 1
    if count > wanted.most_often:
        raise Diverged(
            f"{why}: the run has gone back {count - 1} times since it last got further than step {before[-1].last}"
            if before
            else f"{why}: stability.max_roll_backs = 0",
            fix="a lower learning rate, a longer warmup, or clipping at a lower norm; `clustertrain requeue` then goes "
            "on from the newest checkpoint",
        )
    condemned = tuple((step, marker) for step, marker in markers if step > most)
    record = RollBack(last=wanted.last, most=most, why=why, count=count, left_out=wanted.left_out, condemned=condemned)
    fault_points.reached("before the roll-back's record", 0)
    fences.check(fence)
    fsio.write_bytes(root / FILE, msgspec.json.encode([*before, record]))
    fault_points.reached("after the roll-back's record", 0)
    return max(left)


def enforce(root: Path, remote: RemoteFolder | None) -> None:
    """Remove what the record condemns, as far as it is still there; what is behind the URL only loses its marker."""
    for step, marker in _condemned(root):
        folder = index.step_folder(root, step)
        if retention.marker_of(folder) == marker:
            retention.remove(folder, marker)
            fault_points.reached("between two condemned checkpoints", 0)
        if remote is not None:
            there = index.step_folder(remote, step)
            try:
                if retention.marker_of(there) == marker:
                    (there / index.COMMITTED).unlink()
            except (OSError, CheckpointError) as e:  # a restore looks at the record as well
                log.warning("%s does not count any more and stays: %s", there, e)


def counting(root: F) -> list[F]:
    """Checkpoint folders in ``root``, committed or not, that the record beside them does not condemn; oldest first. A
    ``root`` behind a URL has none beside it."""
    folders = index.folders(root)
    if not isinstance(root, Path):
        return folders
    return [p for p in folders if counts(root, p, index.step_of(p) or 0)]


def counts(root: Path, there: Folder, step: int) -> bool:
    """Whether a checkpoint ``there``, beside the record or behind a URL, is none that it condemns."""
    markers = {marker for s, marker in _condemned(root) if s == step}
    return not markers or retention.marker_of(there) not in markers


def _condemned(root: Path) -> Sequence[tuple[int, str]]:
    return [pair for record in read(root) for pair in record.condemned]


def _markers(root: Path | RemoteFolder) -> list[tuple[int, str]]:
    found = [(index.step_of(p) or 0, retention.marker_of(p)) for p in index.folders(root)]
    return [(step, marker) for step, marker in found if marker is not None]
