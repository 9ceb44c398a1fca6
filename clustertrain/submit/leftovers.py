"""What deleted runs leave outside their folders: records of local jobs, entries of ``wrap``, folders of sweeps."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from clustertrain import fsio, reading
from clustertrain.run import run_dir
from clustertrain.run.lookup import list_sweep_runs
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.backend import TERMINAL_STATES
from clustertrain.scheduler.local import JobFolder, LocalJob, jobs_root


def find_last_runs(runs: Sequence[RunDir]) -> list[Path]:
    """Return the folders of the sweeps that have no other runs than ``runs``: they go with them."""
    paths = {run.path.resolve() for run in runs}
    folders = _list_folders(run_dir.sweeps_folder())
    remaining = {folder: {run.path for run in list_sweep_runs(folder)} for folder in folders}
    return [folder for folder in folders if remaining[folder] and remaining[folder] <= paths]


def remove_leftovers(runs: Sequence[RunDir], sweeps: Sequence[Path]) -> list[str]:
    """Remove what ``runs``, which are deleted, have left, and those of ``sweeps`` that have no runs any more.

    Returns what could not be removed, with the reason.
    """
    problems: list[str] = []

    def remove(path: Path, action: Callable[[Path], object]) -> None:
        try:
            action(path)
        except FileNotFoundError:
            pass
        except OSError as e:
            problems.append(f"{e.filename or path}: {e.strerror or e}")

    for folder in _list_job_folders({str(run.path) for run in runs}):
        remove(folder, shutil.rmtree)
    for entry in _list_wrapped_entries({run.id for run in runs}):
        remove(entry, Path.unlink)
        if not any(reading.is_unsigned_int(path.stem) for path in entry.parent.glob("*.json")):
            remove(entry.parent, shutil.rmtree)  # the job's runs are gone, and so is the job
    for sweep in sweeps:
        if not list_sweep_runs(sweep):
            remove(sweep, shutil.rmtree)
    return problems


def _list_job_folders(run_paths: set[str]) -> list[Path]:
    """Return the folders of the local jobs of these runs.

    The newest job's stays, so that its id is not given to another job, and one for which a job of a sweep waits.
    """
    jobs: dict[Path, LocalJob] = {}
    for folder in _list_folders(jobs_root()):
        try:
            job = JobFolder(folder).read()
        except (OSError, ValueError):  # another program's, or damaged
            continue
        if job is not None and reading.is_unsigned_int(folder.name):
            jobs[folder] = job
    newest = max((int(folder.name) for folder in jobs), default=0)
    awaited = {job.depends_on for job in jobs.values() if job.state not in TERMINAL_STATES}
    return [
        folder
        for folder, job in jobs.items()
        if job.run_dir in run_paths and int(folder.name) != newest and job.job_id not in awaited
    ]


def _list_wrapped_entries(run_ids: set[str]) -> Iterator[Path]:
    for folder in _list_folders(run_dir.wrapped_folder()):
        for path in folder.glob("*.json"):
            entry = fsio.poll_json(path)
            if reading.is_unsigned_int(path.stem) and isinstance(entry, dict) and entry.get("run") in run_ids:
                yield path


def _list_folders(parent: Path) -> list[Path]:
    """Return the user's own folders in ``parent``, without links."""
    try:
        return [p for p in parent.iterdir() if p.is_dir() and not p.is_symlink() and p.stat().st_uid == os.geteuid()]
    except OSError:
        return []
