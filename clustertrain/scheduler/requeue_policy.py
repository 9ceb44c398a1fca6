"""Classify the end of an attempt and decide whether the run continues: pure functions over collected evidence.

Sources in order of trust: the cancel marker, the results of the nodes, the scheduler. srun's exit code is not trusted:
it is 0 after a node failure.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from clustertrain.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_NO_REQUEUE, EXIT_STOPPED, EXIT_SUCCESS
from clustertrain.run import endings, hang_analysis
from clustertrain.run.attempts import Attempt
from clustertrain.run.results import FailureKind, NodeResult
from clustertrain.scheduler.backend import RUNNING, JobView

Action = Literal["finish", "requeue", "resubmit", "stop"]
# A stop this close to the time limit counts as caused by it.
TIME_LIMIT_MARGIN_S = 15.0


@dataclass(frozen=True)
class Evidence:
    """Evidence at the end of an attempt. Times are UTC epoch seconds."""

    nodes: tuple[str, ...]
    results: Mapping[str, NodeResult]
    """Results by node."""
    cancelled: bool
    view: JobView | None
    """None: the scheduler did not answer, or does not know the job."""
    accounting_state: str
    """State of this start in the accounting; empty if it was not queried."""
    step_exit_code: int
    """Exit code of the step launcher."""
    requeue_requested: bool
    end_time: float | None
    """End of the allocation."""
    lead_s: float
    """How long before the end of the allocation the agents stop the ranks."""
    stop_requested_at: float | None
    """Time of the first stop request."""
    stop_sources: tuple[str, ...]
    """Sources of the stop requests."""
    out_of_time: bool
    """The batch process ended the step because the allocation was about to end."""
    now: float
    nodes_without_agent: frozenset[str] = frozenset()
    """Reachable nodes whose agent ended without a result."""
    restart_count: int = 0
    """Requeues of the job before the attempt."""


@dataclass(frozen=True)
class AttemptOutcome:
    """The ending of an attempt, with its reason."""

    ending: endings.Ending
    reason: str
    blamed_nodes: tuple[str, ...] = ()
    fatal_exit_code: int | None = None
    """The exit code if a requeue cannot help."""


@dataclass(frozen=True)
class Decision:
    """What the batch process does with the run after an attempt."""

    action: Action
    reason: str
    exit_code: int
    exclude: tuple[str, ...] = ()
    """Nodes that the next job must not use."""
    options: Mapping[str, str] = field(default_factory=dict)
    """sbatch options of the owner's request."""


def classify(e: Evidence) -> AttemptOutcome | None:
    """Return how the attempt ended, or None if only the scheduler will know, because it is ending the job."""
    node_endings = {r.ending for r in e.results.values()}
    missing = tuple(n for n in e.nodes if n not in e.results)
    if not missing and node_endings == {"completed"}:
        return AttemptOutcome(endings.COMPLETED, _rank_reason(e) or "all ranks completed")
    if e.cancelled:
        return AttemptOutcome(endings.CANCELLED, "cancelled by its owner")
    if e.view is not None and e.view.state != RUNNING and e.view.preempt_time is None:
        return _classify_external_end(e)
    if not missing and "failed" not in node_endings:
        is_budget_spent = any(r.budget_spent for r in e.results.values())
        return (
            AttemptOutcome(endings.BUDGET_SPENT, _rank_reason(e) or "the budget is spent")
            if is_budget_spent
            else _with_rank_reason(_classify_stop(e), e)
        )
    stop_outcome = _classify_stop(e) if e.stop_requested_at is not None or e.out_of_time else None
    if (
        stop_outcome is not None
        and stop_outcome.ending not in (endings.UNKNOWN, endings.SIGNAL)
        and not _is_environment_failure(e)
    ):
        # Neither the run nor a node is to blame for failures during a shutdown.
        return AttemptOutcome(stop_outcome.ending, f"{stop_outcome.reason}; not all ranks ended cleanly")
    return _classify_failure(e, missing)


def _rank_reason(e: Evidence) -> str:
    """Return the reason that the ranks gave, if any."""
    return next((r.reason for r in e.results.values() if r.reason), "")


def _with_rank_reason(outcome: AttemptOutcome, e: Evidence) -> AttemptOutcome:
    """Add the reason of the ranks, if any: without a stop request it is the whole reason."""
    reason = _rank_reason(e)
    if not reason:
        return outcome
    return replace(outcome, reason=f"{outcome.reason}; {reason}" if e.stop_requested_at is not None else reason)


def _is_environment_failure(e: Evidence) -> bool:
    return any(r.kind == "environment" for r in e.results.values())


