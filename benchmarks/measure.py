"""Shared by the benchmarks: timing of whole processes, statistics, and the context of a result."""

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
    """This machine cannot run the benchmark; the message says what is missing."""


@dataclass(frozen=True)
class Timing:
    """Duration of a process."""

    wall_s: float
    cpu_s: float
    """Processor time of the process and its children, which depends least on other load."""


@dataclass(frozen=True)
class Command:
    """A whole process, as a user starts it."""

    label: str
    """Its name in the result."""
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    after: Callable[[str], None] = field(default=lambda printed: None)
    """Called with its output, outside the timing."""

    def run(self) -> Timing:
        """Run it and return its duration.

        Raises:
            CannotRun: it failed; the message has its output.
        """
        before, started = _children_cpu_s(), time.perf_counter()
        done = subprocess.run(self.argv, env=self.env, cwd=self.cwd, capture_output=True, text=True, check=False)
        timing = Timing(time.perf_counter() - started, _children_cpu_s() - before)
        if done.returncode:
            output = (done.stderr or done.stdout).strip()[-2000:]
            raise CannotRun(f"{' '.join(self.argv)} failed with exit code {done.returncode}: {output}")
        self.after(done.stdout)
        return timing


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_alternating(a: Command, b: Command, rounds: int) -> list[tuple[Timing, Timing]]:
    """Run A and B in the order A B A B …, so that a change of the machine's load affects both.

    A first round, not counted, fills the caches and writes Python's bytecode.
    """
    a.run()
    b.run()
    return [(a.run(), b.run()) for _ in range(rounds)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the variables that change how Python starts (bytecode, buffering, paths)."""
    return {k: v for k, v in environ.items() if not k.startswith("PYTHON")}


def context(packages: Sequence[str]) -> dict[str, Any]:
    """Return time, commit, machine and versions of a result.

    The load average is taken before the benchmark: results from a busy machine mean little.
    """
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
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def write(name: str, result: Mapping[str, Any]) -> Path:
    """Write ``benchmarks/results/<name>.json`` and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"benchmark": name, **result}, indent=1) + "\n")
    return path


def write_with_targets(name: str, result: Mapping[str, Any], targets: Sequence[Mapping[str, Any]]) -> int:
    """Write the result with its targets, print which of them are met, and return the exit code: 0 if all are.

    A target has ``words``, ``value`` and ``met``.
    """
    path = write(name, {**result, "targets": targets})
    for target in targets:
        print(f"{'met   ' if target['met'] else 'MISSED'} {target['words']}: {target['value']:g}")
    print(f"written to {path.relative_to(ROOT)}")
    return 0 if all(target["met"] for target in targets) else 1
