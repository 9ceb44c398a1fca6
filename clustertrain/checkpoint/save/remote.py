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
from clustertrain.checkpoint.core.failures import Failure, failure_from_exception
from clustertrain.checkpoint.core.retention import CheckpointInfo
from clustertrain.checkpoint.format import fence as fences
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.fence import AttemptSuperseded
from clustertrain.checkpoint.format.manifest import COMMITTED, MANIFEST, DamagedCheckpoint, Manifest
from clustertrain.checkpoint.format.storage import Folder, RemoteFolder
from clustertrain.checkpoint.format.storage_errors import StorageError, with_retries
from clustertrain.checkpoint.save.writer_jobs import JobOutcome, UploadJob
from clustertrain.errors import ClusterTrainError

ANNOUNCEMENT_FILE = ".uploading.json"
ALL_STEPS = 2**62  # a step that no run comes to
CHUNK_BYTES = 8 << 20
RETRY_BACKOFF_S = (1.0, 300.0)  # after the first failure, and at most
POLL_BACKOFF_S = (0.1, 3.0)  # for what another rank says, likewise
SHARE_TIMEOUT_S = 600.0  # for the other ranks' files, from when one came last


class UploadAnnouncement(
    msgspec.Struct, frozen=True, kw_only=True, rename={"sequence": "nth", "uploaded_upto": "upto"}
):
    """The content of ``.uploading.json``: what rank 0 asks the other ranks to upload."""

    attempt: str
    sequence: int
    """Counts rank 0's announcements of this attempt, from 1."""
    uploaded_upto: int
    """Without a ``step``: the newest step up to which all checkpoints are uploaded or never will be."""
    step: int | None = None
    """The checkpoint to upload."""
    marker: str = ""
    """The commit marker of that checkpoint, which another one of the same step does not have."""


class _Stopped(Exception):
    """Nobody waits for copies any more."""


