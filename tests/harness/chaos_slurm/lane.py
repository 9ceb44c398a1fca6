"""One run after the other, and the rounds that hit it: each does one fault to a run that trains, sees it go on or end,
and checks what must hold."""

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
from tests.harness.chaos_slurm.acts import OTHER_LIMIT, Deed, Fault
from tests.harness.chaos_slurm.faults import OF_MOMENT, kind_of
from tests.harness.chaos_slurm.patience import Stopped, pause, wait_until
from tests.harness.chaos_slurm.rounds import SHAPES, Plan, Report
from tests.harness.chaos_slurm.subject import BEGIN_S, LIMIT, LOOK_S, PACE_S, TOTAL, Subject, send

if TYPE_CHECKING:
    from tests.harness.chaos_slurm.storm import Storm

ROUNDS_A_RUN = 7
WAITING_PACE_S = 1.0  # a step of a run that waits for its next round
AFTERMATH_S = 300.0  # for a run to go on after a fault, or to end
UNHARMED_S = 8.0  # after a fault that a run may outlast
END_S = 300.0  # for the last steps of a run that nothing happens to
GONE_S = 90.0  # for the processes of an attempt that is over
HELD_BY_SLURM = re.compile("launch failed")


class Broken(AssertionError):
    """Something that must hold does not."""


@dataclass
class Life:
    """A run and what has been done to it: by attempt the endings that are true of it."""

    subject: Subject
    allowed: dict[int, set[str]] = field(default_factory=dict)
    rounds: int = 0
    lost_rank_dirs: int = 0
    cut_off: set[int] = field(default_factory=set)
    known: set[str] = field(default_factory=set)  # violations that have been told

    def allow(self, first: int, endings: frozenset[str]) -> None:
        for n in range(first, self.subject.claimed() + 1):
            self.allowed.setdefault(n, set()).update(endings)


