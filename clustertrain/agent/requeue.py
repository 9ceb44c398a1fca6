"""Carry out the decision about a run after an attempt: requeue the job, submit another one, or stop."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from clustertrain import clock
from clustertrain.agent.signals import Signals
from clustertrain.config.job import RunSpec
from clustertrain.errors import EXIT_NO_REQUEUE, EXIT_STOPPED, ClusterTrainError, CommandFailed
from clustertrain.run import attempts, endings
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.backend import RUNNING, Backend, JobView, Submission
from clustertrain.scheduler.requeue_policy import AttemptOutcome, Decision

POLL_S = 0.2
EXIT_TIMEOUT_S = 60.0  # for Slurm to end this process after a requeue
SCHEDULER_TIMEOUT_S = 600.0  # for a scheduler that is being restarted
RETRY_S = 10.0
CANCELLED_REASON = "cancelled by its owner"


@dataclass(frozen=True)
class RequeueAction:
    """Requeue, resubmission or stop of a run, in the batch process after the step."""

    run: RunDir
    backend: Backend
    job_id: str
    spec: RunSpec
    log: EventLog
    signals: Signals
    restart_count: int
    """Restarts of the job before this attempt."""
    deadline: float
    """Monotonic time (s) until which a scheduler that does not answer is queried again."""

    def execute(self, decision: Decision, outcome: AttemptOutcome) -> int:
        """Carry out ``decision`` and return the exit code of the batch process."""
        if decision.action == "stop":
            return self._stop_run(decision.reason, decision.exit_code)
        if decision.action == "finish":
            return decision.exit_code
        # Check again: the owner may have cancelled the run since then.
        view = self.query_job()
        if self.run.cancel_marker.exists():
            return self._stop_run(CANCELLED_REASON, EXIT_NO_REQUEUE)
        if view is not None and view.restarts > self.restart_count:
            self.log.write("requeued", method="slurm", job_id=self.job_id, options=dict(decision.options))
            return EXIT_STOPPED
        is_ending = view is not None and view.state != RUNNING and view.preempt_time is None
        if is_ending and outcome.ending != endings.TIME_LIMIT:
            return self._stop_run("the scheduler is ending the job: too late for a requeue", EXIT_NO_REQUEUE)
        if self.spec.wrapped:
            return self._requeue()  # only sbatch with the user's own options could submit the user's script
        if decision.action == "resubmit" or is_ending:
            # A job at its time limit cannot be requeued, and a lost node would keep it in COMPLETING.
            refusal = self._resubmit(decision)
            if refusal is None:
                return EXIT_STOPPED
            if is_ending or self.run.cancel_marker.exists():
                return self._stop_run(f"a new submission was refused: {refusal}", EXIT_NO_REQUEUE)
        return self._requeue()

    def _stop_run(self, reason: str, code: int) -> int:
        self.log.write("stopped", reason=reason)
        print(f"clustertrain: the run stops: {reason}", flush=True)
        return code

    def _wait_for_retry(self, e: CommandFailed) -> bool:
        """Wait after a query without an answer; return whether to repeat it."""
        print(f"clustertrain: no answer, retrying: {e}", file=sys.stderr, flush=True)
        cancelled = clock.wait_until(self.run.cancel_marker.exists, RETRY_S, POLL_S)
        return not cancelled and clock.monotonic() < self.deadline

    def query_job(self) -> JobView | None:
        """Return the scheduler's view of the job; None if it does not know the job, or does not answer in time."""
        while True:
            try:
                return self.backend.query_jobs([self.job_id]).get(self.job_id)
            except CommandFailed as e:
                if not self._wait_for_retry(e):
                    return None

    def _requeue(self) -> int:
        if problem := self.backend.find_requeue_problem(self.job_id) if self.spec.wrapped else "":
            return self._stop_run(problem, EXIT_NO_REQUEUE)
        # Logged first: once Slurm has accepted, it may kill this process at any moment.
        self.log.write("requeued", method="requeue", job_id=self.job_id)
        signal_count = len(self.signals.received)
        refusal = self._request_requeue()
        if refusal is None:
            if self.backend.name == "slurm":
                # Slurm now ends this process. An earlier exit would race with it for the job's final state.
                clock.wait_until(lambda: len(self.signals.received) > signal_count, EXIT_TIMEOUT_S, POLL_S)
            return EXIT_STOPPED
        if self.spec.wrapped:
            return self._stop_run(f"the requeue was refused: {refusal}", EXIT_NO_REQUEUE)
        print(f"clustertrain: requeue refused, submitting a new job: {refusal}", file=sys.stderr, flush=True)
        resubmit_refusal = self._resubmit(Decision("resubmit", "requeue was refused", EXIT_STOPPED))
        if resubmit_refusal is not None:
            return self._stop_run(
                f"neither a requeue nor a new submission was accepted: {resubmit_refusal}", EXIT_NO_REQUEUE
            )
        return EXIT_STOPPED

    def _request_requeue(self) -> str | None:
        """Request a requeue; return None if the scheduler accepted it, otherwise the refusal.

        Without an answer the request is repeated for minutes: the scheduler may be restarting. It may also have
        received the request, in which case it ends this process.
        """
        unanswered = False
        while True:
            try:
                self.backend.requeue(self.job_id)
                return None
            except CommandFailed as e:
                unanswered = True
                if not self._wait_for_retry(e):
                    return str(e)
            except ClusterTrainError as e:
                view = self.query_job() if unanswered else None
                accepted = view is not None and view.state != RUNNING
                return None if accepted else str(e)

    def _resubmit(self, decision: Decision) -> str | None:
        """Submit the run with the options of earlier submissions; return None if accepted, otherwise the refusal."""
        options = {**attempts.load_submit_options(self.run), **decision.options}
        exclusions = (self.spec.job.exclude, options.get("exclude", ""), *decision.exclude)
        excluded = ",".join(dict.fromkeys(n for n in exclusions if n))
        if excluded:
            options["exclude"] = excluded
        submission = Submission(run=self.run, options=options)
        while not self.run.cancel_marker.exists():
            try:
                job_id = self.backend.restart(self.job_id, submission)
            except ClusterTrainError as e:
                if isinstance(e, CommandFailed) and self._wait_for_retry(e):
                    continue
                print(f"clustertrain: the submission with {options} failed: {e}", file=sys.stderr, flush=True)
                return str(e)
            exclude, logged_options = list(decision.exclude), dict(decision.options)
            self.log.write("requeued", method="resubmit", job_id=job_id, exclude=exclude, options=logged_options)
            return None
        return CANCELLED_REASON
