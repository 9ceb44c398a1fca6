"""RUN on the command line -> a run directory."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from clustertrain import settings
from clustertrain.errors import Ambiguous, NotFound
from clustertrain.run import attempts
from clustertrain.run.folder import RunDir, open_run, runs_folder, sweeps_folder

SHOWN = 10
_CLOSE_SHOWN, _LIKE = 3, 0.6
JOB_ID = re.compile(r"\d+(_\d+)?|local-\d+")


def all_runs() -> list[RunDir]:
    """Every run in ``$CLUSTERTRAIN_HOME``, newest first."""
    folder = runs_folder()
    paths = [p for p in folder.iterdir() if (p / "spec.toml").is_file()] if folder.is_dir() else []
    return [RunDir(p) for p in sorted(paths, key=lambda p: (p / "spec.toml").stat().st_mtime_ns, reverse=True)]


def resolve(name: str) -> RunDir:
    """An exact run id; ``latest``; a job id that a run has held; else a unique prefix of a run id.

    Raises:
        NotFound: nothing fits.
        Ambiguous: several do; they are listed.
    """
    exact = runs_folder() / name
    if name and "/" not in name and (exact / "spec.toml").is_file():
        return open_run(exact)
    runs = all_runs()
    if name in ("", "latest"):
        if not runs:
            raise NotFound(f"there are no runs in {settings.home()}", fix="start one with `clustertrain submit`")
        return runs[0]
    if holders := _holders(name, runs):
        return only(name, holders)
    fitting = [r for r in runs if r.id.startswith(name)]
    if not fitting:
        raise NotFound(f"no run {name!r} in {settings.home()}", fix=_close(name, runs))
    return only(name, fitting)


def _close(name: str, runs: Sequence[RunDir]) -> str:
    """The runs and jobs whose names are like ``name``, in words."""
    alike: dict[str, float] = {}

    def weigh(known: str, shown: str) -> None:
        matcher = difflib.SequenceMatcher(None, name, known)
        if matcher.real_quick_ratio() >= _LIKE and (ratio := matcher.ratio()) >= _LIKE:
            alike[shown] = max(ratio, alike.get(shown, 0.0))

    for run in runs:
        # As it is, without its random end, and as far as was typed.
        for part in {run.id, run.id.rpartition("-")[0], run.id[: len(name)]}:
            weigh(part, run.id)
    if JOB_ID.fullmatch(name):
        for run in runs:
            for job_id in attempts.job_ids(run):
                weigh(job_id, f"{run.id} (job {job_id})")
    nearest = sorted(alike, key=lambda shown: -alike[shown])[:_CLOSE_SHOWN]
    more = "`clustertrain list` shows the runs"
    return f"did you mean {' or '.join(nearest)}? {more}" if nearest else more


def resolve_all(name: str) -> list[RunDir]:
    """Several runs where ``name`` is a sweep or a job array, else the one that it names. Raises as :func:`resolve`."""
    sweep = sweeps_folder() / name
    if name and "/" not in name and sweep.is_dir():
        runs = sweep_runs(sweep)
        if not runs:
            raise NotFound(f"the runs of the sweep {name} are gone")
        return runs
    return _holders(name, all_runs()) or [resolve(name)]


def sweep_runs(sweep: Path) -> list[RunDir]:
    """The runs of a sweep's folder that are still there, in the order of its tasks."""
    links = sorted((p for p in sweep.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    return [RunDir(link.resolve()) for link in links if (link / "spec.toml").is_file()]


def _holders(name: str, runs: Sequence[RunDir]) -> list[RunDir]:
    """The runs that have held the job ``name`` or, where that is an array, one of its tasks."""
    if not JOB_ID.fullmatch(name):
        return []
    return [r for r in runs if any(j == name or j.startswith(f"{name}_") for j in attempts.job_ids(r))]


def only(name: str, fitting: list[RunDir]) -> RunDir:
    """Raises Ambiguous where several runs fit the name."""
    if len(fitting) == 1:
        return fitting[0]
    ids = [r.id for r in fitting]
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    raise Ambiguous(f"{name!r} fits {len(ids)} runs: {', '.join(ids[:SHOWN])}{more}", fix="name one of them")
