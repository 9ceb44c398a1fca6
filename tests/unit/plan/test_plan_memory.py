"""The memory formulas against numbers that others have published or that follow by hand."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.plan.layout import Layout
from clustertrain.plan.memory import GIB, Memory, activation_bytes, logits_bytes, of_rank
from clustertrain.spec.recipe import ModelSpec

LLAMA_7B = ModelSpec(vocab_size=32000, dim=4096, layers=32, heads=32, kv_heads=32, ffn_dim=11008)


def rank(layout: Layout, model: ModelSpec = LLAMA_7B, **changes: Any) -> Memory:
    given: dict[str, Any] = {
        "seq_len": 2048, "micro_batch": 1, "compute": "bf16", "device": "cuda", "capacity_gib": 80.0, **changes
    }  # fmt: skip
    return of_rank(model, layout, **given)


def test_llama_7b_has_the_published_number_of_parameters() -> None:
    assert LLAMA_7B.parameters() == 6_738_415_616  # Llama 2 7B's own count


def test_model_states_are_16_bytes_a_parameter() -> None:
    single = rank(Layout(), compute="fp32")
    states = (single.params_gib or 0) + (single.grads_gib or 0) + (single.optimizer_gib or 0)
    assert states * GIB == pytest.approx(16 * LLAMA_7B.parameters())


def test_fsdp_divides_optimizer_and_gradients_by_the_shards() -> None:
    one, eight = rank(Layout()), rank(Layout(strategy="fsdp", dp_shard=8))
    assert eight.optimizer_gib == pytest.approx((one.optimizer_gib or 0) / 8, rel=1e-6)
    assert eight.grads_gib == pytest.approx((one.grads_gib or 0) / 8, rel=1e-6)
    assert (eight.params_gib or 0) > (one.optimizer_gib or 0) / 16  # what is gathered comes on top


def test_a_7b_model_needs_sharding_on_80_gib() -> None:
    assert rank(Layout(strategy="ddp", dp_replicate=8)).fits is False
    assert rank(Layout(strategy="fsdp", dp_shard=8)).fits is True


def test_activations_match_korthikanti_for_a_4h_mlp() -> None:
    """Counted by hand: the residual stream twice in fp32, 4 h + 2 kv and 4 f in bf16, one statistic a head."""
    model = ModelSpec(dim=1024, layers=10, heads=16, kv_heads=16, ffn_dim=4096)
    seq = 512
    by_hand = seq * (10 * (8 * 1024 + 2 * (6 * 1024 + 4 * 4096) + 4 * 16) + 8 * 1024)
    assert activation_bytes(model, seq, 2) == by_hand
    # Of the same size as the published figure for a GELU MLP of the same width.
    assert 0.8 < activation_bytes(model, seq, 2) / (10 * 34 * seq * 1024) < 1.6


def test_activations_grow_with_micro_batch_and_sequence() -> None:
    base = rank(Layout())
    assert rank(Layout(), micro_batch=4).activations_gib == pytest.approx(4 * (base.activations_gib or 0))
    assert rank(Layout(), seq_len=4096).logits_gib == pytest.approx(2 * (base.logits_gib or 0))


def test_dropout_costs_memory_and_logits_are_counted_in_fp32_too() -> None:
    dropped = ModelSpec(dropout=0.1)
    assert activation_bytes(dropped, 8, 4) > activation_bytes(ModelSpec(), 8, 4)
    assert logits_bytes(ModelSpec(vocab_size=1000), 10, 2) == 10 * 1000 * 10


def test_the_peak_is_the_sum_of_its_parts_and_fits_means_80_percent() -> None:
    memory = rank(Layout(strategy="fsdp", dp_shard=8))
    parts = ("params_gib", "grads_gib", "optimizer_gib", "activations_gib", "logits_gib", "overhead_gib")
    assert memory.peak_gib == pytest.approx(sum(getattr(memory, p) for p in parts))
    assert rank(Layout(strategy="fsdp", dp_shard=8), capacity_gib=(memory.peak_gib or 0) / 0.79).fits is True
    assert rank(Layout(strategy="fsdp", dp_shard=8), capacity_gib=(memory.peak_gib or 0) / 0.81).fits is False


def test_nothing_is_claimed_of_an_unknown_gpu_and_the_cpu_has_no_context() -> None:
    assert rank(Layout(), capacity_gib=None).fits is None
    assert rank(Layout(), device="cpu").overhead_gib == 0
