"""Which of the user's runs a list shows: by recipe, state and time of submission."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from clustertrain.errors import ClusterTrainError
from clustertrain.run import event_types, events
from clustertrain.run.lookup import list_runs
from clustertrain.run.recipe_hash import load_recipe_hash
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.run_status import RunStatus, Unreadable, run_statuses

_READ_ERRORS = (ClusterTrainError, OSError)  # of a damaged run, which has neither a recipe nor a time


@dataclass(frozen=True)
class RunFilter:
    """What the listed runs have in common."""

    recipe_hash: str = ""
    """Prefix of the recipe hash."""
    states: frozenset[str] = frozenset()
    """Empty: all."""
    since: float | None = None
    """Submitted at or after, UTC epoch s."""


def select_runs(selection: RunFilter) -> list[RunDir]:
    """Return the user's runs, newest first, without regard to their state, which the scheduler knows."""
    return [run for run in list_runs() if _matches(run, selection)]


def select_statuses(selection: RunFilter, limit: int) -> list[RunStatus | Unreadable]:
    """Return the status of the newest ``limit`` runs that match.

    Only with ``states`` is a run that cannot be read left out, since its state is unknown.
    """
    runs = select_runs(selection)
    if not selection.states:
        return run_statuses(runs[:limit])
    found: list[RunStatus | Unreadable] = []
    # In parts, since a query of all runs of a year takes long, and mostly the newest ones match.
    for start in range(0, len(runs), limit):
        found += [s for s in run_statuses(runs[start : start + limit]) if _has_state(s, selection.states)]
        if len(found) >= limit:
            break
    return found[:limit]


def _matches(run: RunDir, selection: RunFilter) -> bool:
    with contextlib.suppress(*_READ_ERRORS):
        if selection.recipe_hash and not load_recipe_hash(run).startswith(selection.recipe_hash):
            return False
        return selection.since is None or _find_submit_time(run) >= selection.since
    return False


def _find_submit_time(run: RunDir) -> float:
    submitted = next(events.select(events.for_run(run), event_types.Submitted), None)
    return submitted.t if submitted is not None else run.spec.stat().st_mtime


def _has_state(status: RunStatus | Unreadable, states: Sequence[str] | frozenset[str]) -> bool:
    return not isinstance(status, Unreadable) and status.shown_state in states
