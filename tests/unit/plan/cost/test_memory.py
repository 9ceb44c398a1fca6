"""The memory formulas compared with published numbers and with numbers calculated by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from clustertrain.config.model import ModelSpec
from clustertrain.config.parallel import ParallelSpec
from clustertrain.plan.cost.activations import PassConfig, activation_bytes, logits_bytes
from clustertrain.plan.cost.frameworks import CLUSTERTRAIN
from clustertrain.plan.cost.memory import GIB, MemoryEstimate, estimate_memory
from clustertrain.plan.layout import Layout

LLAMA_7B = ModelSpec(vocab_size=32000, dim=4096, layers=32, heads=32, kv_heads=32, ffn_dim=11008)


def rank(
    layout: Layout, model: ModelSpec = LLAMA_7B, *, capacity_gib: float | None = 80.0, **changes: Any
) -> MemoryEstimate:
    config_fields: dict[str, Any] = {
        "seq_len": 2048,
        "micro_batch": 1,
        "precision": "bf16",
        "device": "cuda",
        **changes,
    }
    return estimate_memory(model, layout, PassConfig(**config_fields), capacity_gib)


def test_llama_7b_parameter_count() -> None:
    assert LLAMA_7B.parameters() == 6_738_415_616  # Llama 2 7B's own count


def test_model_states_are_16_bytes_per_parameter() -> None:
    single = rank(Layout(), precision="fp32")
    states = (single.params_gib or 0) + (single.grads_gib or 0) + (single.optimizer_gib or 0)
    assert states * GIB == pytest.approx(16 * LLAMA_7B.parameters())


def test_fsdp_divides_the_states_and_gathers_units() -> None:
    one, eight = rank(Layout()), rank(Layout(strategy="fsdp", dp_shard=8))
    assert eight.optimizer_gib == pytest.approx((one.optimizer_gib or 0) / 8, rel=1e-6)
    assert (one.grads_gib or 0) / 8 < (eight.grads_gib or 0) < (one.grads_gib or 0)
    assert (one.optimizer_gib or 0) / 16 < (eight.params_gib or 0) < (one.params_gib or 0)


def test_fsdp_keeps_whole_gradients_between_micro_batches() -> None:
    sharded = Layout(strategy="fsdp", dp_shard=8)
    once, several = rank(sharded), rank(sharded, grad_accum=4)
    assert ((several.grads_gib or 0) - (once.grads_gib or 0)) * GIB > 3 * LLAMA_7B.parameters()
    assert rank(Layout(), grad_accum=4) == rank(Layout())


def test_ddp_adds_only_process_group() -> None:
    single, ddp = rank(Layout()), rank(Layout(strategy="ddp", dp_replicate=8))
    assert (ddp.peak_gib or 0) - (single.peak_gib or 0) == pytest.approx(1.0)


def test_7b_model_needs_sharding_on_80_gib() -> None:
    assert rank(Layout(strategy="ddp", dp_replicate=8)).fits is False
    assert rank(Layout(strategy="fsdp", dp_shard=8)).fits is True


def test_activations_match_korthikanti() -> None:
    """34 sbh per layer for a GELU MLP of width 4 h with dropout, without stored attention scores."""
    model = ModelSpec(dim=1024, layers=10, heads=16, kv_heads=16, ffn_dim=4096)
    estimated = activation_bytes(model, PassConfig(512, 1, precision="bf16", device="cuda"))
    assert 0.9 < estimated / (10 * 34 * 512 * 1024) < 1.5


def test_autocast_keeps_more_than_cast_parameters() -> None:
    autocast, cast = (
        activation_bytes(LLAMA_7B, PassConfig(512, 1, precision="bf16", autocast=a, device="cuda"))
        for a in (True, False)
    )
    assert autocast > cast
    assert cast < activation_bytes(LLAMA_7B, PassConfig(512, 1, device="cuda"))


def test_activations_grow_with_micro_batch_and_sequence() -> None:
    base = rank(Layout())
    assert rank(Layout(), micro_batch=4).activations_gib == pytest.approx(4 * (base.activations_gib or 0))
    assert rank(Layout(), seq_len=4096).logits_gib == pytest.approx(2 * (base.logits_gib or 0))


def test_label_smoothing_gathers_logits() -> None:
    """A rank holds its part of the logits, and the loss gathers those of the whole vocabulary."""
    model, run, split = ModelSpec(vocab_size=1000), PassConfig(10, 1, precision="bf16"), Layout(tp=4)
    smoothed = dataclasses.replace(CLUSTERTRAIN, whole_logits=True)
    assert logits_bytes(model, run, split) == 10 * 1000 * 14 / 4
    assert logits_bytes(model, run, split, smoothed) == 10 * 1000 * (2 / 4 + 12)
    assert logits_bytes(model, run, Layout(), smoothed) == logits_bytes(model, run, Layout())
    whole = dataclasses.replace(run, parallel=ParallelSpec(loss_parallel=False))
    assert logits_bytes(model, whole, split, smoothed) == logits_bytes(model, whole, split)


def test_dropout_and_fp32_logits_cost_memory() -> None:
    dropped = ModelSpec(dropout=0.1)
    assert activation_bytes(dropped, PassConfig(8, 1)) > activation_bytes(ModelSpec(), PassConfig(8, 1))
    assert logits_bytes(ModelSpec(vocab_size=1000), PassConfig(10, 1, precision="bf16")) == 10 * 1000 * 14


def test_peak_is_sum_of_parts() -> None:
    memory = rank(Layout(strategy="fsdp", dp_shard=8))
    parts = ("params_gib", "grads_gib", "optimizer_gib", "activations_gib", "logits_gib", "overhead_gib")
    assert memory.peak_gib == pytest.approx(sum(getattr(memory, p) for p in parts))
    assert rank(Layout(strategy="fsdp", dp_shard=8), capacity_gib=(memory.peak_gib or 0) * 1.01).fits is True
    assert rank(Layout(strategy="fsdp", dp_shard=8), capacity_gib=(memory.peak_gib or 0) / 1.01).fits is False


def test_unknown_gpu_and_cpu() -> None:
    assert rank(Layout(), capacity_gib=None).fits is None
    assert rank(Layout(), device="cpu").overhead_gib == 0


def states(memory: MemoryEstimate) -> float:
    return ((memory.params_gib or 0) + (memory.grads_gib or 0) + (memory.optimizer_gib or 0)) * GIB


def test_zero1_divides_optimizer_only() -> None:
    """4 Psi of weights and 4 of gradients in fp32, 8 Psi / N of AdamW (arXiv 1910.02054, section 5.1)."""
    memory = rank(Layout(strategy="zero1", zero1=True, dp_replicate=8), precision="fp32")
    assert states(memory) == pytest.approx((8 + 8 / 8) * LLAMA_7B.parameters(), rel=1e-6)
    # Whole parameters are assigned to ranks: even with very many ranks, one of them holds the largest parameter.
    many = rank(Layout(strategy="zero1", zero1=True, dp_replicate=4096), precision="fp32")
    assert (many.optimizer_gib or 0) * GIB == 8 * 32000 * 4096


def test_zero2_keeps_and_zero3_gathers_parameters() -> None:
    zero3 = rank(Layout(strategy="fsdp", dp_shard=8))
    zero2 = rank(Layout(strategy="fsdp-grad-op", dp_shard=8, reshard_after_forward=False))
    assert (zero2.params_gib or 0) * GIB == pytest.approx(LLAMA_7B.parameters() * (4 / 8 + 2), rel=1e-3)
    assert zero2.params_gib > zero3.params_gib and zero2.optimizer_gib == zero3.optimizer_gib  # type: ignore[operator]


def test_hybrid_shard_divides_by_its_shard_group() -> None:
    hybrid = rank(Layout(strategy="hybrid-shard", dp_replicate=4, dp_shard=8))
    assert hybrid == rank(Layout(strategy="fsdp", dp_shard=8))
    assert (rank(Layout(strategy="fsdp", dp_shard=32)).optimizer_gib or 0) < (hybrid.optimizer_gib or 0)


def test_cp_ranks_share_parameters() -> None:
    together = rank(Layout(strategy="fsdp", dp_shard=4, cp=2))
    assert together.optimizer_gib == rank(Layout(strategy="fsdp", dp_shard=8)).optimizer_gib
    ring = ParallelSpec(context_parallel_method="ring")
    halved = rank(Layout(strategy="fsdp", dp_shard=4, cp=2), parallel=ring)
    assert halved.activations_gib == pytest.approx((rank(Layout(strategy="fsdp", dp_shard=8)).activations_gib or 0) / 2)


def test_attention_mask_is_expensive_for_long_sequences() -> None:
    layout = Layout(strategy="fsdp", dp_shard=1, cp=8)
    ring, gathered = (
        rank(layout, seq_len=65536, parallel=ParallelSpec(context_parallel_method=c)).activations_gib or 0
        for c in ("ring", "all-gather")
    )
    assert (gathered - ring) * GIB > 32 * 65536 * (65536 / 8) * 2


def test_tp_divides_matrices_and_sp_the_rest() -> None:
    one, two = rank(Layout(), precision="fp32"), rank(Layout(tp=2), precision="fp32")
    norms = 4096 * (2 * 32 + 1)
    assert states(two) == pytest.approx(16 * ((LLAMA_7B.parameters() - norms) / 2 + norms))
    with_sequence_parallel = rank(Layout(tp=2, sequence_parallel=True), precision="fp32")
    assert (one.activations_gib or 0) > (two.activations_gib or 0) > (with_sequence_parallel.activations_gib or 0)
    assert (two.logits_gib or 0) == (one.logits_gib or 0) / 2
    whole = rank(Layout(tp=2), precision="fp32", parallel=ParallelSpec(loss_parallel=False))
    assert whole.logits_gib == one.logits_gib


def estimate_pipelined(schedule: str = "1f1b", virtual: int = 1, **changes: Any) -> MemoryEstimate:
    layout = Layout(pp=4, schedule=schedule, virtual_stages=virtual, reshard_after_forward=False)
    return rank(layout, **{"grad_accum": 16, **changes})


def test_stage_has_layers_and_one_end() -> None:
    table = 32000 * 4096
    blocks = 8 * LLAMA_7B.block_parameters()
    assert states(estimate_pipelined(precision="fp32")) == pytest.approx(16 * (blocks + table), rel=1e-4)


def test_in_flight_matches_papers() -> None:
    few = estimate_pipelined(precision="fp32").activations_gib or 0
    assert (estimate_pipelined("gpipe", precision="fp32").activations_gib or 0) == pytest.approx(4 * few, rel=0.01)
    assert (estimate_pipelined("interleaved", 2, precision="fp32").activations_gib or 0) == pytest.approx(
        few * (1 + 3 / 8), rel=0.01
    )
    # The first rank of 1F1B holds about as many layers as the model has: 4 micro-batches of a quarter of the layers.
    assert few == pytest.approx(rank(Layout(), precision="fp32").activations_gib, rel=0.01)
    assert (estimate_pipelined(precision="fp32", grad_accum=2).activations_gib or 0) == pytest.approx(few / 2, rel=0.01)


def test_last_rank_peaks_with_large_vocabulary() -> None:
    wide = ModelSpec(vocab_size=256_000, dim=256, layers=4, heads=4, kv_heads=4)
    layout = Layout(pp=2, schedule="1f1b", reshard_after_forward=False)
    assert (rank(layout, wide, grad_accum=8).logits_gib or 0) > 0
    assert rank(layout, LLAMA_7B, grad_accum=8, seq_len=8192).logits_gib == 0


def test_checkpointing_keeps_inputs_and_one_layer() -> None:
    none, selective, full = (
        rank(Layout(activation_checkpointing=kind), precision="bf16").activations_gib or 0
        for kind in ("none", "selective", "full")
    )
    assert full < selective < none
    tokens, layers = 2048, 32
    working = none / layers * GIB
    assert full * GIB == pytest.approx(2 * tokens * 4096 * layers + working, rel=0.05)  # 2 s b h per layer


def test_offload_keeps_gathered_on_device() -> None:
    on, off = (rank(Layout(strategy="fsdp", dp_shard=8, offload=o)) for o in (False, True))
    assert off.optimizer_gib == 0 and 0 < (off.params_gib or 0) < (on.params_gib or 0)
    assert states(on) - states(off) == pytest.approx(16 * LLAMA_7B.parameters() / 8, rel=1e-6)


def test_immediate_reduction_keeps_no_whole_gradients() -> None:
    layout = Layout(strategy="fsdp", dp_shard=8)
    each = rank(Layout(strategy="fsdp", dp_shard=8, defer_reduction=False), grad_accum=4)
    assert each.grads_gib == rank(layout).grads_gib
    assert (each.grads_gib or 0) < (rank(layout, grad_accum=4).grads_gib or 0) / 4


def test_half_precisions_compute_in_two_bytes() -> None:
    layout = Layout(strategy="fsdp", dp_shard=8)
    bf16, fp16, fp8, tf32 = (rank(layout, precision=c).activations_gib for c in ("bf16", "fp16", "fp8", "tf32"))
    assert bf16 == fp16 == fp8 and tf32 == rank(layout, precision="fp32").activations_gib
