"""Slowdown of training by the sampler on the same node.

A worker on each core runs steps of fixed work, alternately with and without a sampler of 8 stub GPUs at 1 Hz.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.measure import CannotRun
from benchmarks.verdict import interval

PAIRS, TURN_S = 8, 6.0

# About 10 ms per step on one thread, which is a rank's share of the cores; prints the mean step time and the count.
_WORKER = """
import json, statistics, sys, time
import numpy as np
a = np.random.default_rng(0).random((384, 384), dtype=np.float32)
seconds, end = [], time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    began = time.perf_counter()
    for _ in range(4):
        a @ a
    seconds.append(time.perf_counter() - began)
print(json.dumps([statistics.mean(seconds), len(seconds)]))
"""


def measure_steps(folder: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the ratio of the mean step time with the sampler to that without, over pairs of turns.

    Args:
        environ: the sampler's environment, with the stub loaded.
    """
    ratios, alone = [], []
    for pair in range(PAIRS):
        turns = (True, False) if pair % 2 else (False, True)
        seconds = {sampled: _turn(folder / f"{pair}", environ if sampled else None) for sampled in turns}
        ratios.append(seconds[True] / seconds[False])
        alone.append(seconds[False])
    low, high = interval(ratios)
    return {
        "pairs": PAIRS,
        "step_s": round(statistics.median(alone), 6),
        "ratio": round(statistics.median(ratios), 5),
        "interval": [round(low, 5), round(high, 5)],
        "between_turns_alone": round(statistics.stdev(alone) / statistics.mean(alone), 5),
    }


def _turn(folder: Path, environ: Mapping[str, str] | None) -> float:
    """Return the mean step time of all workers, in s."""
    sampler = None
    if environ is not None:
        argv = [sys.executable, "-m", "benchmarks.telemetry", "--seconds", str(TURN_S + 4), "--folder", str(folder)]
        sampler = subprocess.Popen(argv, env=dict(environ), cwd=measure.ROOT, stdout=subprocess.DEVNULL)
    try:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        if sampler is not None:
            _wait_for_sampler(folder, sampler)
        argv = [sys.executable, "-c", _WORKER, str(TURN_S)]
        workers = [subprocess.Popen(argv, env=env, stdout=subprocess.PIPE) for _ in range(os.cpu_count() or 1)]
        means = [json.loads(worker.communicate()[0])[0] for worker in workers]
    finally:
        if sampler is not None:
            sampler.kill()
            sampler.wait()
    return statistics.mean(means)


def _wait_for_sampler(folder: Path, sampler: subprocess.Popen[bytes]) -> None:
    """Wait until it samples: its start is not measured."""
    from clustertrain import clock

    if not clock.wait_until(lambda: any(folder.glob("*/header.json")) or sampler.poll() is not None, 30, 0.02):
        raise CannotRun("the sampler did not start")


def main() -> int:
    """Print the result of this benchmark alone."""
    from tests.fakes.nvml.build import Stub

    with tempfile.TemporaryDirectory() as scratch:
        stub = Stub(Path(scratch) / "nvml")
        print(
            json.dumps(measure_steps(Path(scratch), stub.environ(NVML_STUB_FILE="", NVML_STUB_DEVICES="8")), indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
