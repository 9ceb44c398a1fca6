"""The paths of a run folder. docs/architecture.md lists who writes each file."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clustertrain import fsio, reading, settings
from clustertrain.errors import ConfigError, NotFound, PermissionDenied
from clustertrain.run.rollback_record import RollbackRecord, list_invalidated

ROLLED_BACK_FILE = "rolled-back.json"  # in the checkpoints folder: checkpoints that no longer count
_BASE32 = "abcdefghijklmnopqrstuvwxyz234567"


@dataclass(frozen=True)
class AttemptDir:
    """One start of the run: ``attempts/<n>/``."""

    path: Path
    n: int

    @property
    def record(self) -> Path:
        """The owner of the attempt: job id, restart count, host, pid, nodes, time of the claim. Written once."""
        return self.path / "attempt.json"

    @property
    def nonce(self) -> Path:
        return self.path / "nonce"

    @property
    def stop_request(self) -> Path:
        """Written by the batch process to stop the agents: ``{"reason": …}`` or, on a failure, ``{"abort": true}``."""
        return self.path / "stop.json"

    @property
    def stop_step(self) -> Path:
        """Folder in which the agents agree on the step after which a command stops: ``agent/ranks/stop_step.py``."""
        return self.path / "stop-step"

    @property
    def requeue_request(self) -> Path:
        """Written by ``clustertrain requeue`` while the attempt runs: ``{"options": {…}}``."""
        return self.path / "requeue-request.json"

    @property
    def deadline(self) -> Path:
        """The end of the allocation: see :mod:`clustertrain.agent.deadline`."""
        return self.path / "deadline.json"

    @property
    def signal_warning(self) -> Path:
        """Written by the first node's agent after a signal that only the scheduler can explain."""
        return self.path / "signal-warning.json"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint that a command resumes from, ``{"path": …}``; missing without one."""
        return self.path / "checkpoint.json"

    @property
    def rank_python(self) -> Path:
        """Python, packages and container of the ranks (:mod:`clustertrain.run.rank_python`). Written by rank 0."""
        return self.path / "python.json"

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
        """Return the nodes whose agents ended without a result, as recorded by ``agent_end.sh``.

        It lists the folder because an NFS client then queries the server instead of its cache.
        """
        return {p.stem for p in self.results.iterdir() if p.suffix == ".gone"}

    @property
    def wrap(self) -> Path:
        """The folder of `clustertrain wrap`: ``<node>.json`` when a node's agent has ended, ``exit.json`` at the end.

        Each holds ``{"exit_code": …}``.
        """
        return self.path / "wrap"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    @property
    def flight_record(self) -> Path:
        """Path for torch's Flight Recorder, which appends the rank."""
        return self.logs / "flight-record-rank-"

    @property
    def telemetry(self) -> Path:
        return self.path / "telemetry"


