"""The parts of the check: a program each, bounded in time, which leaves a ``result.json``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import CannotRun

TOTAL_S = 900.0
RESERVE_S = 60.0  # of it, to end a part that hangs, and for the summary
CANNOT_RUN = 3  # exit code of a part; its last line of output says what is missing


@dataclass(frozen=True)
class Part:
    """A program to run. ``{out}`` in its arguments stands for its folder, ``{root}`` for the evidence."""

    name: str
    title: str
    argv: tuple[str, ...]
    limit_s: float
    one_gpu: bool = True
    """Sees only the first GPU, so that its figures and tests do not depend on the number of GPUs."""


def list_parts(device: str) -> list[Part]:
    """Return the parts in the order in which they run: the tests last, in the time that the measurements leave."""
    return [
        _own("nvml", "cost of NVML calls and of the sampler's readings", device, 80),
        _own("nccl", "collectives on one GPU and on all", device, 120, one_gpu=False),
        _own("staging", "training during a checkpoint of state on the GPU", device, 140),
        _own("mfu", "the built-in trainer against a bare torch loop, compiled", device, 260),
        _own("planner", "rates and the predicted step", device, 90, "--mfu", "{root}/mfu/result.json", one_gpu=False),
        _own("layouts", "training of each layout over NCCL, with several GPUs", device, 100, one_gpu=False),
        _own("tests", "tests/gpu", device, TOTAL_S),
    ]


def _own(name: str, title: str, device: str, limit_s: float, *args: str, one_gpu: bool = True) -> Part:
    argv = (sys.executable, "-m", f"benchmarks.gpu_check.part_{name}", "--device", device, "--out", "{out}", *args)
    return Part(name, title, argv, limit_s, one_gpu)


Figures = Mapping[str, float | str | None]


class PartFailed(Exception):
    """A part failed, and has figures and details that are kept."""

    def __init__(self, message: str, figures: Figures, details: Any) -> None:
        super().__init__(message)
        self.figures, self.details = figures, details


def run_main(measure: Callable[[argparse.Namespace], tuple[Figures, Any]], *options: str) -> int:
    """Parse the arguments of a part, run ``measure`` and write its figures and details to ``result.json``.

    Args:
        options: names of further options, each with a value.

    Returns:
        The exit code of the part.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    for option in options:
        parser.add_argument(option)
    arguments = parser.parse_args()
    failure = None
    try:
        figures, details = measure(arguments)
    except CannotRun as e:
        print(f"cannot run: {e}", flush=True)
        return CANNOT_RUN
    except PartFailed as e:
        figures, details, failure = e.figures, e.details, str(e)
    text = json.dumps({"figures": figures, "details": details}, indent=1)
    (arguments.out / "result.json").write_text(text + "\n")
    for name, value in figures.items():
        print(f"{name}: {value}")
    if failure is not None:
        print(failure, flush=True)
        return 1
    return 0
