"""The page of the states of runs and the endings of attempts, from ``clustertrain/run/state.py`` and ``endings.py``."""

from __future__ import annotations

from clustertrain.run import endings, state

_HEADER = """<!-- Written by python -m docs.generate from clustertrain/run/state.py and clustertrain/run/endings.py. -->

# States and endings

A run has one state, and each of its attempts has one ending. `list`, `status`, `wait`, `top`, the reports, JSON and
events use these words. Slurm's own words for the same are in brackets.

## State of a run

"""
_ATTEMPTS = """
`wait` exits with 0 only if all runs are `completed`. JSON has `state` and, during `cancelling`, `"cancelling": true`
beside the state that the run still has.

## Ending of an attempt

While an attempt runs, its state is `running`. *Retries* is how often in a row an ending may happen without a newer
checkpoint before the run stops; a newer checkpoint refills all. The run is then `failed`; `status` shows the reason.

"""
_RANKS = f"""
Independent of its endings, a run stops after {endings.NO_PROGRESS_LIMIT} attempts in a row that trained and committed
nothing new, and after `--max-requeues` requeues. [How a run stops](../explanation/how-a-run-stops.md) has the details.

## Ending of a rank or node

The events `session_ended` and `ranks_ended` and the files of results have three endings: `completed`, `stopped` (on
request) and `failed`. If a rank failed, `kind` says how, and the attempt's ending follows from the kinds of all ranks.
"""
_SLURM = {
    state.PENDING: "PENDING",
    state.RUNNING: "RUNNING",
    endings.PREEMPTED: "PREEMPTED, REQUEUED",
    endings.TIME_LIMIT: "TIMEOUT, DEADLINE",
    endings.NODE_FAILURE: "NODE_FAIL, BOOT_FAIL",
    endings.OUT_OF_MEMORY: "OUT_OF_MEMORY",
    endings.CANCELLED: "CANCELLED",
    endings.COMPLETED: "COMPLETED",
    endings.FAILED: "FAILED",
}


def render() -> str:
    """Return the page."""
    run_rows = [
        f"| `{name}` | {text}{_slurm(name)} | {'yes' if name in state.FINAL else 'no'} |"
        for name, text in state.DESCRIPTIONS.items()
    ]
    attempt_rows = [
        f"| `{name}` | {text}{_slurm(name)} | {_retries(name)} |" for name, text in endings.DESCRIPTIONS.items()
    ]
    return "\n".join(
        [
            _HEADER + "| state | meaning | final |",
            "|---|---|---|",
            *run_rows,
            _ATTEMPTS + "| ending | meaning | retries |",
            "|---|---|---|",
            *attempt_rows,
            _RANKS,
        ]
    )


def _slurm(name: str) -> str:
    return f" ({_SLURM[name]})" if name in _SLURM else ""


def _retries(name: endings.Ending) -> str:
    if name == endings.COMPLETED:
        return "–"
    return str(endings.RETRY_BUDGET.get(name, 0))