class Lane(threading.Thread):
    """One run after the other of one shape, and the rounds that hit it."""

    def __init__(self, storm: Storm, number: int, plans: Sequence[Plan]) -> None:
        super().__init__(name=f"lane-{number}", daemon=True)
        self.storm, self.plans = storm, plans
        self.shape = SHAPES[number]
        self.title = f"storm{number}"
        self.home = storm.home(number)
        self.life: Life | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for plan in self.plans:
                self.storm.tell(self.round(plan))
            if self.life is not None:
                self.storm.tell(self.last(self.plans[-1]))
        except Stopped:
            pass
        except Exception as e:  # the edge of a thread: the storm's own thread raises it
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

    def last(self, plan: Plan) -> Report:
        """What is left of the last run is brought to its end."""
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
            self.living(report).subject.pace(WAITING_PACE_S)
        with self.storm.turns.take(kind_of(plan.fault).alone):
            life = self.living(report)
            report.story.remove("before the fault:")
            report.run = life.subject.id
            self.hit(plan.fault, life, report)

    def hit(self, fault: Fault, life: Life, report: Report) -> None:
        subject, kind = life.subject, kind_of(fault)
        hit = self.arrive(fault, life)
        life.allow(hit, kind.endings)
        deed = Deed(subject, fault, report.story)
        since = clock.monotonic()
        subject.pace(PACE_S + fault.seconds / TOTAL)  # so that it is not over by then
        kind.act(deed)
        subject.pace(PACE_S)
        if fault.kind == "partition node":
            life.cut_off.add(hit)
        life.lost_rank_dirs += deed.lost_rank_dirs
        life.rounds += 1
        state = self.aftermath(subject, hit, since, kind.harmless or not deed.reached, report)
        life.allow(hit, kind.endings)
        report.story.append(f"attempt {hit} -> {state}")
        if fault.kind == "lower time limit":
            deed.slurm("scontrol", "update", f"jobid={subject.job_id()}", f"TimeLimit={LIMIT}")
        self.judge(life, deed, state, report)

    def living(self, report: Report) -> Life:
        """A run that trains and has committed something since it last began."""
        if self.life is not None and (self.life.rounds >= ROUNDS_A_RUN or self.life.subject.excluded()):
            self.finish(report)
        while True:
            if self.life is None:
                self.life = Life(Subject(self.title, self.shape, self.home, self.storm.logs))
            self.life.subject.pace(PACE_S)
            if self.life.subject.trains_or_ends() not in FINAL:
                return self.life
            self.finish(report)

    def arrive(self, fault: Fault, life: Life) -> int:
        """Wait for the fault's moment; the attempt that it hits."""
        subject, n = life.subject, life.subject.claimed()
        if fault.moment != "training":
            life.allow(n, OF_MOMENT[fault.moment])
            subject.call("requeue", subject.id)
        if fault.moment == "stopping":
            wait_until(subject.run.attempt(n).stop_request.exists, 60.0, 0.05)
            pause(2.0 * fault.pick)
        elif fault.moment == "beginning":
            wait_until(lambda: subject.claimed() > n, 120.0, 0.1)
            pause(8.0 * fault.pick)
        return subject.claimed()

    def aftermath(self, subject: Subject, hit: int, since: float, harmless: bool, report: Report) -> str:
        """How it goes on: the run's final state, or ``attempt N`` that trains."""
        acted, seen, next_look = clock.monotonic(), "", 0.0
        deadline = acted + AFTERMATH_S

        def settled() -> bool:
            nonlocal seen, next_look
            newest = max(subject.attempt(), hit)
            last = subject.last_step(newest)
            if last is not None and newest > hit and last["start"] > since:
                seen = f"attempt {newest}"
            elif last is not None and harmless and last["start"] > acted + UNHARMED_S:
                seen = f"attempt {newest}, unharmed"
            elif clock.monotonic() > next_look:
                next_look = clock.monotonic() + LOOK_S
                status = subject.status()
                seen = status["state"] if status["state"] in FINAL else ""
                self.release(status, report)
            return bool(seen)

        if not wait_until(settled, deadline - clock.monotonic(), 0.5):
            raise Broken(f"neither trains nor has ended {AFTERMATH_S:g} s later: {subject.status()['state']}")
        return seen

    def release(self, status: Mapping[str, Any], report: Report) -> None:
        """Where Slurm could not start a job, it holds it (22.05, where a node comes back from DOWN at once). Only its
        owner can go on, and ``status`` must say how."""
        if not HELD_BY_SLURM.search(status["pending_reason"] or ""):
            return
        command = status["continue_command"]
        assert command == f"scontrol release {status['job_id']}"
        report.story.append(f"{command}: {testbed.run(*command.split()).returncode}")

    # -- what must hold

    def judge(self, life: Life, deed: Deed, state: str, report: Report) -> None:
        subject, kind = life.subject, kind_of(deed.fault)
        report.broken += deed.broken + self.check(life)
        if deed.other_limit and state not in FINAL and (limit := testbed.limit(subject.job_id())) != OTHER_LIMIT:
            report.broken.append(f"requeue with a limit of {OTHER_LIMIT} min was accepted, and it is {limit} min")
        if state == COMPLETED:
            self.finish(report)
        elif deed.cancelled and state != CANCELLED:
            raise Broken(f"cancelled, and the run goes on: {state}")
        elif state in (FAILED, CANCELLED):
            by_hand = kind.cancels if state == CANCELLED else kind.by_hand
            if not by_hand:
                why = [a["stopped"] or a["reason"] for a in subject.status()["attempts"]][-1:]
                raise Broken(f"the run is {state}, which nobody asked for: {why}")
            if deed.accepted:
                raise Broken(f"{len(deed.accepted)} requeue accepted, and the run is {state}")
            self.continue_by_hand(subject, state, report)

    def check(self, life: Life) -> list[str]:
        subject = life.subject
        lines, status = subject.lines(), subject.status()
        found = invariants.overlaps(lines, life.cut_off) + invariants.lost_steps(lines)
        found += invariants.late_commits(lines, subject.commits())
        found += invariants.untrue_endings(status["attempts"], life.allowed, lines, TOTAL)
        newest = subject.attempt()
        if not wait_until(lambda: not invariants.processes_left(subject.path, before=newest), GONE_S, 1.0):
            found += invariants.processes_left(subject.path, before=newest)
        fresh = [words for words in found if words not in life.known]
        life.known.update(fresh)
        return fresh

    def continue_by_hand(self, subject: Subject, state: str, report: Report) -> None:
        """What ``status`` says to type is typed."""
        if state == FAILED and "clustertrain requeue" not in subject.call("status", subject.id).stdout:
            report.broken.append("the run has failed, and `status` does not say how to continue it")
        n, since = subject.claimed(), clock.monotonic()
        done = subject.call("requeue", subject.id)
        report.story.append(f"requeue by hand: {done.returncode}")
        if done.returncode:
            raise Broken(f"requeue of a run that is {state}: {done.returncode}\n{done.stdout}{done.stderr}")
        report.story.append(f"went on as {self.aftermath_of_requeue(subject, n, since)}")

    def aftermath_of_requeue(self, subject: Subject, n: int, since: float) -> str:
        if not wait_until(lambda: subject.attempt() > n and subject.last_step(subject.attempt()) is not None, BEGIN_S):
            raise Broken("requeue was accepted, and the run does not train")
        return f"attempt {subject.attempt()}"

    def finish(self, report: Report) -> None:
        """The run is over or comes to its end undisturbed, and is then compared with one that nothing happened to."""
        assert self.life is not None
        life = self.life
        subject = life.subject
        report.run = subject.id
        subject.pace(0.0)
        wait_until(lambda: subject.status()["state"] in FINAL, END_S, 1.0)
        state = subject.status()["state"]
        report.broken += self.check(life)
        if state != COMPLETED:
            raise Broken(f"{subject.id} was left alone and is {state}")
        digest = subject.call("checkpoint", "digest", subject.id).stdout.strip()
        if digest != (wanted := self.storm.undisturbed(subject)):
            report.broken.append(f"{subject.id} ended with digest {digest}, undisturbed {wanted}")
        if not wait_until(lambda: not self.left(life), GONE_S, 1.0):
            report.broken += self.left(life)
        report.story.append(f"{subject.id} completed in {len(subject.status()['attempts'])} attempts")
        self.life = None

    def left(self, life: Life) -> list[str]:
        subject = life.subject
        jobs = [f"job {i} in the queue" for i in testbed.queue(subject.job_ids())]
        processes = invariants.processes_left(subject.path)
        return jobs + processes + invariants.files_left(subject.path, life.lost_rank_dirs)

    def evidence(self) -> list[str]:
        assert self.life is not None
        subject = self.life.subject
        status = subject.call("status", subject.id)
        log = subject.run.job_log
        jobs = log.read_text(errors="replace").splitlines()[-25:] if log.exists() else []
        return [*status.stdout.splitlines(), "--- job.log", *jobs]

    def give_up(self, report: Report, why: Exception) -> None:
        """End a run that cannot go on, so that the next round has a sound one."""
        found = isinstance(why, AssertionError)  # else something that nobody has thought of
        report.broken.append(str(why) if found else "".join(traceback.format_exception(why)))
        if self.life is None:
            return
        report.story += self.evidence()
        subject, self.life = self.life.subject, None
        with self.storm.turns.take(False):
            subject.call("cancel", subject.id)
            testbed.run("scancel", *subject.job_ids())
            wait_until(lambda: not subject.processes(), 60.0, 1.0)
        send(subject.processes(), testbed.signal.SIGKILL)
