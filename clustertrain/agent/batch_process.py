"""The batch process, the last command of job.sh: it runs on the batch host, outside any container.

It claims the attempt, runs the job step (srun, or the local stand-in) and forwards stop requests to the agents.
When the job step ends, it decides whether the run continues, and carries the decision out.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from clustertrain import clock, fsio, proc, settings
from clustertrain.agent.claim import Claim
from clustertrain.agent.deadline import write_deadline
from clustertrain.agent.ranks.program_checkpoints import ProgramCheckpoints
from clustertrain.agent.requeue import SCHEDULER_TIMEOUT_S, RequeueAction
from clustertrain.agent.signals import Signals
from clustertrain.agent.startup import claim_run, requeue_or_fail
from clustertrain.config.job import RunSpec
from clustertrain.errors import EXIT_FAILED, EXIT_NO_REQUEUE, ClusterTrainError, CommandFailed
from clustertrain.run import attempts, endings, event_types, events
from clustertrain.run.events import EventLog
from clustertrain.run.results import NodeResult, parse_node_result
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.run.stop_lead_time import compute_lead_s
from clustertrain.run.usage import budget
from clustertrain.scheduler.backend import RUNNING, Backend, JobView
from clustertrain.scheduler.local import LocalBackend
from clustertrain.scheduler.requeue_policy import AttemptOutcome, Evidence, classify, decide, find_exhausted_budget
from clustertrain.scheduler.slurm import BATCH_PROCESS_TIMEOUT_S, SlurmBackend

POLL_S = 0.2
CHECK_INTERVAL_S = 1.0
SCHEDULER_POLL_S = 60.0  # between queries of the end time, which an administrator may change
AFTER_END_S = 20.0  # after a failure or a stop: for the other nodes to write their results and exit
AFTER_RESULTS_S = 150.0  # for the agents to compact their telemetry after all ranks have completed
AFTER_ABORT_S = 20.0
AGENTS_S = 600.0  # for every agent to start; Python on a busy network file system takes minutes
LATE_RESULTS_S = 5.0  # for results to become visible after the job step has ended
FOLDER_S = 60.0  # for a missing run folder to return (an automounter, a folder being moved)
CANCEL_S = 60.0  # for a last checkpoint, if Slurm itself does not kill the job
LAST_CHANCE_S = 12.0  # before the end of the allocation: Slurm accepts a requeue only while the job runs


class StepProcess(Protocol):
    """What the batch process uses of the process that runs the agents."""

    returncode: int | None

    def poll(self) -> int | None: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...


@dataclass
class JobStep:
    """The job step that runs the agents, started by srun or its local stand-in, and its state."""

    child: StepProcess
    stop_requested_at: float | None = None
    preempt_time: float | None = None
    """Time from the scheduler, which drops it when it requeues the job."""
    cancelled_at: float | None = None
    requeue_requested: bool = False
    requeue_options: dict[str, str] | None = None
    """Options of the requested requeue."""
    late_request: bool = False
    """The request came after the job step had ended."""
    ended_at: float | None = None
    """Time at which a node had failed or all had ended."""
    aborted_at: float | None = None
    orphaned: bool = False
    out_of_time: bool = False
    taken_over: bool = False
    agents_checked: bool = False
    started_at: float = field(default_factory=clock.monotonic)
    next_check: float = 0.0
    next_scheduler_poll: float = 0.0


class BatchProcess:
    """The batch process of one attempt."""

    def __init__(self, run: RunDir, spec: RunSpec, backend: Backend, claim: Claim, signals: Signals) -> None:
        self.run = run
        self.spec = spec
        self.backend = backend
        self.job_id = claim.job_id
        self.attempt: AttemptDir = claim.attempt
        self.nodes = claim.nodes
        self.deadline = claim.deadline
        self.signals = signals
        self.log = EventLog(self.attempt.events_path("batch"))
        self.parent_pid = os.getppid()
        self.started_at = clock.now()

    def main(self, step_argv: Sequence[str]) -> int:
        """Run the job step, carry out the decision about the run and return the exit code."""
        self.log.write(
            "started",
            job_id=self.job_id,
            restart=self._restart_count(),
            nodes=list(self.nodes),
            end_time=self.deadline.end_time,
        )
        program_checkpoints = ProgramCheckpoints(self.run, self.attempt, self.spec)
        try:
            self._publish_checkpoint(program_checkpoints.begin())
        except OSError as e:
            return requeue_or_fail(self.backend, e)
        job_step = JobStep(self._start_step(step_argv))
        while job_step.child.poll() is None:
            self._poll_step(job_step)
            clock.wait_until(lambda: job_step.child.poll() is not None, POLL_S, POLL_S)
        program_checkpoints.end()
        if job_step.orphaned:
            return EXIT_FAILED  # the next attempt closes this one
        self._close_requests(job_step)
        lost_reason = self._lost_reason(job_step)
        if lost_reason:  # a newer attempt owns the run, or its folder is gone
            print(f"clustertrain: attempt {self.attempt.n} decides nothing: {lost_reason}", flush=True)
            return EXIT_NO_REQUEUE
        requeue_action = RequeueAction(
            self.run,
            self.backend,
            self.job_id,
            self.spec,
            self.log,
            self.signals,
            restart_count=self._restart_count(),
            deadline=clock.monotonic() + SCHEDULER_TIMEOUT_S,
        )
        evidence = self._evidence(job_step, requeue_action)
        outcome = classify(evidence)
        if outcome is None:
            # Slurm is ending the job, and its accounting has no state yet. The next start or `status` will read it.
            return EXIT_FAILED
        self._log_ending(outcome, evidence)
        decision = decide(outcome, attempts.load_budgeted_attempts(self.run), self.spec.job.max_requeues)
        if decision.action in ("requeue", "resubmit") and job_step.requeue_options:
            decision = replace(decision, action="resubmit", options=job_step.requeue_options)
        if job_step.late_request:
            self._answer_request(None if decision.action in ("requeue", "resubmit") else decision.reason)
        print(f"clustertrain: attempt {self.attempt.n} {outcome.ending}: {outcome.reason}", flush=True)
        return requeue_action.execute(decision, outcome)

    def stop_if_budget_spent(self) -> int | None:
        """Record the end of the run and return the exit code if earlier attempts spent a budget; otherwise return None.

        A killed attempt could not make this decision itself.
        """
        history = [a for a in attempts.load_budgeted_attempts(self.run) if a.n < self.attempt.n]
        ending: endings.Ending = endings.BUDGET_SPENT
        reason = self._contract_stop_reason()
        if not reason:
            if not history or history[-1].ending is None:
                return None
            ending, reason = (
                endings.NO_PROGRESS,
                find_exhausted_budget(history[-1].ending, history, self.spec.job.max_requeues) or "",
            )
        if not reason:
            return None
        self.log.write("ended", ending=ending, reason=reason, last_step=None, job_id=self.job_id)
        self.log.write("stopped", reason=reason)
        print(f"clustertrain: the run stops: {reason}", flush=True)
        return EXIT_NO_REQUEUE

    def _contract_stop_reason(self) -> str:
        """Return why the contract ends the run now; empty if its budget is not spent or must not stop the run."""
        contract = self.spec.recipe.contract
        if not contract.has_budget or contract.on_budget_spent != "stop":
            return ""
        earlier = [a for a in attempts.load_attempts(self.run) if a.n < self.attempt.n]
        return budget.format_spent(contract, budget.compute_usage(self.run, earlier, None, contract.gpu_hour_cost))

    def _restart_count(self) -> int:
        record = fsio.read_json(self.attempt.record) or {}
        return int(record.get("restart", 0))

    def _publish_checkpoint(self, path: str) -> None:
        """Tell the agents which checkpoint a command resumes from. Without this file it would start at step 0."""
        if path:
            fsio.write_json(self.attempt.checkpoint, {"path": path})

    def _start_step(self, step_argv: Sequence[str]) -> StepProcess:
        env = {
            **os.environ,
            settings.ATTEMPT: str(self.attempt.n),
            settings.NONCE: self.attempt.nonce.read_text(),
            settings.NODE_LIST: ",".join(self.nodes),
        }
        return proc.start(step_argv, env=env)

    def _poll_step(self, job_step: JobStep) -> None:
        now = clock.monotonic()
        if (
            self.signals.first
            and job_step.stop_requested_at is None
            and not self.deadline.is_limit_warning(self.signals.received, clock.now())
        ):
            self._request_stop(job_step, f"signal:{self.signals.first}")
            self._note_preemption(job_step, self._query_job())
        if now < job_step.next_check:
            return
        job_step.next_check = now + CHECK_INTERVAL_S
        if now >= job_step.next_scheduler_poll:
            job_step.next_scheduler_poll = now + SCHEDULER_POLL_S
            self._refresh_deadline()
        if job_step.stop_requested_at is None and (self.signals.first or self.attempt.signal_warning.exists()):
            # Either the warning before the time limit, for which the agents have their own countdown, or a preemption.
            self._note_preemption(job_step, self._query_job())
            if job_step.preempt_time is not None:
                self._request_stop(job_step, "preemption")
        if self._read_requeue_request(job_step):
            self._answer_request(None)
            self._request_stop(job_step, "requeue")
        self._watch_owner(job_step)
        self._watch_cancellation(job_step, now)
        self._watch_failures(job_step, now)
        self._watch_agents(job_step, now)
        if self.deadline.end_time is not None and clock.now() > self.deadline.end_time - LAST_CHANCE_S:
            job_step.out_of_time = True
            self._abort(job_step)
        if self.backend.name == "local" and os.getppid() != self.parent_pid:
            # The supervisor is gone, so nothing could stop or continue this run.
            job_step.orphaned = True
            self._abort(job_step)

    def _read_requeue_request(self, job_step: JobStep) -> bool:
        """Read a request of `clustertrain requeue`; return whether there is a new one."""
        request = None if job_step.requeue_requested else fsio.poll_json(self.attempt.requeue_request)
        if not isinstance(request, dict) or not isinstance(request.get("options"), dict):
            return False
        job_step.requeue_requested, job_step.requeue_options = True, request["options"]
        return True

    def _close_requests(self, job_step: JobStep) -> None:
        """Refuse further requests of `clustertrain requeue`. A request that came first still counts."""
        with contextlib.suppress(OSError):  # the disk failed: then no request can be written either
            if not fsio.create_json(self.attempt.requeue_request, {"too_late": clock.now()}):
                job_step.late_request = self._read_requeue_request(job_step)

    def _answer_request(self, refusal: str | None) -> None:
        self.log.write("requeue_answered", accepted=refusal is None, reason=refusal)

    def _watch_owner(self, job_step: JobStep) -> None:
        """Abort the job step if a newer attempt exists: Slurm may start the run elsewhere after it lost this node."""
        newer = None if job_step.taken_over else self._newer_attempt()
        if newer is not None:
            job_step.taken_over = True
            self.log.write("taken_over", newer_attempt=newer)
        if job_step.taken_over:
            self._abort(job_step)

    def _lost_reason(self, job_step: JobStep) -> str:
        """Return why this attempt no longer owns the run; empty if it does."""
        newer = self._newer_attempt()
        if newer is not None:
            return f"taken over by attempt {newer}"
        if job_step.taken_over:  # and the file system no longer answers
            return "taken over by a newer attempt"
        if not self._wait_for_folder():
            return f"the run folder is gone: {self.run.path}"
        newer = self._newer_attempt()  # it may have appeared with the folder
        return "" if newer is None else f"taken over by attempt {newer}"

    def _wait_for_folder(self) -> bool:
        """Return whether the run's folder exists, after waiting for it."""
        if self._has_folder():
            return True
        print(f"clustertrain batch: {self.run.path} is gone; waiting up to {FOLDER_S:g} s", file=sys.stderr, flush=True)
        signals = len(self.signals.received)
        clock.wait_until(lambda: self._has_folder() or len(self.signals.received) > signals, FOLDER_S, CHECK_INTERVAL_S)
        return self._has_folder()

    def _has_folder(self) -> bool:
        try:
            self.run.path.stat()
        except FileNotFoundError:
            return False
        except OSError:
            pass  # a server that does not answer is not a missing folder
        return True

    def _newer_attempt(self) -> int | None:
        try:
            return self.run.find_newer_attempt(self.attempt.n)
        except OSError as e:
            print(f"clustertrain batch: {self.run.attempts_folder}: {e}", file=sys.stderr, flush=True)
            return None

    def _request_stop(self, job_step: JobStep, source: str) -> None:
        job_step.stop_requested_at = clock.now()
        self.log.write("signal", source=source)
        written = self._write_stop_order({"reason": source, "t": job_step.stop_requested_at})
        # The job step forwards it to every agent. Without the file, agents could mistake USR2 for the early warning of
        # the time limit.
        job_step.child.send_signal(signal.SIGUSR2 if written else signal.SIGUSR1)

    def _write_stop_order(self, order: dict[str, Any]) -> bool:
        """Write ``stop.json``; return whether that succeeded."""
        try:
            fsio.write_json(self.attempt.stop_request, order)
        except OSError as e:
            print(f"clustertrain batch: {self.attempt.stop_request}: {e}", file=sys.stderr, flush=True)
            return False
        return True

    def _refresh_deadline(self) -> None:
        """Update the end of the allocation, which may be changed, and the lead time, from measured saves."""
        view = self._query_job()
        end_time = view.end_time if view is not None and view.end_time is not None else self.deadline.end_time
        allocation_s = end_time - self.started_at if end_time is not None else None
        refreshed = replace(self.deadline, end_time=end_time, lead_s=compute_lead_s(self.run, allocation_s))
        if refreshed != self.deadline:
            self.deadline = refreshed
            with contextlib.suppress(OSError):
                write_deadline(self.attempt.deadline, refreshed)

    def _note_preemption(self, job_step: JobStep, view: JobView | None) -> None:
        if view is not None and view.preempt_time is not None:
            job_step.preempt_time = view.preempt_time

    def _watch_cancellation(self, job_step: JobStep, now: float) -> None:
        """Stop the attempt if the owner cancelled the run, whether or not the scheduler received the cancellation."""
        if job_step.cancelled_at is None and fsio.poll_json(self.run.cancel_marker) is not None:
            job_step.cancelled_at = now
            if job_step.stop_requested_at is None:
                self._request_stop(job_step, "cancel")
        if job_step.cancelled_at is not None and now - job_step.cancelled_at > CANCEL_S:
            self._abort(job_step)

    def _watch_agents(self, job_step: JobStep, now: float) -> None:
        """Abort the job step if an agent never started, for example without access to the run folder."""
        if job_step.agents_checked or now - job_step.started_at < AGENTS_S:
            return
        job_step.agents_checked = True
        started = {p.name for p in self.attempt.events.glob("agent-*.jsonl")}
        if any(self.attempt.events_path(f"agent-{n}").name not in started for n in self.nodes):
            self._abort(job_step)

    def _watch_failures(self, job_step: JobStep, now: float) -> None:
        """Abort the job step some time after a node failed: the other nodes wait in a collective, and srun for them."""
        results = self._read_results()
        failed = any(r.ending == "failed" for r in results.values()) or bool(self._nodes_without_agent(results))
        if (failed or len(results) == len(self.nodes)) and job_step.ended_at is None:
            job_step.ended_at = now
        # Only agents whose ranks completed still have work: they compact telemetry.
        completed = (
            not failed and all(r.ending == "completed" for r in results.values()) and job_step.stop_requested_at is None
        )
        patience_s = AFTER_RESULTS_S if completed else AFTER_END_S
        if job_step.ended_at is not None and now - job_step.ended_at > patience_s:
            self._abort(job_step)

    def _nodes_without_agent(self, results: Container[str]) -> set[str]:
        """Return the nodes whose agent was killed or could not write a result.

        Their ranks ended too, which other ranks notice only if they were already connected.
        """
        try:
            return {n for n in self.attempt.nodes_without_agent() if n in self.nodes and n not in results}
        except OSError:
            return set()

    def _abort(self, job_step: JobStep) -> None:
        now = clock.monotonic()
        if job_step.aborted_at is None:
            job_step.aborted_at = now
            self._write_stop_order({"abort": True, "t": clock.now()})
        elif now - job_step.aborted_at > AFTER_ABORT_S:
            job_step.child.kill()

    def _read_results(self) -> dict[str, NodeResult]:
        results = {n: parse_node_result(fsio.poll_json(self.attempt.result_path(n))) for n in self.nodes}
        return {n: r for n, r in results.items() if r is not None}

    def _query_job(self) -> JobView | None:
        try:
            return self.backend.query_jobs([self.job_id]).get(self.job_id)
        except CommandFailed as e:
            print(f"clustertrain batch: {e}", file=sys.stderr, flush=True)
            return None

    def _accounting_state(self, view: JobView | None) -> str:
        if view is None or view.state == RUNNING:
            return ""
        try:
            # A requeued job has a row without a time for its next start.
            starts = [s for s in self.backend.list_starts(self.job_id) if s.start is not None]
        except CommandFailed:
            return ""
        return starts[-1].state if starts else ""

    def _evidence(self, job_step: JobStep, requeue_action: RequeueAction) -> Evidence:
        clock.wait_until(lambda: len(self._read_results()) == len(self.nodes), LATE_RESULTS_S, POLL_S)
        results = self._read_results()
        completed = len(results) == len(self.nodes) and all(r.ending == "completed" for r in results.values())
        cancelled = self.run.cancel_marker.exists()
        # Not if the answer would change nothing: the query may take minutes.
        view = None if completed or cancelled else requeue_action.query_job()
        self._note_preemption(job_step, view)
        if view is not None:
            view = replace(view, preempt_time=job_step.preempt_time)
        stop_requests = list(events.select(events.for_attempt(self.attempt), event_types.Signal))
        sources = dict.fromkeys(str(request.source) for request in stop_requests)
        # The current limit: an administrator may have changed it since the last query.
        has_end_time = view is not None and view.state == RUNNING and view.end_time is not None
        return Evidence(
            nodes=self.nodes,
            results=results,
            cancelled=cancelled or self.run.cancel_marker.exists(),
            view=view,
            accounting_state=self._accounting_state(view),
            step_exit_code=job_step.child.returncode or 0,
            requeue_requested=job_step.requeue_requested,
            end_time=view.end_time if view is not None and has_end_time else self.deadline.end_time,
            lead_s=self.deadline.lead_for_sources(sources),
            stop_requested_at=min((request.t for request in stop_requests), default=None),
            stop_sources=tuple(sources),
            out_of_time=job_step.out_of_time,
            now=clock.now(),
            restart_count=requeue_action.restart_count,
            nodes_without_agent=frozenset(self._nodes_without_agent(results)),
        )

    def _log_ending(self, outcome: AttemptOutcome, evidence: Evidence) -> None:
        results = evidence.results.values()
        steps = [r.step for r in results if r.step is not None]
        self.log.write(
            "ended",
            ending=outcome.ending,
            reason=outcome.reason,
            last_step=max(steps, default=None),
            job_id=self.job_id,
            step_exit_code=evidence.step_exit_code,
            ended_by_script=any(rank.ended_by_script for result in results for rank in result.ranks),
            ended_by_signal=any(rank.ended_by_signal for result in results for rank in result.ranks),
        )


def main() -> int:
    """Run ``clustertrain batch -- STEP…``, the last line of job.sh."""
    signals = Signals()
    backend = LocalBackend() if settings.LOCAL_JOB in os.environ else SlurmBackend(BATCH_PROCESS_TIMEOUT_S)
    try:
        run, spec, claim = claim_run(backend)
    except ClusterTrainError as e:
        print(f"clustertrain batch: {e}", file=sys.stderr, flush=True)
        return e.exit_code
    except OSError as e:
        return requeue_or_fail(backend, e)
    batch_process = BatchProcess(run, spec, backend, claim, signals)
    exit_code = batch_process.stop_if_budget_spent()
    if exit_code is not None:
        return exit_code
    return batch_process.main(sys.argv[sys.argv.index("--") + 1 :])
