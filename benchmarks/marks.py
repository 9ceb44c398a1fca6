"""Cost of the trainer's progress reports per step, and of reading its rows on a run of a million steps.

python -m benchmarks.marks --rows 1000000
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import measure
from clustertrain import fsio
from clustertrain.run import attempts
from clustertrain.run.run_dir import RunDir
from clustertrain.run.usage import measured_speed
from clustertrain.run.usage.goodput import compute_goodput
from clustertrain.train.session.heartbeat import ProgressReporter

STEPS = 20_000
ROUNDS = 7
GOAL_S = 1.0  # processor time for what `status` reads


def step_us(folder: Path | None) -> float:
    """Return microseconds per step: the minimum of the rounds, since other load on the machine only adds time."""
    reporter = ProgressReporter(folder, 0, 8, lambda: 1.0)
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for i in range(STEPS):
            reporter.begin_step(i)
            reporter.end_step(i + 1, 0.0, 32_768, 0.001)
        rounds.append((time.perf_counter() - started) / STEPS * 1e6)
    reporter.close()
    return round(min(rounds), 2)


def make_long_run(folder: Path, rows: int) -> RunDir:
    """Create a completed run with one attempt of ``rows`` steps and a checkpoint every 500 steps."""
    run = RunDir(folder)
    for path in (run.events, run.metrics, run.attempt(1).events):
        path.mkdir(parents=True)
    rng, t, sums, saves = random.Random(1), 1.79e9, [0.0, 0.0], []
    with run.metrics_path(1).open("w") as f:
        for step in range(1, rows + 1):
            step_s, wait_s = rng.uniform(0.5, 0.55), rng.uniform(0, 0.01)
            t += step_s + 0.001
            sums = [sums[0] + step_s, sums[1] + wait_s]
            row = {"step": step, "t": t, "step_s": step_s, "sum_step_s": sums[0], "tokens_per_s": 524_288 / step_s,
                   "sum_tokens": 524_288 * step, "data_wait_s": wait_s, "sum_data_wait_s": sums[1],
                   "loss": rng.uniform(2, 3), "lr": 3e-4, "grad_norm": rng.random()}  # fmt: skip
            f.write(json.dumps(row, separators=(",", ":")) + "\n")
            if step % 500 == 0:
                saves.append(
                    {"t": t + 4, "event": "checkpoint", "t_begin": t, "step": step, "stall_s": 0.5, "save_s": 4}
                )
                t += 0.5
    log = fsio.JsonlAppender(run.attempt(1).events_path("rank-0"))
    log.append({"t": 1.79e9 - 60, "event": "started", "job_id": "1"})
    log.append({"t": 1.79e9 + 1, "event": "first_step", "t_begin": 1.79e9, "step": 1})
    log.append(*saves)
    log.append({"t": t + 9, "event": "ended", "ending": "completed", "last_step": rows})
    log.close()
    return run


def measure_cpu_s(work: Callable[[], object]) -> float:
    """Return the processor seconds of ``work``, the median of three calls."""
    seconds = []
    for _ in range(3):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    return round(statistics.median(seconds), 4)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.marks")
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args(argv if argv is not None else []).rows
    result = measure.context(("clustertrain", "msgspec"))
    with tempfile.TemporaryDirectory(prefix="marks-") as folder:
        result["step_us"] = {"with_beat": step_us(Path(folder)), "without": step_us(None)}
        run = make_long_run(Path(folder, "run"), rows)
        result["rows"] = rows
        result["file_mib"] = round(run.metrics_path(1).stat().st_size / 2**20, 1)
        history = attempts.load_attempts(run)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result["ledger_cpu_s"] = measure_cpu_s(lambda: compute_goodput(run, history, 0.0, True))
        result["speed_cpu_s"] = measure_cpu_s(lambda: measured_speed.measure_speed(run, run.attempts()))
        result["more_memory_mib"] = round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1)
    result["goal_s"] = GOAL_S
    met = result["ledger_cpu_s"] + result["speed_cpu_s"] < GOAL_S
    result["verdict"] = "met" if met else "missed"
    print(
        {
            k: result[k]
            for k in ("step_us", "rows", "file_mib", "ledger_cpu_s", "speed_cpu_s", "more_memory_mib", "verdict")
        }
    )
    path = measure.write("marks", result)
    print(f"written to {path.relative_to(measure.ROOT)}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
