"""Overhead of the built-in trainer: its tokens/s against a bare PyTorch loop with the same model and layout.

Both train in the same processes in alternating blocks of steps, so that other load on the machine affects both. The
trainer is the real ``clustertrain.train.trainer`` in a run directory, with loader, schedule, stop agreement and
metrics; the bare loop runs between two of its steps. A step of the trainer is timed from one ``yield`` of
``session.steps`` to the next, which includes all that the session does in between.

    python -m benchmarks.step_overhead --pairs 300 --layouts single ddp

With ``--signals``, the trainer is compared with itself: steps with all checks of ``[stability]`` and layer statistics
in every tenth step, against steps with the minimum that a recipe allows. Both use one model and optimizer in one
process, so the ratio of two adjacent blocks is the cost of the signals.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
import torch
import torch.distributed as dist

from benchmarks import measure
from benchmarks.bare_loop import BareLoop
from benchmarks.measure import CannotRun
from clustertrain import fsio, settings
from clustertrain.config import hardware
from clustertrain.config.parsing import documents
from clustertrain.config.recipe import Recipe
from clustertrain.config.stability import StabilitySpec
from clustertrain.plan.layout import Layout
from clustertrain.plan.planner import flops_per_step
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.train.core.context import load_plan
from clustertrain.train.session.session import Session, get_runtime
from clustertrain.train.step.train_step import TrainStep
from tests.ranks.rank_pool import Ranks

WARMUP = 3  # blocks
TIMEOUT_S = 1200.0


Seconds = tuple[float, float]  # wall, processor
ALL_SIGNALS = StabilitySpec(spike="skip", layer_stats_every=10)
NO_SIGNALS = StabilitySpec(spike="off", layer_stats_every=0)
SIGNALS_BLOCK = 10  # steps, so that each block has one with layer statistics
SIGNALS_GOAL = 1.01


@dataclass(frozen=True)
class Setting:
    """What to train on a device, and the goal of the ratio."""

    device: str
    precision: str
    compile: bool
    block: int
    """Consecutive steps of either side; on a GPU several, since only the end of a block waits for the device."""
    goal: float
    layouts: dict[str, Layout]
    model: dict[str, int]
    seq_len: int
    global_batch: int
    micro_batch: int
    min_step_s: float = 0.0
    """Shorter steps are refused: on the CPU they would measure the noise of the machine."""


CPU = Setting(
    device="cpu",
    precision="fp32",
    compile=False,
    block=1,
    goal=1.02,
    layouts={
        "single": Layout(),
        "ddp": Layout(strategy="ddp", dp_replicate=2),
        "fsdp": Layout(strategy="fsdp", dp_shard=2),
    },
    model={"dim": 256, "layers": 4, "heads": 4, "kv_heads": 2},
    seq_len=256,
    global_batch=8,
    micro_batch=2,
    min_step_s=0.2,
)
# About 1.1e9 parameters.
CUDA = Setting(
    device="cuda",
    precision="bf16",
    compile=True,
    block=10,
    goal=1.01,
    layouts={"single": Layout()},
    model={"dim": 2048, "layers": 22, "heads": 16, "kv_heads": 8, "vocab_size": 32_000},
    seq_len=2048,
    global_batch=16,
    micro_batch=4,
)


def interleave(run_dir: str, out: str, block: int, device: str) -> None:
    """Setup of a rank: run the bare loop between the blocks of the session.

    Rank 0 writes the (wall, processor) seconds of each block to ``out``, as pairs (trainer, bare loop).
    """
    os.environ[settings.DEVICE] = device
    run = RunDir(Path(run_dir))
    layout, batch, precision = load_plan(run)
    original = Session.steps

    def steps(self: Session, *args: Any, **kwargs: Any) -> Iterator[int]:
        bare = BareLoop(load_spec(run).recipe, layout, batch, self.device, precision)
        pairs: list[tuple[Seconds, Seconds]] = []
        session_steps = original(self, *args, **kwargs)
        step = next(session_steps)
        while True:
            started = _now(self.device)
            for i in range(block):
                yield step
                next_step = next(session_steps, None)
                if next_step is None:
                    return
                step = next_step
                if i == block - 1:
                    ours_s = _since(started, self.device)
            started = _now(self.device)
            for _ in range(block):
                bare.step()
            pairs.append((ours_s, _since(started, self.device)))
            if self.is_main:
                Path(out).write_text(json.dumps(pairs))

    Session.steps = steps  # type: ignore[method-assign]


def alternate(out: str, block: int, device: str) -> None:
    """Setup of a rank: disable the signals in every other block of steps.

    Rank 0 writes the (wall, processor) seconds of each block to ``out``, as pairs (with, without signals).
    """
    os.environ[settings.DEVICE] = device
    original, call = Session.steps, TrainStep.__call__
    switch = {"on": True}

    def train_step(self: TrainStep, batch: Any, samples: Any, loss_fn: Any, clip: Any, layer_stats: Any = None) -> Any:
        self.guard.spec = ALL_SIGNALS if switch["on"] else NO_SIGNALS
        return call(self, batch, samples, loss_fn, clip, layer_stats if switch["on"] else None)

    def steps(self: Session, *args: Any, **kwargs: Any) -> Iterator[int]:
        pairs: list[tuple[Seconds, Seconds]] = []
        session_steps = original(self, *args, **kwargs)
        processor = get_runtime(self).metrics_processor
        monitor, halves = processor.monitor, []
        step = next(session_steps)
        while True:
            # The order within a pair alternates, so that a drift of the machine affects both.
            switch["on"] = (len(halves) // 2 + len(halves)) % 2 == 0
            processor.monitor = monitor if switch["on"] else None
            started = _now(self.device)
            for _ in range(block):
                yield step
                next_step = next(session_steps, None)
                if next_step is None:
                    return
                step = next_step
            halves.append((switch["on"], _since(started, self.device)))
            if len(halves) % 2 == 0 and self.is_main:
                last_two = dict(halves[-2:])
                pairs.append((last_two[True], last_two[False]))
                Path(out).write_text(json.dumps(pairs))

    TrainStep.__call__ = train_step  # type: ignore[method-assign]
    Session.steps = steps  # type: ignore[method-assign]


def _now(device: torch.device) -> Seconds:
    """Return wall and processor time, after all ranks have arrived and the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter(), time.process_time()


