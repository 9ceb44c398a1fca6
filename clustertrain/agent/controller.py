"""The batch process: job.sh becomes it, on the batch host, outside any container.

It claims the attempt, runs the step (srun, or the local stand-in), passes requests to stop on to every agent, and when
the step is over decides what happens to the run and makes it happen.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from clustertrain import clock, fsio, proc, settings
from clustertrain.agent import deadline as deadlines
from clustertrain.agent.claim import Claim
from clustertrain.agent.job_comment import Commenter, line_of
from clustertrain.agent.requeue import NO_ANSWER_S, Sequel
from clustertrain.agent.signals import Signals
from clustertrain.agent.startup import begin, leave
from clustertrain.config.job import RunSpec
from clustertrain.errors import EXIT_FAILED, EXIT_NO_REQUEUE, ClusterTrainError, CommandFailed
from clustertrain.run import attempts, budget, endings, events
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.run.stop_lead_time import lead_s
from clustertrain.scheduler.backend import RUNNING, Backend, JobView
from clustertrain.scheduler.job_comment import JobComment
from clustertrain.scheduler.local import LocalBackend
from clustertrain.scheduler.requeue_policy import Evidence, Verdict, budget_spent, classify, decide
from clustertrain.scheduler.slurm import BATCH_ANSWER_S, SlurmBackend

POLL_S = 0.2
LOOK_S = 1.0
ASK_SCHEDULER_S = 60.0  # how often the end time is read again: an administrator may have moved it
AFTER_END_S = 20.0  # a failure, or the last result of a stop: for the other nodes to write what they know, and to leave
AFTER_RESULTS_S = 150.0  # for the agents to make their telemetry small, once all nodes have done their work
AFTER_ABORT_S = 20.0
AGENTS_S = 600.0  # for every agent to say that it has started; Python over a busy network filesystem takes minutes
COMMENT_S = 10.0  # for the last line in the job's comment
LATE_RESULTS_S = 5.0  # for results to become visible after the step has ended
FOLDER_S = 60.0  # for a run folder that is gone to come back: an automounter, or somebody who moves folders
CANCEL_S = 60.0  # for a last checkpoint, where Slurm's own kill does not come
LAST_CHANCE_S = 12.0  # before the end of the allocation: a requeue is accepted only while the job still runs


@dataclass
class Step:
    """The running step, as batch sees it."""

    child: subprocess.Popen[bytes]
    stop_at: float | None = None
    preempt_time: float | None = None  # as the scheduler gave it; it forgets it when the job is put back
    cancelled_at: float | None = None
    requeue_asked: bool = False
    new_options: dict[str, str] | None = None  # of the requeue that was asked for
    late_request: bool = False  # it came when the step was over
    over_at: float | None = None  # a node has failed, or all have ended
    aborted_at: float | None = None
    orphaned: bool = False
    out_of_time: bool = False
    taken_over: bool = False
    agents_seen: bool = False
    began: float = field(default_factory=clock.monotonic)
    next_look: float = 0.0
    next_ask: float = 0.0


class Batch:
    def __init__(self, run: RunDir, spec: RunSpec, backend: Backend, held: Claim, signals: Signals) -> None:
        self.run = run
        self.spec = spec
        self.backend = backend
        self.job_id = held.job_id
        self.attempt: AttemptDir = held.attempt
        self.nodes = held.nodes
        self.deadline = held.deadline
        self.signals = signals
        self.log = EventLog(self.attempt.events_of("batch"))
        self.parent = os.getppid()
        self.started = clock.now()
        self.comment: Commenter | None = None

    def main(self, step_argv: Sequence[str]) -> int:
        self.log.write(
            "started",
            job_id=self.job_id,
            restart=self._restart(),
            nodes=list(self.nodes),
            end_time=self.deadline.end_time,
        )
        step = Step(self._start(step_argv))
        self.comment = comment = self._commenter()
        while step.child.poll() is None:
            self._look(step)
            clock.wait_until(lambda: step.child.poll() is not None, POLL_S, POLL_S)
        if step.orphaned:
            return EXIT_FAILED  # whoever continues the run closes this attempt
        self._close_requests(step)
        lost = self._lost(step)
        if lost:  # what becomes of the run is decided elsewhere
            print(f"clustertrain: attempt {self.attempt.n} decides nothing: {lost}", flush=True)
            return EXIT_NO_REQUEUE
        sequel = Sequel(
            self.run,
            self.backend,
            self.job_id,
            self.spec,
            self.log,
            self.signals,
            restart=self._restart(),
            until=clock.monotonic() + NO_ANSWER_S,
        )
        evidence = self._evidence(step, sequel)
        verdict = classify(evidence)
        if verdict is None:
            # Slurm is ending the job by itself and accounting has no word yet. Whoever starts or looks next will know.
            return EXIT_FAILED
        self._close(verdict, evidence)
        decision = decide(verdict, attempts.charged(self.run), self.spec.job.max_requeues)
        if decision.action in ("requeue", "resubmit") and step.new_options:
            decision = replace(decision, action="resubmit", options=step.new_options)
        if step.late_request:
            self._answer_request(None if decision.action in ("requeue", "resubmit") else decision.why)
        print(f"clustertrain: attempt {self.attempt.n} {verdict.ending}: {verdict.reason}", flush=True)
        if comment is not None and decision.action not in ("requeue", "resubmit"):
            comment.finish(COMMENT_S)
        return sequel.act(decision, verdict)

    def _commenter(self) -> Commenter | None:
        telemetry = self.spec.recipe.telemetry
        if self.backend.name != "slurm" or not (telemetry.enabled and telemetry.comment):
            return None
        commenter = Commenter(JobComment(self.job_id, self.log.write), lambda: line_of(self.run))
        commenter.start()
        return commenter

    def spent_by_others(self) -> int | None:
        """Earlier attempts that were killed decided nothing: is there a budget left for this one?"""
        history = [a for a in attempts.charged(self.run) if a.n < self.attempt.n]
        ending, why = endings.SPENT, self._contract_spent()
        if not why:
            if not history or history[-1].ending is None:
                return None
            ending, why = (
                endings.NO_PROGRESS,
                budget_spent(history[-1].ending, history, self.spec.job.max_requeues) or "",
            )
        if not why:
            return None
        self.log.write("ended", ending=ending, reason=why, last_step=None, job_id=self.job_id)
        self.log.write("stopped", why=why)
        return EXIT_NO_REQUEUE

    def _contract_spent(self) -> str:
        """Whether the attempts before this one have used up what the recipe's contract allows, and it says stop."""
        contract = self.spec.recipe.contract
        if not contract.has_budget or contract.when_spent != "stop":
            return ""
        earlier = [a for a in attempts.read_all(self.run) if a.n < self.attempt.n]
        return budget.spent(contract, budget.used(self.run, earlier, None, contract.gpu_hour_cost))

    def _restart(self) -> int:
        record = fsio.read_json(self.attempt.record) or {}
        return int(record.get("restart", 0))

    def _start(self, step_argv: Sequence[str]) -> subprocess.Popen[bytes]:
        env = {
            **os.environ,
            settings.ATTEMPT: str(self.attempt.n),
            settings.NONCE: self.attempt.nonce.read_text(),
            settings.NODE_LIST: ",".join(self.nodes),
        }
        return proc.start(step_argv, env=env)

    def _look(self, step: Step) -> None:
        now = clock.monotonic()
        if (
            self.signals.first
            and step.stop_at is None
            and not self.deadline.explains(self.signals.received, clock.now())
        ):
            self._ask_to_stop(step, f"signal:{self.signals.first}")
            self._note_preemption(step, self._view())
        if now < step.next_look:
            return
        step.next_look = now + LOOK_S
        if now >= step.next_ask:
            step.next_ask = now + ASK_SCHEDULER_S
            self._refresh_deadline()
        if step.stop_at is None and (self.signals.first or self.attempt.warned.exists()):
            # The warning before the time limit, which the agents count down to by themselves; or a preemption.
            self._note_preemption(step, self._view())
            if step.preempt_time is not None:
                self._ask_to_stop(step, "preemption")
        if self._is_asked_to_requeue(step):
            self._answer_request(None)
            self._ask_to_stop(step, "requeue")
        self._watch_owner(step)
        self._watch_cancellation(step, now)
        self._watch_failures(step, now)
        self._watch_agents(step, now)
        if self.deadline.end_time is not None and clock.now() > self.deadline.end_time - LAST_CHANCE_S:
            step.out_of_time = True
            self._abort(step)
        if self.backend.name == "local" and os.getppid() != self.parent:
            # The supervisor is gone. Without it nobody could stop or continue this run, so it does not go on.
            step.orphaned = True
            self._abort(step)

    def _is_asked_to_requeue(self, step: Step) -> bool:
        """Whether there is a request that was not read before."""
        asked = None if step.requeue_asked else fsio.peek_json(self.attempt.requeue_asked)
        if not isinstance(asked, dict) or not isinstance(asked.get("options"), dict):
            return False
        step.requeue_asked, step.new_options = True, asked["options"]
        return True

    def _close_requests(self, step: Step) -> None:
        """From now on `clustertrain requeue` finds that it is too late. A request that came first still counts."""
        with contextlib.suppress(OSError):  # the disk; nobody can ask there either
            if not fsio.create_json(self.attempt.requeue_asked, {"too_late": clock.now()}):
                step.late_request = self._is_asked_to_requeue(step)

    def _answer_request(self, why_not: str | None) -> None:
        self.log.write("requeue_answered", taken=why_not is None, why=why_not)

    def _watch_owner(self, step: Step) -> None:
        """Slurm may have started the run elsewhere, after it lost sight of this node: what goes on here is in vain."""
        newer = None if step.taken_over else self._newer_attempt()
        if newer is not None:
            step.taken_over = True
            self.log.write("taken_over", by=newer)
        if step.taken_over:
            self._abort(step)

    def _lost(self, step: Step) -> str:
        """Why the run is not this attempt's any more; empty while it is."""
        newer = self._newer_attempt()
        if newer is not None:
            return f"taken over by attempt {newer}"
        if step.taken_over:  # and the file system does not answer now
            return "taken over by a newer attempt"
        if not self._wait_for_folder():
            return f"the folder of the run is gone: {self.run.path}"
        newer = self._newer_attempt()  # it may have come with the folder
        return "" if newer is None else f"taken over by attempt {newer}"

    def _wait_for_folder(self) -> bool:
        """Whether the run's folder is there, or is again before long."""
        if self._has_folder():
            return True
        print(f"clustertrain batch: {self.run.path} is gone; waiting up to {FOLDER_S:g} s", file=sys.stderr, flush=True)
        signals = len(self.signals.received)
        clock.wait_until(lambda: self._has_folder() or len(self.signals.received) > signals, FOLDER_S, LOOK_S)
        return self._has_folder()

    def _has_folder(self) -> bool:
        try:
            self.run.path.stat()
        except FileNotFoundError:
            return False
        except OSError:
            pass  # a server's bad minute
        return True

    def _newer_attempt(self) -> int | None:
        try:
            return self.run.newer_attempt(self.attempt.n)
        except OSError as e:
            print(f"clustertrain batch: {self.run.attempts_folder}: {e}", file=sys.stderr, flush=True)
            return None

    def _ask_to_stop(self, step: Step, source: str) -> None:
        step.stop_at = clock.now()
        self.log.write("signal", source=source)
        self._tell_agents({"why": source, "t": step.stop_at})
        step.child.send_signal(signal.SIGUSR2)  # srun and the local step pass it on to every agent
        if self.comment is not None:
            self.comment.quiet()

    def _tell_agents(self, order: dict[str, Any]) -> None:
        try:
            fsio.write_json(self.attempt.stop, order)
        except OSError as e:
            # The signal to the step is the other way to tell them.
            print(f"clustertrain batch: {self.attempt.stop}: {e}", file=sys.stderr, flush=True)

    def _refresh_deadline(self) -> None:
        """An administrator may have moved the end, and the saves of this attempt have shown how long they take."""
        view = self._view()
        end_time = view.end_time if view is not None and view.end_time is not None else self.deadline.end_time
        allocation_s = end_time - self.started if end_time is not None else None
        fresh = replace(self.deadline, end_time=end_time, lead_s=lead_s(self.run, allocation_s))
        if fresh != self.deadline:
            self.deadline = fresh
            with contextlib.suppress(OSError):
                deadlines.write(self.attempt.deadline, fresh)

    def _note_preemption(self, step: Step, view: JobView | None) -> None:
        if view is not None and view.preempt_time is not None:
            step.preempt_time = view.preempt_time

    def _watch_cancellation(self, step: Step, now: float) -> None:
        """The owner's marker ends the attempt whether or not the scheduler has heard of it."""
        if step.cancelled_at is None and fsio.peek_json(self.run.cancelled) is not None:
            step.cancelled_at = now
            if step.stop_at is None:
                self._ask_to_stop(step, "cancel")
        if step.cancelled_at is not None and now - step.cancelled_at > CANCEL_S:
            self._abort(step)

    def _watch_agents(self, step: Step, now: float) -> None:
        """A node whose agent never starts (it does not see the run directory, say) leaves the others waiting for it."""
        if step.agents_seen or now - step.began < AGENTS_S:
            return
        step.agents_seen = True
        seen = {p.name for p in self.attempt.events.glob("agent-*.jsonl")}
        if any(self.attempt.events_of(f"agent-{n}").name not in seen for n in self.nodes):
            self._abort(step)

    def _watch_failures(self, step: Step, now: float) -> None:
        """A node that failed leaves the others in a collective, and srun waits for all of them."""
        results = self._results()
        failed = any(r["ending"] == "failed" for r in results.values()) or bool(self._ended_agents(results))
        if (failed or len(results) == len(self.nodes)) and step.over_at is None:
            step.over_at = now
        # Only agents whose ranks ended by themselves have more to do.
        completed = not failed and all(r["ending"] == "completed" for r in results.values()) and step.stop_at is None
        patience_s = AFTER_RESULTS_S if completed else AFTER_END_S
        if step.over_at is not None and now - step.over_at > patience_s:
            self._abort(step)

    def _ended_agents(self, results: Container[str]) -> set[str]:
        """The nodes whose agent was killed, or could not write a result. Their ranks ended with it, which their peers
        notice only where they had met already."""
        try:
            return {n for n in self.attempt.nodes_without_agent() if n in self.nodes and n not in results}
        except OSError:
            return set()

    def _abort(self, step: Step) -> None:
        now = clock.monotonic()
        if step.aborted_at is None:
            step.aborted_at = now
            self._tell_agents({"abort": True, "t": clock.now()})
        elif now - step.aborted_at > AFTER_ABORT_S:
            step.child.kill()

    def _results(self) -> dict[str, dict[str, Any]]:
        found = {n: fsio.peek_json(self.attempt.result_of(n)) for n in self.nodes}
        return {n: r for n, r in found.items() if r is not None}

    def _view(self) -> JobView | None:
        try:
            return self.backend.views([self.job_id]).get(self.job_id)
        except CommandFailed as e:
            print(f"clustertrain batch: {e}", file=sys.stderr, flush=True)
            return None

    def _accounting(self, view: JobView | None) -> str:
        if view is None or view.state == RUNNING:
            return ""
        try:
            # A requeued job has a row for the start to come, without a time.
            starts = [s for s in self.backend.starts(self.job_id) if s.start is not None]
        except CommandFailed:
            return ""
        return starts[-1].state if starts else ""

    def _evidence(self, step: Step, sequel: Sequel) -> Evidence:
        clock.wait_until(lambda: len(self._results()) == len(self.nodes), LATE_RESULTS_S, POLL_S)
        results = self._results()
        completed = len(results) == len(self.nodes) and all(r["ending"] == "completed" for r in results.values())
        cancelled = self.run.cancelled.exists()
        view = None if completed or cancelled else sequel.view()  # of an answer that would change nothing, no wait
        self._note_preemption(step, view)
        if view is not None:
            view = replace(view, preempt_time=step.preempt_time)
        log = events.of_attempt(self.attempt)
        sources = dict.fromkeys(str(e.get("source")) for e in events.named(log, "signal"))
        asked = [float(e["t"]) for e in events.named(log, "signal")]
        # The limit that counts is that of now: an administrator may have changed it since the last look.
        limited = view is not None and view.state == RUNNING and view.end_time is not None
        return Evidence(
            nodes=self.nodes,
            results=results,
            cancelled=cancelled or self.run.cancelled.exists(),
            view=view,
            accounting=self._accounting(view),
            step_exit=step.child.returncode,
            requeue_asked=step.requeue_asked,
            end_time=view.end_time if view is not None and limited else self.deadline.end_time,
            lead_s=self.deadline.lead_of(sources),
            stop_at=min(asked, default=None),
            sources=tuple(sources),
            out_of_time=step.out_of_time,
            now=clock.now(),
            restart=sequel.restart,
            without_agent=frozenset(self._ended_agents(results)),
        )

    def _close(self, verdict: Verdict, evidence: Evidence) -> None:
        steps = [r["step"] for r in evidence.results.values() if r.get("step") is not None]
        ranks = [rank for r in evidence.results.values() for rank in r.get("ranks") or ()]
        self.log.write(
            "ended",
            ending=verdict.ending,
            reason=verdict.reason,
            last_step=max(steps, default=None),
            job_id=self.job_id,
            step_exit=evidence.step_exit,
            by_script=any(rank.get("by_script") for rank in ranks),
        )


def main() -> int:
    """``clustertrain batch -- STEP…``, the last line of job.sh."""
    signals = Signals()
    backend = LocalBackend() if settings.LOCAL_JOB in os.environ else SlurmBackend(BATCH_ANSWER_S)
    try:
        run, spec, held = begin(backend)
    except ClusterTrainError as e:
        print(f"clustertrain batch: {e}", file=sys.stderr, flush=True)
        return e.exit_code
    except OSError as e:
        return leave(backend, e)
    batch = Batch(run, spec, backend, held, signals)
    spent = batch.spent_by_others()
    if spent is not None:
        return spent
    return batch.main(sys.argv[sys.argv.index("--") + 1 :])
