"""Sanity of the predicted step time: more work takes longer, and hidden communication costs little."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from clustertrain.config import hardware
from clustertrain.config.parallel import ParallelSpec
from clustertrain.plan.cost import collectives, compute, step_time
from clustertrain.plan.cost.activations import PassConfig
from clustertrain.plan.cost.compute import FITTED_CONSTANTS
from clustertrain.plan.cost.frameworks import CLUSTERTRAIN, Framework, get_framework, with_compiled_model
from clustertrain.plan.cost.memory import estimate_memory
from clustertrain.plan.cost.model_shape import DecoderSizes
from clustertrain.plan.cost.step_time import Machine, StepEstimate
from clustertrain.plan.layout import Layout

LLAMA_8B = DecoderSizes(vocab_size=128_256, dim=4096, layers=32, heads=32, kv_heads=8, hidden=14_336)
FSDP = Layout(strategy="fsdp", dp_shard=64)


def machine(name: str = "h100", precision: str = "bf16") -> Machine:
    gpu = hardware.find_gpu_type(name)
    assert gpu is not None
    return Machine(collectives.build_network(gpu, 8), compute.build_rates(gpu, precision))


def step(
    layout: Layout,
    gpu: str = "h100",
    model: DecoderSizes = LLAMA_8B,
    framework: Framework = CLUSTERTRAIN,
    **changes: Any,
) -> StepEstimate:
    config_fields: dict[str, Any] = {
        "seq_len": 8192,
        "micro_batch": 1,
        "precision": "bf16",
        "device": "cuda",
        **changes,
    }
    return step_time.estimate_step(model, layout, PassConfig(**config_fields), framework, machine(gpu))


def block_seconds(
    tokens: int, tp: int = 1, model: DecoderSizes = LLAMA_8B, gpu: str = "h100", precision: str = "bf16"
) -> float:
    rates = machine(gpu, precision).rates
    seconds = compute.block_s(model, tokens, 8192, tp, tp, CLUSTERTRAIN, rates)
    return seconds.forward_s + seconds.backward_s


def test_time_scales_with_tokens() -> None:
    assert block_seconds(16_384) == pytest.approx(2 * block_seconds(8192), rel=0.05)


def test_zero2_reduces_every_micro_batch() -> None:
    """Its ranks keep only their share of each micro-batch's gradients; ZeRO-1 reduces their sum."""
    deepspeed = get_framework("deepspeed")
    layout = Layout(strategy="zero1", zero1=True, dp_replicate=64)

    def data_s(framework: Framework, grad_accum: int) -> float:
        config = PassConfig(seq_len=512, micro_batch=1, grad_accum=grad_accum, precision="bf16", device="cuda")
        return step_time.estimate_step(LLAMA_8B, layout, config, framework, machine()).data_s

    zero2 = dataclasses.replace(deepspeed, shards_gradients=True)
    assert data_s(deepspeed, 8) == pytest.approx(data_s(deepspeed, 1))
    assert data_s(zero2, 8) == pytest.approx(8 * data_s(deepspeed, 1))


def test_small_pieces_run_less_efficiently() -> None:
    assert 16 * block_seconds(512) > 1.1 * block_seconds(8192)
    shares = [tp * block_seconds(8192, tp) for tp in (1, 2, 4, 8)]  # GPU-seconds for the same work
    assert shares == sorted(shares) and shares[-1] > 1.02 * shares[0]


def test_unaligned_width_is_slower() -> None:
    odd = dataclasses.replace(LLAMA_8B, hidden=14_336 + 1)
    assert block_seconds(8192, model=odd) > 1.2 * block_seconds(8192)


def test_speed_by_gpu_and_precision() -> None:
    assert (
        block_seconds(8192, gpu="b200")
        < block_seconds(8192, gpu="h100")
        < block_seconds(8192, gpu="a100")
        < block_seconds(8192, gpu="v100")
    )
    assert (
        block_seconds(8192, precision="fp8")
        < block_seconds(8192)
        < block_seconds(8192, precision="tf32")
        < block_seconds(8192, precision="fp32")
    )
    assert block_seconds(8192, gpu="a100", precision="fp8") == block_seconds(
        8192, gpu="a100"
    )  # it has no 8-bit matmuls


def test_no_gpu_exceeds_its_data_sheet() -> None:
    for gpu in hardware.CATALOG:
        for precision, peak in (("bf16", gpu.tflops), ("fp8", gpu.fp8_tflops or gpu.tflops)):
            rates = compute.build_rates(gpu, precision)
            flops = 2.0 * 8192**3
            assert (
                flops / compute.matmul_s(8192, 8192, 8192, rates.matmul, rates.memory, 2, FITTED_CONSTANTS)
                < peak * 1e12
            )


def test_recomputation_cost() -> None:
    none, selective, full, half = (
        step(msgspec_replace(FSDP, activation_checkpointing=kind)) for kind in ("none", "selective", "full", "full/2")
    )
    assert half.recompute_s == pytest.approx(full.recompute_s / 2, rel=0.05)
    assert none.recompute_s == 0
    assert 0.25 < full.recompute_s / none.compute_s < 0.4
    assert 0 < selective.recompute_s < full.recompute_s / 2
    assert none.compute_s == full.compute_s


