"""The ``[preemption_test]`` table: deliberate preemptions, to test a recipe on one machine."""

from __future__ import annotations

import msgspec

from clustertrain.config.checks.ranges import check_positive


class PreemptionTestSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[preemption_test]`` table: deliberate preemptions by the local backend.

    They follow Slurm's protocol: a warning, a grace time, a kill.
    """

    preempt_at_steps: tuple[int, ...] = ()
    """Steps after which the run is preempted, once each. Empty: none."""
    grace_s: float = 20.0
    """Seconds between the warning and the kill."""

    def __post_init__(self) -> None:
        for step in self.preempt_at_steps:
            check_positive("preempt_at_steps", step)
        check_positive("grace_s", self.grace_s)
