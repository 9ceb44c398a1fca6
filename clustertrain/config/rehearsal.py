"""The ``[rehearsal]`` table: preemptions on purpose, for tests of a recipe on one machine."""

from __future__ import annotations

import msgspec

from clustertrain.config.checks.ranges import check_positive


class RehearsalSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Preemptions on purpose, delivered by the local backend as Slurm would: a warning, a grace time, a kill."""

    preempt_at_steps: tuple[int, ...] = ()
    grace_s: float = 20.0

    def __post_init__(self) -> None:
        for step in self.preempt_at_steps:
            check_positive("preempt_at_steps", step)
        check_positive("grace_s", self.grace_s)
