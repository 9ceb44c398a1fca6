"""Restore, and the way back, all ranks together: which checkpoint, and whether every byte of it was good."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertrain import clock
from clustertrain.checkpoint.core.control_group import Ranks
from clustertrain.checkpoint.core.failures import Trouble, error, told
from clustertrain.checkpoint.core.retention import Policy
from clustertrain.checkpoint.format import fence as fences
from clustertrain.checkpoint.format import folders
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.fence import Fence
from clustertrain.checkpoint.format.manifest import Damaged, Manifest
from clustertrain.checkpoint.format.storage import Folder, RemoteFolder
from clustertrain.checkpoint.format.storage_errors import StorageError
from clustertrain.checkpoint.load import rollback
from clustertrain.checkpoint.load.reader import Finish, Reader
from clustertrain.checkpoint.load.rollback import Wanted
from clustertrain.checkpoint.save import node_local as near
from clustertrain.errors import CheckpointError, Diverged

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """``path`` may be behind a URL. ``rank_state`` is None when another number of ranks saved it. ``skipped`` tells
    which newer checkpoints were passed over: ``[{"step", "path", "why"}]``. ``from_local``: how many bytes all ranks
    have read from their nodes' own disks, on rank 0; None without that tier."""

    step: int
    path: Folder
    rank_state: Any
    restore_s: float
    skipped: list[dict[str, Any]] = field(default_factory=list)
    from_local: int | None = None


@dataclass(frozen=True)
class Made:
    """How a checkpoint was made; ``about`` as it was given to the manager that saved it."""

    layout: Mapping[str, Any]
    world_size: int
    torch: str
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Local:
    """The tier on the nodes' own disks. All ranks have one or none has; ``root`` is None where this node has no such
    disk."""

    root: Path | None
    first: bool  # this rank is the first of its node


@dataclass(frozen=True)
class Remote:
    """Where copies go, as many as ``policy`` says. ``needed``: there may be one without which the run would begin
    again."""

    url: str
    policy: Policy
    needed: bool


Agree = Callable[[Made], None]


@dataclass
class _Candidate:
    """A checkpoint, as far as this rank has come with loading it, and what spoke against that."""

    step: int
    folder: Folder
    manifest: Manifest | None = None
    near: near.Near | None = None
    reader: Reader | None = None
    finish: Finish | None = None
    rank_state: Any = None
    trouble: Trouble | None = None
    other_objects: CheckpointError | None = None

    def blame(self, e: CheckpointError) -> None:
        """The other ranks must hear of it: they wait for this one's word."""
        if isinstance(e, (Damaged, StorageError)):
            self.trouble = told(e)
        else:
            self.trouble, self.other_objects = Trouble(why=e.message, of="objects"), e


