"""Save and restore, all ranks together; keep the last few."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from clustertrain import clock, fsio
from clustertrain.checkpoint import manifest as index
from clustertrain.checkpoint import offline
from clustertrain.checkpoint.agree import Ranks, numbered
from clustertrain.checkpoint.manifest import Damaged, Manifest
from clustertrain.checkpoint.reader import Reader
from clustertrain.checkpoint.state import collect
from clustertrain.checkpoint.storage import FULL, StorageError
from clustertrain.checkpoint.union import Share, agree
from clustertrain.checkpoint.writer import merge, write_blocks
from clustertrain.errors import CheckpointError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    step: int
    path: Path
    bytes: int
    save_s: float


@dataclass(frozen=True)
class Restored:
    """``rank_state`` is None when another number of ranks saved it. ``skipped`` tells which newer checkpoints were
    passed over: ``[{"step", "path", "why"}]``."""

    step: int
    path: Path
    rank_state: Any
    restore_s: float
    skipped: list[dict[str, Any]] = field(default_factory=list)


class CheckpointManager:
    """Checkpoints in ``root``. Its methods are collective: all ranks call them together."""

    def __init__(self, root: Path, ranks: Ranks, *, attempt: str, layout: Mapping[str, Any], keep: int = 3) -> None:
        self._root = root
        self._ranks = ranks
        self._attempt = attempt
        self._layout = dict(layout)
        self._keep = keep

    # -- save

    def save(self, step: int, state: Mapping[str, Any], rank_state: Mapping[str, Any] | None = None) -> Saved:
        """Write and commit a checkpoint. A committed one of the same step is replaced only by a committed one.

        Raises:
            StorageError: on every rank, when any of them could not write. Nothing is committed then, and the older
                checkpoints are as they were.
            CheckpointError: likewise, where the state is one that cannot be saved.
        """
        started = clock.monotonic()
        failure = f"{self._root}: the checkpoint of step {step} was not saved"
        share, own = self._share(state, rank_state or {}, failure)
        staging = index.staging_folder(self._root, step, self._attempt)
        self._on_rank_0(lambda: _fresh_folder(staging), f"{staging}: cannot be made")
        told: dict[str, Any] = {"trouble": None, "own": own}
        try:
            told["records"] = write_blocks(staging, self._ranks.rank, share.blocks)
        except OSError as e:
            told["trouble"] = _told(e)
        everybody = self._ranks.gather(told)
        size = self._on_rank_0(lambda: self._commit(step, staging, everybody, share.values), failure)
        saved = Saved(step, index.step_folder(self._root, step), size, clock.monotonic() - started)
        if self._ranks.rank == 0:
            self._retire()
        return saved

    def _share(self, state: Mapping[str, Any], rank_state: Mapping[str, Any], failure: str) -> tuple[Share, Any]:
        """What this rank writes, and the JSON values of its own."""
        trouble, collected = None, None
        try:
            collected = collect(state, rank_state, self._ranks.rank)
        except CheckpointError as e:
            trouble = _told(e)
        troubles = self._ranks.troubles(trouble)
        if troubles or collected is None:
            raise _error(failure, troubles)
        optimizers = [k for k, v in state.items() if isinstance(v, torch.optim.Optimizer)]
        return agree(self._ranks, collected, optimizers), collected.own

    def _on_rank_0(self, act: Callable[[], Any], failure: str) -> Any:
        """Run ``act`` on rank 0 and tell all ranks what it returned, or that it failed."""
        outcome: dict[str, Any] = {}
        if self._ranks.rank == 0:
            try:
                outcome = {"value": act()}
            except (OSError, CheckpointError) as e:
                outcome = {"trouble": _told(e)}
        outcome = self._ranks.broadcast(outcome)
        if "trouble" in outcome:
            raise _error(failure, [outcome["trouble"]])
        return outcome["value"]

    def _commit(self, step: int, staging: Path, everybody: list[dict[str, Any]], values: dict[str, Any]) -> int:
        try:
            troubles = numbered([t["trouble"] for t in everybody])
            if troubles:
                raise _error("", troubles)
            names = [index.rank_file(r) for r in range(len(everybody))]
            manifest = Manifest(
                format=index.FORMAT,
                torch=str(torch.__version__),
                step=step,
                world_size=len(everybody),
                engine="raw",
                layout=self._layout,
                files={n: (staging / n).stat().st_size for n in names},
                tensors=merge(r for t in everybody for r in t["records"]),
                values={**values, "ranks": {str(r): t["own"] for r, t in enumerate(everybody)}},
            )
            index.write_manifest(staging, manifest)
            _publish(staging, index.step_folder(self._root, step))
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return manifest.bytes

    def _retire(self) -> None:
        try:
            # Without reading all bytes again: that would take as long as a restore, at every save.
            offline.prune(self._root, self._keep, good=offline.looks_whole)
        except (OSError, StorageError) as e:
            # The new checkpoint is committed; an old one that cannot be deleted is no reason to end the run.
            log.warning("old checkpoints in %s could not be deleted: %s", self._root, e)

    # -- restore

    def restore(self, state: dict[str, Any]) -> Restored | None:
        """Put the newest checkpoint that verifies into ``state``; None when there is none at all.

        Newer ones that did not verify are set aside as ``damaged-step-…``: kept as evidence until a newer checkpoint
        is committed, but neither restored nor counted again.

        Raises:
            CheckpointError: there are checkpoints and none verifies, or they are of other objects.
            StorageError: on every rank, when any of them could not read. That is no damage, and nothing is set aside.
        """
        started = clock.monotonic()
        self._on_rank_0(self._sweep, f"{self._root}: cannot be used for checkpoints")
        steps = self._on_rank_0(
            lambda: [index.step_of(p) for p in index.folders(self._root) if index.is_committed(p)],
            f"{self._root}: the checkpoints cannot be listed",
        )
        skipped: list[dict[str, Any]] = []
        for step in reversed(steps):
            folder = index.step_folder(self._root, step)
            trouble, manifest = None, None
            try:
                manifest = index.read_manifest(folder)
                index.check_sizes(folder, manifest)
                reader = Reader(folder, manifest)
                finish = reader.load(state)
                same_world = manifest.world_size == self._ranks.world_size
                rank_state = reader.rank_state(self._ranks.rank) if same_world else None
            except (Damaged, StorageError) as e:
                trouble = _told(e)
            troubles = self._ranks.troubles(trouble)
            if not troubles:
                finish()
                self._on_rank_0(lambda: _set_aside(skipped), "damaged checkpoints cannot be set aside")
                return Restored(step, folder, rank_state, clock.monotonic() - started, skipped)
            if any(t["of"] != "state" for t in troubles):
                raise _error(f"{folder}: cannot be read", troubles)
            skipped.append({"step": step, "path": str(folder), "why": "; ".join(t["why"] for t in troubles)})
        if skipped:
            listed = "\n  ".join(s["why"] for s in skipped)
            raise CheckpointError(
                f"{self._root}: no checkpoint verifies:\n  {listed}",
                fix="restore the files, or move the checkpoints away to begin again",
            )
        return None

    def _sweep(self) -> None:
        """Clear away what a killed save has left. Only the attempt that owns the run gets here."""
        self._root.mkdir(parents=True, exist_ok=True, mode=0o750)
        for old in self._root.glob(".old-step-*"):
            final = self._root / old.name.removeprefix(".old-")
            if final.exists():
                shutil.rmtree(old)
            else:  # killed between the two renames of _publish
                old.rename(final)
        for staging in self._root.glob(".step-*"):
            shutil.rmtree(staging)


def _told(e: OSError | CheckpointError) -> dict[str, Any]:
    """A failure as ranks tell it to each other: ``why``, and whether it is ``of`` the checkpoint's own content
    ("state"), a "full" disk, or a file system that may do better next time ("storage")."""
    if isinstance(e, OSError):
        return {"why": str(e), "of": "full" if e.errno in FULL else "storage"}
    if isinstance(e, StorageError):
        return {"why": e.message, "of": "full" if e.full else "storage"}
    return {"why": e.message, "of": "state"}


def _error(failure: str, troubles: list[dict[str, Any]]) -> CheckpointError:
    """One exception for the troubles of all ranks. What would not go away by itself decides."""
    message = ": ".join(p for p in (failure, "; ".join(t["why"] for t in troubles)) if p)
    causes = {t["of"] for t in troubles}
    if "full" in causes:
        return StorageError(message, full=True)
    return StorageError(message) if "storage" in causes else CheckpointError(message)


def _fresh_folder(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(mode=0o750)


def _publish(staging: Path, final: Path) -> None:
    """Give a complete checkpoint its name. What it replaces goes last; :meth:`CheckpointManager._sweep` brings it back
    after a kill in between."""
    old = index.replaced_folder(final)
    if final.exists():
        final.rename(old)
    staging.rename(final)
    fsio.fsync_folder(final.parent)
    if old.exists():
        shutil.rmtree(old)


def _set_aside(skipped: list[dict[str, Any]]) -> None:
    for entry in skipped:
        folder = Path(entry["path"])
        away = index.damaged_folder(folder)
        if away.exists():
            shutil.rmtree(away)
        folder.rename(away)
