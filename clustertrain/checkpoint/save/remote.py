"""Uploads of committed checkpoints to a URL, by the writer processes while training continues.

Rank 0's writer chooses a step and announces it in ``.uploading.json`` of the shared folder. Each rank's writer uploads
its share of that step's files, whichever rank wrote them, then a file ``.uploaded-<r>``. When all of these exist, rank
0's writer uploads the manifest and, last, COMMITTED: the remote folder then equals the shared one.

A failed upload is retried with exponential backoff, and training is notified only by an event. A new attempt uploads
what earlier ones did not.
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
from clustertrain.checkpoint.format.fence import AttemptSuperseded, check_fence
from clustertrain.checkpoint.format.manifest import (
    COMMITTED,
    MANIFEST,
    DamagedCheckpoint,
    Manifest,
    check_sizes,
    list_checkpoint_folders,
    parse_step,
    read_manifest,
    step_folder,
)
from clustertrain.checkpoint.format.storage import Folder, RemoteFolder
from clustertrain.checkpoint.format.storage_errors import StorageError, with_retries
from clustertrain.checkpoint.save.writer_jobs import JobOutcome, UploadJob
from clustertrain.errors import ClusterTrainError

ANNOUNCEMENT_FILE = ".uploading.json"
ALL_STEPS = 2**62  # no run has so many steps
CHUNK_BYTES = 8 << 20
RETRY_BACKOFF_S = (1.0, 300.0)  # after the first failure, and at most
POLL_BACKOFF_S = (0.1, 3.0)  # between checks for another rank's files: at first, and at most
SHARE_TIMEOUT_S = 600.0  # for the other ranks' files, since the last one arrived


class UploadAnnouncement(
    msgspec.Struct, frozen=True, kw_only=True, rename={"sequence": "nth", "uploaded_upto": "upto"}
):
    """The content of ``.uploading.json``: rank 0's request to the other ranks."""

    attempt: str
    sequence: int
    """Counts rank 0's announcements of this attempt, from 1."""
    uploaded_upto: int
    """Without a ``step``: the newest step up to which all checkpoints are uploaded or never will be."""
    step: int | None = None
    """The checkpoint to upload."""
    marker: str = ""
    """The commit marker of that checkpoint. Another save of the same step has a different one."""


class _Stopped(Exception):
    """The uploader was stopped."""