class Uploader:
    """A thread of the process that writes."""

    def __init__(
        self, job: UploadJob, on_outcome: Callable[[JobOutcome], None], wait_for_save: Callable[[], object]
    ) -> None:
        """``wait_for_save`` waits while a checkpoint is being written: a copy gives way to it."""
        self._job = job
        self._on_outcome = on_outcome
        self._wait_for_save = wait_for_save
        self._root = Path(job.root)
        self._remote: RemoteFolder
        self._wake = threading.Event()
        self._stop_event = threading.Event()
        self._poll_s = POLL_BACKOFF_S[0]
        self._newest_step = 0  # step that this process has written or committed
        self._uploading_step: int | None = None
        self._num_announced = 0
        self._last_announcement = 0
        self._idle_upto = -1
        self._unusable: dict[int, bytes] = {}
        self._remote_markers: dict[int, bytes] = {}  # by step the marker
        self._info_cache: dict[tuple[int, bytes], CheckpointInfo] = {}

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def notify_saved(self, step: int) -> None:
        self._newest_step = max(self._newest_step, step)
        self._wake.set()

    def protected_steps(self) -> tuple[int, ...]:
        """The step that must not be deleted now."""
        return () if self._uploading_step is None else (self._uploading_step,)

    def stop(self) -> None:
        """Copy no more. What is under way stops soon."""
        self._stop_event.set()
        self._wake.set()

    def announce_end(self) -> None:
        """So that nobody waits for what rank 0 was to begin."""
        if self._job.rank == 0:
            with suppress(AttemptSuperseded, StorageError):
                self._announce(upto=ALL_STEPS)

    def _run(self) -> None:
        backoff_s = RETRY_BACKOFF_S[0]
        while not self._stop_event.is_set():
            try:
                self._remote = RemoteFolder(self._job.url)
                while True:
                    self._run_leader() if self._job.rank == 0 else self._run_follower()
                    backoff_s = RETRY_BACKOFF_S[0]
            except (_Stopped, AttemptSuperseded):
                return
            except Exception as e:  # whatever it is, it concerns nobody but this thread
                self._report_failure(e, backoff_s)
            self._stop_event.wait(backoff_s)
            backoff_s = min(2 * backoff_s, RETRY_BACKOFF_S[1])

    def _report_failure(self, e: Exception, retry_s: float) -> None:
        if isinstance(e, (OSError, ClusterTrainError)):
            message = e.message if isinstance(e, ClusterTrainError) else str(e)
        else:
            traceback.print_exc()
            message = f"{type(e).__name__}: {e}"
        if self._job.url not in message:
            message = f"{self._job.url}: {message}"
        step = self._newest_step if self._uploading_step is None else self._uploading_step
        self._report(step, failure=Failure(message=f"{message}; again in {retry_s:g} s", kind="storage"))

    def _report(self, step: int, *, nbytes: int = 0, seconds: float = 0.0, failure: Failure | None = None) -> None:
        ended = clock.monotonic()
        self._on_outcome(
            JobOutcome(step=step, kind="upload", bytes=nbytes, seconds=seconds, ended=ended, failure=failure)
        )

    def _wait_for_wake(self, timeout_s: float | None = None) -> None:
        """For a save, or until the time is over."""
        self._wake.wait(timeout_s)
        self._check_stopped()

    def _check_stopped(self) -> None:
        if self._stop_event.is_set():
            raise _Stopped

    def _report_idle(self, upto: int) -> None:
        if upto > self._idle_upto:
            self._idle_upto = upto
            self._report(upto)

    # -- rank 0

    def _run_leader(self) -> None:
        self._wake.clear()
        self._check_stopped()
        local_markers, missing = self._find_missing()
        if not missing:
            self._uploading_step = None
            upto = max([*local_markers, *self._remote_markers], default=0)
            self._announce(upto=upto)
            self._report_idle(upto)
            self._wait_for_wake()
            return
        step = self._uploading_step = max(missing)
        started = clock.monotonic()
        folder, marker = index.step_folder(self._root, step), local_markers[step]
        self._announce(step=step, marker=marker.decode())
        try:
            manifest = index.read_manifest(folder)
            index.check_sizes(folder, manifest)
            self._upload_share(step, marker)
            self._commit_remote(step, marker, manifest)
        except (DamagedCheckpoint, FileNotFoundError) as e:
            if _is_intact(folder, marker):
                raise
            # It is damaged here, or somebody has deleted it.
            self._unusable[step] = marker
            self._report(step, failure=failure_from_exception(e))
            return
        self._remote_markers[step] = marker
        self._report(step, nbytes=manifest.bytes, seconds=clock.monotonic() - started)
        self._prune_remote()

    def _announce(self, *, upto: int = 0, step: int | None = None, marker: str = "") -> None:
        fences.check_fence(self._job.fence)
        self._num_announced += 1
        announcement = UploadAnnouncement(
            attempt=self._job.attempt, sequence=self._num_announced, uploaded_upto=upto, step=step, marker=marker
        )
        fsio.write_bytes(self._root / ANNOUNCEMENT_FILE, msgspec.json.encode(announcement))

    def _find_missing(self) -> tuple[dict[int, bytes], list[int]]:
        """The markers of what is committed here, and the steps of it that should be there and are not."""
        local_markers = _read_markers(self._root, {})
        self._remote_markers = _read_markers(self._remote, self._remote_markers)
        missing = [
            s for s, m in local_markers.items() if m != self._remote_markers.get(s) and m != self._unusable.get(s)
        ]
        all_markers = {**self._remote_markers, **{s: local_markers[s] for s in missing}}
        to_delete = retention.select_for_deletion(
            [self._read_info(s, m) for s, m in all_markers.items()], self._job.policy, max(all_markers, default=None)
        )
        return local_markers, [s for s in missing if s not in to_delete]

    def _read_info(self, step: int, marker: bytes) -> CheckpointInfo:
        """What the policy looks at."""
        key = (step, marker)
        if key not in self._info_cache:
            folder: Folder = index.step_folder(self._root, step)
            if _read_if_exists(folder / COMMITTED) != marker:
                folder = index.step_folder(self._remote, step)
            self._info_cache[key] = retention.read_checkpoint_info(folder, self._job.policy)
        return self._info_cache[key]

    def _commit_remote(self, step: int, marker: bytes, manifest: Manifest) -> None:
        """When all ranks have copied their share."""
        remote_folder = index.step_folder(self._remote, step)
        if self._is_uploaded(remote_folder, marker):
            return
        pending_ranks = set(range(self._job.world_size))
        poll_s, last_arrival = POLL_BACKOFF_S[0], clock.monotonic()
        while True:
            sizes = remote_folder.sizes()
            arrived = {
                r
                for r in pending_ranks
                if _share_name(r) in sizes
                and _read_if_exists(remote_folder / _share_name(r)) == self._share_token(marker)
            }
            pending_ranks -= arrived
            if not pending_ranks:
                break
            if arrived:
                poll_s, last_arrival = POLL_BACKOFF_S[0], clock.monotonic()
            if clock.monotonic() - last_arrival > SHARE_TIMEOUT_S:
                raise StorageError(
                    f"{remote_folder}: the files of rank {min(pending_ranks)} have not come for {SHARE_TIMEOUT_S:g} s"
                )
            self._stop_event.wait(poll_s)
            self._check_stopped()
            poll_s = min(2 * poll_s, POLL_BACKOFF_S[1])
        mismatched = [n for n, size in manifest.files.items() if sizes.get(n) != size]
        if mismatched:  # somebody else has been there
            remote_folder.rmtree()
            raise StorageError(f"{remote_folder / mismatched[0]}: is not what was written there")
        self._upload_file(index.step_folder(self._root, step) / MANIFEST, remote_folder / MANIFEST)
        fault_points.fault_point("before_remote_commit_marker", 0)
        fences.check_fence(self._job.fence)
        (remote_folder / COMMITTED).write_bytes(marker)
        for rank in range(self._job.world_size):
            (remote_folder / _share_name(rank)).unlink()

    def _prune_remote(self) -> None:
        """Delete what the policy does not keep there, and what of older ones never became whole."""
        newest = max(self._remote_markers)
        infos = [self._read_info(s, m) for s, m in self._remote_markers.items()]
        to_delete = set(retention.select_for_deletion(infos, self._job.policy, newest))
        for folder in index.list_checkpoint_folders(self._remote):
            step = index.parse_step(folder)
            if step in to_delete or (step not in self._remote_markers and step is not None and step < newest):
                fences.check_fence(self._job.fence)
                (folder / COMMITTED).unlink()
                folder.rmtree()
                self._remote_markers.pop(step, None)

    # -- the others

    def _run_follower(self) -> None:
        self._wake.clear()
        self._check_stopped()
        announcement = self._read_announcement()
        if (
            announcement is not None
            and announcement.step is not None
            and announcement.sequence != self._last_announcement
        ):
            with suppress(DamagedCheckpoint, FileNotFoundError):  # rank 0 finds the same
                self._upload_share(announcement.step, announcement.marker.encode())
            self._last_announcement = announcement.sequence
            self._poll_s = POLL_BACKOFF_S[0]
        elif announcement is not None and announcement.step is None and announcement.uploaded_upto >= self._newest_step:
            self._report_idle(announcement.uploaded_upto)
            self._wait_for_wake()
            self._poll_s = POLL_BACKOFF_S[0]
        else:
            self._wait_for_wake(self._poll_s)
            self._poll_s = min(2 * self._poll_s, POLL_BACKOFF_S[1])

    def _read_announcement(self) -> UploadAnnouncement | None:
        try:
            announcement = schema.convert(fsio.poll_json(self._root / ANNOUNCEMENT_FILE), UploadAnnouncement)
        except msgspec.ValidationError:
            return None
        return announcement if announcement.attempt == self._job.attempt else None

    # -- all

    def _upload_share(self, step: int, marker: bytes) -> None:
        """Copy this rank's share of the files."""
        folder, remote_folder = index.step_folder(self._root, step), index.step_folder(self._remote, step)
        if self._is_uploaded(remote_folder, marker):
            return
        share_file = remote_folder / _share_name(self._job.rank)
        if _read_if_exists(share_file) == self._share_token(marker):
            return
        if (folder / COMMITTED).read_bytes() != marker:
            raise StorageError(f"{folder}: is another one than rank 0 sees")
        for name in index.read_manifest(folder).files:
            if owner_rank(name) % self._job.world_size == self._job.rank:
                self._upload_file(folder / name, remote_folder / name)
        share_file.write_bytes(self._share_token(marker))

    def _is_uploaded(self, remote_folder: RemoteFolder, marker: bytes) -> bool:
        """If not, nothing there counts from now on: before the first byte of it is replaced."""
        remote_marker = _read_if_exists(remote_folder / COMMITTED)
        if remote_marker is not None and remote_marker != marker:
            fences.check_fence(self._job.fence)
            (remote_folder / COMMITTED).unlink()
        return remote_marker == marker

    def _share_token(self, marker: bytes) -> bytes:
        """Of other bytes, or of a share among others, it is another one."""
        return marker.strip() + f" {self._job.world_size}\n".encode()

    def _upload_file(self, path: Path, remote_file: RemoteFolder) -> None:
        fault_points.fault_point("during_upload", self._job.rank)
        with path.open("rb", buffering=0) as file, remote_file.open_writer(path.stat().st_size) as write:
            while chunk := file.read(CHUNK_BYTES):
                self._wait_for_save()
                self._check_stopped()
                write(chunk)


def owner_rank(name: str) -> int:
    """The rank that wrote a file, or another one for a file that no rank has its number in."""
    match = re.search(r"\d+", name)
    return int(match[0]) if match else 0


def _share_name(rank: int) -> str:
    return f".uploaded-{rank}"


def _is_intact(folder: Path, marker: bytes) -> bool:
    try:
        index.check_sizes(folder, index.read_manifest(folder))
    except DamagedCheckpoint:
        return False
    return _read_if_exists(folder / COMMITTED) == marker


def _read_if_exists(path: Folder) -> bytes | None:
    """None: it is not there."""
    try:
        return with_retries(path.read_bytes, path)
    except OSError:
        return None


def _read_markers(root: Folder, cached: dict[int, bytes]) -> dict[int, bytes]:
    """By step the marker of what is committed in ``root``; those in ``cached`` are not read again."""
    markers = {}
    for folder in index.list_checkpoint_folders(root):
        step = index.parse_step(folder)
        if step is not None and (marker := cached.get(step) or _read_if_exists(folder / COMMITTED)):
            markers[step] = marker
    return markers