class Restoring:
    def __init__(
        self,
        root: Path,
        ranks: Ranks,
        attempt: str,
        local: Local | None,
        remote: Remote | None,
        fence: Fence | None = None,
    ) -> None:
        self._root = root
        self._ranks = ranks
        self._attempt = attempt
        self._local = local
        self._near_root = local.root if local is not None else None
        self._remote = remote
        self._fence = fence

    def newest(self, state: dict[str, Any], agree: Agree) -> Restored | None:
        """As :meth:`CheckpointManager.restore`."""
        self._ranks.on_first(self._clear_up, f"{self._root}: cannot be used for checkpoints")
        return self._newest_good(state, agree)

    def before(self, state: dict[str, Any], wanted: Wanted) -> Restored | None:
        """As :meth:`CheckpointManager.go_back`."""
        self.condemn(wanted)
        self._ranks.on_first(self._clear_up, f"{self._root}: the run cannot go back")
        return self._newest_good(state, lambda made: None)  # the restore before has asked

    def condemn(self, wanted: Wanted) -> int:
        """As :meth:`CheckpointManager.condemn`."""
        outcome = self._ranks.on_first(lambda: self._begin_back(wanted), f"{self._root}: the run cannot go back")
        if "left" not in outcome:
            raise Diverged(outcome["message"], fix=outcome["fix"])
        left: int = outcome["left"]
        return left

    def left_out(self) -> rollback.Ranges:
        """As :meth:`CheckpointManager.left_out`."""
        found: rollback.Ranges = self._ranks.on_first(
            lambda: rollback.left_out(self._root), f"{self._root}: the record of roll-backs cannot be read"
        )
        return found

    def measured_unless(self, step: int, name: str) -> dict[int, float] | None:
        """As :meth:`CheckpointManager.measured_unless`."""
        found = self._ranks.on_first(
            lambda: self._measured_unless(step, name), f"{self._root}: the checkpoints cannot be listed"
        )
        return None if found is None else {int(step): float(value) for step, value in found}

    def _measured_unless(self, wanted: int, name: str) -> list[tuple[int, float]] | None:
        there = self._found()
        if any(step == wanted for step, _ in there):
            return None
        found = []
        for step, is_here in there:
            try:
                metric = index.read_manifest(self._folder(step, is_here=is_here)).metric
            except Damaged:
                continue
            if metric is not None and metric.name == name and metric.value is not None:
                found.append((step, metric.value))
        return found

    def _begin_back(self, wanted: Wanted) -> dict[str, Any]:
        try:
            left = rollback.begin(self._root, self._behind() if self._remote is not None else None, wanted, self._fence)
        except Diverged as e:  # the other ranks must hear of it
            return {"message": e.message, "fix": e.fix}
        return {"left": left}

    def _clear_up(self) -> None:
        folders.sweep(self._root, self._fence)
        rollback.enforce(self._root, self._behind() if self._remote is not None else None)

    def _set_aside(self, skipped: list[dict[str, Any]]) -> None:
        fences.check(self._fence)
        folders.mark_damaged(skipped)

    def _newest_good(self, state: dict[str, Any], agree: Agree) -> Restored | None:
        started = clock.monotonic()
        found = self._ranks.on_first(self._found, f"{self._root}: the checkpoints cannot be listed")
        skipped: list[dict[str, Any]] = []
        for step, is_here in reversed(found):
            folder = self._folder(step, is_here=is_here)
            it = _Candidate(step, folder)
            troubles = self._opened(it)
            if not troubles and it.manifest is not None:
                agree(Made(it.manifest.layout, it.manifest.world_size, it.manifest.torch, it.manifest.about))
                self._begin(it, it.manifest, state)
                troubles = self._read_to_the_end(it)
            if not troubles:
                return self._finished(it, started, skipped)
            _raise_unless_damaged(it, troubles)
            skipped.append({"step": step, "path": str(folder), "why": "; ".join(t.why for t in troubles)})
        if skipped:
            listed = "\n  ".join(s["why"] for s in skipped)
            raise CheckpointError(
                f"{self._root}: no checkpoint verifies:\n  {listed}",
                fix="restore the files, or move the checkpoints away to begin again",
            )
        return None

    def _opened(self, it: _Candidate) -> list[Trouble]:
        """What any rank has against its index."""
        try:
            it.manifest = index.read_manifest(it.folder)
            index.check_sizes(it.folder, it.manifest)
        except CheckpointError as e:
            it.blame(e)
        return self._ranks.troubles(it.trouble)

    def _begin(self, it: _Candidate, manifest: Manifest, state: dict[str, Any]) -> None:
        """Begin to read what this rank needs of it."""
        try:
            it.near = near.Near(self._near_root, manifest.made_in) if self._near_root is not None else None
            it.reader = Reader(it.folder, manifest, self._ranks, it.near)
            it.finish = it.reader.load(state)
            if manifest.world_size == self._ranks.world_size:
                it.rank_state = it.reader.rank_state(self._ranks.rank)
        except CheckpointError as e:
            it.blame(e)

    def _read_to_the_end(self, it: _Candidate) -> list[Trouble]:
        """What went wrong on any rank."""
        try:
            troubles = self._ranks.troubles(it.trouble)
            if not troubles and it.reader is not None:
                troubles = self._ranks.troubles(_completed(it.reader))
        finally:
            if it.reader is not None:
                it.reader.close()
        return troubles

    def _finished(self, it: _Candidate, started: float, skipped: list[dict[str, Any]]) -> Restored:
        assert it.finish is not None and it.manifest is not None
        it.finish()
        self._ranks.on_first(lambda: self._set_aside(skipped), "damaged checkpoints cannot be set aside")
        restored = Restored(it.step, it.folder, it.rank_state, clock.monotonic() - started, skipped)
        if self._local is None:
            return restored
        if self._local.first and self._near_root is not None:  # nothing else there is worth keeping now
            near.tidy(self._near_root, it.manifest.made_in, self._attempt)
        return dataclasses.replace(restored, from_local=sum(self._ranks.gather(it.near.bytes if it.near else 0)))

    def _found(self) -> list[tuple[int, bool]]:
        """What can be restored, the oldest first: the step, and whether it is here or only behind the URL. Here is
        after there, where it is in both."""
        # A folder has this name only when its marker is there: one without is damaged, not unfinished.
        here = [index.step_of(p) or 0 for p in index.folders(self._root)]
        there: list[int] = []
        if self._remote is not None:
            try:
                committed = [(index.step_of(p) or 0, p) for p in index.folders(self._behind()) if index.is_committed(p)]
                there = [step for step, p in committed if rollback.counts(self._root, p, step)]
            except StorageError as e:
                if self._remote.needed and not here:
                    raise
                log.warning("%s; not looked at for newer checkpoints", e.message)
        return sorted([*((s, True) for s in here), *((s, False) for s in there)])

    def _folder(self, step: int, *, is_here: bool) -> Folder:
        return index.step_folder(self._root, step) if is_here else index.step_folder(self._behind(), step)

    def _behind(self) -> RemoteFolder:
        assert self._remote is not None
        return RemoteFolder(self._remote.url)


def _completed(reader: Reader) -> Trouble | None:
    try:
        reader.complete()
    except (Damaged, StorageError) as e:
        return told(e)
    return None


def _raise_unless_damaged(it: _Candidate, troubles: list[Trouble]) -> None:
    """Only what is damaged is passed over for an older one."""
    if it.other_objects is not None:
        raise it.other_objects
    if any(t.of == "objects" for t in troubles):
        raise error(f"{it.folder}: cannot be loaded", [t for t in troubles if t.of == "objects"])
    if any(t.of != "state" for t in troubles):
        raise error(f"{it.folder}: cannot be read", troubles)
