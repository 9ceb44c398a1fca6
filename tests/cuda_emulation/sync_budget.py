"""How often the host may wait for the device in a training step, by layout, with the reason for each wait.

The numbers are per step and rank. A wait that is not here, or more of one, fails test_layouts_on_cuda.py. So does a
wait for the step just launched where only one for an earlier step is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.cuda_emulation.trace import Event

Wait = tuple[str, str]
"""What waits, and the innermost function of clustertrain."""

METRICS: Wait = ("event.synchronize", "train.core.async_copy.to_dict")
SKIP: Wait = ("item", "train.stability.conditional_step.step_unless")
LOSS_SCALE: Wait = ("blocking copy, device to host", "train.step.train_step._check_overflow")
OFFLOADED_GRADIENTS: Wait = ("event.synchronize", "backward pass")
OFFLOADED_NORM: Wait = ("blocking copy, host to device", "train.distributed.grad_norm.local_squared_norm")
OFFLOADED_SCALE: Wait = ("blocking copy, device to host", "train.distributed.grad_norm.scale_gradients")
SHAMPOO: Wait = ("aten::_linalg_svd.U", "train.optim.wrapper._update")
ADAFACTOR: Wait = ("item", "train.optim.wrapper._update")

REASONS: Mapping[Wait, str] = {
    METRICS: "values of an earlier step, which the host takes when a later step has been launched",
    SKIP: "an optimizer without found_inf: the host decides whether the step is skipped",
    LOSS_SCALE: "fp16: the next step needs the new loss scale",
    OFFLOADED_GRADIENTS: "offload: FSDP waits for the gradients of each group, which the optimizer on the CPU needs",
    OFFLOADED_NORM: "offload: the norm of gradients in host memory goes to the GPU",
    OFFLOADED_SCALE: "offload: the clipping factor goes to gradients in host memory",
    SHAMPOO: "the decomposition of both sides of every hidden matrix, whose success the host checks",
    ADAFACTOR: "torch's Adafactor reads its step and learning rate",
}

FOR_EARLIER_STEPS = frozenset({METRICS})
"""Waits for an event that must have been recorded about a step before, when the device may well be past it."""
_ABOUT_A_STEP = 0.75  # of a step's kernels

EVERY_STEP: Mapping[Wait, float] = {METRICS: 4}
_SKIP: Mapping[Wait, float] = {SKIP: 1}
_FP16: Mapping[Wait, float] = {LOSS_SCALE: 1}
MORE: Mapping[str, Mapping[Wait, float]] = {
    "zero1": _SKIP,
    "zero1-muon": _SKIP,
    "tp-sgd": _SKIP,
    "tp-muon": _SKIP,
    **{f"fsdp-{name}": _SKIP for name in ("sgd", "lion", "muon", "lamb", "lars", "soap", "adamw8bit")},
    "fsdp-shampoo": {SKIP: 1, SHAMPOO: 14},
    "fsdp-adafactor": {SKIP: 1, ADAFACTOR: 22},
    "ddp-layer-stats": {METRICS: 5},
    "tp-layer-stats": {METRICS: 5},
    "ddp-fp16": _FP16,
    "fsdp-fp16": _FP16,
    "fsdp-offload": {OFFLOADED_GRADIENTS: 21, OFFLOADED_NORM: 1, OFFLOADED_SCALE: 1, SKIP: 1},
}


def excess(name: str, per_step: Mapping[Wait, float]) -> dict[Wait, float]:
    """Return the waits in ``per_step`` that exceed the budget of the case ``name``."""
    budget = {**EVERY_STEP, **MORE.get(name, {})}
    return {wait: count for wait, count in per_step.items() if count > budget.get(wait, 0)}


def early_waits(events: Iterable[Event], steps: int) -> list[Event]:
    """Return the waits for an earlier step's values that come less than about a step after their event.

    Args:
        events: a rank's whole trace of ``steps`` steps. Events recorded before it are at least that old.
    """
    kernels = 0
    recorded: dict[int, int] = {}  # kernels launched before, by the event's number
    ages: list[tuple[Event, int]] = []
    for event in events:
        if event.kind == "kernel":
            kernels += 1
        elif event.name == "record_event":
            recorded[event.value] = kernels
        elif event.kind == "sync" and (event.name, event.place) in FOR_EARLIER_STEPS and event.value in recorded:
            ages.append((event, kernels - recorded[event.value]))
    return [event for event, age in ages if age < _ABOUT_A_STEP * kernels / steps]
