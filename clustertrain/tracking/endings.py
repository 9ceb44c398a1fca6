"""How an attempt has ended, as trackers tell it."""

from __future__ import annotations

from clustertrain import fsio
from clustertrain.run import endings
from clustertrain.run.attempts import load_attempts
from clustertrain.run.results import parse_node_result
from clustertrain.run.run_dir import RunDir


def attempt_ending(run: RunDir, attempt: int) -> str | None:
    """``completed`` or ``failed``, from the nodes' results; None where it was stopped, and goes on later."""
    folder = run.attempt(attempt).results
    try:
        results = [parse_node_result(fsio.poll_json(path)) for path in folder.iterdir() if path.suffix == ".json"]
    except OSError:
        return None
    node_endings = {result.ending for result in results if result is not None}
    if node_endings == {"completed"}:
        return "completed"
    return "failed" if "failed" in node_endings else None


def run_ending(run: RunDir) -> str | None:
    """As :func:`attempt_ending`, of a run that has ended for good."""
    history = load_attempts(run)
    if not history:
        return None
    if history[-1].ending == endings.COMPLETED:
        return "completed"
    return "failed" if history[-1].stopped is not None else None
