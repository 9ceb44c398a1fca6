"""How an attempt can end, and how often each ending may happen before the run stops."""

from __future__ import annotations

from typing import Final, Literal

Ending = Literal[
    "completed",
    "preempted",
    "time_limit",
    "node_failure",
    "out_of_memory",
    "hang",
    "communication",
    "failed",
    "no_progress",
    "cancelled",
    "signal",
    "budget",
    "unknown",
]

COMPLETED: Final = "completed"
PREEMPTED: Final = "preempted"
TIME_LIMIT: Final = "time_limit"
NODE_FAILURE: Final = "node_failure"
OUT_OF_MEMORY: Final = "out_of_memory"
HANG: Final = "hang"
COMMUNICATION: Final = "communication"
FAILED: Final = "failed"
NO_PROGRESS: Final = "no_progress"
CANCELLED: Final = "cancelled"
SIGNAL: Final = "signal"  # sent by hand
BUDGET_SPENT: Final = "budget"  # the budget of the recipe's contract, not a retry budget
UNKNOWN: Final = "unknown"

DESCRIPTIONS: Final[dict[Ending, str]] = {
    COMPLETED: "All ranks did all steps, or the program exited with 0",
    PREEMPTED: "Slurm or `clustertrain requeue` took the nodes away",
    TIME_LIMIT: "The time limit of the job was reached",
    NODE_FAILURE: "A node was lost, or did not answer",
    OUT_OF_MEMORY: "A GPU or a host ran out of memory",
    HANG: "Ranks waited for a collective that one of them did not reach",
    COMMUNICATION: "Collectives between the ranks failed",
    FAILED: "The training raised an error, or its environment is unfit: a retry would fail the same way",
    NO_PROGRESS: "Not started: earlier attempts had used up their retries",
    CANCELLED: "Its owner cancelled the run",
    SIGNAL: "Somebody sent a signal by hand (`scancel --signal`, `kill`)",
    BUDGET_SPENT: "The budget of the recipe's contract is spent",
    UNKNOWN: "None of these: ranks crashed, were killed or exited without an error, or left no record",
}
# What earlier versions wrote. Their run folders stay readable.
_RENAMED: Final[dict[object, Ending]] = {"user_error": FAILED}


def current_name(ending: object) -> object:
    """Return the name of an ending, which an earlier version may have recorded under another one."""
    return _RENAMED.get(ending, ending) if isinstance(ending, str) else ending


# How often an ending may happen in a row before the run stops; a newer committed step refills all budgets.
# failed has none: the same code would fail the same way. preempted has a large one, because the cluster causes it,
# but not an unlimited one: a job that is always preempted before it commits anything makes no progress.
RETRY_BUDGET: Final[dict[str, int]] = {
    PREEMPTED: 20,
    TIME_LIMIT: 2,
    NODE_FAILURE: 5,
    OUT_OF_MEMORY: 1,
    HANG: 2,
    COMMUNICATION: 3,
    FAILED: 0,
    SIGNAL: 5,
    UNKNOWN: 2,
}
# Maximum number of attempts in a row, with any endings, that ran steps and committed none.
NO_PROGRESS_LIMIT: Final = 6

# Maximum number of stops in a row that are not known to have saved anything, of a command that may have done so.
UNSAVED_STOPS_LIMIT: Final = 20

# Slurm's states of a finished job. Missing ones (FAILED, COMPLETED, …) do not reveal the cause.
_BY_SLURM_STATE: Final[dict[str, Ending]] = {
    "PREEMPTED": PREEMPTED,
    "REQUEUED": PREEMPTED,  # by `scontrol requeue`; when Slurm itself requeues a job, the state is the cause
    "TIMEOUT": TIME_LIMIT,
    "DEADLINE": TIME_LIMIT,
    "NODE_FAIL": NODE_FAILURE,
    "BOOT_FAIL": NODE_FAILURE,
    "OUT_OF_MEMORY": OUT_OF_MEMORY,
    "CANCELLED": CANCELLED,
}


def from_scheduler_state(state: str) -> Ending:
    """Return the ending for a scheduler's state ("CANCELLED by 0" counts as CANCELLED); unknown for other states."""
    return _BY_SLURM_STATE.get(state.split(maxsplit=1)[0].rstrip("+") if state else "", UNKNOWN)
