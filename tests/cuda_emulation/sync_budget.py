"""How often the host waits for the device in a training step, by layout, with the reason for each wait.

The counts are per step and rank. A wait that is not here, or more of those that are, fails test_layouts_on_cuda.py.
"""

from __future__ import annotations

from collections.abc import Mapping

Wait = tuple[str, str]
"""What waits, and the innermost function of clustertrain."""

METRICS: Wait = ("event.synchronize", "train.core.async_copy.to_dict")
SKIP: Wait = ("item", "train.stability.conditional_step.step_unless")
LOSS_SCALE: Wait = ("blocking copy, device to host", "train.step.train_step._check_overflow")

REASONS: Mapping[Wait, str] = {
    METRICS: "values of an earlier step, whose copy has had a step's time",
    SKIP: "an optimizer without found_inf: the host decides whether the step is skipped",
    LOSS_SCALE: "fp16: the next step needs the new loss scale",
}

_EVERY_STEP: Mapping[Wait, float] = {METRICS: 4}
_MORE: Mapping[str, Mapping[Wait, float]] = {}


def expected_syncs(name: str, rank: int) -> dict[Wait, float]:
    """Return the waits of ``rank`` in a step of the case ``name``."""
    return {**_EVERY_STEP, **_MORE.get(name, {})}
