"""Successive runs and their rounds: each injects one fault into a run that trains, waits until the run continues or
ends, and checks the invariants."""

from __future__ import annotations

import re
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clustertrain import clock
from clustertrain.run.state import CANCELLED, COMPLETED, FAILED, FINAL
from tests.harness.chaos_slurm import invariants, testbed
from tests.harness.chaos_slurm.actions import OTHER_LIMIT, Fault, Injection
from tests.harness.chaos_slurm.faults import MOMENT_ENDINGS, resolve_kind
from tests.harness.chaos_slurm.rounds import SHAPES, Plan, Report
from tests.harness.chaos_slurm.subject import LIMIT, PACE_S, QUERY_INTERVAL_S, START_TIMEOUT_S, TOTAL, Subject, send
from tests.harness.chaos_slurm.waiting import Stopped, pause, wait_until

if TYPE_CHECKING:
    from tests.harness.chaos_slurm.storm import Storm

ROUNDS_PER_RUN = 7
IDLE_PACE_S = 1.0  # per step of a run that waits for its next round
OUTCOME_TIMEOUT_S = 300.0  # for a run to continue or end after a fault
SURVIVAL_S = 8.0  # an attempt that trains this long after a fault has survived it
FINISH_TIMEOUT_S = 300.0  # for the last steps of an undisturbed run
EXIT_TIMEOUT_S = 90.0  # for the processes of an ended attempt
HELD_BY_SLURM = re.compile("launch failed")


class Broken(AssertionError):
    """A violated invariant."""


@dataclass
class RunHistory:
    """A run, its faults so far, and the correct endings of its attempts."""

    subject: Subject
    allowed: dict[int, set[str]] = field(default_factory=dict)
    rounds: int = 0
    orphaned_rank_dirs: int = 0
    cut_off: set[int] = field(default_factory=set)
    known: set[str] = field(default_factory=set)  # violations that have been reported

    def allow(self, first: int, endings: frozenset[str]) -> None:
        for n in range(first, self.subject.claimed() + 1):
            self.allowed.setdefault(n, set()).update(endings)


