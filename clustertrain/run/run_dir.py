"""The run directory: every path in it, in one place. See docs/architecture.md for who writes what."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clustertrain import fsio, reading, settings
from clustertrain.errors import ConfigError, NotFound, PermissionDenied

ROLLED_BACK_FILE = "rolled-back.json"  # among the checkpoints: which do not count any more
_BASE32 = "abcdefghijklmnopqrstuvwxyz234567"


@dataclass(frozen=True)
class AttemptDir:
    """One start of the run: ``attempts/<n>/``."""

    path: Path
    n: int

    @property
    def record(self) -> Path:
        """Who holds the attempt: job id, restart count, host, nodes, end time. Written once by batch."""
        return self.path / "attempt.json"

    @property
    def nonce(self) -> Path:
        return self.path / "nonce"

    @property
    def stop_request(self) -> Path:
        """Written by batch to tell every agent to stop: ``{"why": …}`` or, after a failure, ``{"abort": true}``."""
        return self.path / "stop.json"

    @property
    def requeue_request(self) -> Path:
        """Written by ``clustertrain requeue`` while the attempt runs: ``{"options": {…}}``."""
        return self.path / "requeue-asked.json"

    @property
    def deadline(self) -> Path:
        """When the allocation ends, as far as batch knows: see :mod:`clustertrain.agent.deadline`."""
        return self.path / "deadline.json"

    @property
    def signal_warning(self) -> Path:
        """Written by the first node's agent when it got a signal that only the scheduler can explain."""
        return self.path / "warned.json"

    @property
    def rendezvous(self) -> Path:
        return self.path / "rendezvous.json"

    @property
    def events(self) -> Path:
        return self.path / "events"

    def events_path(self, writer: str) -> Path:
        return self.events / f"{writer}.jsonl"

    @property
    def results(self) -> Path:
        return self.path / "results"

    def result_path(self, node: str) -> Path:
        return self.results / f"{node}.json"

    def nodes_without_agent(self) -> set[str]:
        """The nodes whose agents ended without a result, as ``agent_end_script.sh`` has noted. By listing, since an
        NFS client that opens a folder asks the server."""
        return {p.stem for p in self.results.iterdir() if p.suffix == ".gone"}

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    @property
    def flight_record(self) -> Path:
        """Of torch's Flight Recorder, which appends the rank's number."""
        return self.logs / "flight-record-rank-"

    @property
    def telemetry(self) -> Path:
        return self.path / "telemetry"


