"""Named parts of a training step, timed or traced while the profiler asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch

from clustertrain import clock

Part = Literal["data", "host_to_device", "forward", "backward", "optimizer", "other"]
PARTS: tuple[Part, ...] = ("data", "host_to_device", "forward", "backward", "optimizer")


class StepTimer:
    """Times the parts of one step. Each part ends by waiting for the device, so that the parts add up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.parts_s: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._inside = False
        self._started = self._now()
        self.step_s = 0.0

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return clock.monotonic()

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        if self._inside:  # what is inside another part is that one's
            yield
            return
        self._inside, started = True, self._now()
        try:
            yield
        finally:
            self.parts_s[name] += self._now() - started
            self._inside = False

    def end(self) -> None:
        self.step_s = self._now() - self._started


_clock: StepTimer | None = None
_named = False


def part(name: Part) -> AbstractContextManager[Any]:
    """Around a part of the step. Free but for the call unless this step is profiled."""
    if _clock is not None:
        return _clock.part(name)
    return torch.profiler.record_function(name) if _named else nullcontext()


def start(device: torch.device) -> None:
    """Time the parts of the step that begins now, instead of naming them in a trace."""
    global _clock, _named
    _clock, _named = StepTimer(device), False


def stop() -> StepTimer | None:
    """End the timing. Returns the timer, or None if :func:`start` was not called."""
    global _clock
    timed, _clock = _clock, None
    if timed is not None:
        timed.end()
    return timed


def name_parts(on: bool) -> None:
    """Whether each part is named in the trace that torch's profiler records."""
    global _named  # noqa: PLW0603
    _named = on
