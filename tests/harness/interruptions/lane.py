"""One training and the interruptions drawn for it, one after the other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clustertrain import clock
from tests.harness.chaos_slurm import testbed
from tests.harness.interruptions.judge import Verdict, judge
from tests.harness.interruptions.programs import EVERY, PROGRAMS, RANKS, TOTAL
from tests.harness.interruptions.steps import Steps
from tests.harness.interruptions.subjects import BatchScript, ClustertrainRun, Subject, TrainingEnded

# On two nodes, the ranks agree on a step that they reach seconds later: its margin covers a shared filesystem's caches.
PER_LANE = {"local": 10, "slurm": 6}
RESUME_TIMEOUT_S = 300.0
TIME_LIMIT_S = 60  # the shortest that Slurm knows
SLOW_PACE_S, FAULT_PACE_S = 0.1, 0.04  # seconds per step of trainings that a time limit or faults interrupt
KINDS = {"local": ("preemption", "kill -9", "requeue"), "slurm": ("preemption", "kill -9", "node loss")}
POLL_S = 0.5


@dataclass(frozen=True)
class Lane:
    """A training, where it runs, and the step after which each interruption comes."""

    seed: str
    program: str
    system: str
    """``clustertrain``, or ``alone``: the framework in a plain batch script, on Slurm only."""
    backend: str
    by_time_limit: bool
    kinds: tuple[str, ...]
    at_steps: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.program}, {self.system}, {self.backend}, {'time limit' if self.by_time_limit else 'faults'}"


def draw_lane(seed: str, program: str, system: str, backend: str, *, by_time_limit: bool) -> Lane:
    """Draw the interruptions of a training. The seed determines them, but not their exact moments."""
    rng = random.Random(f"{seed} {program} {backend} {by_time_limit}")  # the same for both systems
    count = 3 if by_time_limit else PER_LANE[backend]
    kinds = ["time limit"] * count if by_time_limit else [rng.choice(KINDS[backend]) for _ in range(count)]
    space = (TOTAL - 2 * EVERY) // count
    # At least EVERY steps apart: there is a periodic checkpoint between two interruptions.
    steps = [1 + i * space + rng.randrange(EVERY + 1, space) for i in range(count)]
    return Lane(seed, program, system, backend, by_time_limit, tuple(kinds), tuple(steps))


def play(lane: Lane, folder: Path, reference: Sequence[Steps] | None, verdicts: list[Verdict]) -> None:
    """Interrupt a training as drawn, in a new folder, and append to ``verdicts`` what each interruption cost.

    Raises:
        TrainingEnded: the training did not reach its next interruption, or did not resume.
    """
    folder.mkdir(parents=True)
    program = PROGRAMS[lane.program]
    on_slurm = lane.backend == "slurm"
    time, pace = (f"0:{TIME_LIMIT_S}", SLOW_PACE_S) if lane.by_time_limit else ("", FAULT_PACE_S)
    preempted = [s for kind, s in zip(lane.kinds, lane.at_steps, strict=True) if kind == "preemption"]
    subject: Subject
    if lane.system == "alone":
        subject = BatchScript(program, folder, time, pace)
    else:
        subject = ClustertrainRun(
            program, folder, on_slurm=on_slurm, time=time, pace=pace, preempt_at=[] if on_slurm else preempted
        )
    try:
        for number, (kind, step) in enumerate(zip(lane.kinds, lane.at_steps, strict=True)):
            verdicts.append(_interrupt(subject, lane, kind, step, number, reference))
            print(f"{lane}: {verdicts[-1]}", flush=True)
        if not lane.by_time_limit and not clock.wait_until(
            lambda: _last_step(subject) >= TOTAL, RESUME_TIMEOUT_S, POLL_S
        ):
            raise TrainingEnded(f"{lane}: did not reach its last step")
    finally:
        subject.cancel()


def _interrupt(
    subject: Subject, lane: Lane, kind: str, step: int, number: int, reference: Sequence[Steps] | None
) -> Verdict:
    rng = random.Random(f"{lane.seed} {number}")
    step = 1 if kind == "time limit" else step
    if not clock.wait_until(lambda: _last_step(subject) >= step, RESUME_TIMEOUT_S, 0.05):
        subject.dump_stacks()
        raise TrainingEnded(f"{lane}: did not reach step {step} before interruption {number}")
    before = _count(subject)
    node = ""
    if kind == "preemption" and lane.backend == "slurm":
        subject.preempt()
    elif kind == "kill -9":
        subject.kill_rank(rng.randrange(RANKS))
    elif kind == "node loss":
        node = subject.kill_node()
    elif kind == "requeue":
        subject.requeue()
    needed_hand = False

    def has_resumed() -> bool:
        nonlocal needed_hand
        if _count(subject) > before:
            return True
        if subject.is_over() and not needed_hand:
            needed_hand = True
            subject.restart_by_hand()
        return False

    try:
        if not clock.wait_until(has_resumed, RESUME_TIMEOUT_S, POLL_S):
            subject.dump_stacks()
            raise TrainingEnded(f"{lane}: did not resume after interruption {number} ({kind})")
    finally:
        if node:
            testbed.node("heal", node)
    attempts = [a for a in subject.read_attempts() if all(a)]
    return judge(kind, attempts[before - 1], attempts[before], reference, needed_hand=needed_hand)


def _count(subject: Subject) -> int:
    """Return how many attempts have done a step on every rank."""
    return sum(all(attempt) for attempt in subject.read_attempts())


def _last_step(subject: Subject) -> int:
    """Return the last step that all ranks of the newest attempt have done."""
    attempts = subject.read_attempts()
    return min(max(steps, default=0) for steps in attempts[-1]) if attempts else 0