@dataclass(frozen=True)
class RunDir:
    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def spec(self) -> Path:
        return self.path / "spec.toml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def job_script(self) -> Path:
        return self.path / "job.sh"

    @property
    def agent_end_script(self) -> Path:
        """A script that is run on a node after the agent there has ended."""
        return self.path / "agent_end.sh"

    @property
    def secrets(self) -> Path:
        """Sourced by job.sh: the values of --env and the webhook. 0600 even where the group may read the run; absent
        where there are none."""
        return self.path / "secrets.sh"

    @property
    def record(self) -> Path:
        return self.path / "record.json"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def job_log(self) -> Path:
        """What batch, srun and Slurm itself print, over all starts."""
        return self.path / "job.log"

    @property
    def events(self) -> Path:
        """Events that belong to no attempt: submitted, cancelled."""
        return self.path / "events"

    @property
    def cancel_marker(self) -> Path:
        """The cancel marker. Whoever would continue the run looks at it first."""
        return self.path / "cancelled.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    def metrics_path(self, attempt: int, segment: int = 0) -> Path:
        """The rows of one attempt, or after it has gone back to an earlier step those of a further ``segment``: in each
        file the steps rise."""
        return self.metrics / f"attempt-{attempt}{f'-{segment}' if segment else ''}.jsonl"

    def metrics_files(self, attempt: int) -> list[Path]:
        """All files of one attempt, in the order in which they were written; the first one whether it is there or
        not."""
        paths = [self.metrics_path(attempt)]
        while (next_path := self.metrics_path(attempt, len(paths))).exists():
            paths.append(next_path)
        return paths

    @property
    def profiles(self) -> Path:
        """What ``train.profile`` has asked for: traces and tables, by attempt and steps. Made by rank 0."""
        return self.path / "profiles"

    @property
    def tracking(self) -> Path:
        """What trackers keep, and what each has been handed. Written by the tracking process."""
        return self.path / "tracking"

    @property
    def checkpoints(self) -> Path:
        """The folder, or a link to ``--checkpoint-dir``."""
        return self.path / "checkpoints"

    def committed_steps(self) -> list[int]:
        """Steps with a committed checkpoint that counts, oldest first. The marker comes last, so a half-written one is
        not here, nor is one that the run has gone back behind."""
        try:
            paths = list(self.checkpoints.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        invalidated = self._load_invalidated()
        matches = ((re.fullmatch(r"step-(\d{8,})", p.name), p / "COMMITTED") for p in paths)
        steps = [(int(match[1]), marker) for match, marker in matches if match and marker.is_file()]
        return sorted(step for step, marker in steps if (step, _read_or_empty(marker)) not in invalidated)

    def _load_invalidated(self) -> set[tuple[int, str]]:
        """Step and marker of what :mod:`clustertrain.checkpoint.load.rollback` has noted; none where its record does
        not read, which the next attempt tells."""
        try:
            records = reading.parse_json(_read_or_empty(self.checkpoints / ROLLED_BACK_FILE) or "[]")
            return {(int(step), str(marker)) for record in records for step, marker in record.get("condemned", ())}
        except (ValueError, TypeError, AttributeError):
            return set()

    @property
    def attempts_folder(self) -> Path:
        return self.path / "attempts"

    def attempt(self, n: int) -> AttemptDir:
        return AttemptDir(self.attempts_folder / str(n), n)

    def attempts(self) -> list[AttemptDir]:
        """All attempts, oldest first; none where the folder is missing.

        Raises:
            OSError: the folder cannot be read. A caller that took this for "no attempts" would start the run over.
        """
        try:
            names = [p.name for p in self.attempts_folder.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [self.attempt(n) for n in sorted(int(name) for name in names if reading.is_unsigned_int(name))]

    def find_newer_attempt(self, n: int) -> int | None:
        """The newest attempt, where it was claimed after attempt ``n``: from then on that one must leave the run alone.
        By listing, since an NFS client that opens a folder asks the server."""
        newest = max((a.n for a in self.attempts()), default=n)
        return newest if newest > n else None


def _read_or_empty(path: Path) -> str:
    """Empty where it is not there (any more)."""
    try:
        return reading.read_bytes(path).decode(errors="replace")
    except OSError:
        return ""


def slugify(name: str) -> str:
    """``name`` as a part of a folder name: lower case letters, digits and dashes, at most 40."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-") or "run"


def runs_folder() -> Path:
    return settings.home() / "runs"


def sweeps_folder() -> Path:
    return settings.home() / "sweeps"


def create_run(name: str, *, share: bool = False) -> RunDir:
    """Make a new, empty run directory with a fresh id.

    Raises:
        ConfigError: ``$CLUSTERTRAIN_HOME`` cannot be written.
    """
    return RunDir(_create_folder(runs_folder(), name, share, ("attempts", "events", "metrics")))


def create_sweep(name: str, *, share: bool = False) -> Path:
    """Make a new folder for the runs of one sweep, whose id has the form of a run's. Raises as :func:`create_run`."""
    return _create_folder(sweeps_folder(), name, share, ())


def _create_folder(folder: Path, name: str, share: bool, subfolders: Sequence[str]) -> Path:
    mode = 0o750 if share else 0o700
    if any(c in str(folder) for c in "\n\r\0"):
        raise ConfigError(f"{settings.HOME} = {str(settings.home())!r}: a path with a line break cannot be used")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
        while True:
            path = folder / f"{slugify(name)}-{''.join(_BASE32[b % 32] for b in os.urandom(6))}"
            if fsio.claim_folder(path, mode=mode):
                break
        for subfolder in subfolders:
            fsio.claim_folder(path / subfolder)
        if share:
            # The way down to it must be open too, and an earlier, private run may have closed it.
            for parent in (folder, folder.parent):
                if parent.stat().st_uid == os.getuid():
                    parent.chmod(parent.stat().st_mode | 0o050)
    except OSError as e:
        raise ConfigError(
            f"{settings.home()} is not writable: {e.strerror or e}",
            fix=f"set {settings.HOME} to a folder of yours on a filesystem that all nodes see",
        ) from e
    return path


def open_run(path: Path) -> RunDir:
    """Raises NotFound when ``path`` is no run directory, PermissionDenied when it may not be looked into, OSError when
    the file system does not answer."""
    try:
        (path / "spec.toml").stat()
    except PermissionError as e:
        raise permission_error(path) from e
    except OSError as e:
        if e.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            raise
        raise NotFound(f"{path}: no run directory (spec.toml is missing)") from e
    return RunDir(path)


@contextlib.contextmanager
def explain_permission_errors() -> Iterator[None]:
    """What the files of another user's run refuse, in words.

    Raises:
        PermissionDenied: one of them may not be read.
    """
    try:
        yield
    except PermissionError as e:
        raise permission_error(Path(e.filename or ".")) from e


def permission_error(path: Path) -> PermissionDenied:
    """The error that a file or folder of somebody else's run may not be read."""
    return PermissionDenied(
        f"{path} may not be read by you: it belongs to {_find_owner(path)}",
        fix="its owner can open the run to its group: `submit --share`, or chmod -R g+rX on the run's folder",
    )


def _find_owner(path: Path) -> str:
    """Of ``path``, or of the nearest folder above it that tells."""
    for parent in (path, *path.parents):
        with contextlib.suppress(OSError, KeyError):
            return parent.owner()
    return "another user"
