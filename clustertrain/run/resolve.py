"""RUN on the command line -> a run directory."""

from __future__ import annotations

from clustertrain import settings
from clustertrain.errors import Ambiguous, NotFound
from clustertrain.run import attempts
from clustertrain.run.folder import RunDir, open_run, runs_folder

SHOWN = 10


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
    if name.isdigit() or name.startswith("local-"):
        holders = [r for r in runs if name in attempts.job_ids(r)]
        if holders:
            return _only(name, holders)
    fitting = [r for r in runs if r.id.startswith(name)]
    if not fitting:
        raise NotFound(f"no run {name!r} in {settings.home()}", fix="`clustertrain list` shows the runs")
    return _only(name, fitting)


def _only(name: str, fitting: list[RunDir]) -> RunDir:
    if len(fitting) == 1:
        return fitting[0]
    ids = [r.id for r in fitting]
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    raise Ambiguous(f"{name!r} fits {len(ids)} runs: {', '.join(ids[:SHOWN])}{more}", fix="give more letters")
