"""A short run of a layout on the emulated device, with what its ranks did in two of the steps."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cuda_emulation import trace
from tests.cuda_emulation.layouts import CASES, Case
from tests.cuda_emulation.sync_budget import Wait
from tests.cuda_emulation.trace import Event
from tests.ranks.rank_pool import Ranks, make_run

STEPS = 8
TRACED = (6, 7)
TRACED_STEPS = TRACED[1] - TRACED[0] + 1


@dataclass(frozen=True)
class TracedRun:
    """What the ranks of a layout logged and did in the traced steps."""

    losses: Mapping[int, tuple[float, float]]
    events: Mapping[int, list[Event]]
    groups: Mapping[str, tuple[int, ...]]

    def waits_per_step(self) -> dict[int, dict[Wait, float]]:
        """Return how often each rank waited for the device in a step, by what waited and where."""
        counts = {
            rank: Counter((e.name, e.place) for e in events if e.kind == "sync") for rank, events in self.events.items()
        }
        return {rank: {wait: n / TRACED_STEPS for wait, n in waits.items()} for rank, waits in counts.items()}


def _train(case: Case, folder: Path, **options: Any) -> Ranks:
    ranks = case.layout.world_size
    run = make_run(folder / "run", case.layout, ranks, steps=STEPS, every=100, **case.options)
    return Ranks(run, ranks, **options).expect(0)


@functools.cache
def traced_run(name: str) -> TracedRun:
    """Return the run of the case ``name``, traced once per process."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = _train(CASES[name], Path(folder), setup=trace.trace_steps, args=TRACED)
        events = {
            rank: list(trace.read(ranks.rank_dir / f"trace-{rank}.jsonl"))
            for rank in range(CASES[name].layout.world_size)
        }
        groups: dict[str, tuple[int, ...]] = {}
        for rank in events:
            groups |= trace.read_groups(ranks.rank_dir / f"groups-{rank}.json")
        return TracedRun(ranks.losses(), events, groups)


@functools.cache
def cpu_losses(name: str) -> Mapping[int, tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        return _train(CASES[name], Path(folder), device="cpu").losses()
