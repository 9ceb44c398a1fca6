"""Cost of telemetry: the sampler in the agent, the bytes on disk, and the time for a report.

overhead   the sampler in a process with 8 stub GPUs at 1 Hz: processor time per second of wall time, and additional
           memory of the process. The stub answers at once, so this is the cost of our own code, nvidia-ml-py, numpy
           and psutil; a driver adds its own.
steps      steps of fixed work on all cores, alternately with and without the sampler.
size       a day of 8 GPUs at 1 Hz, all fields, written by the store and compacted: bytes per stored value, including
           header, totals and roll-ups, against default Parquet and lines of JSON with the same values.
report     `clustertrain telemetry RUN --json` as a whole process: a week of 1,024 GPUs at 10 s, a day of 32 at 1 Hz.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import measure
from benchmarks.measure import CannotRun
from benchmarks.telemetry_steps import measure_steps

if TYPE_CHECKING:
    from tests.fakes.nvml.build import Stub

GPUS, DAY_S = 8, 86_400
_STUB_SETTINGS = {"NVML_STUB_FILE": "", "NVML_STUB_DEVICES": str(GPUS)}
ROUNDS = 5
FAST_INTERVAL_S = 0.1
T0 = 1_790_000_000.0
_PACKAGES = ("clustertrain", "numpy", "nvidia-ml-py", "psutil", "pyarrow")


def main() -> int:
    result = measure.context(_PACKAGES)
    with tempfile.TemporaryDirectory(prefix="telemetry-benchmark-") as scratch:
        folder = Path(scratch)
        result["overhead"] = measure_overhead(folder, 60.0)
        result["steps"] = measure_steps(folder / "steps", build_stub(folder).environ(**_STUB_SETTINGS))
        result["size"], day = measure_size(folder)
        result["report"] = measure_reports(folder, day)
    return measure.write_with_targets("telemetry", result, check_targets(result))


def check_targets(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    slower = result["steps"]["interval"][0] - 1.0
    cost, week, day = result["overhead"], result["report"]["week"], result["report"]["day"]
    values = [
        ("sampler: at most 0.1 % of a core, as a share", cost["cpu_s_per_wall_s"], 0.001),
        ("sampler: at most 60 MB beyond the agent's own, MB", cost["memory_mb"], 60.0),
        ("step time beside the sampler: longer for certain by at most, as a share", slower, 0.002),
        ("store: at most 1.0 byte a value", result["size"]["bytes_per_value"], 1.0),
        ("report, 1,024 GPUs and 7 days: at most 3 s", week["wall_s"]["median"], 3.0),
        ("report, 1,024 GPUs and 7 days: at most 1,000 MB", week["memory_mb"], 1000.0),
        ("report, 32 GPUs and a day: at most 0.5 s", day["wall_s"]["median"], 0.5),
    ]
    return [{"words": words, "value": value, "at_most": bound, "met": value <= bound} for words, value, bound in values]


def measure_overhead(folder: Path, seconds: float) -> dict[str, Any]:
    """Run the sampler in a child process with the stub loaded; return its cost.

    Raises:
        CannotRun: it failed, or there is no compiler for the stub.
    """
    argv = [sys.executable, "-m", "benchmarks.telemetry", "--seconds", str(seconds)]
    argv += ["--folder", str(folder / "sampled")]
    env = build_stub(folder).environ(**_STUB_SETTINGS)
    done = subprocess.run(argv, env=env, cwd=measure.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotRun(f"the sampler failed: {done.stderr.strip()[-1000:]}")
    cost: dict[str, Any] = json.loads(done.stdout)
    return cost


def build_stub(folder: Path) -> Stub:
    """Build the stub of the NVML library. Raise CannotRun without a compiler."""
    from tests.fakes.nvml.build import Stub

    try:
        return Stub(folder / "nvml")
    except RuntimeError as e:
        raise CannotRun(str(e)) from e


def run_sampler(folder: Path, seconds: float) -> dict[str, Any]:
    """Run the sampler in this process; return its processor time in all threads and its memory."""
    import clustertrain.agent.node_environment
    import clustertrain.scheduler.torchrun  # noqa: F401  (the agent has loaded it anyway)

    before_mb = _memory_mb("VmRSS")
    from clustertrain.telemetry.sampler import Sampler
    from clustertrain.telemetry.store.reader import open_node

    idle_wakeups = _measure_wakeups(min(seconds, 20.0))
    sampler = Sampler(folder, "node", os.environ, first_rank=0)
    sampler.start()
    wall, cpu = time.monotonic(), time.process_time()
    threading.Event().wait(seconds)
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    memory_mb = _memory_mb("VmHWM") - before_mb
    sampler.stop()
    (segment,) = open_node(folder)
    fast_sampler = Sampler(folder.with_name("often"), "node", os.environ, FAST_INTERVAL_S, first_rank=0)
    fast_sampler.start()
    fast_cpu = time.process_time()
    threading.Event().wait(min(seconds, 20.0))
    fast_cpu = time.process_time() - fast_cpu
    fast_sampler.stop()
    return {
        "gpus": len(sampler.gpus),
        "interval_s": 1.0,
        "wall_s": round(wall, 2),
        "samples": segment.sample_count,
        "values_a_sample": len(segment.header.fast),
        "cpu_s_per_wall_s": round(cpu / wall, 6),
        # Two bounds of what our code cannot change: a thread that wakes once per second and does nothing, and a sample
        # with caches that are still warm from the one before.
        "waking_cpu_s_per_wall_s": round(idle_wakeups, 6),
        "cpu_s_a_sample": round(cpu / max(1, segment.sample_count), 6),
        "cpu_s_a_sample_at_10_hz": round(fast_cpu / max(1.0, min(seconds, 20.0) / FAST_INTERVAL_S), 6),
        "memory_mb": round(memory_mb, 1),
        "memory_before_mb": round(before_mb, 1),
        "bytes_per_sample": round(
            sum(p.stat().st_size for p in segment.folder.iterdir()) / max(1, segment.sample_count)
        ),
    }


def _measure_wakeups(seconds: float) -> float:
    """Return the processor time per second of a loop that only waits."""
    event, cpu, until = threading.Event(), time.thread_time(), time.monotonic() + seconds
    while time.monotonic() < until:
        event.wait(1.0)
    return (time.thread_time() - cpu) / seconds


def _memory_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024 / 1e6


def measure_size(folder: Path) -> tuple[dict[str, Any], Path]:
    """Return the bytes per value, ours and the peers', and the segment."""
    from benchmarks.telemetry_data import make_header, write_segment
    from clustertrain.telemetry.store.compact import compact

    header = make_header("node000", GPUS, 0, T0)
    cpu = time.process_time()
    segment, values = write_segment(folder / "day", header, DAY_S)
    written_s = time.process_time() - cpu
    live = _file_sizes(segment)
    started = time.perf_counter()
    compact(segment)
    compacted_s = time.perf_counter() - started
    final = _file_sizes(segment)
    n = values.stored

    def per_value(sizes: Mapping[str, int]) -> float:
        return round(sum(sizes.values()) / n, 4)

    peers = {
        "parquet_zstd_float32": _parquet({c: values.fast[:, i] for i, c in enumerate(header.fast)}, values.d)
        + _parquet({c: values.slow[:, i] for i, c in enumerate(header.slow)}, values.slow_d),
        "jsonl_gz": _json_lines(values.d, values.fast) + _json_lines(values.slow_d, values.slow),
    }
    return {
        "gpus": GPUS,
        "seconds": DAY_S,
        "values": n,
        "bytes_per_value": per_value(final),
        "bytes_per_value_live": per_value(live),
        "bytes_per_value_by_file": {name: round(b / n, 4) for name, b in sorted(final.items())},
        "peers_bytes_per_value": {name: round(b / n, 4) for name, b in peers.items()},
        "written_cpu_us_a_sample": round(written_s / DAY_S * 1e6, 1),  # including the synthesis of the values
        "compacted_s": round(compacted_s, 2),
    }, segment


