"""Runs the parts one after another, each for a bounded time, and goes on after a failure."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.gpu_check.parts import CANNOT_RUN, Part
from benchmarks.measure import ROOT
from clustertrain import clock, proc

Status = Literal["ok", "failed", "cannot run", "over time", "not run"]
INTERRUPT_S = 15.0  # for pytest to report the tests that it has run, between SIGINT and SIGKILL
TICK_S = 1.0
LOG, RESULT = "log.txt", "result.json"


class PartResult(NamedTuple):
    """What became of a part."""

    name: str
    title: str
    status: Status
    reason: str
    """Why it is not ok; empty if it is."""
    seconds: float
    limit_s: float
    figures: Mapping[str, Any]
    """What the part measured, also before it failed."""
    details: Any = None
    """Anything else that it left."""


def run_parts(
    parts: Sequence[Part],
    evidence: Path,
    total_s: float,
    env: Mapping[str, str],
    first_gpu: str = "",
    on_tick: Callable[[str], None] = lambda part: None,
    on_start: Callable[[Part, float], None] = lambda part, limit_s: None,
) -> list[PartResult]:
    """Run all parts within ``total_s``; a part that fails, hangs or crashes does not keep the others from running.

    Args:
        evidence: the folder in which each part has its own.
        first_gpu: UUID of the GPU that parts for one GPU see.
        on_tick: called with the part's name about once per second.
        on_start: called with each part and its limit in seconds.
    """
    # SIGTERM comes at the time limit of a batch job. A shell starts background commands with SIGINT ignored, and the
    # parts would inherit that.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    proc.become_subreaper()
    deadline = clock.monotonic() + total_s
    results: list[PartResult] = []
    interrupted = ""
    for part in parts:
        limit_s = min(part.limit_s, deadline - clock.monotonic())
        if interrupted or limit_s < TICK_S:
            reason = interrupted or f"no time left: the parts before it took the {total_s:g} s of the whole check"
            results.append(PartResult(part.name, part.title, "not run", reason, 0.0, part.limit_s, {}))
            continue
        on_start(part, limit_s)
        part_env = {**env, "CUDA_VISIBLE_DEVICES": first_gpu} if first_gpu and part.one_gpu else dict(env)
        try:
            results.append(_run_part(part, evidence, limit_s, part_env, on_tick))
        except KeyboardInterrupt:  # what has been measured is worth its summary
            interrupted = f"the check was interrupted during {part.name}"
            figures, details = _read_result(evidence / part.name / RESULT) or ({}, None)
            results.append(
                PartResult(part.name, part.title, "failed", interrupted, 0.0, round(limit_s, 1), figures, details)
            )
    return results


def _run_part(
    part: Part, evidence: Path, limit_s: float, env: Mapping[str, str], on_tick: Callable[[str], None]
) -> PartResult:
    folder = evidence / part.name
    folder.mkdir(parents=True)
    argv = [a.replace("{out}", str(folder)).replace("{root}", str(evidence)) for a in part.argv]
    started = clock.monotonic()
    try:
        child = proc.start(argv, env=env, cwd=ROOT, log=folder / LOG, new_session=True)
    except OSError as e:
        return PartResult(part.name, part.title, "failed", f"{argv[0]}: {e.strerror}", 0.0, limit_s, {})
    try:
        while child.poll() is None and clock.monotonic() - started < limit_s:
            on_tick(part.name)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(min(TICK_S, max(0.01, limit_s - (clock.monotonic() - started))))
        is_over_time = child.poll() is None
        if is_over_time:
            _interrupt(child)
    finally:
        proc.kill_descendants()
    seconds = clock.monotonic() - started
    result = _read_result(folder / RESULT)
    status, reason = _judge(child.poll(), is_over_time, limit_s, result is not None, folder / LOG)
    figures, details = result or ({}, None)
    return PartResult(part.name, part.title, status, reason, round(seconds, 1), round(limit_s, 1), figures, details)


def _interrupt(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(INTERRUPT_S)


def _judge(code: int | None, is_over_time: bool, limit_s: float, has_result: bool, log: Path) -> tuple[Status, str]:
    if is_over_time:
        return "over time", f"ended after its limit of {limit_s:.0f} s; its last line: {_last_line(log)}"
    if code == CANNOT_RUN:
        return "cannot run", _last_line(log).removeprefix("cannot run: ")
    if code:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "failed", f"{how}; its last line: {_last_line(log)}"
    if not has_result:
        return "failed", f"it left no readable {RESULT}"
    return "ok", ""


def _read_result(path: Path) -> tuple[Mapping[str, Any], Any] | None:
    try:
        result = json.loads(path.read_text())
        figures: Mapping[str, Any] = result["figures"]
        return {**figures}, result.get("details")
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "(no output)"
