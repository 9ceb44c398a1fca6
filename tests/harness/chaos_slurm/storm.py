"""All rounds of a storm, with one thread per concurrent run."""

from __future__ import annotations

import faulthandler
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from clustertrain import clock
from tests.harness.chaos_slurm import disks, testbed
from tests.harness.chaos_slurm.lane import Lane
from tests.harness.chaos_slurm.rounds import SHAPES, Plan, Report
from tests.harness.chaos_slurm.subject import SCRIPT, Subject
from tests.harness.chaos_slurm.waiting import Stopped, Turns, pause, stop
from tests.ranks.rank_pool import CONTEXT, undisturbed

ROUND_S = 1800.0  # more than the sum of all timeouts of a round
STOP_S = 20.0  # for the threads of an interrupted storm
CONTEXT.set_forkserver_preload(["torch", "clustertrain.train.trainer"])  # only what the script needs


class Storm:
    def __init__(self, folder: Path, plans: Sequence[Plan]) -> None:
        self.folder, self.plans = folder, plans
        self.logs, self.broken = folder / "logs", folder / "broken"
        self.logs.mkdir(parents=True)
        shutil.copy(SCRIPT, self.logs)  # outside of the repository, which each run would otherwise snapshot
        self.turns = Turns()
        self.reports: list[Report] = []
        self.last_report_at = clock.monotonic()
        self._printing, self._reference = threading.Lock(), threading.Lock()

    def home(self, lane: int) -> Path:
        return self.folder / f"home{lane}"

    @contextmanager
    def disks(self) -> Iterator[None]:
        with ExitStack() as stack:
            for lane in sorted({p.lane for p in self.plans}):
                stack.enter_context(disks.disk(self.home(lane)))
            yield

    def play(self) -> None:
        """Play all rounds.

        Raises:
            TestbedFailed: the testbed failed.
            Stopped: Ctrl-C was pressed, or a round did not end.
        """
        lanes = [Lane(self, i, [p for p in self.plans if p.lane == i]) for i in range(len(SHAPES))]
        lanes = [lane for lane in lanes if lane.plans]
        for lane in lanes:
            lane.start()
        try:
            while any(lane.is_alive() for lane in lanes):
                pause(0.5)
                if clock.monotonic() - self.last_report_at > ROUND_S:
                    faulthandler.dump_traceback(all_threads=True)
                    raise Stopped(f"no round has ended for {ROUND_S:g} s")
                if any(lane.error for lane in lanes):
                    break
        finally:
            stop()
            for lane in lanes:
                lane.join(STOP_S)
            testbed.end_jobs([lane.title for lane in lanes])
        for lane in lanes:
            if lane.error is not None:
                raise lane.error

    def undisturbed(self, subject: Subject) -> str:
        with self._reference:
            return undisturbed(subject.path, self.folder / f"undisturbed-{subject.id}")

    def keep(self, run: Path, plan: Plan) -> None:
        """Copy the evidence of a violation: the run folder, and the logs of its ranks and of Slurm."""
        folder = self.broken / f"round-{plan.number}"
        for source, name in ((run, "run"), (self.logs / run.name, "steps"), (Path(testbed.STATE, "log"), "slurm")):
            with suppress(OSError):  # a file may disappear meanwhile; the others are copied
                shutil.copytree(source, folder / name, dirs_exist_ok=True, ignore_dangling_symlinks=True)

    def add_report(self, report: Report) -> None:
        with self._printing:
            self.reports.append(report)
            self.last_report_at = clock.monotonic()
            verdict = "BROKEN" if report.broken else "held"
            title = "the last run's end" if report.after else str(report.plan.fault)
            head = f"{report.plan.number} {verdict} {report.run}: {title}"
            print(f"{head} [{report.wall_s:.0f} s]", flush=True)
            for line in report.story:
                print(f"    {line}", flush=True)
            for line in report.broken:
                print(f"    BROKEN {line}", flush=True)
