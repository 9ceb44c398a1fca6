"""What follows an attempt: the decision made true. The run goes on as the same job, as another one, or not."""

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
from clustertrain.scheduler.requeue_policy import Decision, Verdict

POLL_S = 0.2
GONE_S = 60.0  # for Slurm to end this process after a requeue
NO_ANSWER_S = 600.0  # for a scheduler that is being restarted
RETRY_S = 10.0
CANCELLED = "cancelled by its owner"


@dataclass(frozen=True)
class Sequel:
    """Runs in the batch process, after the step."""

    run: RunDir
    backend: Backend
    job_id: str
    spec: RunSpec
    log: EventLog
    signals: Signals
    restart: int  # of the job, when this attempt began
    until: float  # monotonic s: a scheduler that gives no answer is asked again until then

    def act(self, decision: Decision, verdict: Verdict) -> int:
        """Returns the exit code of the batch process."""
        if decision.action == "stop":
            return self._give_up(decision.why, decision.exit_code)
        if decision.action == "finish":
            return decision.exit_code
        # The marker and the state once more: between the verdict and here the owner may have cancelled.
        view = self.view()
        if self.run.cancelled.exists():
            return self._give_up(CANCELLED, EXIT_NO_REQUEUE)
        if view is not None and view.restarts > self.restart:
            self.log.write("requeued", how="slurm", job_id=self.job_id, options=dict(decision.options))
            return EXIT_STOPPED
        ending = view is not None and view.state != RUNNING and view.preempt_time is None
        if ending and verdict.ending != endings.TIME_LIMIT:
            return self._give_up("the job is being ended from outside, too late for a requeue", EXIT_NO_REQUEUE)
        if decision.action == "resubmit" or ending:
            # At its limit a job takes no requeue any more, and a lost node would hold it in COMPLETING.
            refused = self._restart(decision)
            if refused is None:
                return EXIT_STOPPED
            if ending or self.run.cancelled.exists():
                return self._give_up(f"a fresh submission was refused: {refused}", EXIT_NO_REQUEUE)
        return self._requeue()

    def _give_up(self, why: str, code: int) -> int:
        self.log.write("stopped", why=why)
        print(f"clustertrain: the run stops: {why}", flush=True)
        return code

    def _again(self, e: CommandFailed) -> bool:
        """Wait for a scheduler that gave no answer; False when it is not to be asked again."""
        print(f"clustertrain: no answer, to be asked again: {e}", file=sys.stderr, flush=True)
        cancelled = clock.wait_until(self.run.cancelled.exists, RETRY_S, POLL_S)
        return not cancelled and clock.monotonic() < self.until

    def view(self) -> JobView | None:
        """The job as the scheduler sees it; None where it knows no such job, or gives no answer until the end."""
        while True:
            try:
                return self.backend.views([self.job_id]).get(self.job_id)
            except CommandFailed as e:
                if not self._again(e):
                    return None

    def _requeue(self) -> int:
        self.log.write("requeued", how="requeue", job_id=self.job_id)
        before = len(self.signals.received)
        refused = self._ask_for_requeue()
        if refused is None:
            if self.backend.name == "slurm":
                # Slurm ends this process now. Leaving by ourselves first would race with it for the job's final state.
                clock.wait_until(lambda: len(self.signals.received) > before, GONE_S, POLL_S)
            return EXIT_STOPPED
        print(f"clustertrain: requeue refused, submitting afresh: {refused}", file=sys.stderr, flush=True)
        again = self._restart(Decision("resubmit", "requeue was refused", EXIT_STOPPED))
        if again is not None:
            return self._give_up(f"neither a requeue nor a fresh submission was accepted: {again}", EXIT_NO_REQUEUE)
        return EXIT_STOPPED

    def _ask_for_requeue(self) -> str | None:
        """None once the scheduler has agreed, else why it has not. Without an answer it is asked again for minutes: it
        may be restarting, and may even have heard us, in which case it ends this process."""
        unanswered = False
        while True:
            try:
                self.backend.requeue(self.job_id)
                return None
            except CommandFailed as e:
                unanswered = True
                if not self._again(e):
                    return str(e)
            except ClusterTrainError as e:
                view = self.view() if unanswered else None
                heard = view is not None and view.state != RUNNING
                return None if heard else str(e)

    def _restart(self, decision: Decision) -> str | None:
        """A fresh start with all that earlier ones were given; None when accepted, else why not."""
        options = {**attempts.carried_options(self.run), **decision.options}
        asked = (self.spec.job.exclude, options.get("exclude", ""), *decision.exclude)
        excluded = ",".join(dict.fromkeys(n for n in asked if n))
        if excluded:
            options["exclude"] = excluded
        submission = Submission(run=self.run, options=options)
        while not self.run.cancelled.exists():
            try:
                job_id = self.backend.restart(self.job_id, submission)
            except ClusterTrainError as e:
                if isinstance(e, CommandFailed) and self._again(e):
                    continue
                print(f"clustertrain: no fresh start with {options}: {e}", file=sys.stderr, flush=True)
                return str(e)
            exclude, given = list(decision.exclude), dict(decision.options)
            self.log.write("requeued", how="resubmit", job_id=job_id, exclude=exclude, options=given)
            return None
        return CANCELLED
