"""A window of profiled steps: a trace for a viewer, the dearest operations, and where the time of one step goes.

On rank 0 alone; the steps of the window are slower, and slow the others down with them. Elsewhere
:func:`clustertrain.train.core.step_timer.part` returns a context that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from clustertrain import fsio
from clustertrain.train.core import step_timer
from clustertrain.train.core.step_timer import StepTimer

TOP = 10
# As torch.profiler names what gloo and NCCL do.
_COMMUNICATION = ("gloo:", "nccl:", "nccldevkernel", "ncclkernel")
_US = 1e-6


class Profiler:
    """:meth:`begin` and :meth:`end` are called around each step, with how many were done before it.

    The last step of the window is not traced but timed part by part: waiting for the device after each would spoil the
    trace.
    """

    def __init__(
        self, steps: range, folder: Path | None, attempt: int, device: torch.device, event: Callable[..., None]
    ) -> None:
        """``folder``: None where this rank does not profile."""
        self._steps = steps if folder is not None else range(0)
        self._folder, self._attempt, self._device, self._event = folder, attempt, device, event
        self._trace: torch.profiler.profile | None = None
        self._traced: list[int] = []

    def begin(self, step: int) -> None:
        if step not in self._steps:
            return
        if step == self._steps[-1]:
            self._end_of_trace()
            step_timer.start(self._device)
            return
        if self._trace is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._trace = torch.profiler.profile(activities=activities)
            step_timer.name_parts(True)
            self._trace.start()
        self._traced.append(step)

    def end(self, step: int) -> None:
        timed = step_timer.stop() if step in self._steps else None
        if timed is not None:
            self._write(step, timed)

    def close(self) -> None:
        """Of a run that ends, or goes back, inside the window: what was traced is written all the same. No other
        window follows."""
        step_timer.stop()
        self._steps = range(0)
        if self._trace is not None:
            self._end_of_trace()
            self._write(None, None)

    def _end_of_trace(self) -> None:
        step_timer.name_parts(False)
        if self._trace is not None:
            self._trace.stop()

    def _write(self, step: int | None, timed: StepTimer | None) -> None:
        assert self._folder is not None
        self._folder.mkdir(exist_ok=True)
        steps = [*self._traced, *([step] if step is not None else [])]
        name = f"attempt-{self._attempt}-steps-{steps[0]}-{steps[-1]}"
        found: dict[str, Any] = {"attempt": self._attempt, "device": self._device.type}
        if timed is not None:
            found |= {"step": step, "step_s": timed.step_s, "parts_s": self._parts(timed)}
        table = ""
        if self._trace is not None:
            averages = self._trace.key_averages()
            by = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
            found |= {"traced_steps": self._traced, "communication_s": _communication_s(averages, self._device)}
            found["top"] = [_row(a, self._device) for a in sorted(averages, key=lambda a: -getattr(a, by))[:TOP]]
            table = averages.table(sort_by=by, row_limit=TOP, max_name_column_width=48)
            self._trace.export_chrome_trace(str(self._folder / f"{name}.trace.json.gz"))
            self._trace = None
        fsio.write_json(self._folder / f"{name}.json", found)
        words = words_of(found)
        fsio.write_text(self._folder / f"{name}.txt", f"{words}\n{table}")
        print(words, flush=True)
        self._event("profiled", steps=[steps[0], steps[-1]], path=str(self._folder / name))

    def _parts(self, timed: StepTimer) -> dict[str, float]:
        return {**timed.parts_s, "other": max(0.0, timed.step_s - sum(timed.parts_s.values()))}


def _communication_s(averages: Any, device: torch.device) -> float:
    """A traced step's, most of it beside the parts and not in their sum: sending overlaps computing."""
    ours = [a for a in averages if a.key.lower().startswith(_COMMUNICATION)]
    on_device = device.type == "cuda"
    return float(sum(a.self_device_time_total if on_device else a.self_cpu_time_total for a in ours)) * _US


def _row(average: Any, device: torch.device) -> dict[str, Any]:
    found = {"name": average.key, "calls": average.count, "self_cpu_s": average.self_cpu_time_total * _US}
    return found | ({"self_device_s": average.self_device_time_total * _US} if device.type == "cuda" else {})


def words_of(found: dict[str, Any]) -> str:
    """A profile as lines of text: the parts of a step, and the dearest operations."""
    lines = []
    if "parts_s" in found:
        step_s = found["step_s"]
        lines.append(f"step {found['step']}: {step_s * 1e3:.1f} ms, each part until the device has done it")
        for name, seconds in found["parts_s"].items():
            lines.append(f"  {name.replace('_', ' '):<16}{seconds * 1e3:>10.1f} ms {seconds / step_s:>7.1%}")
    if found.get("traced_steps"):
        each = found["communication_s"] / len(found["traced_steps"])
        lines.append(f"  communication   {each * 1e3:>10.1f} ms a step, beside the others or inside them")
        lines.append(f"the {len(found['top'])} dearest operations of {len(found['traced_steps'])} steps")
        for row in found["top"]:
            seconds = row.get("self_device_s", row["self_cpu_s"])
            lines.append(f"  {row['name'][:48]:<50}{seconds * 1e3:>10.1f} ms {row['calls']:>7} calls")
    return "\n".join(lines)
