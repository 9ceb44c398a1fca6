"""What the sampler costs: processor seconds a second of wall time, with 8 stand-in GPUs at 1 Hz; prints JSON.

The stand-in answers at once, so this is the cost of our own code, of nvidia-ml-py and of psutil; a driver adds its own.

    python -m benchmarks.telemetry_overhead --seconds 60
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

GPUS = 8


def measure(folder: Path, seconds: float) -> dict[str, object]:
    """Run the sampler in this process and count the processor time of all its threads."""
    import psutil

    from clustertrain.telemetry import store
    from clustertrain.telemetry.sampler import Sampler

    sampler = Sampler(folder, "node", os.environ, first_rank=0)
    sampler.start()
    wall, cpu = time.monotonic(), time.process_time()
    threading.Event().wait(seconds)
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    sampler.stop()
    samples = sum(isinstance(r, store.Sample) for r in store.read(folder))
    return {
        "gpus": len(sampler.gpus),
        "interval_s": 1.0,
        "wall_s": round(wall, 2),
        "samples": samples,
        "cpu_s_per_wall_s": round(cpu / wall, 6),
        "bytes_per_sample": round(store.path_of(folder).stat().st_size / max(1, samples)),
        "processes_on_host": len(psutil.pids()),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # set in the child that has the stub loaded
    options = parser.parse_args()
    if options.folder is not None:
        print(json.dumps(measure(options.folder, options.seconds)))
        return 0
    from tests.nvml_stub.build import Stub

    with tempfile.TemporaryDirectory() as scratch:
        stub = Stub(Path(scratch) / "nvml")
        argv = [sys.executable, "-m", "benchmarks.telemetry_overhead"]
        argv += ["--seconds", str(options.seconds), "--folder", str(Path(scratch) / "telemetry")]
        env = stub.environ(NVML_STUB_FILE="", NVML_STUB_DEVICES=str(GPUS))
        return subprocess.run(argv, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
