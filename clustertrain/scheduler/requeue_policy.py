"""After an attempt: how did it end, and does the run go on? Pure functions over evidence that somebody else gathered.

Several witnesses are asked, in this order of trust: the cancel marker, what the nodes wrote, the scheduler. srun's exit
code is none of them: it is 0 after a node failure.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from clustertrain.errors import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, EXIT_NO_REQUEUE, EXIT_STOPPED
from clustertrain.run import endings, hang_analysis
from clustertrain.run.attempts import Attempt
from clustertrain.scheduler.backend import RUNNING, JobView

Action = Literal["finish", "requeue", "resubmit", "stop"]
# How close to the time limit a stop counts as one because of it.
NEAR_LIMIT_S = 15.0


@dataclass(frozen=True)
class Evidence:
    """What is known at the end of an attempt. Times are UTC epoch seconds."""

    nodes: tuple[str, ...]
    results: Mapping[str, Mapping[str, Any]]  # results/<node>.json, by node
    cancelled: bool
    view: JobView | None  # None: the scheduler did not answer, or does not know the job
    accounting: str  # the accounting's word for this start, where it was asked for; else ""
    step_exit: int  # the step launcher's own code
    requeue_asked: bool
    end_time: float | None
    lead_s: float  # the agents' own countdown
    stop_at: float | None  # when the stop was asked for
    sources: tuple[str, ...]  # who asked for it
    out_of_time: bool  # batch ended the step itself, because the allocation was about to end
    now: float
    without_agent: frozenset[str] = frozenset()  # nodes that are there, and whose agent has ended
    restart: int = 0  # how often the job had been requeued when the attempt began


@dataclass(frozen=True)
class Verdict:
    ending: str
    reason: str
    blamed: tuple[str, ...] = ()  # nodes
    fatal: int | None = None  # an exit code that no requeue can change


@dataclass(frozen=True)
class Decision:
    action: Action
    why: str
    exit_code: int
    exclude: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)  # sbatch options that the owner asked for


def classify(e: Evidence) -> Verdict | None:
    """How the attempt ended, or None when only the scheduler will know (it is ending the job by itself)."""
    endings_seen = {str(r["ending"]) for r in e.results.values()}
    missing = tuple(n for n in e.nodes if n not in e.results)
    if not missing and endings_seen == {"completed"}:
        return Verdict(endings.COMPLETED, _why(e) or "all ranks completed")
    if e.cancelled:
        return Verdict(endings.CANCELLED, "cancelled by its owner")
    if e.view is not None and e.view.state != RUNNING and e.view.preempt_time is None:
        return _ended_from_outside(e)
    if not missing and "failed" not in endings_seen:
        spent = any(r.get("spent") for r in e.results.values())
        return Verdict(endings.SPENT, _why(e) or "the budget is spent") if spent else _with_why(_stopped(e), e)
    known = _stopped(e) if e.stop_at is not None or e.out_of_time else None
    if known is not None and known.ending not in (endings.UNKNOWN, endings.SIGNAL) and not _hopeless(e):
        # What breaks while everything is being taken down is not the run's fault, and no node is to blame for it.
        return Verdict(known.ending, f"{known.reason}; not all ranks had left in order")
    return _failed(e, missing)


def _why(e: Evidence) -> str:
    """The ranks' own word on it, where they have one."""
    return next((str(r["why"]) for r in e.results.values() if r.get("why")), "")


def _with_why(verdict: Verdict, e: Evidence) -> Verdict:
    """Where the ranks left as a script of the user's own does, which a later start may find to be done."""
    why = _why(e)
    if not why:
        return verdict
    return replace(verdict, reason=f"{verdict.reason}; {why}" if e.stop_at is not None else why)


def _hopeless(e: Evidence) -> bool:
    return any(r.get("kind") == "environment" for r in e.results.values())


