"""What the built-in trainer adds to a step: its tokens/s against a bare PyTorch loop with the same model and layout.

Both train in the same processes, block of steps by block of steps in turn, so that whatever else the machine does meets
both. The trainer is the real one, ``clustertrain.train.trainer`` in a run directory with loader, schedule, stop
agreement and metrics; between two of its steps the bare loop gets the processes. A step of the trainer is timed from
one ``yield`` of ``session.steps`` to the next, which includes all that the session does between them.

    python -m benchmarks.step_overhead --pairs 300 --layouts single ddp

With ``--signals`` it is the trainer against itself: steps with all that ``[stability]`` watches, figures of layers in
every tenth step, and steps with as little of it as a recipe can ask for. Both have one model and optimizer in one
process, so a ratio of two neighbouring blocks is what the signals cost.
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
from benchmarks.bare_loop import Bare
from benchmarks.measure import CannotRun
from clustertrain import fsio, settings
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
LEAST_STEP_S = 0.2
# Dense bf16 of the data sheets, FLOP/s, for the model FLOPs utilisation.
PEAK = {"H200": 989.5e12, "H100": 989.5e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}


Seconds = tuple[float, float]  # wall, processor
ALL = StabilitySpec(spike="skip", layer_stats_every=10)
NONE = StabilitySpec(spike="off", layer_stats_every=0)
SIGNALS_BLOCK = 10  # steps, so that each block has one with figures of layers
SIGNALS_GOAL = 1.01


@dataclass(frozen=True)
class Setting:
    """``block``: steps in a row of either side. On a GPU more than one, since only their end waits for the device."""

    device: str
    precision: str
    compile: bool
    block: int
    goal: float
    layouts: dict[str, Layout]
    model: dict[str, int]
    seq_len: int
    global_batch: int
    micro_batch: int


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
    """Setup of a rank: from here on the bare loop runs between the steps of the session. Rank 0 writes the seconds of
    each block to ``out``, as pairs (trainer's, bare loop's) of (wall, processor) seconds."""
    os.environ[settings.DEVICE] = device
    run = RunDir(Path(run_dir))
    recipe = load_spec(run).recipe
    layout, batch, precision = load_plan(run)
    original = Session.steps

    def steps(self: Session, *args: Any, **kwargs: Any) -> Iterator[int]:
        bare = Bare(recipe, layout, batch, self.device, precision)
        pairs: list[tuple[Seconds, Seconds]] = []
        theirs = original(self, *args, **kwargs)
        step = next(theirs)
        while True:
            started = _now(self.device)
            for i in range(block):
                yield step
                last = next(theirs, None)
                if last is None:
                    return
                step = last
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
    """Setup of a rank: in every other block of steps the signals are off. Rank 0 writes the seconds of each block to
    ``out``, as pairs (with, without) of (wall, processor) seconds."""
    os.environ[settings.DEVICE] = device
    original, call = Session.steps, TrainStep.__call__
    switch = {"on": True}

    def stepped(self: TrainStep, batch: Any, samples: Any, loss_fn: Any, clip: Any, look: Any = None) -> Any:
        self.guard.spec = ALL if switch["on"] else NONE
        return call(self, batch, samples, loss_fn, clip, look if switch["on"] else None)

    def steps(self: Session, *args: Any, **kwargs: Any) -> Iterator[int]:
        pairs: list[tuple[Seconds, Seconds]] = []
        theirs = original(self, *args, **kwargs)
        processor = get_runtime(self).metrics_processor
        watch, halves = processor.monitor, []
        step = next(theirs)
        while True:
            # The first of a pair is now one and now the other, so that a drift of the machine meets both.
            switch["on"] = (len(halves) // 2 + len(halves)) % 2 == 0
            processor.monitor = watch if switch["on"] else None
            started = _now(self.device)
            for _ in range(block):
                yield step
                last = next(theirs, None)
                if last is None:
                    return
                step = last
            halves.append((switch["on"], _since(started, self.device)))
            if len(halves) % 2 == 0 and self.is_main:
                last_two = dict(halves[-2:])
                pairs.append((last_two[True], last_two[False]))
                Path(out).write_text(json.dumps(pairs))

    TrainStep.__call__ = stepped  # type: ignore[method-assign]
    Session.steps = steps  # type: ignore[method-assign]


def _now(device: torch.device) -> Seconds:
    """When all ranks have come here and the device has done what it was given, and this process's processor time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter(), time.process_time()


def _since(started: Seconds, device: torch.device) -> Seconds:
    now = _now(device)
    return now[0] - started[0], now[1] - started[1]


def _make_run(path: Path, setting: Setting, layout: Layout, blocks: int) -> RunDir:
    run = RunDir(path)
    (run.path / "attempts").mkdir(parents=True)
    recipe = {
        "model": setting.model,
        "data": {"seq_len": setting.seq_len, "max_bytes": 8_000_000},
        "stability": {"spike": ALL.spike, "layer_stats_every": ALL.layer_stats_every},
        # One more, whose end is the end of the run and belongs to no block.
        "train": {"steps": blocks * setting.block + 1, "global_batch": setting.global_batch, "log_every": 10},
        "checkpoint": {"every": 10**9},
        "parallel": {"compile": setting.compile},
    }
    run.spec.write_text(tomli_w.dumps({"recipe": recipe}))
    batch = {
        "micro_batch": setting.micro_batch,
        "grad_accum": setting.global_batch // layout.data_parallel // setting.micro_batch,
        "global_batch": setting.global_batch,
        "tokens_per_step": setting.global_batch * setting.seq_len,
    }
    fields = {f: getattr(layout, f) for f in Layout.__struct_fields__}
    fsio.write_json(run.plan, {"layout": fields, "batch": batch, "precision": setting.precision})
    return run


