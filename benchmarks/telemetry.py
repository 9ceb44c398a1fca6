"""What telemetry costs: the sampler in the agent, the bytes on disk, and the wait for a report.

overhead   the sampler in a process with 8 stand-in GPUs at 1 Hz: processor time a second of wall time, and memory
           beyond what the process had before. The stand-in answers at once, so this is the cost of our own code, of
           nvidia-ml-py, numpy and psutil; a driver adds its own.
steps      steps of fixed work on all cores, with the sampler beside them and without, in turn.
size       a day of 8 GPUs at 1 Hz, all fields, written by the store and compacted: bytes a stored value with header,
           totals and roll-ups counted in, against Parquet as it is by default and lines of JSON, of the same values.
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
from benchmarks.telemetry_steps import steps

if TYPE_CHECKING:
    from tests.fakes.nvml.build import Stub

GPUS, DAY_S = 8, 86_400
_GPUS = {"NVML_STUB_FILE": "", "NVML_STUB_DEVICES": str(GPUS)}
ROUNDS = 5
OFTEN_S = 0.1
T0 = 1_790_000_000.0
_PACKAGES = ("clustertrain", "numpy", "nvidia-ml-py", "psutil", "pyarrow")


def main() -> int:
    result = measure.context(_PACKAGES)
    with tempfile.TemporaryDirectory(prefix="telemetry-benchmark-") as scratch:
        folder = Path(scratch)
        result["overhead"] = overhead(folder, 60.0)
        result["steps"] = steps(folder / "steps", stand_in(folder).environ(**_GPUS))
        result["size"], day = size(folder)
        result["report"] = reports(folder, day)
    result["targets"] = targets(result)
    path = measure.write("telemetry", result)
    for target in result["targets"]:
        print(f"{'met   ' if target['met'] else 'MISSED'} {target['words']}: {target['value']:g}")
    print(f"written to {path.relative_to(measure.ROOT)}")
    return 0 if all(target["met"] for target in result["targets"]) else 1


def targets(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    slower = result["steps"]["interval"][0] - 1.0
    cost, week, day = result["overhead"], result["report"]["week"], result["report"]["day"]
    found = [
        ("sampler: at most 0.1 % of a core, as a share", cost["cpu_s_per_wall_s"], 0.001),
        ("sampler: at most 60 MB beyond the agent's own, MB", cost["memory_mb"], 60.0),
        ("step time beside the sampler: longer for certain by at most, as a share", slower, 0.002),
        ("store: at most 1.0 byte a value", result["size"]["bytes_per_value"], 1.0),
        ("report, 1,024 GPUs and 7 days: at most 3 s", week["wall_s"]["median"], 3.0),
        ("report, 1,024 GPUs and 7 days: at most 1,000 MB", week["memory_mb"], 1000.0),
        ("report, 32 GPUs and a day: at most 0.5 s", day["wall_s"]["median"], 0.5),
    ]
    return [{"words": words, "value": value, "at_most": bound, "met": value <= bound} for words, value, bound in found]


def overhead(folder: Path, seconds: float) -> dict[str, Any]:
    """The sampler in a child that has the stand-in loaded.

    Raises:
        CannotRun: it failed, or there is no compiler for the stand-in.
    """
    argv = [sys.executable, "-m", "benchmarks.telemetry", "--seconds", str(seconds)]
    argv += ["--folder", str(folder / "sampled")]
    env = stand_in(folder).environ(**_GPUS)
    done = subprocess.run(argv, env=env, cwd=measure.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotRun(f"the sampler failed: {done.stderr.strip()[-1000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def stand_in(folder: Path) -> Stub:
    """Raises CannotRun where there is no compiler."""
    from tests.fakes.nvml.build import Stub

    try:
        return Stub(folder / "nvml")
    except RuntimeError as e:
        raise CannotRun(str(e)) from e


def sample(folder: Path, seconds: float) -> dict[str, Any]:
    """Run the sampler in this process and count the processor time of all its threads."""
    import clustertrain.agent.node_environment
    import clustertrain.scheduler.torchrun  # noqa: F401  (what the agent has anyway)

    before_mb = _memory_mb("VmRSS")
    from clustertrain.telemetry.sampler import Sampler
    from clustertrain.telemetry.store.reader import open_node

    waking = _waking(min(seconds, 20.0))
    sampler = Sampler(folder, "node", os.environ, first_rank=0)
    sampler.start()
    wall, cpu = time.monotonic(), time.process_time()
    threading.Event().wait(seconds)
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    memory_mb = _memory_mb("VmHWM") - before_mb
    sampler.stop()
    (segment,) = open_node(folder)
    often = Sampler(folder.with_name("often"), "node", os.environ, OFTEN_S, first_rank=0)
    often.start()
    often_cpu = time.process_time()
    threading.Event().wait(min(seconds, 20.0))
    often_cpu = time.process_time() - often_cpu
    often.stop()
    return {
        "gpus": len(sampler.gpus),
        "interval_s": 1.0,
        "wall_s": round(wall, 2),
        "samples": segment.sample_count,
        "values_a_sample": len(segment.header.fast),
        "cpu_s_per_wall_s": round(cpu / wall, 6),
        # What this machine takes for a thread that wakes once a second and does nothing, and for a sample where the
        # caches are still warm from the one before: between the two lies what no code of ours decides.
        "waking_cpu_s_per_wall_s": round(waking, 6),
        "cpu_s_a_sample": round(cpu / max(1, segment.sample_count), 6),
        "cpu_s_a_sample_at_10_hz": round(often_cpu / max(1.0, min(seconds, 20.0) / OFTEN_S), 6),
        "memory_mb": round(memory_mb, 1),
        "memory_before_mb": round(before_mb, 1),
        "bytes_per_sample": round(
            sum(p.stat().st_size for p in segment.folder.iterdir()) / max(1, segment.sample_count)
        ),
    }


def _waking(seconds: float) -> float:
    """Processor time a second of a loop that only waits."""
    event, cpu, until = threading.Event(), time.thread_time(), time.monotonic() + seconds
    while time.monotonic() < until:
        event.wait(1.0)
    return (time.thread_time() - cpu) / seconds


def _memory_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024 / 1e6


def size(folder: Path) -> tuple[dict[str, Any], Path]:
    """Bytes a value, ours and the peers'; and the segment."""
    from benchmarks.telemetry_data import header, write_segment
    from clustertrain.telemetry.store.compact import compact

    of = header("node000", GPUS, 0, T0)
    cpu = time.process_time()
    segment, values = write_segment(folder / "day", of, DAY_S)
    written_s = time.process_time() - cpu
    live = _bytes(segment)
    started = time.perf_counter()
    compact(segment)
    compacted_s = time.perf_counter() - started
    final = _bytes(segment)
    n = values.stored

    def per_value(sizes: Mapping[str, int]) -> float:
        return round(sum(sizes.values()) / n, 4)

    peers = {
        "parquet_zstd_float32": _parquet({c: values.fast[:, i] for i, c in enumerate(of.fast)}, values.d)
        + _parquet({c: values.slow[:, i] for i, c in enumerate(of.slow)}, values.slow_d),
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
        "written_cpu_us_a_sample": round(written_s / DAY_S * 1e6, 1),  # with making up the values
        "compacted_s": round(compacted_s, 2),
    }, segment


