"""The ending of an attempt or a run that trackers show."""

from __future__ import annotations

from clustertrain.run import endings
from clustertrain.run.attempts import load_attempts
from clustertrain.run.results import load_node_results
from clustertrain.run.run_dir import RunDir


def attempt_ending(run: RunDir, attempt: int) -> str | None:
    """Return ``completed`` or ``failed`` from the nodes' results; None if the attempt was stopped and will resume."""
    node_endings = {result.ending for result in load_node_results(run.attempt(attempt).results)}
    if node_endings == {"completed"}:
        return "completed"
    return "failed" if "failed" in node_endings else None


def run_ending(run: RunDir) -> str | None:
    """Return ``completed`` or ``failed`` for a run that has ended; None if it may resume."""
    history = load_attempts(run)
    if not history:
        return None
    if history[-1].ending == endings.COMPLETED:
        return "completed"
    return "failed" if history[-1].stopped is not None else None
