"""Named parts of a training step, timed or labeled in a trace during profiling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch

from clustertrain import clock

StepPart = Literal["data", "host_to_device", "forward", "backward", "optimizer", "other"]
STEP_PARTS: tuple[StepPart, ...] = ("data", "host_to_device", "forward", "backward", "optimizer")


class StepTimer:
    """Timer for the parts of one step. Each part ends with a device synchronization, so that the parts add up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.parts_s: dict[str, float] = dict.fromkeys(STEP_PARTS, 0.0)
        self._is_timing = False
        self._started = self._synchronized_time()
        self.step_s = 0.0

    def _synchronized_time(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return clock.monotonic()

    @contextmanager
    def record(self, name: StepPart) -> Iterator[None]:
        """Add the time of the block to the part ``name``."""
        if self._is_timing:  # a nested part counts toward the outer one
            yield
            return
        self._is_timing, started = True, self._synchronized_time()
        try:
            yield
        finally:
            self.parts_s[name] += self._synchronized_time() - started
            self._is_timing = False

    def finish(self) -> None:
        self.step_s = self._synchronized_time() - self._started


_timer: StepTimer | None = None
_label_trace = False


def record_part(name: StepPart) -> AbstractContextManager[Any]:
    """Return a context manager for a part of the step; it does nothing unless the step is profiled."""
    if _timer is not None:
        return _timer.record(name)
    return torch.profiler.record_function(name) if _label_trace else nullcontext()


def start_timer(device: torch.device) -> None:
    """Start timing the parts of the current step; they are no longer labeled in a trace."""
    global _timer, _label_trace
    _timer, _label_trace = StepTimer(device), False


def stop_timer() -> StepTimer | None:
    """Stop timing and return the timer, or None if :func:`start_timer` was not called."""
    global _timer
    timer, _timer = _timer, None
    if timer is not None:
        timer.finish()
    return timer


def set_trace_labels(enabled: bool) -> None:
    """Set whether the parts are labeled in the trace that torch's profiler records."""
    global _label_trace  # noqa: PLW0603
    _label_trace = enabled