def _since(started: Seconds, device: torch.device) -> Seconds:
    now = _now(device)
    return now[0] - started[0], now[1] - started[1]


def describe(setting: Setting) -> dict[str, Any]:
    """Return what a step of ``setting`` depends on."""
    names = ("model", "seq_len", "global_batch", "micro_batch", "precision", "compile")
    return {name: getattr(setting, name) for name in names}


def recipe(setting: Setting, blocks: int) -> Recipe:
    """Return the recipe of a run of ``blocks`` blocks."""
    return documents.build(_recipe_tables(setting, blocks), Recipe, "the benchmark's recipe")


def _recipe_tables(setting: Setting, blocks: int) -> dict[str, dict[str, Any]]:
    return {
        "model": setting.model,
        "data": {"seq_len": setting.seq_len, "max_bytes": 8_000_000},
        "stability": {"spike": ALL_SIGNALS.spike, "layer_stats_every": ALL_SIGNALS.layer_stats_every},
        # One more step, whose end is the end of the run and belongs to no block.
        "train": {"steps": blocks * setting.block + 1, "global_batch": setting.global_batch, "log_every": 10},
        "checkpoint": {"every": 10**9},
        "parallel": {"compile": setting.compile},
    }


def _make_run(path: Path, setting: Setting, layout: Layout, blocks: int) -> RunDir:
    run = RunDir(path)
    (run.path / "attempts").mkdir(parents=True)
    run.spec.write_text(tomli_w.dumps({"recipe": _recipe_tables(setting, blocks)}))
    batch = {
        "micro_batch": setting.micro_batch,
        "grad_accum": setting.global_batch // layout.data_parallel // setting.micro_batch,
        "global_batch": setting.global_batch,
        "tokens_per_step": setting.global_batch * setting.seq_len,
    }
    fields = {f: getattr(layout, f) for f in Layout.__struct_fields__}
    fsio.write_json(run.plan, {"layout": fields, "batch": batch, "precision": setting.precision})
    return run


