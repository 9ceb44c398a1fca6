"""Step time during a save."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.checkpoint_state import Shapes, State, make_manager, rank_state
from benchmarks.rank_team import Team
from clustertrain.checkpoint.manager import SaveResult

WIDTH, BATCH = 1024, 128
MIN_STEPS = 3  # during a save, for it to count
CLEAN_STEPS = 20


def step_seconds(team: Team, shapes: Shapes, folder: Path, rounds: int, label: str) -> list[tuple[float, float]]:
    """Job of a team: return pairs of mean step times (s), without a save and during one.

    "During" is from the end of the stall to the commit. A round in which this was too short is omitted.
    """
    state = State(shapes)
    training = _Training()
    committed: list[SaveResult] = []
    manager = make_manager(folder, team.new_control_group(), on_commit=committed.append)

    def is_saving() -> bool:
        manager.poll()
        return team.rank != 0 or not committed

    pairs = []
    for n in range(rounds + 1):  # the first warms up
        clean = training.steps(lambda: True, CLEAN_STEPS)
        manager.save(n + 1, state.objects, rank_state())
        committed.clear()
        saving = training.steps(is_saving)
        manager.wait_for_saves()
        if n == 0:
            continue
        if len(saving) >= MIN_STEPS:
            pairs.append((_mean(clean), _mean(saving)))
            team.log(f"  {label}, round {n}: {_mean(clean):.4f} s, {len(saving)} during a save {_mean(saving):.4f} s")
        else:
            team.log(f"  {label}, round {n}: a save takes only {len(saving)} steps, not counted")
    manager.close(10.0)
    team.on_rank_0(lambda: shutil.rmtree(folder))
    return pairs


class _Training:
    """A training of two layers on each rank. As in a session, the ranks agree at each step whether to continue, so all
    are as fast as the slowest."""

    def __init__(self) -> None:
        self._model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._batch = torch.randn(BATCH, WIDTH)

    def steps(self, is_active: Callable[[], bool], max_steps: int | None = None) -> list[float]:
        """Train until ``is_active`` is false on a rank; return the seconds of each step before that one. Collective."""
        seconds: list[float] = []
        last = time.perf_counter()
        while max_steps is None or len(seconds) < max_steps:
            self._optimizer.zero_grad()
            self._model(self._batch).square().mean().backward()
            self._optimizer.step()
            is_over = torch.tensor([not is_active()], dtype=torch.int32)
            dist.all_reduce(is_over, dist.ReduceOp.MAX)
            if is_over:
                break
            now = time.perf_counter()
            seconds.append(now - last)
            last = now
        return seconds


def _mean(seconds: list[float]) -> float:
    return sum(seconds) / len(seconds)
