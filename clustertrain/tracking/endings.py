"""How an attempt has ended, as trackers tell it."""

from __future__ import annotations

from clustertrain import fsio
from clustertrain.run import endings
from clustertrain.run.attempts import read_all
from clustertrain.run.run_dir import RunDir


def of_attempt(run: RunDir, attempt: int) -> str | None:
    """``completed`` or ``failed``, from the nodes' results; None where it was stopped, and goes on later."""
    folder = run.attempt(attempt).results
    try:
        found = [fsio.peek_json(path) for path in folder.iterdir() if path.suffix == ".json"]
    except OSError:
        return None
    said = {str(result.get("ending")) for result in found if isinstance(result, dict)}
    if said == {"completed"}:
        return "completed"
    return "failed" if "failed" in said else None


def of_run(run: RunDir) -> str | None:
    """As :func:`of_attempt`, of a run that has ended for good."""
    history = read_all(run)
    if not history:
        return None
    if history[-1].ending == endings.COMPLETED:
        return "completed"
    return "failed" if history[-1].stopped is not None else None
