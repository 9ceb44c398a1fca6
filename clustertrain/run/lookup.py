"""Lookup of run folders by the RUN of the command line."""

from __future__ import annotations

import contextlib
import difflib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from clustertrain import reading, settings
from clustertrain.errors import AmbiguousName, NotFound, UsageError
from clustertrain.run import attempts
from clustertrain.run.run_dir import (
    RunDir,
    explain_permission_errors,
    open_run,
    permission_error,
    runs_folder,
    sweeps_folder,
)
from clustertrain.run.safe_names import JOB_ID

MAX_LISTED = 10
_MAX_SUGGESTIONS, _MIN_SIMILARITY = 3, 0.6
_LOCAL_PREFIX = "local-"


def list_runs() -> list[RunDir]:
    """Return the runs in ``$CLUSTERTRAIN_HOME`` that the user may read, newest first.

    Raises:
        PermissionDenied: the folder itself may not be read.
    """
    created = [(time_ns, path) for path in _list_entries() if (time_ns := _find_creation_time_ns(path)) is not None]
    return [RunDir(path) for _, path in sorted(created, reverse=True)]


def _list_entries() -> list[Path]:
    try:
        with explain_permission_errors():
            # A run that is being deleted begins with a dot.
            return [path for path in runs_folder().iterdir() if not path.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _find_creation_time_ns(path: Path) -> int | None:
    """Return the creation time of a run (ns); None if ``path`` is not a run or may not be read."""
    try:
        info = (path / "spec.toml").stat()
    except OSError:
        return None
    return info.st_mtime_ns if stat.S_ISREG(info.st_mode) else None


def resolve_run(name: str) -> RunDir:
    """Return the run that ``name`` stands for.

    ``name`` is ``latest``, a run id, the id of a job of the run, or a unique prefix of a run id, tried in this order.

    Raises:
        NotFound: nothing matches.
        AmbiguousName: several runs match; the message lists them.
        PermissionDenied: the matching run belongs to another user and is not shared.
        UsageError: the name is empty.
    """
    _check_name(name)
    if name != "latest" and "/" not in name:
        with contextlib.suppress(NotFound):
            return open_run(runs_folder() / name)
    runs = list_runs()
    if name == "latest":
        if not runs:
            raise NotFound(f"there are no runs in {settings.home()}", fix="start one with `clustertrain submit`")
        return runs[0]
    if job_runs := _find_runs_with_job(name, runs):
        return require_single(name, job_runs)
    matches = [r for r in runs if r.id.startswith(name)]
    if not matches:
        for path in _list_entries():
            if path.name.startswith(name) and _is_denied(path):
                raise permission_error(path)
        raise NotFound(f"no run {name!r} in {settings.home()}", fix=_suggest_similar(name, runs))
    return require_single(name, matches)


def _check_name(name: str) -> None:
    """Raise an error for a name that no file can have.

    Raises:
        UsageError: it is blank. `cancel "$JOB"` with an empty variable must not cancel the newest run.
        NotFound: it has a NUL, or characters that cannot be encoded.
    """
    if not name.strip():
        raise UsageError(
            f"RUN is {name!r}: not a run (an empty shell variable?)",
            fix="name a run, or use latest for the newest",
        )
    with contextlib.suppress(UnicodeEncodeError):
        if b"\0" not in os.fsencode(name):
            return
    raise NotFound(f"no run {name!r} in {settings.home()}", fix="`clustertrain list` shows the runs")


def _is_denied(path: Path) -> bool:
    try:
        (path / "spec.toml").stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _suggest_similar(name: str, runs: Sequence[RunDir]) -> str:
    """Return a hint with the runs and jobs whose names are similar to ``name``."""
    similarity: dict[str, float] = {}

    def score(candidate: str, label: str, query: str = name) -> None:
        matcher = difflib.SequenceMatcher(None, query, candidate)
        if matcher.real_quick_ratio() >= _MIN_SIMILARITY and (ratio := matcher.ratio()) >= _MIN_SIMILARITY:
            similarity[label] = max(ratio, similarity.get(label, 0.0))

    for run in runs:
        # The whole id, the id without its random part, and a prefix as long as the query.
        for name_part in {run.id, run.id.rpartition("-")[0], run.id[: len(name)]}:
            score(name_part, run.id)
    if JOB_ID.fullmatch(name):
        for run in runs:
            for job_id in _list_job_ids(run):
                # Without the common prefix of local jobs, which would make all of them similar.
                score(job_id.removeprefix(_LOCAL_PREFIX), f"{run.id} (job {job_id})", name.removeprefix(_LOCAL_PREFIX))
    nearest = sorted(similarity, key=lambda label: -similarity[label])[:_MAX_SUGGESTIONS]
    hint = "`clustertrain list` shows the runs"
    if nearest:
        return f"did you mean {' or '.join(nearest)}? {hint}"
    ids = _list_job_ids(runs[0]) if runs and JOB_ID.fullmatch(name) else []
    return f"the newest run is {runs[0].id} (job {ids[-1]}); {hint}" if ids else hint


def resolve_runs(name: str) -> list[RunDir]:
    """Return the runs of the sweep or job array ``name``, or the single run that it stands for.

    Raises:
        NotFound: nothing matches, or the runs of the sweep were removed.
        AmbiguousName, PermissionDenied, UsageError: as :func:`resolve_run`.
    """
    _check_name(name)
    sweep = sweeps_folder() / name
    if "/" not in name and sweep.is_dir():
        runs = list_sweep_runs(sweep)
        if not runs:
            raise NotFound(f"the runs of the sweep {name} are gone")
        return runs
    return _find_runs_with_job(name, list_runs()) or [resolve_run(name)]


def resolve_sweep(name: str) -> Path:
    """Return the folder of a sweep by its exact name, ``latest``, a job id of its array, or a unique prefix.

    Raises:
        NotFound: nothing matches.
        AmbiguousName: several sweeps match; the message lists them.
        UsageError: the name is empty.
    """
    _check_name(name)
    try:
        sweeps = sorted((p for p in sweeps_folder().iterdir() if p.is_dir()), key=lambda p: -p.stat().st_mtime)
    except (FileNotFoundError, NotADirectoryError):
        sweeps = []
    if not sweeps:
        raise NotFound(f"there are no sweeps in {settings.home()}", fix="start one with `clustertrain sweep`")
    exact = [path for path in sweeps if path.name == name]
    if name == "latest" or exact:
        return exact[0] if exact else sweeps[0]
    job_run_paths = {run.path for run in _find_runs_with_job(name, list_runs())}
    matches = [p for p in sweeps if job_run_paths & {run.path for run in list_sweep_runs(p)}] if job_run_paths else []
    matches = matches or [p for p in sweeps if p.name.startswith(name)]
    if not matches:
        raise NotFound(f"no sweep {name!r} in {settings.home()}", fix=f"the newest one is {sweeps[0].name}")
    if len(matches) > 1:
        names = ", ".join(p.name for p in matches[:MAX_LISTED])
        raise AmbiguousName(f"{name!r} matches {len(matches)} sweeps: {names}", fix="name one of them")
    return matches[0]


def list_sweep_runs(sweep: Path) -> list[RunDir]:
    """Return the remaining runs of a sweep, in the order of its tasks."""
    links = sorted((p for p in sweep.iterdir() if reading.is_unsigned_int(p.name)), key=lambda p: int(p.name))
    return [RunDir(link.resolve()) for link in links if (link / "spec.toml").is_file()]


def list_runs_with_job(job_id: str) -> list[RunDir]:
    """Return the runs that have the job ``job_id`` or, if it is an array, one of its tasks."""
    return _find_runs_with_job(job_id, list_runs())


def _find_runs_with_job(name: str, runs: Sequence[RunDir]) -> list[RunDir]:
    """Return the runs that have the job ``name`` or, if it is an array, one of its tasks."""
    if not JOB_ID.fullmatch(name):
        return []
    return [r for r in runs if any(j == name or j.startswith(f"{name}_") for j in _list_job_ids(r))]


def _list_job_ids(run: RunDir) -> list[str]:
    """Return the job ids of a run; empty if its files are damaged or unreadable, which must not hide other runs."""
    try:
        return attempts.list_job_ids(run)
    except Exception:  # damaged files may raise anything
        return []


def require_single(name: str, matches: list[RunDir]) -> RunDir:
    """Return the only match; raise AmbiguousName if there are several."""
    if len(matches) == 1:
        return matches[0]
    ids = [r.id for r in matches]
    more = f" and {len(ids) - MAX_LISTED} more" if len(ids) > MAX_LISTED else ""
    raise AmbiguousName(
        f"{name!r} matches {len(ids)} runs: {', '.join(ids[:MAX_LISTED])}{more}", fix="name one of them"
    )
