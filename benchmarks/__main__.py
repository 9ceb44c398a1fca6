"""``python -m benchmarks [NAME…]``: run all benchmarks, or those named. Each writes ``benchmarks/results/<name>.json``.

Exit status: 0 all targets met, 1 a target missed, 2 unknown name, 3 a benchmark could not run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from benchmarks import (
    checkpoint,
    cli_speed,
    marks,
    nvml_calls,
    planner,
    pretrained,
    rank_hooks,
    shipped_environment,
    sockets,
    step_overhead,
    telemetry,
    ui,
    ui_run,
    watch,
)
from benchmarks.measure import CannotRun

BENCHMARKS: dict[str, tuple[Callable[[], int], str]] = {
    "checkpoint": (checkpoint.main, "save and restore, against DCP, torchsnapshot, torch.save and plain files; long"),
    "cli_speed": (cli_speed.main, "--help and submit, against click, submitit and torchx"),
    "marks": (marks.main, "cost of progress reports per step, and of `status` on a run of a million steps"),
    "nvml_calls": (nvml_calls.main, "cost of each NVML call; needs a GPU"),
    "planner": (planner.main, "predictions, against published configurations; writes docs/explanation/planner.md"),
    "pretrained": (
        pretrained.main,
        "loading pretrained weights into FSDP shards, against Transformers, DCP and a raw read",
    ),
    "rank_hooks": (
        rank_hooks.main,
        "cost of the hooks in a command's ranks, per start and step, against the bare program",
    ),
    "shipped_environment": (
        shipped_environment.main,
        "start of a rank from a shipped environment, against a shared filesystem with slow metadata; needs FUSE",
    ),
    "sockets": (sockets.main, "sockets per rank and latency of the control groups, against full gloo groups"),
    "step_overhead": (step_overhead.main, "tokens/s of the built-in trainer, against a bare PyTorch loop"),
    "telemetry": (telemetry.main, "cost of the sampler, bytes per value, and time for a report of 1,024 GPUs"),
    "ui": (ui.main, "time until `ui` shows 200 runs and a change in one, and its memory"),
    "ui_run": (ui_run.main, "the page of a run of 1,024 GPUs for a week: time to open, and for an update"),
    "watch": (
        watch.main,
        "`watch` on four hosts: first report, cost for the job, 50 times attach and detach; needs Slurm",
    ),
}


def main() -> int:
    descriptions = "\n".join(f"  {name:20} {text}" for name, (_, text) in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", epilog=descriptions, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmark to run; default: all")
    names = parser.parse_args().names or list(BENCHMARKS)
    for name in names:
        if name not in BENCHMARKS:
            parser.error(f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}")
    status = 0
    for name in names:
        print(f"== {name}", flush=True)
        try:
            status = max(status, BENCHMARKS[name][0]())
        except CannotRun as e:
            print(f"{name}: cannot run: {e}", file=sys.stderr)
            status = 3
    return status


if __name__ == "__main__":
    sys.exit(main())
