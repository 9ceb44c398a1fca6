"""``python -m benchmarks [NAME…]``: run the benchmarks by name, or all; each writes ``benchmarks/results/<name>.json``.

Exit status: 0 all targets met, 1 one missed, 2 an unknown name, 3 one could not run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from benchmarks import checkpoint, cli_speed, marks, nvml_calls, planner, step_overhead, telemetry
from benchmarks.measure import CannotRun

BENCHMARKS: dict[str, tuple[Callable[[], int], str]] = {
    "checkpoint": (checkpoint.main, "save and restore against DCP, torchsnapshot, torch.save and bare files; long"),
    "cli_speed": (cli_speed.main, "--help and submit against click, submitit and torchx"),
    "marks": (marks.main, "what the trainer's marks cost a step, and `status` on a run of a million steps"),
    "nvml_calls": (nvml_calls.main, "cost of each call to NVML; needs a GPU"),
    "planner": (planner.main, "predictions against published configurations; writes docs/explanation/planner.md"),
    "step_overhead": (step_overhead.main, "tokens/s of the built-in trainer against a bare PyTorch loop"),
    "telemetry": (telemetry.main, "what the sampler costs, bytes a value, and the wait for a report of 1,024 GPUs"),
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