def _classify_external_end(e: Evidence) -> AttemptOutcome | None:
    """Classify a job that the scheduler ends (scancel, time limit, lost node) or that was requeued externally."""
    ending, view = endings.from_scheduler_state(e.accounting_state), e.view
    if ending == endings.CANCELLED:
        return AttemptOutcome(ending, "cancelled with the scheduler's own command")
    if view is not None and view.restarts > e.restart_count:
        if ending in (endings.NODE_FAILURE, endings.PREEMPTED) and e.accounting_state != "REQUEUED":
            return AttemptOutcome(ending, f"the scheduler requeued the job itself: {e.accounting_state}")
        return AttemptOutcome(endings.PREEMPTED, "requeued with the scheduler's own command (scontrol requeue)")
    at_limit = view is not None and view.reason == "TimeLimit"
    if (
        ending == endings.TIME_LIMIT
        or at_limit
        or (e.end_time is not None and e.now >= e.end_time - TIME_LIMIT_MARGIN_S)
    ):
        return AttemptOutcome(endings.TIME_LIMIT, "the time limit was reached")
    return None


def _classify_stop(e: Evidence) -> AttemptOutcome:
    if e.requeue_requested:
        return AttemptOutcome(endings.PREEMPTED, "its owner requeued it")
    if e.view is not None and e.view.preempt_time is not None:
        return AttemptOutcome(endings.PREEMPTED, "the scheduler preempted the job")
    requested_at = e.stop_requested_at or e.now
    if e.out_of_time:
        blocker = (
            "the ranks were still running"
            if any(n not in e.results for n in e.nodes)
            else "the agents were still writing"
        )
        return AttemptOutcome(endings.TIME_LIMIT, f"{blocker} close to the time limit and were killed")
    if e.end_time is not None and (
        "deadline" in e.stop_sources or requested_at >= e.end_time - e.lead_s - TIME_LIMIT_MARGIN_S
    ):
        return AttemptOutcome(
            endings.TIME_LIMIT, f"stopped {max(0.0, e.end_time - requested_at):.0f} s before the time limit"
        )
    source = ", ".join(e.stop_sources) or "an unknown source"
    if e.view is None:
        return AttemptOutcome(endings.UNKNOWN, f"stopped on request of {source}; the scheduler did not answer why")
    signals = [s.removeprefix("signal:") for s in e.stop_sources if s.startswith("signal:")]
    if signals:
        reason = f"stopped by {' and '.join(signals)} sent by hand (scancel --signal, kill)"
        return AttemptOutcome(endings.SIGNAL, f"{reason}: the scheduler neither preempts nor ends the job")
    return AttemptOutcome(endings.UNKNOWN, f"stopped on request of {source}; the scheduler names no cause")


STOP_SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"})
UNEXPLAINED_KINDS: frozenset[FailureKind] = frozenset({"crashed", "exited", "killed", "device", "storage", "launcher"})
_ENDING_BY_KIND: dict[FailureKind, endings.Ending] = {
    "out_of_memory": endings.OUT_OF_MEMORY,
    "error": endings.FAILED,
}


def _classify_failure(e: Evidence, missing: tuple[str, ...]) -> AttemptOutcome:
    failed = [r for r in e.results.values() if r.ending == "failed"]
    decisive: tuple[FailureKind, ...] = ("environment", *_ENDING_BY_KIND)
    for kind in decisive:
        culprit = next((r for r in failed if r.kind == kind), None)
        if culprit is not None:
            ending = _ENDING_BY_KIND.get(kind, endings.FAILED)
            fatal = EXIT_CONFIG if kind == "environment" else None
            return AttemptOutcome(ending, str(culprit.message), fatal_exit_code=fatal)
    if missing and e.step_exit_code == EXIT_CONFIG:
        # An agent that cannot see the run folder cannot write a result; its message is in job.log.
        names = ", ".join(missing)
        return AttemptOutcome(endings.FAILED, f"{names} could not start: see job.log", fatal_exit_code=EXIT_CONFIG)
    killed_by = _signal_name(e.step_exit_code) if e.view is not None else ""
    if missing and killed_by:
        # The scheduler still has all nodes, and the launcher could wait for the agent's process.
        reason = f"the agent on {', '.join(missing)} was killed by {killed_by}, and its ranks with it"
        if e.view is not None and e.view.preempt_time is not None:
            return AttemptOutcome(endings.PREEMPTED, f"the scheduler preempted the job; {reason}")
        # An agent that is still starting has no handlers yet.
        return AttemptOutcome(endings.SIGNAL if killed_by in STOP_SIGNALS else endings.UNKNOWN, reason)
    if missing and not e.results:
        return AttemptOutcome(
            endings.UNKNOWN, f"no node wrote a result (the step ended with {e.step_exit_code}): see job.log"
        )
    if missing:
        return _classify_missing_results(e, missing)
    # Before the unexplained kinds: a rank that hung is killed in the end, and leaves no record.
    hung = next((r for r in failed if r.kind == "hang"), None)
    if hung is not None:
        return AttemptOutcome(endings.HANG, hang_analysis.describe_hang({n: r.ranks for n, r in e.results.items()}))
    # These kinds explain the broken collectives of other ranks, but have no known cause themselves.
    unexplained = next((r for r in failed if r.kind in UNEXPLAINED_KINDS), None)
    if unexplained is not None:
        return AttemptOutcome(endings.UNKNOWN, str(unexplained.message))
    communication = next((r for r in failed if r.kind == "communication"), None)
    if communication is not None:
        return AttemptOutcome(endings.COMMUNICATION, str(communication.message))
    return AttemptOutcome(endings.UNKNOWN, str(failed[0].message) if failed else "some ranks stopped, some completed")


