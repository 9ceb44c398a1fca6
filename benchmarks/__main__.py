"""``python -m benchmarks [NAME…]``: run the benchmarks by name, or all; each writes ``benchmarks/results/<name>.json``.

Exit status: 0 all targets met, 1 one missed, 2 an unknown name, 3 one could not run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable

from benchmarks import checkpoint, cli_speed, measure, nvml_calls, planner, step_overhead
from benchmarks.measure import CannotRun


def telemetry_overhead() -> int:
    """Run it as the command that it is, and keep what it prints."""
    result = measure.context(("clustertrain", "nvidia-ml-py", "psutil"))
    argv = [sys.executable, "-m", "benchmarks.telemetry_overhead"]
    done = subprocess.run(argv, cwd=measure.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotRun(f"benchmarks.telemetry_overhead failed: {done.stderr.strip()[-1000:]}")
    result["result"] = json.loads(done.stdout)
    path = measure.write("telemetry_overhead", result)
    print(f"{result['result']}; written to {path.relative_to(measure.ROOT)}")
    return 0


BENCHMARKS: dict[str, tuple[Callable[[], int], str]] = {
    "checkpoint": (checkpoint.main, "save and restore against DCP, torchsnapshot, torch.save and bare files; long"),
    "cli_speed": (cli_speed.main, "--help and submit against click, submitit and torchx"),
    "nvml_calls": (nvml_calls.main, "cost of each call to NVML; needs a GPU"),
    "planner": (planner.main, "predictions against published configurations; writes docs/planner.md"),
    "step_overhead": (step_overhead.main, "tokens/s of the built-in trainer against a bare PyTorch loop"),
    "telemetry_overhead": (telemetry_overhead, "processor time of the sampler with 8 stand-in GPUs, over a minute"),
}


def main() -> int:
    listed = "\n".join(f"  {name:20} {text}" for name, (_, text) in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", epilog=listed, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; default: all")
    names = parser.parse_args().names or list(BENCHMARKS)
    for name in names:
        if name not in BENCHMARKS:
            parser.error(f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}")
    worst = 0
    for name in names:
        print(f"== {name}", flush=True)
        try:
            worst = max(worst, BENCHMARKS[name][0]())
        except CannotRun as e:
            print(f"{name}: cannot run: {e}", file=sys.stderr)
            worst = 3
    return worst


if __name__ == "__main__":
    sys.exit(main())
