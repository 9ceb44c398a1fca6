"""RUN on the command line -> a run directory."""

from __future__ import annotations

import contextlib
import difflib
import stat
from collections.abc import Sequence
from pathlib import Path

from clustertrain import reading, settings
from clustertrain.errors import Ambiguous, NotFound, UsageError
from clustertrain.run import attempts
from clustertrain.run.run_dir import RunDir, open_run, readable, refused, runs_folder, sweeps_folder
from clustertrain.run.safe_names import JOB_ID

SHOWN = 10
_CLOSE_SHOWN, _LIKE = 3, 0.6
_LOCAL = "local-"


def all_runs() -> list[RunDir]:
    """Every run in ``$CLUSTERTRAIN_HOME`` that I may look into, newest first.

    Raises:
        NotReadable: the folder itself may not be read.
    """
    made = [(at, path) for path in _entries() if (at := _made_at(path)) is not None]
    return [RunDir(path) for _, path in sorted(made, reverse=True)]


def _entries() -> list[Path]:
    try:
        with readable():
            return list(runs_folder().iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _made_at(path: Path) -> int | None:
    """ns; None for what is no run, or another user's that is not shared."""
    try:
        found = (path / "spec.toml").stat()
    except OSError:
        return None
    return found.st_mtime_ns if stat.S_ISREG(found.st_mode) else None


def resolve(name: str) -> RunDir:
    """An exact run id; ``latest``; a job id that a run has held; else a unique prefix of a run id.

    Raises:
        NotFound: nothing fits.
        Ambiguous: several do; they are listed.
        NotReadable: what fits is another user's, and not shared.
        UsageError: the name is empty.
    """
    _check(name)
    if name != "latest" and "/" not in name:
        with contextlib.suppress(NotFound):
            return open_run(runs_folder() / name)
    runs = all_runs()
    if name == "latest":
        if not runs:
            raise NotFound(f"there are no runs in {settings.home()}", fix="start one with `clustertrain submit`")
        return runs[0]
    if holders := _holders(name, runs):
        return only(name, holders)
    fitting = [r for r in runs if r.id.startswith(name)]
    if not fitting:
        for path in _entries():
            if path.name.startswith(name) and _denied(path):
                raise refused(path)
        raise NotFound(f"no run {name!r} in {settings.home()}", fix=_close(name, runs))
    return only(name, fitting)


def _check(name: str) -> None:
    """An empty shell variable must not mean the newest run: `cancel "$JOB"`."""
    if not name.strip():
        raise UsageError(
            f"RUN is {name!r}, which names no run; an empty shell variable?",
            fix="name one, or write latest for the newest",
        )


def _denied(path: Path) -> bool:
    try:
        (path / "spec.toml").stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _close(name: str, runs: Sequence[RunDir]) -> str:
    """The runs and jobs whose names are like ``name``, in words."""
    alike: dict[str, float] = {}

    def weigh(known: str, shown: str, typed: str = name) -> None:
        matcher = difflib.SequenceMatcher(None, typed, known)
        if matcher.real_quick_ratio() >= _LIKE and (ratio := matcher.ratio()) >= _LIKE:
            alike[shown] = max(ratio, alike.get(shown, 0.0))

    for run in runs:
        # As it is, without its random end, and as far as was typed.
        for part in {run.id, run.id.rpartition("-")[0], run.id[: len(name)]}:
            weigh(part, run.id)
    if JOB_ID.fullmatch(name):
        for run in runs:
            for job_id in _job_ids(run):
                # What all local jobs begin with makes none of them like another.
                weigh(job_id.removeprefix(_LOCAL), f"{run.id} (job {job_id})", name.removeprefix(_LOCAL))
    nearest = sorted(alike, key=lambda shown: -alike[shown])[:_CLOSE_SHOWN]
    more = "`clustertrain list` shows the runs"
    if nearest:
        return f"did you mean {' or '.join(nearest)}? {more}"
    ids = _job_ids(runs[0]) if runs and JOB_ID.fullmatch(name) else []
    return f"the newest run is {runs[0].id} (job {ids[-1]}); {more}" if ids else more


def resolve_all(name: str) -> list[RunDir]:
    """Several runs where ``name`` is a sweep or a job array, else the one that it names. Raises as :func:`resolve`."""
    _check(name)
    sweep = sweeps_folder() / name
    if "/" not in name and sweep.is_dir():
        runs = sweep_runs(sweep)
        if not runs:
            raise NotFound(f"the runs of the sweep {name} are gone")
        return runs
    return _holders(name, all_runs()) or [resolve(name)]


def resolve_sweep(name: str) -> Path:
    """The folder of a sweep: its exact name; ``latest``; the id of its array or a job of it; else a unique prefix.

    Raises:
        NotFound: nothing fits.
        Ambiguous: several do; they are listed.
        UsageError: the name is empty.
    """
    _check(name)
    try:
        known = sorted((p for p in sweeps_folder().iterdir() if p.is_dir()), key=lambda p: -p.stat().st_mtime)
    except (FileNotFoundError, NotADirectoryError):
        known = []
    if not known:
        raise NotFound(f"there are no sweeps in {settings.home()}", fix="start one with `clustertrain sweep`")
    exact = [path for path in known if path.name == name]
    if name == "latest" or exact:
        return exact[0] if exact else known[0]
    held = {run.path for run in _holders(name, all_runs())}
    fitting = [p for p in known if held & {run.path for run in sweep_runs(p)}] if held else []
    fitting = fitting or [p for p in known if p.name.startswith(name)]
    if not fitting:
        raise NotFound(f"no sweep {name!r} in {settings.home()}", fix=f"the newest one is {known[0].name}")
    if len(fitting) > 1:
        names = ", ".join(p.name for p in fitting[:SHOWN])
        raise Ambiguous(f"{name!r} fits {len(fitting)} sweeps: {names}", fix="name one of them")
    return fitting[0]


def sweep_runs(sweep: Path) -> list[RunDir]:
    """The runs of a sweep's folder that are still there, in the order of its tasks."""
    links = sorted((p for p in sweep.iterdir() if reading.is_count(p.name)), key=lambda p: int(p.name))
    return [RunDir(link.resolve()) for link in links if (link / "spec.toml").is_file()]


def _holders(name: str, runs: Sequence[RunDir]) -> list[RunDir]:
    """The runs that have held the job ``name`` or, where that is an array, one of its tasks."""
    if not JOB_ID.fullmatch(name):
        return []
    return [r for r in runs if any(j == name or j.startswith(f"{name}_") for j in _job_ids(r))]


def _job_ids(run: RunDir) -> list[str]:
    """None of a run whose files may not be read, or are damaged: its neighbors are found all the same."""
    try:
        return attempts.job_ids(run)
    except Exception:  # at the edge of one run, of which nothing is known
        return []


def only(name: str, fitting: list[RunDir]) -> RunDir:
    """Raises Ambiguous where several runs fit the name."""
    if len(fitting) == 1:
        return fitting[0]
    ids = [r.id for r in fitting]
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    raise Ambiguous(f"{name!r} fits {len(ids)} runs: {', '.join(ids[:SHOWN])}{more}", fix="name one of them")
