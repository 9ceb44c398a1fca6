"""Run the parts from standard input as ``benchmarks.gpu_check`` does; print their results as JSON.

A child of the test: the runner kills all descendants of its process after each part. With ``torch`` in the request, the
whole check runs, on the GPUs of NVML and with this instead of what torch says.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.gpu_check import machine, runner
from benchmarks.gpu_check.__main__ import check
from benchmarks.gpu_check.clocks import ClockLog
from benchmarks.gpu_check.parts import Part

runner.INTERRUPT_S = 0.5


def main() -> int:
    request = json.load(sys.stdin)
    folder = Path(request["folder"])
    parts = [Part(name, f"the part {name}", tuple(argv), limit) for name, argv, limit in request["parts"]]
    if "torch" in request:
        machine.read_torch = lambda: request["torch"]
        return check(parts, "cuda", folder, request["total_s"])
    clocks = ClockLog(folder / "clocks.jsonl")
    results = runner.run_parts(parts, folder, request["total_s"], os.environ, "GPU-first", clocks.record)
    clocks.close()
    print(json.dumps([result._asdict() for result in results]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
