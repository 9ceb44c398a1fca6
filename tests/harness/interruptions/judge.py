"""What an interruption cost, from the steps that the ranks printed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tests.harness.interruptions.steps import Steps

WARNED = frozenset({"preemption", "time limit", "requeue"})
"""Kinds that leave the program time to save."""


class Verdict(msgspec.Struct, frozen=True):
    """One interruption and the resume after it."""

    kind: str
    last_steps: list[int]
    """Last step of each rank before the interruption."""
    resumed_at: list[int]
    """First step of each rank after it."""
    wrong_losses: int
    """Steps after it, on all ranks, whose losses are not those of the uninterrupted program."""
    needed_hand: bool
    """Nothing started the program again, so the harness did it."""

    @property
    def lost_steps(self) -> int:
        """Steps that the slowest rank did twice."""
        return max(last + 1 - first for last, first in zip(self.last_steps, self.resumed_at, strict=True))

    @property
    def ranks_agree(self) -> bool:
        return len(set(self.resumed_at)) == 1

    @property
    def skipped_steps(self) -> int:
        """Steps that no attempt has done: more than 0 is a wrong resume."""
        return max(0, *(first - last - 1 for last, first in zip(self.last_steps, self.resumed_at, strict=True)))


def judge(
    kind: str, before: Sequence[Steps], after: Sequence[Steps], reference: Sequence[Steps] | None, *, needed_hand: bool
) -> Verdict:
    """Compare the attempts before and after an interruption, in which every rank has done a step.

    Args:
        reference: the losses of each rank without an interruption; None: the program itself resumes inexactly.
    """
    wrong = 0
    if reference is not None:
        wrong = sum(
            whole.get(step) != loss
            for steps, whole in zip(after, reference, strict=True)
            for step, loss in steps.items()
        )
    return Verdict(
        kind=kind,
        last_steps=[max(steps) for steps in before],
        resumed_at=[min(steps) for steps in after],
        wrong_losses=wrong,
        needed_hand=needed_hand,
    )
