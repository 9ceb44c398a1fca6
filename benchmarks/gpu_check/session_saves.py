"""How long a save holds a session up: the built-in trainer in a run, with the checks that come before each save.

A session checks all steps before it saves, so the host waits until the device has done them. That and the copy are in
these figures; :mod:`benchmarks.gpu_check.part_staging` measures the copy alone.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure
from benchmarks.gpu_check.parts import Figures
from benchmarks.measure import CannotRun
from clustertrain.checkpoint.manager import CheckpointManager
from clustertrain.plan.layout import Layout
from clustertrain.train.session.session import Session
from tests.ranks.rank_pool import Ranks, make_run

TIMEOUT_S = 80.0
WARMUP = 2  # windows with a save, which fill both buffers


@dataclass(frozen=True)
class SessionSize:
    """What to train, and the steps of a window: every other one begins with a save."""

    window: int
    rounds: int
    seq_len: int
    precision: str
    model: dict[str, int] = field(default_factory=dict)


SIZES = {
    # About 0.36e9 parameters: a state of 4 GiB.
    "cuda": SessionSize(
        20, 3, 2048, "bf16", {"dim": 2048, "layers": 5, "heads": 16, "kv_heads": 8, "vocab_size": 32_000}
    ),
    "cpu": SessionSize(3, 1, 16, "fp32"),
}


def measure_session(device: str, folder: Path) -> tuple[Figures, Any]:
    """Train with saves in a run below ``folder``; return the stall of a save and the host's wait in it, in seconds.

    Raises:
        CannotRun: the run failed.
    """
    size = SIZES[device]
    with tempfile.TemporaryDirectory(prefix="gpu-check-session-", dir=folder) as name:
        out = Path(name, "windows.json")
        run = make_run(
            Path(name, "run"), Layout(), 1, steps=2 * size.window * (WARMUP + size.rounds + 1), every=2 * size.window,
            keep=1, global_batch=4, precision=size.precision, model=dict(size.model), data={"seq_len": size.seq_len},
        )  # fmt: skip
        ranks = Ranks(run, 1, setup=time_windows, args=(str(out), size.window), device=device)
        try:
            codes = ranks.wait(TIMEOUT_S)
        except AssertionError as e:
            raise CannotRun(str(e)[-2000:]) from e
        if any(codes):
            raise CannotRun(f"exit codes {codes}: {ranks.logs()[-2000:]}")
        windows = json.loads(out.read_text())[2 * WARMUP :]
    clean, saving = ([row["seconds"] for row in windows if row["saves"] == saves] for saves in (False, True))
    host = [row["host_s"] for row in windows if row["saves"]]
    stalls = [with_save - without for with_save, without in zip(saving, clean, strict=False)]
    return {
        "session_stall_s": round(statistics.median(stalls), 4),
        "session_host_wait_s": round(statistics.median(host), 4),
        "session_step_s": round(statistics.median(clean) / size.window, 5),
    }, {name: measure.spread(values) for name, values in (("session_stall_s", stalls), ("session_host_wait_s", host))}


def time_windows(out: str, window: int) -> None:
    """Setup of a rank: time windows of steps, from an idle device to an idle device; write them to ``out``.

    Checkpoints are due every two windows, after the first step of a window. Each begins with all saves committed.
    """
    original_steps, original_save = Session.steps, CheckpointManager.save
    managers: list[CheckpointManager] = []

    def save(self: CheckpointManager, *args: Any, **kwargs: Any) -> None:
        managers[:] = [self]
        original_save(self, *args, **kwargs)

    def steps(self: Session, *args: Any, **kwargs: Any) -> Iterator[int]:
        def idle() -> None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        session_steps, windows = original_steps(self, *args, **kwargs), []
        started, host_s = 0.0, 0.0
        for done in itertools.count():  # steps
            if (done + 1) % window == 0:
                idle()
                if started:
                    saves = (done + 1) // window % 2 == 1
                    windows.append({"saves": saves, "seconds": time.perf_counter() - started, "host_s": host_s})
                    Path(out).write_text(json.dumps(windows))
                for manager in managers:
                    manager.wait_for_saves()
                started = time.perf_counter()
            before = time.perf_counter()
            step = next(session_steps, None)  # ends the step before, and saves if that is due
            if done % window == 0:
                host_s = time.perf_counter() - before
            if step is None:
                return
            yield step

    Session.steps, CheckpointManager.save = steps, save  # type: ignore[method-assign]
