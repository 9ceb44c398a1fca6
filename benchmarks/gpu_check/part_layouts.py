"""Training of each layout of ``tests/cuda_emulation/layouts.py`` over NCCL, one rank per GPU, if there are two GPUs.

A layout passes if its ranks end without an error and its first loss equals that of one rank with the same model:
initial weights do not depend on the layout. Each lane of four GPUs trains one layout at a time. The rehearsal trains
two over gloo.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.parts import Figures, PartFailed, run_main
from clustertrain.plan.layout import Layout
from tests.cuda_emulation.layouts import CASES, COVERING, Case
from tests.ranks.rank_pool import Ranks, make_run

STEPS = 4
GPUS_PER_CASE = 4  # at most
START_S = 65.0  # no layout starts later
CASE_S = 30.0
TOLERANCE = 0.02  # of the first loss, in 16 bit
REHEARSAL = ("ddp", "pp-1f1b")


@dataclass(frozen=True)
class Outcome:
    """What became of a layout: its first loss, why it failed, or neither if it was not started in time."""

    loss: float | None = None
    error: str = ""


def measure_layouts(options: argparse.Namespace) -> tuple[Figures, Any]:
    """Train what fits the number of GPUs, what covers most first; fail if a layout does."""
    gpus = torch.cuda.device_count() if options.device == "cuda" else 2
    names = list(REHEARSAL) if options.device == "cpu" else sorted(CASES, key=lambda name: name not in COVERING)
    fitting = [name for name in names if CASES[name].layout.world_size <= gpus] if gpus > 1 else []
    skipped = [name for name in names if name not in fitting]
    outcomes = _train_all({name: CASES[name] for name in fitting}, options.device, gpus) if fitting else {}
    failed = {name: outcome.error for name, outcome in outcomes.items() if outcome.error}
    trained = [name for name, outcome in outcomes.items() if outcome.loss is not None and not outcome.error]
    figures: Figures = {
        "gpus": float(gpus),
        "layouts_trained": float(len(trained)),
        "layouts_failed": float(len(failed)),
        "failed": ", ".join(failed) or "none",
        "no_time_left": ", ".join(sorted(outcomes.keys() - failed.keys() - set(trained))) or "none",
        "skipped_for_lack_of_gpus": ", ".join(skipped) or "none",
    }
    details = {"trained": trained, "failed": failed}
    if failed:
        name = next(iter(failed))
        raise PartFailed(
            f"{len(failed)} layouts failed; {name}: {failed[name].strip().splitlines()[-1]}", figures, details
        )
    return figures, details


def _train_all(cases: Mapping[str, Case], device: str, gpus: int) -> dict[str, Outcome]:
    """Train ``cases`` in lanes of GPUs of their own, after the models that they share on one GPU."""
    deadline = time.monotonic() + START_S
    width = min(GPUS_PER_CASE, gpus)
    lanes = [list(range(first, first + width)) for first in range(0, gpus - width + 1, width)]
    models = {_model_of(case): Case(Layout(), {"model": case.options.get("model", {})}) for case in cases.values()}
    free = list(lanes)
    with ThreadPoolExecutor(len(lanes)) as pool:

        def train(case: Case) -> Outcome:
            if time.monotonic() > deadline:
                return Outcome()
            lane = free.pop()
            try:
                return _train(case, device, lane)
            finally:
                free.append(lane)

        expected = dict(zip(models, pool.map(train, models.values()), strict=True))
        outcomes = dict(zip(cases, pool.map(train, cases.values()), strict=True))
    return {name: _compare(outcome, expected[_model_of(cases[name])]) for name, outcome in outcomes.items()}


def _model_of(case: Case) -> str:
    return json.dumps(case.options.get("model", {}), sort_keys=True)


def _compare(outcome: Outcome, one_rank: Outcome) -> Outcome:
    if outcome.loss is None or one_rank.loss is None:
        return Outcome(outcome.loss, outcome.error or one_rank.error)
    if math.isclose(outcome.loss, one_rank.loss, rel_tol=TOLERANCE):
        return outcome
    return Outcome(outcome.loss, f"the first loss is {outcome.loss:.5g}, and {one_rank.loss:.5g} with one rank")


def _train(case: Case, device: str, gpus: list[int]) -> Outcome:
    world_size = case.layout.world_size
    visible = ",".join(map(str, gpus[:world_size]))
    with tempfile.TemporaryDirectory(prefix="gpu-check-layout-") as folder:
        run = make_run(Path(folder, "run"), case.layout, world_size, steps=STEPS, every=100, **case.options)
        ranks = Ranks(run, world_size, setup=_see_gpus, args=(visible,), device=device)
        try:
            codes = ranks.wait(CASE_S)
        except AssertionError as e:
            return Outcome(error=str(e)[-2000:])
        losses = [loss for loss, _ in ranks.losses().values()]
        if any(codes) or len(losses) != STEPS or not all(map(math.isfinite, losses)):
            return Outcome(error=f"exit codes {codes}, losses {losses}\n{ranks.logs()[-2000:]}")
        return Outcome(losses[0])


def _see_gpus(visible: str) -> None:
    """Setup of a rank: see only these of the GPUs that this part sees, before CUDA starts."""
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = outer.split(",") if outer else None
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[int(i)] if names else i for i in visible.split(","))


if __name__ == "__main__":
    sys.exit(run_main(measure_layouts))
