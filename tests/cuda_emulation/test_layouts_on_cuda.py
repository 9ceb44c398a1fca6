"""Training steps of each layout on the emulated device: equal to the CPU's, without hidden waits, races or disorder."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_emulation import sync_budget, trace
from tests.cuda_emulation.collectives import check_order
from tests.cuda_emulation.layouts import CASES, NOT_ON_CPU, Case
from tests.cuda_emulation.races import RaceChecker
from tests.cuda_emulation.trace import Event
from tests.ranks.rank_pool import Ranks, make_run

pytestmark = [pytest.mark.ranks, pytest.mark.emulated]
STEPS = 6
TRACED = (4, 5)
# bf16 rounds differently in another order of sums; SOAP's eigenvectors turn with the last bit of a gradient.
TOLERANCE = {"bf16": 5e-3, "fp16": 1e-3}
LOOSE = {"fsdp-soap": 0.05, "fsdp-muon": 1e-3, "zero1-muon": 1e-3, "tp-muon": 1e-3}


# What `make test` runs; `make cuda-emulated` runs all.
COVERING = frozenset({"zero1", "fsdp", "hsdp", "fsdp+tp", "cp", "pp-1f1b", "fsdp-offload", "ddp-fp16", "fsdp-sgd"})


def _cases(*, on_cpu: bool = False) -> list[Any]:
    names = [name for name in CASES if not on_cpu or name not in NOT_ON_CPU]
    return [pytest.param(name, marks=[] if name in COVERING else [pytest.mark.long]) for name in names]


@dataclass(frozen=True)
class TracedRun:
    """What the ranks of a layout logged and did in the traced steps."""

    losses: Mapping[int, tuple[float, float]]
    events: Mapping[int, list[Event]]
    groups: Mapping[str, tuple[int, ...]]


def _train(case: Case, folder: Path, **options: Any) -> Ranks:
    ranks = case.layout.world_size
    run = make_run(folder / "run", case.layout, ranks, steps=STEPS, every=100, **case.options)
    return Ranks(run, ranks, **options).expect(0)


@functools.cache
def traced_run(name: str) -> TracedRun:
    """Return the run of the case ``name``; the tests of this file share it."""
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


@pytest.mark.parametrize("name", _cases(on_cpu=True))
def test_losses_equal_the_cpu_s(name: str) -> None:
    tolerance = LOOSE.get(name, TOLERANCE.get(CASES[name].options.get("precision", "fp32"), 1e-6))
    losses, expected = traced_run(name).losses, cpu_losses(name)
    assert losses.keys() == expected.keys() and len(losses) == STEPS
    for step, values in losses.items():
        assert values == pytest.approx(expected[step], rel=tolerance), f"step {step}"


@pytest.mark.parametrize("name", _cases())
def test_host_waits_only_where_named(name: str) -> None:
    """The host waits where :mod:`tests.cuda_emulation.sync_budget` says so, and nowhere else."""
    steps = TRACED[1] - TRACED[0] + 1
    for rank, events in traced_run(name).events.items():
        syncs = Counter((e.name, e.place) for e in events if e.kind == "sync")
        assert not sync_budget.excess(name, {wait: n / steps for wait, n in syncs.items()}), f"rank {rank}"


def test_each_allowed_wait_has_a_reason() -> None:
    allowed = {*sync_budget.EVERY_STEP, *(wait for waits in sync_budget.MORE.values() for wait in waits)}
    assert allowed == sync_budget.REASONS.keys()
    assert sync_budget.MORE.keys() <= CASES.keys()


@pytest.mark.parametrize("name", _cases())
def test_streams_do_not_race(name: str) -> None:
    for rank, events in traced_run(name).events.items():
        races = sorted(set(map(str, RaceChecker().check(events))))
        assert not races, f"rank {rank}: " + "\n".join(races)


@pytest.mark.parametrize("name", _cases())
def test_ranks_start_collectives_in_the_same_order(name: str) -> None:
    run = traced_run(name)
    assert any(e.kind == "collective" for e in run.events[0])
    assert check_order(run.events, run.groups) == []