def test_offloaded_activations_cross_the_bus_twice() -> None:
    plain, offloaded = (
        step(FSDP, grad_accum=2),
        step(FSDP, grad_accum=2, parallel=ParallelSpec(activation_offload=True)),
    )
    activations_gb = (
        estimate_memory(LLAMA_8B, FSDP, PassConfig(8192, 1, precision="bf16", device="cuda"), None).activations_gib or 0
    ) * 1.0737
    assert offloaded.step_s - plain.step_s == pytest.approx(offloaded.offload_s)
    assert offloaded.offload_s == pytest.approx(2 * 2 * activations_gb / 25, rel=0.2)
    assert plain.offload_s == 0


def msgspec_replace(layout: Layout, **changes: Any) -> Layout:
    return Layout(**{**{f: getattr(layout, f) for f in layout.__struct_fields__}, **changes})


def estimate_pipelined(virtual: int = 1, schedule: str = "1f1b", accumulate: int = 16, vocab: int = 64) -> StepEstimate:
    layout = Layout(pp=4, schedule=schedule, virtual_stages=virtual, reshard_after_forward=False)
    # Almost no head, so that only filling and draining cause the bubble.
    return step(layout, model=dataclasses.replace(LLAMA_8B, vocab_size=vocab), grad_accum=accumulate)


def test_pipeline_bubble_matches_paper() -> None:
    """The bubble is (p - 1) / (v m) of the compute time (arXiv 2104.04473, section 2.2)."""
    for virtual in (1, 2, 4):
        for micro_batches in (8, 16, 32):
            estimate = estimate_pipelined(virtual, "interleaved" if virtual > 1 else "1f1b", micro_batches)
            assert estimate.bubble_s / estimate.compute_s == pytest.approx(3 / (virtual * micro_batches), rel=0.1)


def test_split_backward_recomputes_for_each_layer() -> None:
    """Only torch's backward passes for weights are known to do so: not those of other frameworks."""
    layouts = [
        Layout(pp=4, schedule=schedule, virtual_stages=2, activation_checkpointing="full")
        for schedule in ("interleaved", "zero-bubble")
    ]
    whole, split = (step(layout, grad_accum=8) for layout in layouts)
    assert split.recompute_s == pytest.approx(10 * whole.recompute_s)
    whole, split = (step(layout, framework=get_framework("megatron"), grad_accum=8) for layout in layouts)
    assert split.recompute_s == whole.recompute_s > 0


def test_bubble_and_sends_by_schedule() -> None:
    plain, interleaved, zero_bubble, zbv = (
        estimate_pipelined(),
        estimate_pipelined(2, "interleaved"),
        estimate_pipelined(2, "zero-bubble"),
        estimate_pipelined(2, "zbv"),
    )
    assert zbv.bubble_s < zero_bubble.bubble_s < interleaved.bubble_s < plain.bubble_s
    assert interleaved.pipeline_s == pytest.approx(2 * plain.pipeline_s)


def test_interleaving_needs_micro_batches() -> None:
    """A single micro-batch is on one rank at a time, regardless of the number of stages per rank."""
    for virtual, schedule in ((1, "gpipe"), (2, "interleaved"), (8, "interleaved"), (2, "zero-bubble"), (2, "zbv")):
        single = estimate_pipelined(virtual, schedule, accumulate=1)
        assert single.bubble_s / single.compute_s == pytest.approx(3, rel=0.1)
    plain, interleaved = estimate_pipelined(1, "gpipe", 2), estimate_pipelined(4, "interleaved", 2)
    assert 2 * 0.9 < 2 * interleaved.bubble_s / interleaved.compute_s < 2 * plain.bubble_s / plain.compute_s


def test_large_head_imbalances_stages() -> None:
    """It does with equal numbers of blocks per stage; clustertrain gives the stage with the head fewer blocks."""
    wide = dataclasses.replace(LLAMA_8B, vocab_size=256_000)
    layout = Layout(pp=4, schedule="1f1b", reshard_after_forward=False)
    run = PassConfig(8192, 1, grad_accum=16, precision="bf16", device="cuda")
    even, balanced = (
        step_time.estimate_step(wide, layout, run, stack, machine()).bubble_s
        for stack in (dataclasses.replace(CLUSTERTRAIN, even_stages=True), CLUSTERTRAIN)
    )
    assert even > 1.5 * balanced and balanced < 1.5 * estimate_pipelined().bubble_s


def test_resharding_sends_more_than_keeping() -> None:
    slow = Machine(dataclasses.replace(machine().network, fabric_bytes_s=1e9), machine().rates)  # too slow to be hidden
    resharded, kept = (
        step_time.estimate_step(
            LLAMA_8B,
            Layout(strategy=strategy, dp_shard=64, reshard_after_forward=strategy == "fsdp"),
            PassConfig(8192, 1, grad_accum=8, precision="bf16", device="cuda"),
            CLUSTERTRAIN,
            slow,
        )
        for strategy in ("fsdp", "fsdp-grad-op")
    )
    assert resharded.data_s > 1.5 * kept.data_s  # gathers again in every backward pass
    assert resharded.compute_s == kept.compute_s