def _classify_missing_results(e: Evidence, missing: tuple[str, ...]) -> AttemptOutcome:
    lost_nodes = tuple(n for n in missing if n not in e.nodes_without_agent)
    if lost_nodes:
        return AttemptOutcome(endings.NODE_FAILURE, f"no result from {', '.join(lost_nodes)}", blamed_nodes=lost_nodes)
    # For example a full disk: the node is not at fault.
    return AttemptOutcome(endings.UNKNOWN, f"the agent on {', '.join(missing)} ended without a result: see job.log")


def _signal_name(exit_code: int) -> str:
    """Return the name of the signal that a step launcher's exit code stands for; empty if there is none."""
    try:
        return signal.Signals(exit_code - 128).name
    except ValueError:
        return ""


def decide(outcome: AttemptOutcome, history: Sequence[Attempt], max_requeues: int) -> Decision:
    """Return what to do after ``outcome``. ``history`` holds all attempts, with the one that just ended as the last."""
    if outcome.ending == endings.COMPLETED:
        return Decision("finish", outcome.reason, EXIT_SUCCESS)
    if outcome.fatal_exit_code is not None:
        return Decision("stop", f"{outcome.reason}; a requeue would fail the same way", outcome.fatal_exit_code)
    if outcome.ending in (endings.CANCELLED, endings.BUDGET_SPENT):
        return Decision("stop", outcome.reason, EXIT_NO_REQUEUE)
    if outcome.ending == endings.FAILED:
        return Decision("stop", outcome.reason, EXIT_FAILED)
    stop_reason = find_exhausted_budget(outcome.ending, history, max_requeues)
    if stop_reason is not None:
        return Decision("stop", stop_reason, EXIT_NO_REQUEUE)
    if outcome.blamed_nodes:
        return Decision(
            "resubmit", f"without {', '.join(outcome.blamed_nodes)}", EXIT_STOPPED, exclude=outcome.blamed_nodes
        )
    return Decision("requeue", outcome.reason, EXIT_STOPPED)


def _is_script_stop(attempt: Attempt) -> bool:
    """Return whether only the program knows what it saved at the stop: its checkpoints are not named."""
    is_stop = attempt.ending in (endings.PREEMPTED, endings.TIME_LIMIT)
    return attempt.ended_by_script and is_stop and attempt.checkpoint_times is None


def _is_unstarted(attempt: Attempt) -> bool:
    return attempt.ending == endings.PREEMPTED and attempt.first_step is None


def _is_unsaved_stop(attempt: Attempt) -> bool:
    """Return whether a command has probably saved nothing, although no other budget is charged for it."""
    if _is_script_stop(attempt):
        return attempt.ended_by_signal
    return _is_unstarted(attempt) and attempt.checkpoint_times is not None


def find_exhausted_budget(ending: str, history: Sequence[Attempt], max_requeues: int) -> str | None:
    """Return why the run must stop, or None. Only newer saved state refills a budget."""
    if len(history) > max_requeues:
        return f"--max-requeues {max_requeues} is used up after {len(history)} attempts"
    without_progress: list[Attempt] = []
    for attempt in reversed(history):
        if attempt.made_progress:
            break
        without_progress.append(attempt)
    saved = "saved no newer checkpoint" if history[-1].checkpoint_times else "committed no newer step"
    # Not charged: preemptions before the first step, and stops of scripts that save their own checkpoints.
    charged = [a for a in without_progress if not _is_unstarted(a) and not _is_script_stop(a)]
    if len(charged) >= endings.NO_PROGRESS_LIMIT:
        return f"no progress: {len(charged)} attempts in a row {saved}"
    same_ending = [a for a in charged if a.ending == ending]
    limit = endings.RETRY_BUDGET.get(ending, 0)
    if len(same_ending) > limit:
        return f"no progress: {len(same_ending)} attempts in a row ended with {ending} (allowed: {limit})"
    unsaved = [a for a in without_progress if _is_unsaved_stop(a)]
    if len(unsaved) > endings.UNSAVED_STOPS_LIMIT:
        cause = "" if history[-1].checkpoint_times else "; --checkpoints names those that the command saves by itself"
        return f"no progress: {len(unsaved)} stops, and no checkpoint is known{cause}"
    return None