def measure_layout(setting: Setting, name: str, pairs: int, *, signals: bool = False) -> dict[str, Any]:
    """Return one row of the result; with ``signals``, compare with the trainer without them.

    Raises:
        CannotRun: the ranks failed, or a step is too short.
    """
    layout = setting.layouts[name]
    with tempfile.TemporaryDirectory(prefix="step-overhead-") as folder:
        out = Path(folder, "pairs.json")
        run = _make_run(Path(folder, "run"), setting, layout, (WARMUP + pairs) * (1 + signals))
        setup: Callable[..., None] = alternate if signals else interleave
        args = (str(out), setting.block, setting.device)
        args = args if signals else (str(run.path), *args)
        ranks = Ranks(run, layout.world_size, setup=setup, args=args)
        try:
            codes = ranks.wait(TIMEOUT_S)
        except AssertionError as e:
            raise CannotRun(str(e)[-2000:]) from e
        if any(codes):
            raise CannotRun(f"{name}: exit codes {codes}: {ranks.logs()[-2000:]}")
        blocks = json.loads(out.read_text())[WARMUP:]
        spec = load_spec(run)
    ours, bare = ([p[i][0] / setting.block for p in blocks] for i in range(2))
    if statistics.median(bare) < setting.min_step_s:
        raise CannotRun(f"{name}: a step takes {statistics.median(bare):.3f} s, less than {setting.min_step_s} s")
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    tokens = setting.global_batch * setting.seq_len
    row: dict[str, Any] = {
        "layout": name,
        "ranks": layout.world_size,
        "pairs": len(blocks),
        "steps_a_block": setting.block,
        "ours_step_s": measure.spread(ours),
        "bare_step_s": measure.spread(bare),
        "ours_tokens_per_s": round(tokens / statistics.median(ours)),
        "bare_tokens_per_s": round(tokens / statistics.median(bare)),
        "ratio": {**measure.spread(ratios), "standard_error": _error(ratios)},
        # Depends least on other load.
        "processor_time_ratio": measure.spread([a[1] / b[1] for a, b in blocks]),
        "goal": setting.goal,
        "verdict": _verdict(ratios, setting.goal),
    }
    gpu = hardware.find_gpu_type(_device_name(setting))
    if gpu is not None:
        peak = gpu.tflops * 1e12  # dense, in 16 bit, from the data sheet
        flops = flops_per_step(spec, setting.global_batch) / layout.world_size
        row["mfu"] = {"ours": flops / statistics.median(ours) / peak, "bare": flops / statistics.median(bare) / peak}
    return row


def _error(ratios: list[float]) -> float | None:
    """Return the standard error of the median, from 1.4826 times the median deviation.

    The values are about normally distributed, except for a few outliers from other load.
    """
    if len(ratios) < 2:
        return None
    median = statistics.median(ratios)
    deviation = 1.4826 * statistics.median(abs(r - median) for r in ratios)
    return round(1.2533 * deviation / math.sqrt(len(ratios)), 4)


def _verdict(ratios: list[float], goal: float) -> str:
    """Return ``met`` or ``missed``; ``noisy`` if the error is more than half of what the goal allows."""
    error = _error(ratios)
    if error is None or error > (goal - 1) / 2:
        return "noisy"
    return "met" if statistics.median(ratios) <= goal else "missed"


def _device_name(setting: Setting) -> str:
    return torch.cuda.get_device_name(0) if setting.device == "cuda" else ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_overhead")
    parser.add_argument("--pairs", type=int, default=150, help="counted blocks per side")
    parser.add_argument("--signals", action="store_true", help="compare the trainer with and without all signals")
    parser.add_argument("--layouts", nargs="*", metavar="NAME", help="default: all of the device's")
    options = parser.parse_args(argv if argv is not None else [])
    setting = CUDA if torch.cuda.is_available() else CPU
    if options.signals:
        setting = replace(setting, block=SIGNALS_BLOCK, goal=SIGNALS_GOAL)
    result = measure.context(("clustertrain", "torch"))
    result["device"] = _device_name(setting) or "cpu"
    result["setting"] = describe(setting)
    result["rows"] = []
    for name in options.layouts or setting.layouts:
        row = measure_layout(setting, name, options.pairs, signals=options.signals)
        result["rows"].append(row)
        print(_line(row), flush=True)
    verdicts = {row["verdict"] for row in result["rows"]}
    if "noisy" in verdicts:
        raise CannotRun("the machine is too busy; nothing is written")
    path = measure.write("step_signals" if options.signals else "step_overhead", result)
    print(f"written to {path.relative_to(measure.ROOT)}")
    return 1 if "missed" in verdicts else 0


def _line(row: dict[str, Any]) -> str:
    ratio, mfu = row["ratio"], row.get("mfu")
    return (
        f"{row['layout']}: {row['ours_tokens_per_s']} tokens/s, bare {row['bare_tokens_per_s']}; a step "
        f"{row['ours_step_s']['median']:.3f} s; ratio {ratio['median']:.4f} +- {ratio['standard_error']} (processor "
        f"time {row['processor_time_ratio']['median']:.4f}, goal {row['goal']}): {row['verdict']}"
        + (f"; MFU {mfu['ours']:.3f}, bare {mfu['bare']:.3f}" if mfu else "")
    )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except CannotRun as e:
        print(f"cannot run: {e}", file=sys.stderr)
        sys.exit(3)
