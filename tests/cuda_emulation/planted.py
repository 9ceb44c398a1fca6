"""Faults for a rank: each setup breaks the trainer in a way that a CPU run would not show."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from clustertrain.checkpoint.save.staging import StagingBuffer
from clustertrain.train.core import seeds
from clustertrain.train.core.async_copy import AsyncCopy
from clustertrain.train.data import prefetch
from clustertrain.train.data.prefetch import DeviceTransfer
from clustertrain.train.distributed import grad_norm, parallelize
from clustertrain.train.session.metrics_writer import MetricsWriter
from clustertrain.train.stability import monitor
from clustertrain.train.step import train_step
from clustertrain.train.step.train_step import TrainStep


def _before_update(act: Callable[[TrainStep, torch.Tensor], object]) -> None:
    """Call ``act`` with the loss sums of each step before its update."""
    update = TrainStep._update

    def changed(self: TrainStep, totals: torch.Tensor, *args: Any) -> Any:
        act(self, totals)
        return update(self, totals, *args)

    TrainStep._update = changed  # type: ignore[method-assign]


# -- a tensor on the wrong device


def batch_stays_on_host() -> None:
    DeviceTransfer.__call__ = lambda self, batch: batch  # type: ignore[method-assign]


def parameters_stay_on_host() -> None:
    parallelize._move_to_device = lambda part, device, offload: part._apply(  # type: ignore[assignment]
        lambda t: torch.empty_like(t, device="cpu") if t.is_meta else t
    )


def statistics_on_host() -> None:
    _before_update(lambda step, totals: totals + torch.ones(totals.shape))


# -- a tensor handed to a group of the other device


def cpu_tensor_to_nccl() -> None:
    _before_update(lambda step, totals: dist.all_reduce(torch.ones(1)))


def cpu_norm_to_nccl() -> None:
    original = grad_norm.local_squared_norm
    train_step.local_squared_norm = lambda *args, **kwargs: original(*args, **kwargs).cpu()  # type: ignore[attr-defined]


def cpu_tensor_broadcast_by_nccl() -> None:
    _before_update(lambda step, totals: dist.broadcast(torch.ones(1), 0))


def cpu_tensor_scattered_by_nccl() -> None:
    _before_update(lambda step, totals: dist.reduce_scatter_tensor(torch.ones(1), torch.ones(2)))


def cuda_tensor_to_gloo() -> None:
    _before_update(lambda step, totals: dist.all_reduce(totals, group=dist.new_group(backend="gloo")))


def cuda_tensor_broadcast_by_gloo() -> None:
    _before_update(lambda step, totals: dist.broadcast(totals, 0, group=dist.new_group(backend="gloo")))


def cuda_tensor_gathered_by_gloo() -> None:
    def gather(step: TrainStep, totals: torch.Tensor) -> None:
        dist.all_gather([torch.empty_like(totals) for _ in range(2)], totals, group=dist.new_group(backend="gloo"))

    _before_update(gather)


# -- what NCCL refuses


def tensor_of_another_gpu() -> None:
    _before_update(lambda step, totals: dist.all_reduce(totals.to(f"cuda:{1 - dist.get_rank()}")))


def tensor_of_another_gpu_gathered() -> None:
    def gather(step: TrainStep, totals: torch.Tensor) -> None:
        other = totals.to(f"cuda:{1 - dist.get_rank()}")
        dist.all_gather_into_tensor(torch.empty(2 * totals.numel(), device=totals.device), other.float())

    _before_update(gather)


def tensor_of_another_gpu_sent() -> None:
    def send(step: TrainStep, totals: torch.Tensor) -> None:
        peer = 1 - dist.get_rank()
        other = totals.to(f"cuda:{peer}")
        dist.batch_isend_irecv([dist.P2POp(dist.isend, other, peer), dist.P2POp(dist.irecv, other, peer)])

    _before_update(send)


def _bitwise(operation: Any) -> None:
    _before_update(
        lambda step, totals: dist.all_reduce(torch.ones(2, dtype=torch.int32, device=totals.device), op=operation)
    )


def bitwise_and() -> None:
    _bitwise(dist.ReduceOp.BAND)


def bitwise_or() -> None:
    _bitwise(dist.ReduceOp.BOR)


def bitwise_xor_scattered() -> None:
    def scatter(step: TrainStep, totals: torch.Tensor) -> None:
        flags = torch.ones(2, dtype=torch.int32, device=totals.device)
        dist.reduce_scatter_tensor(flags[:1].clone(), flags, op=dist.ReduceOp.BXOR)

    _before_update(scatter)


# -- a hidden wait of the host


def item() -> None:
    _before_update(lambda step, totals: totals.sum().item())


def boolean() -> None:
    _before_update(lambda step, totals: bool(totals.isfinite().all()))


def nonzero() -> None:
    _before_update(lambda step, totals: totals.nonzero())


def blocking_copy() -> None:
    _before_update(lambda step, totals: totals.cpu())


def pageable_copy() -> None:
    _before_update(lambda step, totals: torch.ones(4).to(totals.device, non_blocking=True))


def pinned_allocation() -> None:
    kept: list[torch.Tensor] = []
    _before_update(lambda step, totals: kept.append(torch.empty(1 << 12, pin_memory=True)))


def emptied_cache() -> None:
    _before_update(lambda step, totals: torch.cuda.empty_cache())


def host_index() -> None:
    _before_update(lambda step, totals: totals[torch.tensor([0, 1])])


# -- a wait for the step just launched, in the place of one for an earlier step


def check_without_lag() -> None:
    monitor.CHECK_LAG_STEPS = 0


def metrics_at_once() -> None:
    enqueue = MetricsWriter.enqueue

    def changed(self: MetricsWriter, *args: Any, **kwargs: Any) -> None:
        enqueue(self, *args, **kwargs)
        self.flush(wait=True)

    MetricsWriter.enqueue = changed  # type: ignore[method-assign]


# -- use of a tensor on a stream without an event


def transfer_without_wait() -> None:
    """The step does not wait for its batch."""

    def call(self: DeviceTransfer, batch: Any) -> Any:
        with torch.cuda.stream(self._stream):
            return prefetch._copy_to_device(batch, self._device, torch.cuda.current_stream(self._device))

    DeviceTransfer.__call__ = call  # type: ignore[method-assign]


def _stage_with_streams(choose: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Let each staging take the current stream and an idle one, as ``choose`` orders them, for its two waits."""
    stage, current_stream = StagingBuffer.stage, torch.cuda.current_stream

    def changed(self: StagingBuffer, *args: Any) -> Any:
        streams = iter(choose(current_stream(), torch.cuda.Stream()))
        torch.cuda.current_stream = lambda device=None: next(streams)  # type: ignore[assignment]
        try:
            return stage(self, *args)
        finally:
            torch.cuda.current_stream = current_stream

    StagingBuffer.stage = changed  # type: ignore[method-assign]


