"""Copies of committed checkpoints behind a URL, made by the processes that write, beside the training.

Rank 0's chooses a step and says so in ``.uploading.json`` of the shared folder. Every rank's copies its share of that
step's files, whoever wrote them, and leaves a file ``.uploaded-<r>`` beside the copies. When rank 0's has seen all of
these, it adds the manifest and, last, COMMITTED: the folder there is then the same as the one here.

A copy that fails is made again, with longer and longer pauses, and the training never hears of it but by an event. What
is missing there when an attempt begins is copied then.
"""

from __future__ import annotations

import re
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from clustertrain import clock, fsio, schema
from clustertrain.checkpoint.core import fault_points, retention
from clustertrain.checkpoint.core.failures import Trouble, told
from clustertrain.checkpoint.core.retention import Known, Policy
from clustertrain.checkpoint.format import fence as fences
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.fence import Fence, TakenOver
from clustertrain.checkpoint.format.manifest import COMMITTED, MANIFEST, Damaged, Manifest
from clustertrain.checkpoint.format.storage import Folder, RemoteFolder
from clustertrain.checkpoint.format.storage_errors import StorageError, patiently
from clustertrain.errors import ClusterTrainError

SAID = ".uploading.json"
NO_MORE = 2**62  # a step that no run comes to
CHUNK_BYTES = 8 << 20
PAUSES_S = (1.0, 300.0)  # after the first failure, and at most
POLLS_S = (0.1, 3.0)  # for what another rank says, likewise
PATIENCE_S = 600.0  # for the other ranks' files, from when one came last


