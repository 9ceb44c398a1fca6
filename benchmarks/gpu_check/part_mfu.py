"""Tokens/s and model FLOPs utilization of the built-in trainer with the recipe of about 1.1e9 parameters, compiled.

The baseline is a bare torch loop in the same process (:mod:`benchmarks.step_overhead`).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

import torch

from benchmarks import step_overhead
from benchmarks.gpu_check.parts import Figures, run_main
from benchmarks.measure import CannotRun
from benchmarks.step_overhead import CPU, CUDA, Setting

PAIRS = {"cuda": 8, "cpu": 2}
# Two models with Adam's moments, 16 bytes per parameter each, and the activations of one.
LEAST_GIB = 64.0
_RECIPE = replace(CUDA, block=5)  # blocks long enough for one wait at their end, and short enough for 4 minutes
_SMALL = replace(_RECIPE, model={**CUDA.model, "layers": 5}, micro_batch=2)  # about 0.35e9 parameters: 24 GiB
_TINY = replace(
    CPU, model={"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2}, seq_len=64, global_batch=4, min_step_s=0.0
)


def choose_setting(device: str) -> Setting:
    """Return the recipe, or a smaller one for a GPU without room for two of its models.

    Raises:
        CannotRun: the GPU has no room for the smaller one either.
    """
    if device == "cpu":
        return _TINY
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    if gib >= LEAST_GIB:
        return _RECIPE
    if gib < LEAST_GIB / 3:
        raise CannotRun(f"the GPU has {gib:.0f} GiB, and two models of 0.35e9 parameters need {LEAST_GIB / 3:.0f}")
    return _SMALL


def measure_mfu(options: argparse.Namespace) -> tuple[Figures, Any]:
    setting = choose_setting(options.device)
    try:
        row = step_overhead.measure_layout(setting, "single", PAIRS[options.device])
    except CannotRun as e:  # a rank failed: this machine can run it, so that is a failure
        raise RuntimeError(str(e)) from e
    mfu = row.get("mfu", {})
    return {
        "parameters": float(step_overhead.recipe(setting, 1).model.parameters()),
        "tokens_per_s": float(row["ours_tokens_per_s"]),
        "bare_tokens_per_s": float(row["bare_tokens_per_s"]),
        "step_s": row["ours_step_s"]["median"],
        "step_time_over_bare": row["ratio"]["median"],
        "mfu": mfu.get("ours"),
        "bare_mfu": mfu.get("bare"),
    }, {**row, "setting": step_overhead.describe(setting)}


if __name__ == "__main__":
    sys.exit(run_main(measure_mfu))
