"""Training steps of each layout on the emulated device: equal to the CPU's, without hidden waits, races or disorder."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda_emulation import sync_budget
from tests.cuda_emulation.collectives import check_order
from tests.cuda_emulation.layouts import CASES, COVERING, NOT_ON_CPU
from tests.cuda_emulation.races import RaceChecker
from tests.cuda_emulation.traced_run import STEPS, TRACED_STEPS, cpu_losses, traced_run

pytestmark = [pytest.mark.ranks, pytest.mark.emulated]
# bf16 rounds differently in another order of sums; SOAP's eigenvectors turn with the last bit of a gradient.
TOLERANCE = {"bf16": 5e-3, "fp16": 1e-3}
LOOSE = {"fsdp-soap": 0.05, "fsdp-muon": 1e-3, "zero1-muon": 1e-3, "tp-muon": 1e-3}


def _cases(*, on_cpu: bool = False) -> list[Any]:
    names = [name for name in CASES if not on_cpu or name not in NOT_ON_CPU]
    return [pytest.param(name, marks=[] if name in COVERING else [pytest.mark.long]) for name in names]


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
    by_rank = traced_run(name).waits_per_step()
    for rank, waits in by_rank.items():
        assert not sync_budget.excess(name, waits), f"rank {rank}"
    assert sync_budget.MORE.get(name, {}).keys() <= set().union(*by_rank.values()), (
        "the budget names waits that are gone"
    )


@pytest.mark.parametrize("name", _cases())
def test_host_waits_for_metrics_of_earlier_steps_only(name: str) -> None:
    for rank, events in traced_run(name).events.items():
        assert sync_budget.early_waits(events, TRACED_STEPS) == [], f"rank {rank}"


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
def test_ranks_start_collectives_and_transfers_in_orders_that_match(name: str) -> None:
    run = traced_run(name)
    assert any(e.kind == "collective" for e in run.events[0])
    assert check_order(run.events, run.groups) == []
