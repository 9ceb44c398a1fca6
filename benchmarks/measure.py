"""What the benchmarks share: whole processes timed in turn, statistics pair by pair, and what the numbers belong to."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


class CannotRun(Exception):
    """A benchmark that this machine cannot run; the message says what is missing."""


@dataclass(frozen=True)
class Took:
    """``cpu_s`` is the processor time of the process and its children: what a busy machine changes least."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Command:
    """One whole process, as a user starts it, and ``shown`` in the result. ``after`` gets what it printed and runs
    outside of the timing."""

    shown: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    after: Callable[[str], None] = field(default=lambda printed: None)

    def run(self) -> Took:
        """From the start to the end of the process.

        Raises:
            CannotRun: it failed, with what it printed.
        """
        before, started = _children_cpu_s(), time.perf_counter()
        done = subprocess.run(self.argv, env=self.env, cwd=self.cwd, capture_output=True, text=True, check=False)
        took = Took(time.perf_counter() - started, _children_cpu_s() - before)
        if done.returncode:
            said = (done.stderr or done.stdout).strip()[-2000:]
            raise CannotRun(f"{' '.join(self.argv)} failed with exit code {done.returncode}: {said}")
        self.after(done.stdout)
        return took


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def in_turn(a: Command, b: Command, rounds: int) -> list[tuple[Took, Took]]:
    """A and B in the order A B A B …, so that a change of the machine's mood meets both. One round before
    the first is not counted: it fills the caches and writes Python's bytecode."""
    a.run()
    b.run()
    return [(a.run(), b.run()) for _ in range(rounds)]


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what changes how Python starts: no bytecode, no buffer, other paths."""
    return {k: v for k, v in environ.items() if not k.startswith("PYTHON")}


def context(packages: Sequence[str]) -> dict[str, Any]:
    """When, on what and with which versions. The load is that of the minute before: numbers of a busy machine say
    little."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _first_line(["git", "-C", str(ROOT), "rev-parse", "HEAD"]),
        "machine": {
            "processor": _processor(),
            "processors": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "load_1min": round(os.getloadavg()[0], 2),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
    }


def _first_line(argv: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().splitlines()[0]


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return found[0] if found else platform.processor()


def write(name: str, result: Mapping[str, Any]) -> Path:
    """``benchmarks/results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"benchmark": name, **result}, indent=1) + "\n")
    return path
