"""Run a sampler until a line arrives on standard input; print its events as JSON lines."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from clustertrain.telemetry.sampler import Intervals, Sampler


def print_event(name: str, **fields: Any) -> None:
    # A single write, so that the lines of two threads do not mix.
    sys.stdout.write(json.dumps({"event": name, **fields}) + "\n")
    sys.stdout.flush()


def main() -> None:
    quick = Intervals(slow_s=0.05, flush_s=0.02)
    heartbeat_dir = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    sampler = Sampler(
        Path(sys.argv[1]),
        "node-a",
        os.environ,
        0.02,
        print_event,
        first_rank=4,
        heartbeat_dir=heartbeat_dir,
        intervals=quick,
    )
    sampler.start()
    print_event("ready", gpus=sampler.gpus, nvml=sampler.nvml_error)
    sys.stdin.readline()
    print_event("stopped", clean=sampler.stop(30))


if __name__ == "__main__":
    main()
