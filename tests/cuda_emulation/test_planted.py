"""The emulated device and its checkers catch faults that are planted in the trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertrain.plan.layout import Layout
from tests.cuda_emulation import planted, sync_budget, trace
from tests.cuda_emulation.collectives import check_order
from tests.cuda_emulation.races import RaceChecker
from tests.ranks.rank_pool import Ranks, digest, make_run

pytestmark = [pytest.mark.ranks, pytest.mark.emulated]
TWO = Layout(strategy="ddp", dp_replicate=2)
SHARDED = Layout(strategy="fsdp", dp_shard=2)
ONE = Layout()
SCRIPT = Path(__file__).with_name("dropout_script.py")
Setup = Callable[[], None]


def _trace_with(fault: Setup, *kinds: trace.Kind) -> None:
    trace.trace_steps(2, 3, *kinds)
    fault()


def _trace_far_behind_with(fault: Setup) -> None:
    """Trace while the device is so far behind that no wait for metrics orders what follows."""
    from tests.cuda_emulation.device import emulated

    _trace_with(fault)
    emulated.set_lag(1 << 40)


def _trace_hang_with(fault: Setup) -> None:
    trace.trace_until_quiet(5.0)
    fault()


def _run(folder: Path, layout: Layout, setup: Callable[..., None], *args: Any, every: int = 100) -> Ranks:
    run = make_run(folder / "run", layout, layout.world_size, steps=4, every=every, model={"dropout": 0.1})
    return Ranks(run, layout.world_size, setup=setup, args=args)


def _events(ranks: Ranks) -> list[trace.Event]:
    return list(trace.read(ranks.rank_dir / "trace-0.jsonl"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (planted.batch_stays_on_host, "Expected all tensors to be on the same device"),
        (planted.parameters_stay_on_host, "and module parameters {device(type='cpu')}"),
        (planted.statistics_on_host, "Expected all tensors to be on the same device"),
        (planted.cpu_norm_to_nccl, "Expected all tensors to be on the same device"),
        (planted.cpu_tensor_to_nccl, "No backend type associated with device type cpu"),
        (planted.cpu_tensor_broadcast_by_nccl, "No backend type associated with device type cpu"),
        (planted.cpu_tensor_scattered_by_nccl, "No backend type associated with device type cpu"),
        (planted.cuda_tensor_to_gloo, "No backend type associated with device type cuda"),
        (planted.cuda_tensor_broadcast_by_gloo, "No backend type associated with device type cuda"),
        (planted.cuda_tensor_gathered_by_gloo, "No backend type associated with device type cuda"),
    ],
)
def test_wrong_placement_fails_the_run(tmp_path: Path, fault: Setup, message: str) -> None:
    ranks = _run(tmp_path, TWO, fault)
    assert ranks.wait() == [1, 1]
    assert message in ranks.logs()


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (planted.item, "item"),
        (planted.boolean, "item"),
        (planted.nonzero, "aten::nonzero"),
        (planted.blocking_copy, "blocking copy, device to host"),
        (planted.pageable_copy, "copy of pageable memory, host to device"),
        (planted.pinned_allocation, "allocation of pinned memory"),
    ],
)
def test_hidden_wait_exceeds_the_budget(tmp_path: Path, fault: Setup, name: str) -> None:
    ranks = _run(tmp_path, ONE, _trace_with, fault, "sync").expect(0)
    syncs = Counter((e.name, e.place) for e in _events(ranks))
    unexpected = sync_budget.excess("ddp", {wait: n / 2 for wait, n in syncs.items()})
    assert (name, "train.step.train_step.__call__") in unexpected


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (planted.transfer_without_wait, "unordered"),
        (planted.staging_without_wait, "unordered"),
        (planted.values_on_another_stream, "unordered"),
        (planted.transfer_without_record_stream, "freed while in use"),
        (planted.temporary_of_another_stream, "freed while in use"),
        (planted.unpinned_during_copy, "freed while in use"),
    ],
)
def test_race_is_found(tmp_path: Path, fault: Setup, reason: str) -> None:
    ranks = _run(tmp_path, ONE, _trace_far_behind_with, fault, every=2).expect(0)
    races = list(map(str, RaceChecker().check(_events(ranks))))
    assert any(reason in race for race in races), races


def test_no_race_while_a_checkpoint_is_staged(tmp_path: Path) -> None:
    ranks = _run(tmp_path, ONE, trace.trace_steps, 2, 3, every=2).expect(0)
    assert any("staging" in e.place for e in _events(ranks))
    assert RaceChecker().check(_events(ranks)) == []


@pytest.mark.parametrize(
    "fault", [planted.groups_in_order_of_rank, planted.tensors_in_order_of_rank, planted.later_on_one_rank]
)
def test_collectives_in_different_orders_are_found(tmp_path: Path, fault: Setup) -> None:
    ranks = _run(tmp_path, SHARDED, _trace_hang_with, fault)
    assert ranks.wait() == [9, 9]
    traces = {rank: list(trace.read(ranks.rank_dir / f"trace-{rank}.jsonl")) for rank in range(2)}
    mismatches = check_order(traces, trace.read_groups(ranks.rank_dir / "groups-0.json"))
    assert [mismatch.ranks for mismatch in mismatches] == [(0, 1)]
    assert mismatches[0].first is not None and mismatches[0].second is not None


def test_value_read_before_its_copy_arrives_is_not_the_value(tmp_path: Path) -> None:
    ranks = _run(tmp_path, ONE, planted.metrics_read_too_early)
    assert ranks.wait() == [1]
    assert "cannot convert float NaN to integer" in ranks.logs()  # the number of tokens


def _resumed_digest(folder: Path, fault: Setup | None) -> str:
    """Return the digest of six steps of which the last two are resumed."""
    run = make_run(folder / "run", ONE, 1, script=(SCRIPT, ("4",)))
    Ranks(run, 1, setup=fault).expect(0)
    run.spec.write_text(run.spec.read_text().replace('"4"', '"6"'))
    Ranks(run, 1, 2, setup=fault).expect(0)
    return digest(run)


def test_random_numbers_of_the_device_are_restored(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", ONE, 1, script=(SCRIPT, ("6",)))
    Ranks(whole, 1).expect(0)
    assert _resumed_digest(tmp_path / "right", None) == digest(whole)
    for fault in (planted.cuda_state_not_saved, planted.cuda_state_not_restored, planted.state_restored_for_the_cpu):
        assert _resumed_digest(tmp_path / fault.__name__, fault) != digest(whole), fault.__name__
