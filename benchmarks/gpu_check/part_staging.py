"""How long a save holds training up, for state in GPU memory: the host's wait, the step's delay, and the copy's speed.

A window of training steps with a save at its start is compared with one without, both timed until the device is idle.
The bound is a plain copy of as many bytes into pinned memory. Then the same with a session, which waits for the device
before each save.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import measure
from benchmarks.cold import MEMORY_FILE_SYSTEMS, file_system
from benchmarks.gpu_check.parts import Figures, PartFailed, run_main
from benchmarks.gpu_check.session_saves import measure_session
from benchmarks.measure import CannotRun
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager
from clustertrain.checkpoint.save.staging import available_memory

WARMUP_ROUNDS = 2  # they fill both buffers
ENOUGH_S = 50.0  # after which a slow disk gets no further round
MIN_STEPS = 8  # in a window
_STATE_COPIES = {"memory": 4.0, "disk": 5.0, "gpu": 2.5}  # what a state of one byte needs of each


@dataclass(frozen=True)
class Size:
    """The model: its state is three times its parameters."""

    width: int
    tokens: int
    state_bytes: int
    rounds: int
    """That count."""


SIZES = {"cuda": Size(4096, 4096, 4 << 30, 5), "cpu": Size(128, 16, 1 << 20, 1)}
_LAYER_BYTES = 12  # per element: a weight and Adam's two moments, in fp32


class Round(NamedTuple):
    """Seconds of a window without a save and of one with it, of the call of the save, and from it to the commit."""

    clean: float
    saving: float
    host: float
    commit: float


class Training:
    """Linear layers whose step is long enough to hide a copy."""

    def __init__(self, size: Size, state_bytes: int, device: torch.device) -> None:
        layers = max(2, state_bytes // (_LAYER_BYTES * size.width**2))
        self.device = device
        linear = [nn.Linear(size.width, size.width, bias=False, device=device) for _ in range(layers)]
        self.model = nn.Sequential(*linear)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=device.type == "cuda")
        self._batch = torch.randn(size.tokens, size.width, device=device)
        self.step()
        self.state_bytes = 3 * sum(p.numel() * p.element_size() for p in self.model.parameters())

    def step(self) -> None:
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            self.model(self._batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, steps: int, before: Callable[[], Any] = lambda: None) -> float:
        """Return the seconds of ``before`` and of ``steps`` steps, until the device is idle."""
        self.synchronize()
        started = time.perf_counter()
        before()
        for _ in range(steps):
            self.step()
        self.synchronize()
        return time.perf_counter() - started


def choose_bytes(size: Size, device: torch.device, folder: Path) -> int:
    """Return the largest state up to the wanted one for which GPU, host memory and disk have room.

    Raises:
        CannotRun: there is room for less than a sixteenth of it.
    """
    free = {"memory": available_memory(), "disk": shutil.disk_usage(folder).free}
    if device.type == "cuda":
        free["gpu"] = torch.cuda.mem_get_info(device)[0]
    room = min(int(free[kind] / _STATE_COPIES[kind]) for kind in free)
    if room < size.state_bytes // 16:
        gib = ", ".join(f"{kind} {amount / 2**30:.1f}" for kind, amount in free.items())
        raise CannotRun(f"too little room for {size.state_bytes >> 20} MiB of state; GiB free: {gib}")
    return min(size.state_bytes, room)


def pinned_copy_gb_s(device: torch.device, size: int) -> float:
    """Return the speed of a plain copy from the device into pinned memory."""
    chunk = min(size, 1 << 30)
    source = torch.ones(chunk, dtype=torch.uint8, device=device)
    target = torch.empty(chunk, dtype=torch.uint8, pin_memory=device.type == "cuda")
    seconds = []
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return chunk / statistics.median(seconds[1:]) / 1e9


def measure_stall(options: argparse.Namespace) -> tuple[Figures, Any]:
    """Train and save in turn, in a scratch folder beside the evidence."""
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    size = SIZES[options.device]
    wanted = choose_bytes(size, device, options.out)
    copy_gb_s = pinned_copy_gb_s(device, wanted)
    training = Training(size, wanted, device)
    step_s = training.time(MIN_STEPS) / MIN_STEPS
    copy_s = training.state_bytes / copy_gb_s / 1e9
    steps = max(MIN_STEPS, math.ceil(2 * copy_s / step_s))
    with tempfile.TemporaryDirectory(prefix="gpu-check-staging-", dir=options.out.parent) as folder:
        rounds, pinned = _rounds(training, Path(folder), steps, WARMUP_ROUNDS + size.rounds)
    clean, saving, host, commit = zip(*rounds, strict=True)
    stalls = [with_save - without for with_save, without in zip(saving, clean, strict=True)]
    gib = training.state_bytes / 2**30
    kind = file_system(options.out)
    samples = {
        "window_s": clean, "window_with_save_s": saving, "stall_s": stalls, "host_wait_s": host, "commit_s": commit,
    }  # fmt: skip
    figures = {
        "state_gib": round(gib, 3),
        "host_wait_s": round(statistics.median(host), 4),
        "stall_s": round(statistics.median(stalls), 4),
        "stall_s_per_gib": round(statistics.median(stalls) / gib, 4),
        "pinned_copy_gb_s": round(copy_gb_s, 2),
        "plain_copy_s": round(copy_s, 4),
        "commit_s": round(statistics.median(commit), 3),
        "buffer_is_pinned": str(pinned),
        "file_system": f"{kind} (in memory)" if kind in MEMORY_FILE_SYSTEMS else kind,
    }
    spreads = {name: measure.spread(values) for name, values in samples.items()}
    details = {"steps_in_a_window": steps, "step_s": step_s, **spreads}
    is_whole = training.state_bytes > size.state_bytes / 2
    del training  # whose memory the session needs
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if not is_whole:
        return {**figures, "session_stall_s": "too little room"}, details
    try:
        session_figures, session_details = measure_session(options.device, options.out.parent)
    except CannotRun as e:
        raise PartFailed(f"the session's saves were not measured: {e}", figures, details) from e
    return {**figures, **session_figures}, {**details, **session_details}


def _rounds(training: Training, folder: Path, steps: int, rounds: int) -> tuple[list[Round], bool]:
    """Return the rounds that count, and whether the staging buffers are pinned."""
    state = {"model": training.model, "optimizer": training.optimizer}
    config = CheckpointConfig(attempt="1", layout={}, device=training.device)
    committed: list[Any] = []
    manager = CheckpointManager(folder / "c", Ranks(), config, on_commit=committed.append)
    manager.start()
    host: list[float] = []

    def save() -> None:
        started = time.perf_counter()
        manager.save(len(host) + 1, state)
        host.append(time.perf_counter() - started)

    seconds = []
    try:
        manager.reserve(state)
        started = time.perf_counter()
        for _ in range(rounds):
            clean = training.time(steps)
            saving = training.time(steps, save)
            manager.wait_for_saves()
            seconds.append(Round(clean, saving, host[-1], committed[-1].save_s))
            if time.perf_counter() - started > ENOUGH_S and len(seconds) > WARMUP_ROUNDS:
                break
        pinned = all(buffer._pinned for buffer in manager._staging_buffers)
    finally:
        manager.close(60.0)
    return seconds[WARMUP_ROUNDS:], pinned


if __name__ == "__main__":
    sys.exit(run_main(measure_stall))