@dataclass(frozen=True)
class RunDir:
    """The run folder."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    def find_owner(self) -> str:
        """Return the user that owns the run: the uid if it has no name here; empty if the run was deleted."""
        try:
            uid = self.path.stat().st_uid
        except OSError:
            return ""
        try:
            return pwd.getpwuid(uid).pw_name
        except KeyError:  # as in a container
            return str(uid)

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
        """The script that runs on a node after its agent has ended."""
        return self.path / "agent_end.sh"

    @property
    def secrets(self) -> Path:
        """Values of --env and the webhook, sourced by job.sh; absent without any. Mode 0600 even in a shared run."""
        return self.path / "secrets.sh"

    @property
    def record(self) -> Path:
        return self.path / "record.json"

    @property
    def watched(self) -> Path:
        """The job that `clustertrain watch` samples, which was started without clustertrain; absent in other runs."""
        return self.path / "watched.json"

    @property
    def watch_lock(self) -> Path:
        """Locked by the `clustertrain watch` that samples the job."""
        return self.path / "watch.lock"

    @property
    def environment(self) -> Path:
        """The Python environment that the run takes to its nodes: :mod:`clustertrain.run.shipped_environment`."""
        return self.path / "environment.json"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def job_log(self) -> Path:
        """Output of the batch process, srun and Slurm, over all starts."""
        return self.path / "job.log"

    @property
    def events(self) -> Path:
        """Events that belong to no attempt: submitted, continued, cancelled."""
        return self.path / "events"

    @property
    def cancel_marker(self) -> Path:
        """The cancel marker, checked before the run is continued."""
        return self.path / "cancelled.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    def metrics_path(self, attempt: int, segment: int = 0) -> Path:
        """Return the path of an attempt's rows. A rollback starts a new ``segment``, so that steps rise in a file."""
        return self.metrics / f"attempt-{attempt}{f'-{segment}' if segment else ''}.jsonl"

    def metrics_files(self, attempt: int) -> list[Path]:
        """Return all files of an attempt in the order of writing, with the first one even if it does not exist."""
        paths = [self.metrics_path(attempt)]
        while (next_path := self.metrics_path(attempt, len(paths))).exists():
            paths.append(next_path)
        return paths

    @property
    def profiles(self) -> Path:
        """Traces and tables of ``train.profile``, by attempt and steps. Created by rank 0."""
        return self.path / "profiles"

    @property
    def tracking(self) -> Path:
        """Files of the trackers, and what each has received. Written by the tracking process."""
        return self.path / "tracking"

    @property
    def predictions(self) -> Path:
        """Predictions of evaluations: a folder per step. Written by the ranks."""
        return self.path / "predictions"

    @property
    def checkpoints(self) -> Path:
        """The folder, or a link to ``--checkpoint-dir``."""
        return self.path / "checkpoints"

    @property
    def rollback_record(self) -> Path:
        """The rollbacks, with the checkpoints that no longer count: see :mod:`clustertrain.run.rollback_record`."""
        return self.checkpoints / ROLLED_BACK_FILE

    def committed_steps(self) -> list[int]:
        """Return the steps of committed checkpoints, oldest first, without those that a rollback invalidated.

        The marker is written last, so incomplete checkpoints are not included.
        """
        try:
            paths = list(self.checkpoints.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        invalidated = self._load_invalidated()
        matches = ((re.fullmatch(r"step-(\d{8,})", p.name), p / "COMMITTED") for p in paths)
        steps = [(int(match[1]), marker) for match, marker in matches if match and marker.is_file()]
        return sorted(step for step, marker in steps if (step, _read_or_empty(marker)) not in invalidated)

    def _load_invalidated(self) -> set[tuple[int, str]]:
        """Return step and marker of the checkpoints that :mod:`clustertrain.checkpoint.load.rollback` invalidated.

        Empty if its record cannot be read, which :meth:`find_rollback_record_error` reports.
        """
        try:
            return set(list_invalidated(reading.read_struct(self.rollback_record, list[RollbackRecord])))
        except OSError:
            return set()

    def find_rollback_record_error(self) -> str | None:
        """Return why the record of rollbacks cannot be read; None if it can be, or if there is none."""
        try:
            reading.read_struct(self.rollback_record, list[RollbackRecord])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            return f"{self.rollback_record}: {e.strerror or e}"
        return None

    @property
    def attempts_folder(self) -> Path:
        return self.path / "attempts"

    def attempt(self, n: int) -> AttemptDir:
        return AttemptDir(self.attempts_folder / str(n), n)

    def attempts(self) -> list[AttemptDir]:
        """Return all attempts, oldest first; empty if the folder is missing.

        Raises:
            OSError: the folder cannot be read. Treated as "no attempts", the run would start from step 0.
        """
        try:
            names = [p.name for p in self.attempts_folder.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [self.attempt(n) for n in sorted(int(name) for name in names if reading.is_unsigned_int(name))]

    def find_newer_attempt(self, n: int) -> int | None:
        """Return the newest attempt if it is newer than ``n``, which then no longer owns the run; otherwise None.

        It lists the folder because an NFS client then queries the server instead of its cache.
        """
        newest = max((a.n for a in self.attempts()), default=n)
        return newest if newest > n else None


def _read_or_empty(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return reading.read_bytes(path).decode(errors="replace")
    except OSError:
        return ""


def slugify(name: str) -> str:
    """Return ``name`` as part of a folder name: at most 40 lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-") or "run"


def runs_folder() -> Path:
    return settings.home() / "runs"


def sweeps_folder() -> Path:
    return settings.home() / "sweeps"


def wrapped_folder() -> Path:
    """Return the folder in which `clustertrain wrap` finds the runs of a job."""
    return settings.home() / "wrapped"


def create_run(name: str, *, share: bool = False) -> RunDir:
    """Create an empty run folder with a new id.

    Raises:
        ConfigError: ``$CLUSTERTRAIN_HOME`` cannot be written.
    """
    return RunDir(_create_folder(runs_folder(), name, share, ("attempts", "events", "metrics")))


def create_sweep(name: str, *, share: bool = False) -> Path:
    """Create the folder of a sweep, with an id like that of a run. Raises as :func:`create_run`."""
    return _create_folder(sweeps_folder(), name, share, ())


def _create_folder(folder: Path, name: str, share: bool, subfolders: Sequence[str]) -> Path:
    mode = 0o750 if share else 0o700
    if any(c in str(folder) for c in "\n\r\0"):
        raise ConfigError(f"{settings.HOME} = {str(settings.home())!r}: the path contains a line break or a NUL")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
        while True:
            path = folder / f"{slugify(name)}-{''.join(_BASE32[b % 32] for b in os.urandom(6))}"
            if fsio.claim_folder(path, mode=mode):
                break
        for subfolder in subfolders:
            fsio.claim_folder(path / subfolder)
        if share:
            # An earlier, private run may have closed the parent folders.
            for parent in (folder, folder.parent):
                if parent.stat().st_uid == os.getuid():
                    parent.chmod(parent.stat().st_mode | 0o050)
    except OSError as e:
        raise ConfigError(
            f"{settings.home()} is not writable: {e.strerror or e}",
            fix=f"set {settings.HOME} to a folder that you can write, on a file system that all nodes see",
        ) from e
    return path


def open_run(path: Path) -> RunDir:
    """Return the run in ``path``.

    Raises:
        NotFound: ``path`` is not a run folder.
        PermissionDenied: the user may not read it.
        OSError: the file system does not answer.
    """
    try:
        (path / "spec.toml").stat()
    except PermissionError as e:
        raise permission_error(path) from e
    except OSError as e:
        if e.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            raise
        raise NotFound(f"{path}: not a run folder (spec.toml is missing)") from e
    return RunDir(path)


@contextlib.contextmanager
def explain_permission_errors() -> Iterator[None]:
    """Turn a PermissionError in the block into PermissionDenied.

    Raises:
        PermissionDenied: a file may not be read.
    """
    try:
        yield
    except PermissionError as e:
        raise permission_error(Path(e.filename or ".")) from e


def permission_error(path: Path) -> PermissionDenied:
    """Return the error for a file or folder of another user's run that may not be read."""
    return PermissionDenied(
        f"{path}: you may not read it; it belongs to {_find_owner(path)}",
        fix="its owner can open the run to its group: `submit --share`, or chmod -R g+rX on the run folder",
    )


def _find_owner(path: Path) -> str:
    """Return the owner of ``path``, or of its nearest parent folder with a known owner."""
    for parent in (path, *path.parents):
        with contextlib.suppress(OSError, KeyError):
            return parent.owner()
    return "another user"