def test_reduction_per_micro_batch_sends_more() -> None:
    per_micro_batch, deferred = (
        step(Layout(strategy="fsdp", dp_shard=64, defer_reduction=defer), grad_accum=8) for defer in (False, True)
    )
    assert per_micro_batch.data_s > deferred.data_s


def test_sharding_inside_node_saves_traffic() -> None:
    hybrid = Layout(strategy="hybrid-shard", dp_shard=8, dp_replicate=64)
    whole = Layout(strategy="fsdp", dp_shard=512)
    assert step(hybrid, seq_len=1024, grad_accum=4).data_s < step(whole, seq_len=1024, grad_accum=4).data_s


def test_communication_hides_under_enough_work() -> None:
    short, long = step(FSDP, seq_len=256), step(FSDP, seq_len=8192)
    assert long.data_s < 0.05 * long.step_s
    assert short.data_s > 0.2 * short.step_s


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(strategy="ddp", dp_replicate=8),
        Layout(strategy="zero1", zero1=True, dp_replicate=8),
        FSDP,
        Layout(strategy="hybrid-shard", dp_replicate=8, dp_shard=8),
        Layout(strategy="fsdp", dp_shard=4, tp=2, sequence_parallel=True, cp=2, pp=2, schedule="1f1b"),
    ],
    ids=lambda layout: layout.describe(),
)
def test_step_time_is_sum_of_nonnegative_parts(layout: Layout) -> None:
    estimate = step(layout, grad_accum=4)
    parts = dataclasses.asdict(estimate)
    assert min(parts.values()) >= 0 and sum(parts.values()) == pytest.approx(estimate.step_s)
    degrees = {"tensor_s": layout.tp, "context_s": layout.cp, "pipeline_s": layout.pp, "bubble_s": layout.pp,
               "data_s": layout.gradient_ranks}  # fmt: skip
    assert {name for name in degrees if parts[name] > 0} == {name for name, degree in degrees.items() if degree > 1}


def test_tp_across_nodes_is_network_bound() -> None:
    one_port = Machine(dataclasses.replace(machine().network, fabric_bytes_s=50e9 / 8), machine().rates)
    run = PassConfig(8192, 1, precision="bf16", device="cuda")
    inside, across = (
        step_time.estimate_step(LLAMA_8B, Layout(tp=tp, sequence_parallel=True), run, CLUSTERTRAIN, one_port)
        for tp in (8, 16)
    )
    assert across.tensor_s > 5 * inside.tensor_s and across.step_s > inside.step_s


def test_ring_hides_communication() -> None:
    gathered, ring = (
        step(Layout(cp=8), seq_len=65_536, parallel=ParallelSpec(context_parallel_method=kind))
        for kind in ("all-gather", "ring")
    )
    assert ring.context_s < gathered.context_s
    assert ring.compute_s < gathered.compute_s  # the mask's hidden half is not computed


def test_offload_is_slower_and_smaller() -> None:
    run = PassConfig(8192, 1, precision="bf16", device="cuda")
    on, off = (msgspec_replace(FSDP, offload=offload) for offload in (False, True))
    assert step(off).optimizer_s > 5 * step(on).optimizer_s
    assert (estimate_memory(LLAMA_8B, off, run, None).peak_gib or 0) < (
        estimate_memory(LLAMA_8B, on, run, None).peak_gib or 0
    )


def test_each_rank_updates_its_share_of_the_optimizer() -> None:
    ddp, zero1 = (step(Layout(strategy=s, zero1=s == "zero1", dp_replicate=8)).optimizer_s for s in ("ddp", "zero1"))
    assert ddp == pytest.approx(8 * zero1)


def test_tiny_model_is_host_bound() -> None:
    tiny = DecoderSizes(vocab_size=256, dim=64, layers=4, heads=4, kv_heads=4, hidden=256)
    fast, slow = (step(Layout(), gpu, model=tiny, seq_len=64) for gpu in ("b200", "a100"))
    assert fast.compute_s == pytest.approx(slow.compute_s, rel=0.1)  # launching kernels is the limit
    run = PassConfig(64, 1, precision="bf16", device="cuda")
    eager, fused = (
        step_time.estimate_step(tiny, Layout(), run, s, machine())
        for s in (CLUSTERTRAIN, with_compiled_model(CLUSTERTRAIN))
    )
    assert fused.step_s < 0.7 * eager.step_s


def test_predicted_rate_is_realistic() -> None:
    """Published runs of dense models of this size reach 35 to 60 % of the peak (torchtitan rows of layout-tables, H100,
    8192 tokens per rank)."""
    estimate = step(FSDP, micro_batch=2)
    tokens = 2 * 8192
    flops = 6 * 8.03e9 * tokens + 12 * 32 * 8192 * 4096 * tokens / 2
    assert 0.3 < flops / estimate.step_s / 989e12 < 0.65
