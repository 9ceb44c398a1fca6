"""The memory formulas compared with published numbers and with numbers calculated by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
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
    """All gradients exist while a second micro-batch's loss is computed."""
    single = rank(Layout(), precision="fp32", grad_accum=2, seq_len=4096)
    assert (single.logits_gib or 0) > 0
    assert states(single) == pytest.approx(16 * LLAMA_7B.parameters())


def test_fsdp_divides_the_states_and_gathers_units() -> None:
    one, eight = rank(Layout()), rank(Layout(strategy="fsdp", dp_shard=8))
    assert eight.optimizer_gib == pytest.approx((one.optimizer_gib or 0) / 8, rel=1e-6)
    assert 0 < (eight.grads_gib or 0) < (one.grads_gib or 0)
    assert (one.optimizer_gib or 0) / 16 < (eight.params_gib or 0) < (one.params_gib or 0)


def test_fsdp_keeps_whole_gradients_between_micro_batches() -> None:
    sharded = Layout(strategy="fsdp", dp_shard=8)
    once, several = rank(sharded), rank(sharded, grad_accum=4)
    assert ((several.grads_gib or 0) - (once.grads_gib or 0)) * GIB > 3 * LLAMA_7B.parameters()
    assert rank(sharded, grad_accum=2) == several


def test_gradients_of_one_micro_batch_replace_its_activations() -> None:
    """A single rank has no gradients yet when the loss is computed, and has all when no activations are left."""
    once, several = rank(Layout(), seq_len=8192), rank(Layout(), seq_len=8192, grad_accum=4)
    assert once.grads_gib == 0 and (several.grads_gib or 0) * GIB == 4 * LLAMA_7B.parameters()
    assert rank(Layout(), seq_len=512).activations_gib < once.activations_gib  # type: ignore[operator]


def test_ddp_keeps_buckets() -> None:
    """They hold the gradients throughout the step; those of micro-batches that are not reduced are other tensors."""
    single, ddp = rank(Layout(), seq_len=8192), rank(Layout(strategy="ddp", dp_replicate=8), seq_len=8192)
    weights = 4 * LLAMA_7B.parameters() / GIB
    assert (ddp.grads_gib or 0) - (single.grads_gib or 0) == pytest.approx(weights)
    several = rank(Layout(strategy="ddp", dp_replicate=8), seq_len=8192, grad_accum=2)
    assert several.grads_gib == pytest.approx(2 * weights)


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
    base = rank(Layout(), grad_accum=2)
    assert rank(Layout(), micro_batch=4, grad_accum=2).activations_gib == pytest.approx(4 * (base.activations_gib or 0))
    assert rank(Layout(), seq_len=4096, grad_accum=2).logits_gib == pytest.approx(2 * (base.logits_gib or 0))


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
    memory = rank(Layout(strategy="zero1", zero1=True, dp_replicate=8), precision="fp32", seq_len=8192)
    # torch shares out the parameters with weight decay first, then the embedding.
    embedding = 32000 * 4096
    expected = 8 * LLAMA_7B.parameters() + 8 * (LLAMA_7B.parameters() - embedding) / 8 + 8 * embedding
    assert states(memory) == pytest.approx(expected, rel=0.01)
    # Whole parameters are assigned to ranks: even with very many ranks, one of them holds the largest parameter.
    many = rank(Layout(strategy="zero1", zero1=True, dp_replicate=4096), precision="fp32")
    assert (many.optimizer_gib or 0) * GIB == 8 * embedding


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
    # Roughly: with fewer activations, the peak comes later in the backward pass, when gradients replace more of them.
    half = (rank(Layout(strategy="fsdp", dp_shard=8)).activations_gib or 0) / 2
    assert halved.activations_gib == pytest.approx(half, rel=0.05)


def test_attention_mask_is_expensive_for_long_sequences() -> None:
    layout = Layout(strategy="fsdp", dp_shard=1, cp=8)
    ring, gathered = (
        rank(layout, seq_len=65536, parallel=ParallelSpec(context_parallel_method=c)).activations_gib or 0
        for c in ("ring", "all-gather")
    )
    assert (gathered - ring) * GIB > 32 * 65536 * (65536 / 8) * 2


def test_tp_divides_matrices_and_sp_the_rest() -> None:
    long: dict[str, Any] = {"precision": "fp32", "seq_len": 8192, "grad_accum": 2}
    one, two = rank(Layout(), **long), rank(Layout(tp=2), **long)
    norms = 4096 * (2 * 32 + 1)
    # The embedding's gradient covers the whole vocabulary.
    other_half = 4 * 32000 * 4096 / 2
    assert states(two) == pytest.approx(16 * ((LLAMA_7B.parameters() - norms) / 2 + norms) + other_half)
    with_sequence_parallel = rank(Layout(tp=2, sequence_parallel=True), **long)
    assert (one.activations_gib or 0) > (two.activations_gib or 0) > (with_sequence_parallel.activations_gib or 0)
    # torch's loss of split logits makes four fp32 tensors rather than three.
    assert (two.logits_gib or 0) == pytest.approx((one.logits_gib or 0) / 2 * 4 / 3)
    whole = rank(Layout(tp=2), parallel=ParallelSpec(loss_parallel=False), **long)
    assert whole.logits_gib == one.logits_gib