def staging_does_not_wait_for_step() -> None:
    """The copy of a checkpoint may start before the step's last kernels."""
    _stage_with_streams(lambda current, idle: (idle, current))


def step_does_not_wait_for_staging() -> None:
    """The next step's kernels may start during the copy of a checkpoint."""
    _stage_with_streams(lambda current, idle: (current, idle))


def values_on_another_stream() -> None:
    """A kernel on a side stream changes values that the step then reads."""
    side = torch.cuda.Stream()

    def change(step: TrainStep, totals: torch.Tensor) -> None:
        with torch.cuda.stream(side):
            totals.add_(0)

    _before_update(change)


# -- memory freed while a copy is under way


def transfer_without_record_stream() -> None:
    """The memory of the samples' positions goes to the next transfer while dropout still reads them."""
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]


def temporary_of_another_stream() -> None:
    """A side stream reads a temporary that is freed before the stream has run."""
    side = torch.cuda.Stream()

    def copy(step: TrainStep, totals: torch.Tensor) -> None:
        temporary = totals * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            temporary.to("cpu", non_blocking=True)

    _before_update(copy)


def unpinned_during_copy() -> None:
    """Memory is unpinned while the device still writes to it."""
    host = torch.empty(512, dtype=torch.float64)

    def copy(step: TrainStep, totals: torch.Tensor) -> None:
        runtime = torch.cuda.cudart()
        runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)
        host[: totals.numel()].copy_(totals, non_blocking=True)
        runtime.cudaHostUnregister(host.data_ptr())

    _before_update(copy)


