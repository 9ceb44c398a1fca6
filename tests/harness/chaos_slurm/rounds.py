"""The rounds of a storm: seed and round number determine which fault hits which run."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field

from tests.harness.chaos_slurm.actions import Fault
from tests.harness.chaos_slurm.faults import draw
from tests.harness.chaos_slurm.subject import Shape

# Shapes of the concurrent runs. They share no nodes, and the cluster has one spare node.
SHAPES = (Shape(2, 1), Shape(1, 2))


@dataclass(frozen=True)
class Plan:
    """The plan of a round.

    The number determines which run it hits, so that a run gets the same faults whenever a seed is replayed; their exact
    moments vary with the machine.
    """

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
    """Outcome of a round, with violations in ``broken``; ``after``: of finishing the last run, after all rounds."""

    plan: Plan
    after: bool = False
    run: str = ""
    story: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    wall_s: float = 0.0