def estimate_pipelined(schedule: str = "1f1b", virtual: int = 1, **changes: Any) -> MemoryEstimate:
    layout = Layout(pp=4, schedule=schedule, virtual_stages=virtual, reshard_after_forward=False)
    return rank(layout, **{"grad_accum": 16, **changes})


def test_stage_has_layers_and_one_end() -> None:
    table = 32000 * 4096
    blocks = 8 * LLAMA_7B.block_parameters()
    gradients_in_flight = 4 * 4096 * 11008  # of the matrix whose backward pass runs
    measured = states(estimate_pipelined(precision="fp32")) - gradients_in_flight
    assert measured == pytest.approx(16 * (blocks + table), rel=1e-3)


def test_in_flight_matches_papers() -> None:
    def kept(schedule: str = "1f1b", virtual: int = 1, **changes: Any) -> float:
        """Return the bytes of activations without the buffers of the stages and the temporary tensors of a pass."""
        changes = {"precision": "fp32", "grad_accum": 64, **changes}
        memory = estimate_pipelined(schedule, virtual, **changes)
        buffers = (2 * virtual - 1) * changes["grad_accum"] * 2048 * 4096 * 4
        return (memory.activations_gib or 0) * GIB - buffers - 2048 * 4 * (2 * 11008 + 2 * 4096)

    few = kept()
    assert kept("gpipe") == pytest.approx(16 * few, rel=0.01)
    assert kept("interleaved", 2) == pytest.approx(few * (1 + 3 / 8), rel=0.02)
    # The first rank of 1F1B holds about as many layers as the model has: 4 micro-batches of a quarter of the layers.
    single = (rank(Layout(), precision="fp32", seq_len=16_384, grad_accum=2).activations_gib or 0) * GIB / 8
    assert few == pytest.approx(single, rel=0.02)


def test_last_rank_peaks_with_large_vocabulary() -> None:
    wide = ModelSpec(vocab_size=256_000, dim=256, layers=4, heads=4, kv_heads=4)
    layout = Layout(pp=2, schedule="1f1b", reshard_after_forward=False)
    assert (rank(layout, wide, grad_accum=8).logits_gib or 0) > 0
    assert rank(layout, LLAMA_7B, grad_accum=8, seq_len=8192).logits_gib == 0


def test_checkpointing_keeps_inputs_and_one_layer() -> None:
    # With a large one, the loss would need more than the recomputed layer.
    small_vocabulary = msgspec.structs.replace(LLAMA_7B, vocab_size=1000)
    none, selective, full = (
        rank(Layout(activation_checkpointing=kind), small_vocabulary, seq_len=16_384, grad_accum=2).activations_gib or 0
        for kind in ("none", "selective", "full")
    )
    assert full < selective < none
    tokens, layers = 16_384, 32
    gradients = 2 * tokens * (2 * 11008 + 2 * 4096)
    block = (none * GIB - gradients) / layers
    assert full * GIB == pytest.approx(2 * tokens * 4096 * layers + block + gradients, rel=0.05)  # 2 s b h per layer


def test_offload_keeps_gathered_on_device() -> None:
    on, off = (rank(Layout(strategy="fsdp", dp_shard=8, offload=o)) for o in (False, True))
    assert off.optimizer_gib == 0 and 0 < (off.params_gib or 0) < (on.params_gib or 0)
    assert states(on) - states(off) == pytest.approx(12 * LLAMA_7B.parameters() / 8, rel=0.02)


def test_immediate_reduction_keeps_no_whole_gradients() -> None:
    layout = Layout(strategy="fsdp", dp_shard=8)
    each = rank(Layout(strategy="fsdp", dp_shard=8, defer_reduction=False), grad_accum=4)
    share = 4 * LLAMA_7B.parameters() / 8
    last_reduced = 4 * 2 * 32000 * 4096  # the embedding and the head, until the next micro-batch's first reduction
    assert 1 < (each.grads_gib or 0) * GIB / (share + last_reduced) < 1.1
    assert (each.grads_gib or 0) < (rank(layout, grad_accum=4).grads_gib or 0) / 4


def test_half_precisions_compute_in_two_bytes() -> None:
    layout = Layout(strategy="fsdp", dp_shard=8)
    bf16, fp16, fp8, tf32 = (rank(layout, precision=c).activations_gib for c in ("bf16", "fp16", "fp8", "tf32"))
    assert bf16 == fp16 == fp8 and tf32 == rank(layout, precision="fp32").activations_gib


def test_split_backward_keeps_gradients_and_recomputes_more() -> None:
    def activations(schedule: str, mode: str = "none") -> float:
        layout = Layout(strategy="fsdp", dp_shard=8, pp=4, schedule=schedule, virtual_stages=2,
                        activation_checkpointing=mode)  # fmt: skip
        return rank(layout, grad_accum=4).activations_gib or 0.0

    assert activations("zero-bubble") > activations("interleaved")
    # Each layer of the four blocks of a stage recomputes its block.
    assert activations("zero-bubble", "full") > 5 * activations("interleaved", "full")