# -- a value read before its copy has arrived


def metrics_read_too_early() -> None:
    original = AsyncCopy.__init__

    def init(self: AsyncCopy, *args: Any) -> None:
        original(self, *args)
        self._copy_done = None

    AsyncCopy.__init__ = init  # type: ignore[method-assign]


# -- collectives that ranks start in different orders: a group at a time, so that two of the three hang


@functools.cache
def _second_group() -> dist.ProcessGroup:
    """Return another group of all ranks. The first call is collective."""
    return dist.new_group()  # type: ignore[return-value]


def _start(tensors: Iterable[tuple[torch.Tensor, dist.ProcessGroup | None]]) -> None:
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in tensors]
    for work in works:
        work.wait()  # type: ignore[union-attr]


def groups_in_order_of_rank() -> None:
    """Two groups' reductions, in an order that depends on the rank."""

    def reduce(step: TrainStep, totals: torch.Tensor) -> None:
        pairs = [(torch.ones_like(totals), group) for group in (None, _second_group())]
        _start(reversed(pairs) if dist.get_rank() else pairs)

    _before_update(reduce)


def tensors_in_order_of_rank() -> None:
    """Two reductions of one group in an order that depends on the rank, like that of a set."""

    def reduce(step: TrainStep, totals: torch.Tensor) -> None:
        pairs = [(torch.ones(6, dtype=dtype, device=totals.device), None) for dtype in (torch.float32, torch.int32)]
        _start(reversed(pairs) if dist.get_rank() else pairs)

    _before_update(reduce)


def later_on_one_rank() -> None:
    """A reduction that one rank starts before the update, and the other after it."""
    update = TrainStep._update

    def changed(self: TrainStep, totals: torch.Tensor, *args: Any) -> Any:
        pair = torch.ones_like(totals), _second_group()
        if dist.get_rank() == 0:
            work: Any = dist.all_reduce(pair[0], group=pair[1], async_op=True)
        result = update(self, totals, *args)
        if dist.get_rank() == 0:
            work.wait()
        else:
            _start([pair])
        return result

    TrainStep._update = changed  # type: ignore[method-assign]


# -- transfers between two ranks in orders that do not match: gloo carries them, NCCL hangs


def both_send_first() -> None:
    """Each rank sends by itself before it receives."""

    def exchange(step: TrainStep, totals: torch.Tensor) -> None:
        peer = 1 - dist.get_rank()
        ours = torch.ones(8, device=totals.device)
        theirs = torch.empty_like(ours)
        for work in [dist.isend(ours, peer), dist.irecv(theirs, peer)]:
            work.wait()  # type: ignore[union-attr]

    _before_update(exchange)


def transfer_across_a_collective() -> None:
    """One rank sends in a batch before a reduction, and the other receives after it."""

    def exchange(step: TrainStep, totals: torch.Tensor) -> None:
        sent, reduced = torch.ones(8, device=totals.device), torch.ones(4, device=totals.device)
        if dist.get_rank() == 0:
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, 1)])
            dist.all_reduce(reduced)
        else:
            dist.all_reduce(reduced)
            works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, sent, 0)])
        for work in works:
            work.wait()

    _before_update(exchange)


def batch_against_single_transfer() -> None:
    """One rank sends in a batch, in the group's stream, and the other receives outside of one."""

    def exchange(step: TrainStep, totals: torch.Tensor) -> None:
        tensor = torch.ones(8, device=totals.device)
        if dist.get_rank() == 0:
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1)])
        else:
            works = [dist.irecv(tensor, 0)]  # type: ignore[list-item]
        for work in works:
            work.wait()

    _before_update(exchange)


# -- random numbers of the device that are not restored


def cuda_state_not_saved() -> None:
    capture = seeds.capture_rng_state
    seeds.capture_rng_state = lambda device: {k: v for k, v in capture(device).items() if k != "cuda"}


def cuda_state_not_restored() -> None:
    torch.cuda.set_rng_state = lambda *args: None  # type: ignore[assignment]


def state_restored_for_the_cpu() -> None:
    restore = seeds.restore_rng_state
    seeds.restore_rng_state = lambda state, device: restore(state, torch.device("cpu"))