def _bytes(segment: Path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in segment.iterdir()}


def _parquet(columns: Mapping[str, Any], d: Any) -> int:
    """Single precision loses counters' last digits, as a plain table of floats does."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"t": T0 + d, **{c: v.astype("float32") for c, v in columns.items()}})
    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd")
    return out.tell()


def _json_lines(d: Any, rows: Any) -> int:
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", mtime=0, compresslevel=6) as f:
        for at, row in zip(d.tolist(), rows.tolist(), strict=True):
            short = [None if math.isnan(v) else int(v) if v == int(v) else v for v in row]
            f.write(json.dumps([at, short], separators=(",", ":")).encode() + b"\n")
    return out.tell()


def reports(folder: Path, day: Path) -> dict[str, Any]:
    """The report of a week and of a day, as whole processes."""
    from benchmarks.telemetry_data import copy_segment, header, new_run, write_segment
    from clustertrain.telemetry.store.compact import compact

    home = folder / "home"
    week, _ = write_segment(folder / "week", header("node000", GPUS, 0, T0, 10.0), 7 * DAY_S // 10, flush_s=600)
    compact(week)
    found = {}
    for name, source, nodes, interval_s in (("week", week, 128, 10.0), ("day", day, 4, 1.0)):
        names = [f"node{i:03d}" for i in range(nodes)]
        attempt = new_run(home, f"{name}-abc234", names)
        for i, node in enumerate(names):
            copy_segment(source, attempt.telemetry / node / "0", header(node, GPUS, GPUS * i, T0, interval_s))
        argv = [sys.executable, "-m", "clustertrain", "telemetry", f"{name}-abc234", "--json"]
        env = {**measure.child_environ(os.environ), "CLUSTERTRAIN_HOME": str(home)}
        took = [_whole(argv, env, lambda printed, n=nodes: _complete(printed, n)) for _ in range(ROUNDS + 1)][1:]
        found[name] = {
            "gpus": GPUS * nodes,
            "columns": len(header("node000", GPUS, 0, T0).fast),
            "wall_s": measure.spread([t[0] for t in took]),
            "cpu_s": measure.spread([t[1] for t in took]),
            "memory_mb": round(max(t[2] for t in took), 1),
        }
    found["empty"] = _nothing()
    return found


def _nothing() -> dict[str, Any]:
    """How long this machine takes for a Python that imports what every reader of columns imports."""
    env = measure.child_environ(os.environ)
    took = [_whole([sys.executable, "-c", "import numpy"], env, lambda printed: None) for _ in range(ROUNDS)]
    return {"argv": "python -c 'import numpy'", "wall_s": round(statistics.median(t[0] for t in took), 4)}


def _complete(printed: str, nodes: int) -> None:
    report = json.loads(printed)
    answered = sum(gpu["utilization"] is not None and gpu["samples"] > 0 for gpu in report["gpus"])
    if answered != GPUS * nodes:
        raise CannotRun(f"the report has figures of {answered} GPUs, not of {GPUS * nodes}")


# A child's greatest memory counts what it was forked from, so a small process stands in between.
_MEASURED = """
import json, os, resource, subprocess, sys, time
started = time.perf_counter()
done = subprocess.run(sys.argv[2:], stdout=open(sys.argv[1], "wb"))
wall = time.perf_counter() - started
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6]))
sys.exit(done.returncode)
"""


def _whole(argv: list[str], env: Mapping[str, str], check: Callable[[str], None]) -> tuple[float, float, float]:
    """Wall and processor seconds and the greatest memory, MB, of a process."""
    with tempfile.NamedTemporaryFile() as out:
        command = [sys.executable, "-c", _MEASURED, out.name, *argv]
        done = subprocess.run(command, env=env, cwd=measure.ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotRun(f"{' '.join(argv)} failed: {done.stderr[-1000:]}")
        check(Path(out.name).read_text())
    wall, cpu, memory_mb = json.loads(done.stdout)
    return wall, cpu, memory_mb


def _child() -> int:
    parser = argparse.ArgumentParser(description="the sampler alone, in a process with the stand-in loaded")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    print(json.dumps(sample(options.folder, options.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(_child())
