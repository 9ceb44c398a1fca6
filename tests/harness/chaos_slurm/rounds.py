"""The rounds of a storm: which fault hits which run follows from the seed and the round's number."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field

from tests.harness.chaos_slurm.acts import Fault
from tests.harness.chaos_slurm.faults import draw
from tests.harness.chaos_slurm.subject import Shape

# The runs that are alive at a time. Each has its nodes for itself, and the cluster one more.
SHAPES = (Shape(2, 1), Shape(1, 2))


@dataclass(frozen=True)
class Plan:
    """A round, by its number. Which of the runs it hits follows from the number, so that a run meets the same faults
    whenever a seed is played; the moments at which they meet it vary with the machine."""

    seed: str
    number: int
    fault: Fault

    @property
    def lane(self) -> int:
        return self.number % len(SHAPES)


def plan_of(seed: str, number: int, only: Collection[str] = ()) -> Plan:
    rng = random.Random(f"{seed}/{number}")
    return Plan(seed, number, draw(rng, SHAPES[number % len(SHAPES)].world, only))


@dataclass
class Report:
    """``broken``: what does not hold. ``after``: not of a round, but of the last run's end after the last one."""

    plan: Plan
    after: bool = False
    run: str = ""
    story: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    wall_s: float = 0.0