def _ended_from_outside(e: Evidence) -> Verdict | None:
    """The job is being ended by the scheduler itself: by scancel, at its limit, or because a node is gone; or somebody
    has put it back in the queue."""
    known, view = endings.of_scheduler(e.accounting), e.view
    if known == endings.CANCELLED:
        return Verdict(known, "cancelled with the scheduler's own command")
    if view is not None and view.restarts > e.restart:
        if known in (endings.NODE_FAILURE, endings.PREEMPTED) and e.accounting != "REQUEUED":
            return Verdict(known, f"the scheduler requeued the job itself: {e.accounting}")
        return Verdict(endings.PREEMPTED, "requeued with the scheduler's own command (scontrol requeue)")
    at_limit = view is not None and view.reason == "TimeLimit"
    if known == endings.TIME_LIMIT or at_limit or (e.end_time is not None and e.now >= e.end_time - NEAR_LIMIT_S):
        return Verdict(endings.TIME_LIMIT, "the time limit was reached")
    return None


def _stopped(e: Evidence) -> Verdict:
    if e.requeue_asked:
        return Verdict(endings.PREEMPTED, "stopped for a requeue that its owner asked for")
    if e.view is not None and e.view.preempt_time is not None:
        return Verdict(endings.PREEMPTED, "the scheduler preempted the job")
    asked = e.stop_at or e.now
    if e.out_of_time:
        who = "the ranks had not left" if any(n not in e.results for n in e.nodes) else "the agents were still writing"
        return Verdict(endings.TIME_LIMIT, f"{who} when the time limit was near; ended by force")
    if e.end_time is not None and ("deadline" in e.sources or asked >= e.end_time - e.lead_s - NEAR_LIMIT_S):
        return Verdict(endings.TIME_LIMIT, f"stopped {max(0.0, e.end_time - asked):.0f} s before the time limit")
    source = ", ".join(e.sources) or "an unknown source"
    if e.view is None:
        return Verdict(endings.UNKNOWN, f"stopped on request of {source}; the scheduler gave no answer as to why")
    sent = [s.removeprefix("signal:") for s in e.sources if s.startswith("signal:")]
    if sent:
        words = f"stopped by {' and '.join(sent)} that somebody sent (scancel --signal, kill)"
        return Verdict(endings.SIGNAL, f"{words}: the scheduler neither preempts nor ends the job")
    return Verdict(endings.UNKNOWN, f"stopped on request of {source}; the scheduler names no cause")


STOP_SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"})
UNEXPLAINED = frozenset({"crashed", "exited", "killed", "device", "storage", "launcher"})
_SCHEDULER_KINDS = {"out_of_memory": endings.OUT_OF_MEMORY, "user_error": endings.USER_ERROR}


def _failed(e: Evidence, missing: tuple[str, ...]) -> Verdict:
    failed = [r for r in e.results.values() if r["ending"] == "failed"]
    for kind in ("environment", *_SCHEDULER_KINDS):
        culprit = next((r for r in failed if r.get("kind") == kind), None)
        if culprit is not None:
            ending = _SCHEDULER_KINDS.get(kind, endings.USER_ERROR)
            fatal = EXIT_CONFIG if kind == "environment" else None
            return Verdict(ending, str(culprit.get("message")), fatal=fatal)
    if missing and e.step_exit == EXIT_CONFIG:
        # An agent that does not see the run directory can't write why; its words are in job.log.
        names = ", ".join(missing)
        return Verdict(endings.USER_ERROR, f"{names} could not start: see job.log", fatal=EXIT_CONFIG)
    killed_by = _signal_of(e.step_exit) if e.view is not None else ""
    if missing and killed_by:
        # The scheduler still counts on all nodes, and the launcher could wait for the agent's process.
        reason = f"the agent on {', '.join(missing)} was killed by {killed_by}, and its ranks with it"
        if e.view is not None and e.view.preempt_time is not None:
            return Verdict(endings.PREEMPTED, f"the scheduler preempted the job; {reason}")
        # An agent that is still starting has no handlers yet.
        return Verdict(endings.SIGNAL if killed_by in STOP_SIGNALS else endings.UNKNOWN, reason)
    if missing and not e.results:
        return Verdict(endings.UNKNOWN, f"no node wrote a result (the step ended with {e.step_exit}): see job.log")
    if missing:
        return _no_result(e, missing)
    # Before what nothing explains: a rank that hung is killed in the end, and so has left no word.
    hung = next((r for r in failed if r.get("kind") == "hang"), None)
    if hung is not None:
        return Verdict(endings.HANG, hang_analysis.words({n: r.get("ranks") or () for n, r in e.results.items()}))
    # These explain the broken collectives of the other ranks, but not themselves.
    unexplained = next((r for r in failed if r.get("kind") in UNEXPLAINED), None)
    if unexplained is not None:
        return Verdict(endings.UNKNOWN, str(unexplained.get("message")))
    communication = next((r for r in failed if r.get("kind") == "communication"), None)
    if communication is not None:
        return Verdict(endings.COMMUNICATION, str(communication.get("message")))
    return Verdict(endings.UNKNOWN, str(failed[0].get("message")) if failed else "some ranks stopped, some completed")