class Uploader:
    """The upload thread of a writer process."""

    def __init__(
        self, job: UploadJob, on_outcome: Callable[[JobOutcome], None], wait_for_save: Callable[[], object]
    ) -> None:
        """
        Args:
            on_outcome: called with the outcome of each upload.
            wait_for_save: waits while a checkpoint is being written, because a save has priority over an upload.
        """
        self._job = job
        self._on_outcome = on_outcome
        self._wait_for_save = wait_for_save
        self._root = Path(job.root)
        self._remote: RemoteFolder
        self._wake = threading.Event()
        self._stop_event = threading.Event()
        self._poll_s = POLL_BACKOFF_S[0]
        self._newest_step = 0  # that this process has written or committed
        self._uploading_step: int | None = None
        self._num_announced = 0
        self._last_announcement = 0
        self._idle_upto = -1
        self._unusable: dict[int, bytes] = {}
        self._remote_markers: dict[int, bytes] = {}  # by step
        self._info_cache: dict[tuple[int, bytes], CheckpointInfo] = {}

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def notify_saved(self, step: int) -> None:
        self._newest_step = max(self._newest_step, step)
        self._wake.set()

    def protected_steps(self) -> tuple[int, ...]:
        """Return the steps that must not be deleted now."""
        return () if self._uploading_step is None else (self._uploading_step,)

    def stop(self) -> None:
        """Stop uploading; the current upload stops after its next chunk."""
        self._stop_event.set()
        self._wake.set()

    def announce_end(self) -> None:
        """Announce that rank 0 uploads nothing more, so that the other ranks do not wait for it."""
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
            except Exception as e:  # the thread's edge: a failed upload must not end the writer
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
        self._report(step, failure=Failure(message=f"{message}; retry in {retry_s:g} s", kind="storage"))

    def _report(self, step: int, *, nbytes: int = 0, seconds: float = 0.0, failure: Failure | None = None) -> None:
        ended = clock.monotonic()
        self._on_outcome(
            JobOutcome(step=step, kind="upload", bytes=nbytes, seconds=seconds, ended=ended, failure=failure)
        )

    def _wait_for_wake(self, timeout_s: float | None = None) -> None:
        """Wait for the next save, at most ``timeout_s``."""
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
        folder, marker = step_folder(self._root, step), local_markers[step]
        self._announce(step=step, marker=marker.decode())
        try:
            manifest = read_manifest(folder)
            check_sizes(folder, manifest)
            self._upload_share(step, marker)
            self._commit_remote(step, marker, manifest)
        except (DamagedCheckpoint, FileNotFoundError) as e:
            if _is_intact(folder, marker):
                raise
            # The checkpoint is damaged or was deleted; do not try it again.
            self._unusable[step] = marker
            self._report(step, failure=failure_from_exception(e))
            return
        self._remote_markers[step] = marker
        self._report(step, nbytes=manifest.bytes, seconds=clock.monotonic() - started)
        self._prune_remote()

    def _announce(self, *, upto: int = 0, step: int | None = None, marker: str = "") -> None:
        check_fence(self._job.fence)
        self._num_announced += 1
        announcement = UploadAnnouncement(
            attempt=self._job.attempt, sequence=self._num_announced, uploaded_upto=upto, step=step, marker=marker
        )
        fsio.write_bytes(self._root / ANNOUNCEMENT_FILE, msgspec.json.encode(announcement))

    def _find_missing(self) -> tuple[dict[int, bytes], list[int]]:
        """Return the commit markers in the shared folder by step, and the steps that are still to be uploaded."""
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
        """Return the properties of a checkpoint that the retention policy uses."""
        key = (step, marker)
        if key not in self._info_cache:
            folder: Folder = step_folder(self._root, step)
            if _read_if_exists(folder / COMMITTED) != marker:
                folder = step_folder(self._remote, step)
            self._info_cache[key] = retention.read_checkpoint_info(folder, self._job.policy)
        return self._info_cache[key]

    def _commit_remote(self, step: int, marker: bytes, manifest: Manifest) -> None:
        """Wait for all ranks' shares, then commit the remote checkpoint."""
        remote_folder = step_folder(self._remote, step)
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
                    f"{remote_folder}: the files of rank {min(pending_ranks)} did not arrive in {SHARE_TIMEOUT_S:g} s"
                )
            self._stop_event.wait(poll_s)
            self._check_stopped()
            poll_s = min(2 * poll_s, POLL_BACKOFF_S[1])
        mismatched = [n for n, size in manifest.files.items() if sizes.get(n) != size]
        if mismatched:  # something else has written there
            remote_folder.rmtree()
            raise StorageError(f"{remote_folder / mismatched[0]}: has a different size than the uploaded file")
        self._upload_file(step_folder(self._root, step) / MANIFEST, remote_folder / MANIFEST)
        fault_points.fault_point("before_remote_commit_marker", 0)
        check_fence(self._job.fence)
        (remote_folder / COMMITTED).write_bytes(marker)
        for rank in range(self._job.world_size):
            (remote_folder / _share_name(rank)).unlink()

    def _prune_remote(self) -> None:
        """Delete the copies that the policy does not keep, and older ones that were never committed there."""
        newest = max(self._remote_markers)
        infos = [self._read_info(s, m) for s, m in self._remote_markers.items()]
        to_delete = set(retention.select_for_deletion(infos, self._job.policy, newest))
        for folder in list_checkpoint_folders(self._remote):
            step = parse_step(folder)
            if step in to_delete or (step not in self._remote_markers and step is not None and step < newest):
                check_fence(self._job.fence)
                (folder / COMMITTED).unlink()
                folder.rmtree()
                self._remote_markers.pop(step, None)

    # -- other ranks

    def _run_follower(self) -> None:
        self._wake.clear()
        self._check_stopped()
        announcement = self._read_announcement()
        if (
            announcement is not None
            and announcement.step is not None
            and announcement.sequence != self._last_announcement
        ):
            with suppress(DamagedCheckpoint, FileNotFoundError):  # rank 0 sees and reports the same
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

    # -- all ranks

    def _upload_share(self, step: int, marker: bytes) -> None:
        """Upload this rank's share of the files."""
        folder, remote_folder = step_folder(self._root, step), step_folder(self._remote, step)
        if self._is_uploaded(remote_folder, marker):
            return
        share_file = remote_folder / _share_name(self._job.rank)
        if _read_if_exists(share_file) == self._share_token(marker):
            return
        if (folder / COMMITTED).read_bytes() != marker:
            raise StorageError(f"{folder}: is not the checkpoint that rank 0 sees")
        for name in read_manifest(folder).files:
            if owner_rank(name) % self._job.world_size == self._job.rank:
                self._upload_file(folder / name, remote_folder / name)
        share_file.write_bytes(self._share_token(marker))

    def _is_uploaded(self, remote_folder: RemoteFolder, marker: bytes) -> bool:
        """Return whether the remote folder has this checkpoint.

        If it has a different one, remove that one's commit marker before any byte is replaced.
        """
        remote_marker = _read_if_exists(remote_folder / COMMITTED)
        if remote_marker is not None and remote_marker != marker:
            check_fence(self._job.fence)
            (remote_folder / COMMITTED).unlink()
        return remote_marker == marker

    def _share_token(self, marker: bytes) -> bytes:
        """Return the content of a share file, which identifies the checkpoint and the number of ranks."""
        return marker.strip() + f" {self._job.world_size}\n".encode()

    def _upload_file(self, path: Path, remote_file: RemoteFolder) -> None:
        fault_points.fault_point("during_upload", self._job.rank)
        with path.open("rb", buffering=0) as file, remote_file.open_writer(path.stat().st_size) as write:
            while chunk := file.read(CHUNK_BYTES):
                self._wait_for_save()
                self._check_stopped()
                write(chunk)


def owner_rank(name: str) -> int:
    """Return the rank in the name of a file, or 0 if there is none."""
    match = re.search(r"\d+", name)
    return int(match[0]) if match else 0


def _share_name(rank: int) -> str:
    return f".uploaded-{rank}"


def _is_intact(folder: Path, marker: bytes) -> bool:
    try:
        check_sizes(folder, read_manifest(folder))
    except DamagedCheckpoint:
        return False
    return _read_if_exists(folder / COMMITTED) == marker


def _read_if_exists(path: Folder) -> bytes | None:
    """Return the bytes of a file, or None if it cannot be read."""
    try:
        return with_retries(path.read_bytes, path)
    except OSError:
        return None


def _read_markers(root: Folder, cached: dict[int, bytes]) -> dict[int, bytes]:
    """Return the commit markers in ``root`` by step; those in ``cached`` are not read again."""
    markers = {}
    for folder in list_checkpoint_folders(root):
        step = parse_step(folder)
        if step is not None and (marker := cached.get(step) or _read_if_exists(folder / COMMITTED)):
            markers[step] = marker
    return markers
