"""The emulated device and its checkers catch faults that are planted in the trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clustertrain.plan.layout import Layout
from tests.cuda_emulation import planted, sync_budget, trace
from tests.cuda_emulation.collectives import check_order
from tests.cuda_emulation.process import run
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
    submitted = make_run(folder / "run", layout, layout.world_size, steps=4, every=every, model={"dropout": 0.1})
    return Ranks(submitted, layout.world_size, setup=setup, args=args)


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
        (planted.tensor_of_another_gpu, "Tensor found on device cuda:"),
        (planted.tensor_of_another_gpu_gathered, "Tensor found on device cuda:"),
        (planted.tensor_of_another_gpu_sent, "Tensor found on device cuda:"),
        (planted.bitwise_and, "Cannot use ReduceOp.BAND"),
        (planted.bitwise_or, "Cannot use ReduceOp.BAND"),
        (planted.bitwise_xor_scattered, "Cannot use ReduceOp.BAND"),
    ],
)
def test_what_torch_or_nccl_refuses_fails_the_run(tmp_path: Path, fault: Setup, message: str) -> None:
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
        (planted.emptied_cache, "empty_cache"),
        (planted.host_index, "blocking copy, host to device"),
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
        (planted.step_does_not_wait_for_staging, "unordered"),
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


@pytest.mark.parametrize("fault", [planted.check_without_lag, planted.metrics_at_once])
def test_wait_for_the_step_just_launched_is_found(tmp_path: Path, fault: Setup) -> None:
    ranks = _run(tmp_path, ONE, _trace_with, fault).expect(0)
    assert sync_budget.early_waits(_events(ranks), 2)


def _races_of_staging(folder: Path, fault: Setup | None) -> list[str]:
    """Return the races between a step, the copy of its state for a save, and the step after it."""
    from clustertrain.checkpoint.core.state_dict import to_local_shard
    from clustertrain.checkpoint.save.staging import StagingBuffer

    if fault is not None:
        fault()
    weight = torch.ones(1024, device="cuda")
    buffer = StagingBuffer(folder, torch.device("cuda", 0))
    recorded = trace.Trace()
    recorded.start()
    weight.add_(1)
    buffer.stage([to_local_shard("weight", "model", weight)])
    weight.add_(1)
    recorded.stop()
    return list(map(str, RaceChecker().check(recorded.events)))


def test_staging_without_either_wait_races(tmp_path: Path) -> None:
    """By itself: in a session, the check of all steps before a save waits for the device, and hides a missing wait."""
    assert run(_races_of_staging, tmp_path, None) == []
    for fault in (planted.staging_does_not_wait_for_step, planted.step_does_not_wait_for_staging):
        races = run(_races_of_staging, tmp_path, fault)
        assert len(races) == 1 and "unordered read and write" in races[0], (fault.__name__, races)


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


@pytest.mark.parametrize(
    "fault", [planted.both_send_first, planted.transfer_across_a_collective, planted.batch_against_single_transfer]
)
def test_transfers_in_orders_that_do_not_match_are_found(tmp_path: Path, fault: Setup) -> None:
    ranks = _run(tmp_path, TWO, _trace_with, fault, "collective").expect(0)
    traces = {rank: list(trace.read(ranks.rank_dir / f"trace-{rank}.jsonl")) for rank in range(2)}
    mismatches = check_order(traces, trace.read_groups(ranks.rank_dir / "groups-0.json"))
    assert [mismatch.ranks for mismatch in mismatches] == [(0, 1)]


def test_value_read_before_its_copy_arrives_is_not_the_value(tmp_path: Path) -> None:
    ranks = _run(tmp_path, ONE, planted.metrics_read_too_early)
    assert ranks.wait() == [1]
    assert "cannot convert float NaN to integer" in ranks.logs()  # the number of tokens


def _resumed_digest(folder: Path, fault: Setup | None) -> str:
    """Return the digest of six steps of which the last two are resumed."""
    resumed = make_run(folder / "run", ONE, 1, script=(SCRIPT, ("4",)))
    Ranks(resumed, 1, setup=fault).expect(0)
    resumed.spec.write_text(resumed.spec.read_text().replace('"4"', '"6"'))
    Ranks(resumed, 1, 2, setup=fault).expect(0)
    return digest(resumed)


def test_random_numbers_of_the_device_are_restored(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", ONE, 1, script=(SCRIPT, ("6",)))
    Ranks(whole, 1).expect(0)
    assert _resumed_digest(tmp_path / "right", None) == digest(whole)
    for fault in (planted.cuda_state_not_saved, planted.cuda_state_not_restored, planted.state_restored_for_the_cpu):
        assert _resumed_digest(tmp_path / fault.__name__, fault) != digest(whole), fault.__name__