class Upload(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What of ``root`` shall be in ``url``: what ``policy`` would keep there. ``rank`` of ``world_size`` does its share
    of it."""

    url: str
    root: str
    rank: int
    world_size: int
    attempt: str
    policy: Policy
    fence: Fence | None = None


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's ``nth`` word to the others: ``step``, as it is while its marker is ``marker``, is being copied. None:
    nothing is, and all up to ``upto`` is there or never will be."""

    attempt: str
    nth: int
    upto: int
    step: int | None = None
    marker: str = ""


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is told. Without ``trouble`` and ``seconds``: there is nothing left to do for it up to ``step``."""

    step: int
    bytes: int = 0
    seconds: float = 0.0
    trouble: Trouble | None = None


class _Ended(Exception):
    """Nobody waits for copies any more."""


class Uploader:
    """A thread of the process that writes."""

    def __init__(self, job: Upload, tell: Callable[[Copied], None], save_is_over: Callable[[], object]) -> None:
        """``save_is_over`` waits while a checkpoint is being written: a copy gives way to it."""
        self._job = job
        self._tell = tell
        self._save_is_over = save_is_over
        self._root = Path(job.root)
        self._remote: RemoteFolder
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._poll_s = POLLS_S[0]
        self._newest = 0  # step that this process has written or committed
        self._step: int | None = None
        self._said = 0
        self._heard = 0
        self._idle_upto = -1
        self._hopeless: dict[int, bytes] = {}
        self._there: dict[int, bytes] = {}  # by step the marker
        self._known: dict[tuple[int, bytes], Known] = {}

    def begin(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def saved(self, step: int) -> None:
        self._newest = max(self._newest, step)
        self._wake.set()

    def spared(self) -> tuple[int, ...]:
        """The step that must not be deleted now."""
        return () if self._step is None else (self._step,)

    def end(self) -> None:
        """Copy no more. What is under way stops soon."""
        self._ended.set()
        self._wake.set()

    def say_over(self) -> None:
        """So that nobody waits for what rank 0 was to begin."""
        if self._job.rank == 0:
            with suppress(TakenOver, StorageError):
                self._say(upto=NO_MORE)

    def _run(self) -> None:
        pause = PAUSES_S[0]
        while not self._ended.is_set():
            try:
                self._remote = RemoteFolder(self._job.url)
                while True:
                    self._lead() if self._job.rank == 0 else self._follow()
                    pause = PAUSES_S[0]
            except (_Ended, TakenOver):
                return
            except Exception as e:  # whatever it is, it concerns nobody but this thread
                self._failed(e, pause)
            self._ended.wait(pause)
            pause = min(2 * pause, PAUSES_S[1])

    def _failed(self, e: Exception, again_s: float) -> None:
        if isinstance(e, (OSError, ClusterTrainError)):
            why = e.message if isinstance(e, ClusterTrainError) else str(e)
        else:
            traceback.print_exc()
            why = f"{type(e).__name__}: {e}"
        if self._job.url not in why:
            why = f"{self._job.url}: {why}"
        step = self._newest if self._step is None else self._step
        self._tell(Copied(step=step, trouble=Trouble(why=f"{why}; again in {again_s:g} s", of="storage")))

    def _wait(self, timeout_s: float | None = None) -> None:
        """For a save, or until the time is over."""
        self._wake.wait(timeout_s)
        self._go_on()

    def _go_on(self) -> None:
        if self._ended.is_set():
            raise _Ended

    def _idle(self, upto: int) -> None:
        if upto > self._idle_upto:
            self._idle_upto = upto
            self._tell(Copied(step=upto))

    # -- rank 0

    def _lead(self) -> None:
        self._wake.clear()
        self._go_on()
        here, missing = self._compare()
        if not missing:
            self._step = None
            upto = max([*here, *self._there], default=0)
            self._say(upto=upto)
            self._idle(upto)
            self._wait()
            return
        step = self._step = max(missing)
        started = clock.monotonic()
        folder, marker = index.step_folder(self._root, step), here[step]
        self._say(step=step, marker=marker.decode())
        try:
            manifest = index.read_manifest(folder)
            index.check_sizes(folder, manifest)
            self._upload(step, marker)
            self._commit(step, marker, manifest)
        except (Damaged, FileNotFoundError) as e:
            if _is_whole(folder, marker):
                raise
            # It is damaged here, or somebody has deleted it.
            self._hopeless[step] = marker
            self._tell(Copied(step=step, trouble=told(e)))
            return
        self._there[step] = marker
        self._tell(Copied(step=step, bytes=manifest.bytes, seconds=clock.monotonic() - started))
        self._prune()

    def _say(self, *, upto: int = 0, step: int | None = None, marker: str = "") -> None:
        fences.check(self._job.fence)
        self._said += 1
        said = Said(attempt=self._job.attempt, nth=self._said, upto=upto, step=step, marker=marker)
        fsio.write_bytes(self._root / SAID, msgspec.json.encode(said))

    def _compare(self) -> tuple[dict[int, bytes], list[int]]:
        """The markers of what is committed here, and the steps of it that should be there and are not."""
        here = _markers(self._root, {})
        self._there = _markers(self._remote, self._there)
        missing = [s for s, m in here.items() if m != self._there.get(s) and m != self._hopeless.get(s)]
        both = {**self._there, **{s: here[s] for s in missing}}
        doomed = retention.doomed(
            [self._know(s, m) for s, m in both.items()], self._job.policy, max(both, default=None)
        )
        return here, [s for s in missing if s not in doomed]

    def _know(self, step: int, marker: bytes) -> Known:
        """What the policy looks at."""
        key = (step, marker)
        if key not in self._known:
            folder: Folder = index.step_folder(self._root, step)
            if _read(folder / COMMITTED) != marker:
                folder = index.step_folder(self._remote, step)
            self._known[key] = retention.known(folder, self._job.policy)
        return self._known[key]

    def _commit(self, step: int, marker: bytes, manifest: Manifest) -> None:
        """When all ranks have copied their share."""
        there = index.step_folder(self._remote, step)
        if self._there_already(there, marker):
            return
        waiting = set(range(self._job.world_size))
        poll_s, last = POLLS_S[0], clock.monotonic()
        while True:
            sizes = there.sizes()
            came = {r for r in waiting if _share(r) in sizes and _read(there / _share(r)) == self._word(marker)}
            waiting -= came
            if not waiting:
                break
            if came:
                poll_s, last = POLLS_S[0], clock.monotonic()
            if clock.monotonic() - last > PATIENCE_S:
                raise StorageError(f"{there}: the files of rank {min(waiting)} have not come for {PATIENCE_S:g} s")
            self._ended.wait(poll_s)
            self._go_on()
            poll_s = min(2 * poll_s, POLLS_S[1])
        wrong = [n for n, size in manifest.files.items() if sizes.get(n) != size]
        if wrong:  # somebody else has been there
            there.rmtree()
            raise StorageError(f"{there / wrong[0]}: is not what was written there")
        self._put(index.step_folder(self._root, step) / MANIFEST, there / MANIFEST)
        fault_points.reached("before the remote marker", 0)
        fences.check(self._job.fence)
        (there / COMMITTED).write_bytes(marker)
        for rank in range(self._job.world_size):
            (there / _share(rank)).unlink()

    def _prune(self) -> None:
        """Delete what the policy does not keep there, and what of older ones never became whole."""
        newest = max(self._there)
        known = [self._know(s, m) for s, m in self._there.items()]
        doomed = set(retention.doomed(known, self._job.policy, newest))
        for folder in index.folders(self._remote):
            step = index.step_of(folder)
            if step in doomed or (step not in self._there and step is not None and step < newest):
                fences.check(self._job.fence)
                (folder / COMMITTED).unlink()
                folder.rmtree()
                self._there.pop(step, None)

    # -- the others

    def _follow(self) -> None:
        self._wake.clear()
        self._go_on()
        said = self._hear()
        if said is not None and said.step is not None and said.nth != self._heard:
            with suppress(Damaged, FileNotFoundError):  # rank 0 finds the same
                self._upload(said.step, said.marker.encode())
            self._heard = said.nth
            self._poll_s = POLLS_S[0]
        elif said is not None and said.step is None and said.upto >= self._newest:
            self._idle(said.upto)
            self._wait()
            self._poll_s = POLLS_S[0]
        else:
            self._wait(self._poll_s)
            self._poll_s = min(2 * self._poll_s, POLLS_S[1])

    def _hear(self) -> Said | None:
        try:
            said = schema.convert(fsio.peek_json(self._root / SAID), Said)
        except msgspec.ValidationError:
            return None
        return said if said.attempt == self._job.attempt else None

    # -- all

    def _upload(self, step: int, marker: bytes) -> None:
        """Copy this rank's share of the files."""
        folder, there = index.step_folder(self._root, step), index.step_folder(self._remote, step)
        if self._there_already(there, marker):
            return
        share = there / _share(self._job.rank)
        if _read(share) == self._word(marker):
            return
        if (folder / COMMITTED).read_bytes() != marker:
            raise StorageError(f"{folder}: is another one than rank 0 sees")
        for name in index.read_manifest(folder).files:
            if owner(name) % self._job.world_size == self._job.rank:
                self._put(folder / name, there / name)
        share.write_bytes(self._word(marker))

    def _there_already(self, there: RemoteFolder, marker: bytes) -> bool:
        """If not, nothing there counts from now on: before the first byte of it is replaced."""
        found = _read(there / COMMITTED)
        if found is not None and found != marker:
            fences.check(self._job.fence)
            (there / COMMITTED).unlink()
        return found == marker

    def _word(self, marker: bytes) -> bytes:
        """Of other bytes, or of a share among others, it is another one."""
        return marker.strip() + f" {self._job.world_size}\n".encode()

    def _put(self, path: Path, there: RemoteFolder) -> None:
        fault_points.reached("while uploading", self._job.rank)
        with path.open("rb", buffering=0) as file, there.writing(path.stat().st_size) as write:
            while chunk := file.read(CHUNK_BYTES):
                self._save_is_over()
                self._go_on()
                write(chunk)


def owner(name: str) -> int:
    """The rank that wrote a file, or another one for a file that no rank has its number in."""
    number = re.search(r"\d+", name)
    return int(number[0]) if number else 0


def _share(rank: int) -> str:
    return f".uploaded-{rank}"


def _is_whole(folder: Path, marker: bytes) -> bool:
    try:
        index.check_sizes(folder, index.read_manifest(folder))
    except Damaged:
        return False
    return _read(folder / COMMITTED) == marker


def _read(path: Folder) -> bytes | None:
    """None: it is not there."""
    try:
        return patiently(path.read_bytes, path)
    except OSError:
        return None


def _markers(root: Folder, before: dict[int, bytes]) -> dict[int, bytes]:
    """By step the marker of what is committed in ``root``; those in ``before`` are not read again."""
    found = {}
    for folder in index.folders(root):
        step = index.step_of(folder)
        if step is not None and (marker := before.get(step) or _read(folder / COMMITTED)):
            found[step] = marker
    return found
