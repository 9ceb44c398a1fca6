"""How much slower steps are while a save is being written."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.checkpoint_state import Shapes, State, manager_of, rank_state
from benchmarks.rank_team import Team
from clustertrain.checkpoint.manager import SaveResult

WIDTH, BATCH = 1024, 128
LEAST_STEPS = 3  # in a flight that counts
CLEAN_STEPS = 20


def step_seconds(team: Team, shapes: Shapes, folder: Path, rounds: int, words: str) -> list[tuple[float, float]]:
    """Job of a team. Pairs of mean seconds of a step: with no save under way, and with one, from the end of the stall
    to the commit. A round in which that was too short has none."""
    state = State(shapes)
    training = _Training()
    committed: list[SaveResult] = []
    manager = manager_of(folder, team.own_group(), on_commit=committed.append)

    def goes_on() -> bool:
        manager.poll()
        return team.rank != 0 or not committed

    pairs = []
    for n in range(rounds + 1):  # the first warms up
        clean = training.steps(lambda: True, CLEAN_STEPS)
        manager.save(n + 1, state.objects, rank_state())
        committed.clear()
        saving = training.steps(goes_on)
        manager.wait_for_saves()
        if n == 0:
            continue
        if len(saving) >= LEAST_STEPS:
            pairs.append((_mean(clean), _mean(saving)))
            team.say(f"  {words}, round {n}: {_mean(clean):.4f} s, {len(saving)} during a save {_mean(saving):.4f} s")
        else:
            team.say(f"  {words}, round {n}: a save takes {len(saving)} steps, too few to count")
    manager.close(10.0)
    team.on_rank_0(lambda: shutil.rmtree(folder))
    return pairs


class _Training:
    """Forward, backward and update of two layers on each rank. The ranks agree at each step whether to go on, as a
    session does, so they are as fast as the slowest."""

    def __init__(self) -> None:
        self._model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._batch = torch.randn(BATCH, WIDTH)

    def steps(self, goes_on: Callable[[], bool], most: int | None = None) -> list[float]:
        """Seconds of each, without that in which ``goes_on`` of a rank has ended it. Collective."""
        took: list[float] = []
        last = time.perf_counter()
        while most is None or len(took) < most:
            self._optimizer.zero_grad()
            self._model(self._batch).square().mean().backward()
            self._optimizer.step()
            ends = torch.tensor([not goes_on()], dtype=torch.int32)
            dist.all_reduce(ends, dist.ReduceOp.MAX)
            if ends:
                break
            now = time.perf_counter()
            took.append(now - last)
            last = now
        return took


def _mean(seconds: list[float]) -> float:
    return sum(seconds) / len(seconds)
