"""The emulated device refuses, reports and remembers what a CUDA device would."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.cuda_emulation.process import run

pytestmark = [pytest.mark.ranks, pytest.mark.emulated]


def _syncs(call: Callable[[], object]) -> list[str]:
    """Return the synchronizations of ``call``."""
    from tests.cuda_emulation.trace import Trace

    trace = Trace("sync")
    trace.start()
    call()
    trace.stop()
    return [event.name for event in trace.events]


def _matmul_of_two_devices() -> None:
    torch.ones(2, 2, device="cuda") @ torch.ones(2, 2)


def _add_on_another_gpu() -> None:
    torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")


def _index_of_gpu_with_cpu_weight() -> None:
    torch.nn.functional.embedding(torch.zeros(2, dtype=torch.long, device="cuda"), torch.ones(2, 2))


def _kernel_on_gpu_that_is_not_current() -> None:
    torch.ones(2, device="cuda:1").add_(1)


@pytest.mark.parametrize(
    "call",
    [_matmul_of_two_devices, _add_on_another_gpu, _index_of_gpu_with_cpu_weight, _kernel_on_gpu_that_is_not_current],
)
def test_wrong_device_is_refused(call: Callable[[], None]) -> None:
    with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device|is current"):
        run(call)


_SYNCS: dict[str, tuple[str, str]] = {
    "eigh": ("torch.linalg.eigh(torch.eye(3, device='cuda'))", "aten::_linalg_eigh.eigenvalues"),
    "svd": ("torch.linalg.svd(torch.eye(3, device='cuda'))", "aten::_linalg_svd.U"),
    "item": ("torch.ones(3, device='cuda').sum().item()", "item"),
    "bool": ("bool(torch.ones(1, device='cuda') > 0)", "item"),
    "nonzero": ("torch.ones(3, device='cuda').nonzero()", "aten::nonzero"),
    "mask": ("(lambda t: t[t > 0])(torch.ones(3, device='cuda'))", "aten::nonzero"),
    "to_device": ("torch.ones(3).to('cuda')", "blocking copy, host to device"),
    "to_host": ("torch.ones(3, device='cuda').cpu()", "blocking copy, device to host"),
    "host_index": ("torch.ones(3, device='cuda')[torch.tensor([0, 2])]", "blocking copy, host to device"),
    "list_index": ("torch.ones(3, device='cuda')[[0, 2]]", "blocking copy, host to device"),
    "host_index_put": (
        "(lambda t: t.__setitem__(torch.tensor([0, 2]), 2.0))(torch.ones(3, device='cuda'))",
        "blocking copy, host to device",
    ),
    "empty_cache": ("torch.cuda.empty_cache()", "empty_cache"),
    "literal": ("torch.tensor([1.0, 2.0], device='cuda')", "blocking copy, host to device"),
    "pageable": ("torch.ones(3).to('cuda', non_blocking=True)", "copy of pageable memory, host to device"),
    "pinned": ("torch.empty(1 << 20, pin_memory=True)", "allocation of pinned memory"),
    "device": ("torch.cuda.synchronize()", "device.synchronize"),
    "stream": ("torch.cuda.current_stream().synchronize()", "stream.synchronize"),
    "event": ("(lambda e: (e.record(), e.synchronize()))(torch.cuda.Event())", "event.synchronize"),
}
_NO_SYNCS = {
    "kernel": "torch.ones(3, device='cuda').mul_(2)",
    "masked_fill": "(lambda t: t.masked_fill_(t > 0, 2.0))(torch.ones(3, device='cuda'))",
    "fill_by_mask": "(lambda t: t.__setitem__(t > 0, 2.0))(torch.ones(3, device='cuda'))",
    "device_index": "(lambda t: t[t.new_zeros(2, dtype=torch.long)])(torch.ones(3, device='cuda'))",
    "shape": "torch.ones(3, device='cuda').numel()",
    "pinned_again": "[torch.empty(1 << 10, pin_memory=True) for _ in range(2)]",
    "pinned_copy": "torch.empty(1 << 11, pin_memory=True).to('cuda', non_blocking=True)",
}


def _syncs_of(code: str) -> list[str]:
    del [torch.empty(1 << 10, pin_memory=True) for _ in range(2)][:]  # blocks that the cases may reuse
    torch.empty(1 << 11, pin_memory=True)
    return _syncs(lambda: eval(code))


@pytest.mark.parametrize("name", _SYNCS)
def test_wait_of_host_is_reported(name: str) -> None:
    code, expected = _SYNCS[name]
    assert run(_syncs_of, code) == [expected]


@pytest.mark.parametrize("name", _NO_SYNCS)
def test_what_does_not_wait_is_not_reported(name: str) -> None:
    assert run(_syncs_of, _NO_SYNCS[name]) == []


def _read_copy(wait: bool) -> float:
    host = torch.ones(1, device="cuda").to("cpu", non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    if wait:
        done.synchronize()
    return float(host)


def test_copy_arrives_when_host_has_waited() -> None:
    assert run(_read_copy, True) == 1.0
    assert run(_read_copy, False) != 1.0


def _event_queries(kernels: int) -> list[bool]:
    """Return three queries of an event: at once, again, and of a second event after ``kernels``."""
    from tests.cuda_emulation.device import emulated

    emulated.set_lag(64)
    values, first, second = torch.ones(1, device="cuda"), torch.cuda.Event(), torch.cuda.Event()
    first.record()
    queries = [first.query(), first.query()]
    second.record()
    for _ in range(kernels):
        values.add_(1)
    return [*queries, second.query()]


def test_busy_device_is_some_kernels_behind() -> None:
    assert run(_event_queries, 2) == [False, True, False]
    assert run(_event_queries, 100) == [False, True, True]


def _random_numbers() -> tuple[bool, bool, bool]:
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda")
    after_first = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    return (
        torch.equal(first, torch.rand(4, device="cuda")),
        torch.equal(first, after_first),
        torch.equal(torch.nn.functional.dropout(torch.ones(64, device="cuda")).cpu(), torch.ones(64)),
    )


def test_random_generator_is_the_device_s_own() -> None:
    assert run(_random_numbers) == (True, False, False)


def _cpu_numbers_after_device_numbers() -> bool:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    torch.rand(4, device="cuda")
    return torch.equal(expected, torch.rand(4))


def test_device_does_not_draw_from_the_cpu_s_generator() -> None:
    assert run(_cpu_numbers_after_device_numbers)


def _memory() -> tuple[int, int, int]:
    before = torch.cuda.memory_allocated()
    kept = torch.empty(100, dtype=torch.uint8, device="cuda")
    during = torch.cuda.memory_allocated() - before
    torch.empty(5000, dtype=torch.uint8, device="cuda")
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return during, peak, torch.cuda.memory_allocated() - before


def test_memory_is_counted_in_blocks_of_512_bytes() -> None:
    assert run(_memory) == (512, 512 + 5120, 0)


def _events_of_resized_output() -> list[tuple[str, int]]:
    """Return the kernels and memory events that concern the output of an operator that allocates it by resizing."""
    from tests.cuda_emulation.trace import Trace

    values = torch.ones(1000, device="cuda")
    trace = Trace("kernel", "memory")
    trace.start()
    output = values.abs()
    address = output.data_ptr()
    del output
    trace.stop()
    writes = [(event.name, event.writes[0]) for event in trace.events if event.writes]
    return [(name, written.nbytes) for name, written in writes if written.begin == address]


def test_memory_of_resized_output_is_reported() -> None:
    assert run(_events_of_resized_output) == [("allocate", 4096), ("aten::abs.out", 4000), ("free", 4096)]


def _is_uninitialized_memory_nan() -> bool:
    return bool(torch.empty(64, device="cuda").isnan().all())


def test_uninitialized_memory_is_nan() -> None:
    assert run(_is_uninitialized_memory_nan)


def _allocate_beyond_capacity() -> None:
    from tests.cuda_emulation.device import emulated

    emulated.set_capacity(1 << 20)
    torch.empty(2 << 20, dtype=torch.uint8, device="cuda")


def test_allocation_beyond_capacity_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError, match="OutOfMemoryError: CUDA out of memory"):
        run(_allocate_beyond_capacity)