def _no_result(e: Evidence, missing: tuple[str, ...]) -> Verdict:
    lost = tuple(n for n in missing if n not in e.without_agent)
    if lost:
        return Verdict(endings.NODE_FAILURE, f"no result from {', '.join(lost)}", blamed=lost)
    # A disk that was full, say: the node is no worse than another one.
    return Verdict(endings.UNKNOWN, f"the agent on {', '.join(missing)} ended without a result: see job.log")


def _signal_of(exit_code: int) -> str:
    """The name of the signal that a step launcher's exit code stands for; else empty."""
    try:
        return signal.Signals(exit_code - 128).name
    except ValueError:
        return ""


def decide(verdict: Verdict, history: Sequence[Attempt], max_requeues: int) -> Decision:
    """What to do after ``verdict``. ``history`` holds all attempts, the one just ended last (its ending filled in)."""
    if verdict.ending == endings.COMPLETED:
        return Decision("finish", verdict.reason, EXIT_DONE)
    if verdict.fatal is not None:
        return Decision("stop", f"{verdict.reason}; a requeue would fail the same way", verdict.fatal)
    if verdict.ending in (endings.CANCELLED, endings.SPENT):
        return Decision("stop", verdict.reason, EXIT_NO_REQUEUE)
    if verdict.ending == endings.USER_ERROR:
        return Decision("stop", verdict.reason, EXIT_FAILED)
    spent = budget_spent(verdict.ending, history, max_requeues)
    if spent is not None:
        return Decision("stop", spent, EXIT_NO_REQUEUE)
    if verdict.blamed:
        return Decision("resubmit", f"without {', '.join(verdict.blamed)}", EXIT_STOPPED, exclude=verdict.blamed)
    return Decision("requeue", verdict.reason, EXIT_STOPPED)


def _own(attempt: Attempt) -> bool:
    return attempt.by_script and attempt.ending in (endings.PREEMPTED, endings.TIME_LIMIT)


def budget_spent(ending: str, history: Sequence[Attempt], max_requeues: int) -> str | None:
    """Why the run must not go on, or None. Only a newer committed step refills a budget."""
    if len(history) > max_requeues:
        return f"--max-requeues {max_requeues} is used up after {len(history)} attempts"
    since: list[Attempt] = []
    for attempt in reversed(history):
        if attempt.progressed:
            break
        since.append(attempt)
    # A preemption before the first step says nothing about the run; nor does a stop of a script that saves by itself.
    charged = [a for a in since if not (a.ending == endings.PREEMPTED and a.first_step is None) and not _own(a)]
    if len(charged) >= endings.NO_PROGRESS_LIMIT:
        return f"no progress: {len(charged)} attempts in a row committed no newer step"
    same = [a for a in charged if a.ending == ending]
    allowed = endings.BUDGET.get(ending, 0)
    if len(same) > allowed:
        return f"no progress: {len(same)} attempts in a row ended with {ending} (allowed: {allowed})"
    return None