class Lane(threading.Thread):
    """Thread with successive runs of one shape, and their rounds."""

    def __init__(self, storm: Storm, number: int, plans: Sequence[Plan]) -> None:
        super().__init__(name=f"lane-{number}", daemon=True)
        self.storm, self.plans = storm, plans
        self.shape = SHAPES[number]
        self.title = f"storm{number}"
        self.home = storm.home(number)
        self.history: RunHistory | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for plan in self.plans:
                self.storm.add_report(self.round(plan))
            if self.history is not None:
                self.storm.add_report(self.finish_last(self.plans[-1]))
        except Stopped:
            pass
        except Exception as e:  # the storm's main thread raises it
            self.error = e

    # -- rounds

    def round(self, plan: Plan) -> Report:
        report = Report(plan)
        started = clock.monotonic()
        try:
            self.play(plan, report)
        except testbed.TestbedFailed as e:
            report.broken.append(f"not played, the testbed failed: {e}")
            with self.storm.turns.take(True):
                testbed.repair()
        except Stopped:
            raise
        except Exception as e:
            self.give_up(report, e)
        if report.broken and report.run:
            self.storm.keep(self.home / "runs" / report.run, plan)
        report.wall_s = clock.monotonic() - started
        return report

    def finish_last(self, plan: Plan) -> Report:
        """Finish the last run."""
        report = Report(plan, after=True)
        try:
            with self.storm.turns.take(False):
                self.finish(report)
        except Stopped:
            raise
        except Exception as e:
            self.give_up(report, e)
        if report.broken:
            self.storm.keep(self.home / "runs" / report.run, plan)
        return report

    def play(self, plan: Plan, report: Report) -> None:
        report.story.append("before the fault:")
        with self.storm.turns.take(False):
            self.find_training_run(report).subject.pace(IDLE_PACE_S)
        with self.storm.turns.take(resolve_kind(plan.fault).whole_cluster):
            history = self.find_training_run(report)
            report.story.remove("before the fault:")
            report.run = history.subject.id
            self.hit(plan.fault, history, report)

    def hit(self, fault: Fault, history: RunHistory, report: Report) -> None:
        subject, kind = history.subject, resolve_kind(fault)
        hit = self.wait_for_moment(fault, history)
        history.allow(hit, kind.endings)
        injection = Injection(subject, fault, report.story)
        since = clock.monotonic()
        subject.pace(PACE_S + fault.seconds / TOTAL)  # so that the run does not end meanwhile
        kind.act(injection)
        subject.pace(PACE_S)
        if fault.kind == "partition node":
            history.cut_off.add(hit)
        history.orphaned_rank_dirs += injection.orphaned_rank_dirs
        history.rounds += 1
        state = self.wait_for_outcome(subject, hit, since, kind.harmless or not injection.reached, report)
        history.allow(hit, kind.endings)
        report.story.append(f"attempt {hit} -> {state}")
        if fault.kind == "lower time limit":
            injection.slurm("scontrol", "update", f"jobid={subject.job_id()}", f"TimeLimit={LIMIT}")
        self.judge(history, injection, state, report)

    def find_training_run(self, report: Report) -> RunHistory:
        """Return a run that trains and has committed a checkpoint since its last start."""
        if self.history is not None and (self.history.rounds >= ROUNDS_PER_RUN or self.history.subject.excluded()):
            self.finish(report)
        while True:
            if self.history is None:
                self.history = RunHistory(Subject(self.title, self.shape, self.home, self.storm.logs))
            self.history.subject.pace(PACE_S)
            if self.history.subject.wait_until_training_or_ended() not in FINAL:
                return self.history
            self.finish(report)

    def wait_for_moment(self, fault: Fault, history: RunHistory) -> int:
        """Wait for the moment of the fault and return the attempt that it hits."""
        subject, n = history.subject, history.subject.claimed()
        if fault.moment != "training":
            history.allow(n, MOMENT_ENDINGS[fault.moment])
            subject.call("requeue", subject.id)
        if fault.moment == "stopping":
            wait_until(subject.run.attempt(n).stop_request.exists, 60.0, 0.05)
            pause(2.0 * fault.pick)
        elif fault.moment == "beginning":
            wait_until(lambda: subject.claimed() > n, 120.0, 0.1)
            pause(8.0 * fault.pick)
        return subject.claimed()

    def wait_for_outcome(self, subject: Subject, hit: int, since: float, harmless: bool, report: Report) -> str:
        """Wait for the outcome and return it: the run's final state, or ``attempt N`` for one that trains."""
        injected_at, outcome, next_query = clock.monotonic(), "", 0.0
        deadline = injected_at + OUTCOME_TIMEOUT_S

        def settled() -> bool:
            nonlocal outcome, next_query
            newest = max(subject.attempt(), hit)
            last = subject.last_step(newest)
            if last is not None and newest > hit and last["start"] > since:
                outcome = f"attempt {newest}"
            elif last is not None and harmless and last["start"] > injected_at + SURVIVAL_S:
                outcome = f"attempt {newest}, unharmed"
            elif clock.monotonic() > next_query:
                next_query = clock.monotonic() + QUERY_INTERVAL_S
                status = subject.status()
                outcome = status["state"] if status["state"] in FINAL else ""
                self.release(status, report)
            return bool(outcome)

        if not wait_until(settled, deadline - clock.monotonic(), 0.5):
            raise Broken(f"neither trains nor has ended after {OUTCOME_TIMEOUT_S:g} s: {subject.status()['state']}")
        return outcome

    def release(self, status: Mapping[str, Any], report: Report) -> None:
        """Release a job that Slurm holds because it could not start it (22.05, if a node returns from DOWN at once).

        Only its owner can release it, and ``status`` must print the command.
        """
        if not HELD_BY_SLURM.search(status["pending_reason"] or ""):
            return
        command = status["continue_command"]
        assert command == f"scontrol release {status['job_id']}"
        report.story.append(f"{command}: {testbed.run(*command.split()).returncode}")

    # -- invariants

    def judge(self, history: RunHistory, injection: Injection, state: str, report: Report) -> None:
        subject, kind = history.subject, resolve_kind(injection.fault)
        report.broken += injection.broken + self.check(history)
        if injection.other_limit and state not in FINAL and (limit := testbed.limit(subject.job_id())) != OTHER_LIMIT:
            report.broken.append(
                f"requeue with a limit of {OTHER_LIMIT} min was accepted, but the limit is {limit} min"
            )
        if state == COMPLETED:
            self.finish(report)
        elif injection.cancelled and state != CANCELLED:
            raise Broken(f"the run was cancelled but continues: {state}")
        elif state in (FAILED, CANCELLED):
            by_hand = kind.cancels if state == CANCELLED else kind.by_hand
            if not by_hand:
                reasons = [a["stopped"] or a["reason"] for a in subject.status()["attempts"]][-1:]
                raise Broken(f"the run is {state} without a request: {reasons}")
            if injection.accepted:
                raise Broken(f"{len(injection.accepted)} requeues were accepted, but the run is {state}")
            self.continue_by_hand(subject, state, report)

    def check(self, history: RunHistory) -> list[str]:
        subject = history.subject
        lines, status = subject.lines(), subject.status()
        violations = invariants.overlaps(lines, history.cut_off) + invariants.lost_steps(lines)
        violations += invariants.late_commits(lines, subject.commits())
        violations += invariants.wrong_endings(status["attempts"], history.allowed, lines, TOTAL)
        newest = subject.attempt()
        if not wait_until(lambda: not invariants.remaining_processes(subject.path, before=newest), EXIT_TIMEOUT_S, 1.0):
            violations += invariants.remaining_processes(subject.path, before=newest)
        new = [violation for violation in violations if violation not in history.known]
        history.known.update(new)
        return new

    def continue_by_hand(self, subject: Subject, state: str, report: Report) -> None:
        """Type the command that ``status`` prints."""
        if state == FAILED and "clustertrain requeue" not in subject.call("status", subject.id).stdout:
            report.broken.append("the run has failed, but `status` does not print how to continue it")
        n, since = subject.claimed(), clock.monotonic()
        result = subject.call("requeue", subject.id)
        report.story.append(f"requeue by hand: {result.returncode}")
        if result.returncode:
            raise Broken(f"requeue of a run that is {state}: {result.returncode}\n{result.stdout}{result.stderr}")
        report.story.append(f"continued as {self.wait_for_requeue(subject, n, since)}")

    def wait_for_requeue(self, subject: Subject, n: int, since: float) -> str:
        if not wait_until(
            lambda: subject.attempt() > n and subject.last_step(subject.attempt()) is not None, START_TIMEOUT_S
        ):
            raise Broken("requeue was accepted, but the run does not train")
        return f"attempt {subject.attempt()}"

    def finish(self, report: Report) -> None:
        """Let the run complete undisturbed, and compare it with an undisturbed run."""
        assert self.history is not None
        history = self.history
        subject = history.subject
        report.run = subject.id
        subject.pace(0.0)
        wait_until(lambda: subject.status()["state"] in FINAL, FINISH_TIMEOUT_S, 1.0)
        state = subject.status()["state"]
        report.broken += self.check(history)
        if state != COMPLETED:
            raise Broken(f"{subject.id} was undisturbed but is {state}")
        digest = subject.call("checkpoint", "digest", subject.id).stdout.strip()
        if digest != (expected := self.storm.undisturbed(subject)):
            report.broken.append(f"{subject.id} ended with digest {digest}, undisturbed {expected}")
        if not wait_until(lambda: not self.find_leftovers(history), EXIT_TIMEOUT_S, 1.0):
            report.broken += self.find_leftovers(history)
        report.story.append(f"{subject.id} completed in {len(subject.status()['attempts'])} attempts")
        self.history = None

    def find_leftovers(self, history: RunHistory) -> list[str]:
        subject = history.subject
        jobs = [f"job {i} in the queue" for i in testbed.queue(subject.job_ids())]
        processes = invariants.remaining_processes(subject.path)
        return jobs + processes + invariants.remaining_files(subject.path, history.orphaned_rank_dirs)

    def describe_run(self) -> list[str]:
        assert self.history is not None
        subject = self.history.subject
        status = subject.call("status", subject.id)
        log = subject.run.job_log
        jobs = log.read_text(errors="replace").splitlines()[-25:] if log.exists() else []
        return [*status.stdout.splitlines(), "--- job.log", *jobs]

    def give_up(self, report: Report, error: Exception) -> None:
        """Cancel a run that cannot continue, so that the next round gets a new one."""
        is_violation = isinstance(error, AssertionError)  # otherwise an unexpected error
        report.broken.append(str(error) if is_violation else "".join(traceback.format_exception(error)))
        if self.history is None:
            return
        report.story += self.describe_run()
        subject, self.history = self.history.subject, None
        with self.storm.turns.take(False):
            subject.call("cancel", subject.id)
            testbed.run("scancel", *subject.job_ids())
            wait_until(lambda: not subject.processes(), 60.0, 1.0)
        send(subject.processes(), testbed.signal.SIGKILL)