def timed(setting: Setting, name: str, pairs: int, *, signals: bool = False) -> dict[str, Any]:
    """One row of the result; with ``signals`` in place of the bare loop the trainer without them. Raises CannotRun
    when the ranks failed or a step is too short to tell."""
    layout = setting.layouts[name]
    with tempfile.TemporaryDirectory(prefix="step-overhead-") as folder:
        out = Path(folder, "pairs.json")
        run = _make_run(Path(folder, "run"), setting, layout, (WARMUP + pairs) * (1 + signals))
        setup: Callable[..., None] = alternate if signals else interleave
        given = (str(out), setting.block, setting.device)
        given = given if signals else (str(run.path), *given)
        ranks = Ranks(run, layout.world_size, setup=setup, args=given)
        try:
            codes = ranks.wait(TIMEOUT_S)
        except AssertionError as e:
            raise CannotRun(str(e)[-2000:]) from e
        if any(codes):
            raise CannotRun(f"{name}: exit codes {codes}: {ranks.logs()[-2000:]}")
        found = json.loads(out.read_text())[WARMUP:]
        spec = load_spec(run)
    ours, bare = ([p[i][0] / setting.block for p in found] for i in range(2))
    if setting.device == "cpu" and statistics.median(bare) < LEAST_STEP_S:
        raise CannotRun(f"{name}: a step takes {statistics.median(bare):.3f} s, {LEAST_STEP_S} s are needed to tell")
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    tokens = setting.global_batch * setting.seq_len
    row: dict[str, Any] = {
        "layout": name,
        "ranks": layout.world_size,
        "pairs": len(found),
        "steps_a_block": setting.block,
        "ours_step_s": measure.spread(ours),
        "bare_step_s": measure.spread(bare),
        "ours_tokens_per_s": round(tokens / statistics.median(ours)),
        "bare_tokens_per_s": round(tokens / statistics.median(bare)),
        "ratio": {**measure.spread(ratios), "standard_error": _error(ratios)},
        # What a busy machine changes least.
        "processor_time_ratio": measure.spread([a[1] / b[1] for a, b in found]),
        "goal": setting.goal,
        "verdict": _verdict(ratios, setting.goal),
    }
    peak = next((v for k, v in PEAK.items() if k in _device_name(setting).replace("-", " ").split()), None)
    if peak is not None:
        flops = flops_per_step(spec, setting.global_batch) / layout.world_size
        row["mfu"] = {"ours": flops / statistics.median(ours) / peak, "bare": flops / statistics.median(bare) / peak}
    return row


def _error(ratios: list[float]) -> float | None:
    """Of the median, for values spread about normally but for a few that something else on the machine has met: the
    spread is 1.4826 times the median deviation from the median."""
    if len(ratios) < 2:
        return None
    middle = statistics.median(ratios)
    deviation = 1.4826 * statistics.median(abs(r - middle) for r in ratios)
    return round(1.2533 * deviation / math.sqrt(len(ratios)), 4)


def _verdict(ratios: list[float], goal: float) -> str:
    """``met`` or ``missed``; ``noisy`` where the error is more than half of what the goal allows: such a ratio says
    nothing, whichever side of the goal it is on."""
    error = _error(ratios)
    if error is None or error > (goal - 1) / 2:
        return "noisy"
    return "met" if statistics.median(ratios) <= goal else "missed"


def _device_name(setting: Setting) -> str:
    return torch.cuda.get_device_name(0) if setting.device == "cuda" else ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_overhead")
    parser.add_argument("--pairs", type=int, default=150, help="blocks of either side that count")
    parser.add_argument("--signals", action="store_true", help="the trainer with all signals against one without")
    parser.add_argument("--layouts", nargs="*", metavar="NAME", help="default: all of the device's")
    options = parser.parse_args(argv if argv is not None else [])
    setting = CUDA if torch.cuda.is_available() else CPU
    if options.signals:
        setting = replace(setting, block=SIGNALS_BLOCK, goal=SIGNALS_GOAL)
    result = measure.context(("clustertrain", "torch"))
    result["device"] = _device_name(setting) or "cpu"
    result["setting"] = {"model": setting.model, "seq_len": setting.seq_len, "global_batch": setting.global_batch,
                         "micro_batch": setting.micro_batch, "precision": setting.precision,
                         "compile": setting.compile}  # fmt: skip
    result["rows"] = []
    for name in options.layouts or setting.layouts:
        row = timed(setting, name, options.pairs, signals=options.signals)
        result["rows"].append(row)
        print(_line(row), flush=True)
    verdicts = {row["verdict"] for row in result["rows"]}
    if "noisy" in verdicts:
        raise CannotRun("the machine is too busy to tell; nothing is written")
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
