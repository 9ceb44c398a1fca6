"""The memory formulas against numbers that others have published or that follow by hand."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.plan.layout import Layout
from clustertrain.plan.memory import GIB, Memory, Pass, activation_bytes, logits_bytes, of_rank
from clustertrain.spec.recipe import ModelSpec

LLAMA_7B = ModelSpec(vocab_size=32000, dim=4096, layers=32, heads=32, kv_heads=32, ffn_dim=11008)


def rank(layout: Layout, model: ModelSpec = LLAMA_7B, *, capacity_gib: float | None = 80.0, **changes: Any) -> Memory:
    given: dict[str, Any] = {"seq_len": 2048, "micro_batch": 1, "compute": "bf16", "device": "cuda", **changes}
    return of_rank(model, layout, Pass(**given), capacity_gib)


def test_llama_7b_has_the_published_number_of_parameters() -> None:
    assert LLAMA_7B.parameters() == 6_738_415_616  # Llama 2 7B's own count


def test_model_states_are_16_bytes_a_parameter() -> None:
    single = rank(Layout(), compute="fp32")
    states = (single.params_gib or 0) + (single.grads_gib or 0) + (single.optimizer_gib or 0)
    assert states * GIB == pytest.approx(16 * LLAMA_7B.parameters())


def test_fsdp_divides_the_states_and_gathers_units() -> None:
    one, eight = rank(Layout()), rank(Layout(strategy="fsdp", dp_shard=8))
    assert eight.optimizer_gib == pytest.approx((one.optimizer_gib or 0) / 8, rel=1e-6)
    assert (one.grads_gib or 0) / 8 < (eight.grads_gib or 0) < (one.grads_gib or 0)
    assert (one.optimizer_gib or 0) / 16 < (eight.params_gib or 0) < (one.params_gib or 0)


def test_fsdp_keeps_whole_gradients_between_micro_batches() -> None:
    sharded = Layout(strategy="fsdp", dp_shard=8)
    once, often = rank(sharded), rank(sharded, grad_accum=4)
    assert ((often.grads_gib or 0) - (once.grads_gib or 0)) * GIB > 3 * LLAMA_7B.parameters()
    assert rank(Layout(), grad_accum=4) == rank(Layout())


def test_ddp_needs_what_a_single_rank_needs_and_its_process_group() -> None:
    single, ddp = rank(Layout()), rank(Layout(strategy="ddp", dp_replicate=8))
    assert (ddp.peak_gib or 0) - (single.peak_gib or 0) == pytest.approx(1.0)


def test_a_7b_model_needs_sharding_on_80_gib() -> None:
    assert rank(Layout(strategy="ddp", dp_replicate=8)).fits is False
    assert rank(Layout(strategy="fsdp", dp_shard=8)).fits is True


def test_activations_are_of_the_size_that_korthikanti_count() -> None:
    """34 sbh a layer for a GELU MLP of width 4 h with dropout, without stored attention scores."""
    model = ModelSpec(dim=1024, layers=10, heads=16, kv_heads=16, ffn_dim=4096)
    counted = activation_bytes(model, Pass(512, 1, compute="bf16", device="cuda"))
    assert 0.9 < counted / (10 * 34 * 512 * 1024) < 1.5


def test_autocast_keeps_more_than_cast_parameters() -> None:
    autocast, cast = (
        activation_bytes(LLAMA_7B, Pass(512, 1, compute="bf16", autocast=a, device="cuda")) for a in (True, False)
    )
    assert autocast > cast
    assert cast < activation_bytes(LLAMA_7B, Pass(512, 1, device="cuda"))


def test_activations_grow_with_micro_batch_and_sequence() -> None:
    base = rank(Layout())
    assert rank(Layout(), micro_batch=4).activations_gib == pytest.approx(4 * (base.activations_gib or 0))
    assert rank(Layout(), seq_len=4096).logits_gib == pytest.approx(2 * (base.logits_gib or 0))


def test_dropout_costs_memory_and_logits_are_counted_in_fp32_too() -> None:
    dropped = ModelSpec(dropout=0.1)
    assert activation_bytes(dropped, Pass(8, 1)) > activation_bytes(ModelSpec(), Pass(8, 1))
    assert logits_bytes(ModelSpec(vocab_size=1000), Pass(10, 1, compute="bf16")) == 10 * 1000 * 14


def test_the_peak_is_the_sum_of_its_parts_and_fits_means_80_percent() -> None:
    memory = rank(Layout(strategy="fsdp", dp_shard=8))
    parts = ("params_gib", "grads_gib", "optimizer_gib", "activations_gib", "logits_gib", "overhead_gib")
    assert memory.peak_gib == pytest.approx(sum(getattr(memory, p) for p in parts))
    assert rank(Layout(strategy="fsdp", dp_shard=8), capacity_gib=(memory.peak_gib or 0) / 0.79).fits is True
    assert rank(Layout(strategy="fsdp", dp_shard=8), capacity_gib=(memory.peak_gib or 0) / 0.81).fits is False


def test_nothing_is_claimed_of_an_unknown_gpu_and_the_cpu_has_no_context() -> None:
    assert rank(Layout(), capacity_gib=None).fits is None
    assert rank(Layout(), device="cpu").overhead_gib == 0