def _file_sizes(segment: Path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in segment.iterdir()}


def _parquet(columns: Mapping[str, Any], d: Any) -> int:
    """Return the bytes of the columns in single precision, which loses the last digits of counters."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"t": T0 + d, **{c: v.astype("float32") for c, v in columns.items()}})
    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd")
    return out.tell()


def _json_lines(d: Any, rows: Any) -> int:
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", mtime=0, compresslevel=6) as f:
        for moment, row in zip(d.tolist(), rows.tolist(), strict=True):
            compact_row = [None if math.isnan(v) else int(v) if v == int(v) else v for v in row]
            f.write(json.dumps([moment, compact_row], separators=(",", ":")).encode() + b"\n")
    return out.tell()


def measure_reports(folder: Path, day: Path) -> dict[str, Any]:
    """Measure the report of a week and of a day, as whole processes."""
    from benchmarks.telemetry_data import copy_segment, make_header, new_run, write_segment
    from clustertrain.telemetry.store.compact import compact

    home = folder / "home"
    week, _ = write_segment(folder / "week", make_header("node000", GPUS, 0, T0, 10.0), 7 * DAY_S // 10, flush_s=600)
    compact(week)
    results = {}
    for name, source, nodes, interval_s in (("week", week, 128, 10.0), ("day", day, 4, 1.0)):
        names = [f"node{i:03d}" for i in range(nodes)]
        attempt = new_run(home, f"{name}-abc234", names)
        for i, node in enumerate(names):
            copy_segment(source, attempt.telemetry / node / "0", make_header(node, GPUS, GPUS * i, T0, interval_s))
        argv = [sys.executable, "-m", "clustertrain", "telemetry", f"{name}-abc234", "--json"]
        env = {**measure.child_environ(os.environ), "CLUSTERTRAIN_HOME": str(home)}
        runs = [
            _run_measured(argv, env, lambda printed, n=nodes: _check_complete(printed, n)) for _ in range(ROUNDS + 1)
        ][1:]
        results[name] = {
            "gpus": GPUS * nodes,
            "columns": len(make_header("node000", GPUS, 0, T0).fast),
            "wall_s": measure.spread([t[0] for t in runs]),
            "cpu_s": measure.spread([t[1] for t in runs]),
            "memory_mb": round(max(t[2] for t in runs), 1),
        }
    results["empty"] = _measure_numpy_import()
    return results


def _measure_numpy_import() -> dict[str, Any]:
    """Measure a Python that only imports numpy, as every reader of columns does."""
    env = measure.child_environ(os.environ)
    runs = [_run_measured([sys.executable, "-c", "import numpy"], env, lambda printed: None) for _ in range(ROUNDS)]
    return {"argv": "python -c 'import numpy'", "wall_s": round(statistics.median(t[0] for t in runs), 4)}


def _check_complete(printed: str, nodes: int) -> None:
    report = json.loads(printed)
    reported = sum(gpu["utilization"] is not None and gpu["samples"] > 0 for gpu in report["gpus"])
    if reported != GPUS * nodes:
        raise CannotRun(f"the report has figures of {reported} GPUs, not of {GPUS * nodes}")


# The peak memory of a child includes that of its parent at the fork, so a small process starts it.
_LAUNCHER = """
import json, os, resource, subprocess, sys, time
started = time.perf_counter()
done = subprocess.run(sys.argv[2:], stdout=open(sys.argv[1], "wb"))
wall = time.perf_counter() - started
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6]))
sys.exit(done.returncode)
"""


def _run_measured(argv: list[str], env: Mapping[str, str], check: Callable[[str], None]) -> tuple[float, float, float]:
    """Run a process and check its output; return wall seconds, processor seconds and peak memory in MB."""
    with tempfile.NamedTemporaryFile() as out:
        command = [sys.executable, "-c", _LAUNCHER, out.name, *argv]
        done = subprocess.run(command, env=env, cwd=measure.ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotRun(f"{' '.join(argv)} failed: {done.stderr[-1000:]}")
        check(Path(out.name).read_text())
    wall, cpu, memory_mb = json.loads(done.stdout)
    return wall, cpu, memory_mb


def _child() -> int:
    parser = argparse.ArgumentParser(description="run only the sampler, in a process with the stub loaded")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    print(json.dumps(run_sampler(options.folder, options.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(_child())
