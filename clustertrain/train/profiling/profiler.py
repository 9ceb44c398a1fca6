"""Profiling of a window of steps: a trace, the most expensive operations, and the breakdown of one step.

It runs on rank 0 only. Steps in the window are slower and delay the other ranks. Outside the window,
:func:`clustertrain.train.core.step_timer.record_part` returns a context that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from clustertrain import fsio
from clustertrain.train.core import step_timer
from clustertrain.train.core.step_timer import StepTimer

MAX_TOP_OPS = 10
# Prefixes of gloo and NCCL operations in torch.profiler.
_COMMUNICATION_PREFIXES = ("gloo:", "nccl:", "nccldevkernel", "ncclkernel")
_US = 1e-6


class Profiler:
    """Profiler of a window of steps. Call :meth:`begin` and :meth:`end` around each step, numbered from 0.

    The last step of the window is timed part by part instead of traced, since waiting for the device after each part
    would distort the trace.
    """

    def __init__(
        self, steps: range, folder: Path | None, attempt: int, device: torch.device, emit_event: Callable[..., None]
    ) -> None:
        """Profile ``steps`` and write to ``folder``; None disables profiling on this rank."""
        self._steps = steps if folder is not None else range(0)
        self._folder, self._attempt, self._device, self._emit_event = folder, attempt, device, emit_event
        self._trace: torch.profiler.profile | None = None
        self._traced_steps: list[int] = []

    def begin(self, step: int) -> None:
        if step not in self._steps:
            return
        if step == self._steps[-1]:
            self._stop_trace()
            step_timer.start_timer(self._device)
            return
        if self._trace is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._trace = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True)
            step_timer.set_trace_labels(True)
            self._trace.start()
        self._traced_steps.append(step)

    def end(self, step: int) -> None:
        timer = step_timer.stop_timer() if step in self._steps else None
        if timer is not None:
            self._write_profile(step, timer)

    def close(self) -> None:
        """Disable profiling, and write what was traced if a run ends or rolls back inside the window."""
        step_timer.stop_timer()
        self._steps = range(0)
        if self._trace is not None:
            self._stop_trace()
            self._write_profile(None, None)

    def _stop_trace(self) -> None:
        step_timer.set_trace_labels(False)
        if self._trace is not None:
            self._trace.stop()

    def _write_profile(self, step: int | None, timer: StepTimer | None) -> None:
        assert self._folder is not None
        self._folder.mkdir(exist_ok=True)
        steps = [*self._traced_steps, *([step] if step is not None else [])]
        name = f"attempt-{self._attempt}-steps-{steps[0]}-{steps[-1]}"
        profile: dict[str, Any] = {"attempt": self._attempt, "device": self._device.type}
        if timer is not None:
            profile |= {"step": step, "step_s": timer.step_s, "parts_s": self._part_durations(timer)}
        table = ""
        if self._trace is not None:
            averages = self._trace.key_averages()
            sort_key = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
            profile |= {"traced_steps": self._traced_steps, "communication_s": _communication_s(averages, self._device)}
            profile["top"] = [
                _op_row(a, self._device) for a in sorted(averages, key=lambda a: -getattr(a, sort_key))[:MAX_TOP_OPS]
            ]
            table = averages.table(sort_by=sort_key, row_limit=MAX_TOP_OPS, max_name_column_width=48)
            self._trace.export_chrome_trace(str(self._folder / f"{name}.trace.json.gz"))
            self._trace = None
        fsio.write_json(self._folder / f"{name}.json", profile)
        text = format_profile(profile)
        fsio.write_text(self._folder / f"{name}.txt", f"{text}\n{table}")
        print(text, flush=True)
        self._emit_event("profiled", steps=[steps[0], steps[-1]], path=str(self._folder / name))

    def _part_durations(self, timer: StepTimer) -> dict[str, float]:
        return {**timer.parts_s, "other": max(0.0, timer.step_s - sum(timer.parts_s.values()))}


def _communication_s(averages: Any, device: torch.device) -> float:
    """Return the seconds of communication in the traced steps; most of it overlaps with the parts."""
    collectives = [a for a in averages if a.key.lower().startswith(_COMMUNICATION_PREFIXES)]
    on_device = device.type == "cuda"
    return float(sum(a.self_device_time_total if on_device else a.self_cpu_time_total for a in collectives)) * _US


def _op_row(average: Any, device: torch.device) -> dict[str, Any]:
    row = {"name": average.key, "calls": average.count, "self_cpu_s": average.self_cpu_time_total * _US}
    return row | ({"self_device_s": average.self_device_time_total * _US} if device.type == "cuda" else {})


def format_profile(profile: dict[str, Any]) -> str:
    """Return the parts of a step and the most expensive operations as text."""
    lines = []
    if "parts_s" in profile:
        step_s = profile["step_s"]
        lines.append(f"step {profile['step']}: {step_s * 1e3:.1f} ms, each part including the device's work")
        for name, seconds in profile["parts_s"].items():
            lines.append(f"  {name.replace('_', ' '):<16}{seconds * 1e3:>10.1f} ms {seconds / step_s:>7.1%}")
    if profile.get("traced_steps"):
        per_step_s = profile["communication_s"] / len(profile["traced_steps"])
        lines.append(f"  communication   {per_step_s * 1e3:>10.1f} ms per step, overlapping the other parts")
        lines.append(f"the {len(profile['top'])} most expensive operations of {len(profile['traced_steps'])} steps")
        for row in profile["top"]:
            seconds = row.get("self_device_s", row["self_cpu_s"])
            lines.append(f"  {row['name'][:48]:<50}{seconds * 1e3:>10.1f} ms {row['calls']:>7} calls")
    return "\n".join(lines)
