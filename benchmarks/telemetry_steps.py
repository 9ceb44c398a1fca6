"""Whether the sampler slows down the training beside it: a worker on each core does steps of fixed work, in turn with
and without a sampler of 8 stand-in GPUs at 1 Hz on the same node."""

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

# Some 10 ms a step, on one thread, which is all that a rank of this many has; prints its steps' median.
_WORKER = """
import json, statistics, sys, time
import numpy as np
a = np.random.default_rng(0).random((384, 384), dtype=np.float32)
took, end = [], time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    began = time.perf_counter()
    for _ in range(4):
        a @ a
    took.append(time.perf_counter() - began)
print(json.dumps([statistics.mean(took), len(took)]))
"""


def steps(folder: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """Ratios of a step's mean time, with the sampler over without, by pairs of turns.

    Args:
        environ: of the sampler, with the stand-in loaded.
    """
    ratios, alone = [], []
    for pair in range(PAIRS):
        turns = (True, False) if pair % 2 else (False, True)
        took = {sampled: _turn(folder / f"{pair}", environ if sampled else None) for sampled in turns}
        ratios.append(took[True] / took[False])
        alone.append(took[False])
    low, high = interval(ratios)
    return {
        "pairs": PAIRS,
        "step_s": round(statistics.median(alone), 6),
        "ratio": round(statistics.median(ratios), 5),
        "interval": [round(low, 5), round(high, 5)],
        "between_turns_alone": round(statistics.stdev(alone) / statistics.mean(alone), 5),
    }


def _turn(folder: Path, environ: Mapping[str, str] | None) -> float:
    """The mean step of all workers, s."""
    sampler = None
    if environ is not None:
        argv = [sys.executable, "-m", "benchmarks.telemetry", "--seconds", str(TURN_S + 4), "--folder", str(folder)]
        sampler = subprocess.Popen(argv, env=dict(environ), cwd=measure.ROOT, stdout=subprocess.DEVNULL)
    try:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        if sampler is not None:
            _wait_for(folder, sampler)
        argv = [sys.executable, "-c", _WORKER, str(TURN_S)]
        workers = [subprocess.Popen(argv, env=env, stdout=subprocess.PIPE) for _ in range(os.cpu_count() or 1)]
        means = [json.loads(worker.communicate()[0])[0] for worker in workers]
    finally:
        if sampler is not None:
            sampler.kill()
            sampler.wait()
    return statistics.mean(means)


def _wait_for(folder: Path, sampler: subprocess.Popen[bytes]) -> None:
    """Until it samples: its start is not what is asked about."""
    from clustertrain import clock

    if not clock.wait_until(lambda: any(folder.glob("*/header.json")) or sampler.poll() is not None, 30, 0.02):
        raise CannotRun("the sampler did not begin")


def main() -> int:
    """By itself, for a look."""
    from tests.fakes.nvml.build import Stub

    with tempfile.TemporaryDirectory() as scratch:
        stub = Stub(Path(scratch) / "nvml")
        print(json.dumps(steps(Path(scratch), stub.environ(NVML_STUB_FILE="", NVML_STUB_DEVICES="8")), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
