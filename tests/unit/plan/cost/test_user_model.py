"""The memory of a user's model, estimated from its statistics."""

from __future__ import annotations

import msgspec
import pytest

from clustertrain.plan.cost import user_model
from clustertrain.plan.cost.activations import PassConfig
from clustertrain.plan.cost.memory import GIB
from clustertrain.plan.cost.user_model import MemoryTrace, ModelStats, ModuleStats
from clustertrain.plan.layout import Layout

M = 1024 * 1024
# Ten units of 20 M parameters and 56 M others; 0.5 GiB of them are not trained.
MODEL = ModelStats(
    parameters=256 * M,
    parameter_bytes=GIB,
    trainable=128 * M,
    trainable_bytes=GIB // 2,
    state_bytes=GIB,
    buffers=1,
    buffer_bytes=GIB // 4,
    dtypes={"float32": 256 * M},
    largest=ModuleStats("embed", 56 * M),
    units=tuple(ModuleStats(f"layers.{i}", 20 * M) for i in range(10)),
)
ONE = PassConfig(seq_len=8, micro_batch=2)


def states(layout: Layout, run: PassConfig = ONE) -> tuple[float | None, float | None, float | None]:
    estimate = user_model.estimate_user_model(MODEL, layout, run, None)
    return estimate.params_gib, estimate.grads_gib, estimate.optimizer_gib


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(), (1.25, 0.5, 1.0)),
        (Layout(strategy="ddp", dp_replicate=4), (1.25, 0.5, 1.0)),
        (Layout(strategy="zero1", dp_replicate=4, zero1=True), (1.25, 0.5, 0.25)),
        (Layout(tp=2), (0.75, 0.25, 0.5)),
        (Layout(pp=4, schedule="1f1b"), (0.5, 0.125, 0.25)),
    ],
    ids=["single", "ddp", "zero1", "tp", "pp"],
)
def test_states_per_layout(layout: Layout, expected: tuple[float, ...]) -> None:
    assert states(layout) == expected


def test_sharded_rank_holds_shard_and_gathered() -> None:
    layout = Layout(strategy="fsdp", dp_shard=4)
    params, grads, optimizer = states(layout)
    gathered = (56 + 2 * 20) * M * 4 / GIB  # the other parameters, the current unit and the next one
    whole = (56 + 20) * M * 4 / GIB + 56 * M * 4 / GIB  # a gradient for each, and the copy that is reduced
    assert (params, grads, optimizer) == pytest.approx((0.25 + 0.25 + gathered, 0.125 + whole, 0.25))
    kept, _, _ = states(msgspec.structs.replace(layout, reshard_after_forward=False))
    assert kept == pytest.approx(0.25 + 0.25 + 1.0)
    _, deferred, _ = states(layout, PassConfig(seq_len=8, micro_batch=2, grad_accum=2))
    assert deferred == pytest.approx(0.125 + 1.0 + 56 * M * 4 / GIB)  # nothing is reduced before the last micro-batch


def test_model_without_units_is_gathered_whole() -> None:
    model = msgspec.structs.replace(MODEL, units=())
    estimate = user_model.estimate_user_model(model, Layout(strategy="fsdp", dp_shard=4), ONE, None)
    assert estimate.params_gib == pytest.approx(0.25 + 0.25 + 1.0)


def test_traced_step_gives_peak() -> None:
    estimate = user_model.estimate_user_model(MODEL, Layout(), ONE, 8.0)
    assert (estimate.activations_gib, estimate.peak_gib, estimate.fits, estimate.capacity_gib) == (
        None,
        None,
        None,
        8.0,
    )
    model = msgspec.structs.replace(
        MODEL, memory_trace=MemoryTrace(micro_batch=2, activations_bytes=3 * GIB, peak_bytes={})
    )
    estimate = user_model.estimate_user_model(model, Layout(), ONE, 8.0)
    assert (estimate.activations_gib, estimate.overhead_gib, estimate.peak_gib, estimate.fits) == (3.0, 0.0, 5.75, True)
    on_gpu = user_model.estimate_user_model(model, Layout(), PassConfig(seq_len=8, micro_batch=2, device="cuda"), 8.0)
    assert on_gpu.overhead_gib == pytest.approx(1.0 + 0.05 * 5.75)  # the context, and the allocator's extra reserve
    assert (on_gpu.peak_gib, on_gpu.fits) == (pytest.approx(1.05 * 5.75 + 1.0), True)
    larger = msgspec.structs.replace(
        model, memory_trace=MemoryTrace(micro_batch=2, activations_bytes=4 * GIB, peak_bytes={})
    )
    assert (
        user_model.estimate_user_model(larger, Layout(), PassConfig(seq_len=8, micro_batch=2, device="cuda"), 8.0).fits
        is False
    )


def test_describe_stats() -> None:
    description = user_model.describe_stats(MODEL, "nets:Net", Layout(tp=2), 2)
    assert description == (
        "counted: nets:Net has 268,435,456 parameters (float32); 134,217,728 of them trained; 268,435,456 bytes of "
        "buffers; most of them, 58,720,256, in embed; 10 layers to shard one by one; tp and pp taken as an even split"
    )
    assert "no list of layers" in user_model.describe_stats(
        msgspec.structs.replace(MODEL, units=()), "a:b", Layout(), 2
    )


def test_too_large_states_warn() -> None:
    memory = user_model.estimate_user_model(MODEL, Layout(), ONE, None)
    assert user_model.memory_warning(MODEL, memory, 3.0, Layout()) is None
    warning = user_model.memory_warning(MODEL, memory, 2.0, Layout())
    assert warning is not None and "2.8 GiB per rank, more than 2.0 GiB; --layout fsdp" in warning
    failed = msgspec.structs.replace(MODEL, trace_error="it failed")
    assert user_model.memory_warning(failed, memory, 3.0, Layout()) == "activations are unknown: it failed"


def test_building_the_whole_model_warns() -> None:
    large = msgspec.structs.replace(MODEL, parameter_bytes=20 * GIB)
    sharded = Layout(strategy="fsdp", dp_shard=8)
    (warning,) = user_model.construction_warnings(large, sharded, 8, 16.0)
    assert "8 x 20.2 GiB per node" in warning and "init_parameter" in warning
    assert "splits the model on the GPU" in user_model.construction_warnings(large, Layout(tp=8), 8, 16.0)[1]
    assert user_model.construction_warnings(MODEL, sharded, 8, 16.0) == []
    assert user_model.construction_warnings(msgspec.structs.replace(large, fills_meta=True), Layout(tp=8), 8, 1.0) == []
