"""The memory formulas reproduce the tables of the papers that they come from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clustertrain.plan.cost import frameworks
from clustertrain.plan.cost.activations import PassConfig, RankStage, activation_bytes
from clustertrain.plan.cost.frameworks import Framework
from clustertrain.plan.cost.memory import GIB, estimate_memory
from clustertrain.plan.cost.model_shape import DecoderSizes
from clustertrain.plan.layout import Layout

# About 7.5 billion parameters; the tests compare bytes per parameter.
GPT_7B5 = DecoderSizes(vocab_size=50_304, dim=4096, layers=36, heads=32, kv_heads=32, hidden=4 * 4096, gated=False)
# Fp16 weights and gradients, fp32 weights and AdamW's moments (arXiv 1910.02054, section 3.1).
ZERO = Framework(name="zero", weight_bytes=2, grad_bytes=2, optimizer_bytes=12)


def states(layout: Layout, framework: Framework) -> float:
    """Return GB (1e9 bytes) for 7.5e9 parameters."""
    memory = estimate_memory(GPT_7B5, layout, PassConfig(1024, 1, precision="fp16", device="cuda"), None, framework)
    total_gib = (memory.params_gib or 0) + (memory.grads_gib or 0) + (memory.optimizer_gib or 0)
    return total_gib * GIB / GPT_7B5.parameters() * 7.5


def test_zero_table_of_7_5b_on_64_gpus() -> None:
    """Figure 1 of arXiv 1910.02054: 120, 31.4, 16.6 and 1.9 GB."""
    zero1 = Layout(strategy="zero1", zero1=True, dp_replicate=64)
    assert states(Layout(strategy="ddp", dp_replicate=64), ZERO) == pytest.approx(120, abs=0.05)
    assert states(zero1, ZERO) == pytest.approx(31.4, abs=0.05)
    assert states(zero1, replace(ZERO, shards_gradients=True)) == pytest.approx(16.6, abs=0.05)
    # The paper does not count what stage 3 gathers temporarily; offload leaves only that.
    zero3 = Layout(strategy="fsdp", dp_shard=64)
    gathered = states(Layout(strategy="fsdp", dp_shard=64, offload=True), ZERO)
    assert states(zero3, ZERO) - gathered == pytest.approx(1.88, abs=0.01)


# Korthikanti et al.: one layer of Megatron's 175B model with dropout and plain attention, in units of s b h.
GPT_175B = DecoderSizes(
    vocab_size=51_200, dim=12_288, layers=96, heads=96, kv_heads=96, hidden=4 * 12_288, gated=False, dropout=0.1
)
MEGATRON = frameworks.get_framework("megatron-lm-2021")
SEQ = 2048
SCORES = 5 * GPT_175B.heads * SEQ / GPT_175B.dim  # 80, with plain attention


def layer_bytes(
    kind: str, tp: int, *, sequence_parallel: bool = False, micro_batch: int = 1, framework: Framework = MEGATRON
) -> float:
    """Return the bytes that one more layer keeps, per s b h."""
    layout = Layout(tp=tp, sequence_parallel=sequence_parallel, activation_checkpointing=kind)
    run = PassConfig(SEQ, micro_batch, precision="fp16", device="cuda")
    more, fewer = (activation_bytes(GPT_175B, run, layout, RankStage(n), framework) for n in (9, 8))
    return (more - fewer) / (SEQ * micro_batch * GPT_175B.dim)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_layer_bytes_match_korthikanti(tp: int) -> None:
    """Table 2 of arXiv 2205.05198."""
    assert layer_bytes("none", tp) == pytest.approx(10 + 24 / tp + SCORES / tp, rel=0.001)
    assert layer_bytes("selective_attn", tp) == pytest.approx(10 + 24 / tp, rel=0.003)
    assert layer_bytes("full", tp) == pytest.approx(2)
    if tp > 1:
        assert layer_bytes("none", tp, sequence_parallel=True) == pytest.approx((34 + SCORES) / tp, rel=0.001)
        assert layer_bytes("selective_attn", tp, sequence_parallel=True) == pytest.approx(34 / tp, rel=0.003)
        assert layer_bytes("full", tp, sequence_parallel=True) == pytest.approx(2 / tp)


def test_flash_attention_saves_scores() -> None:
    flash = replace(MEGATRON, plain_attention=False)
    assert layer_bytes("none", 1) - layer_bytes("none", 1, framework=flash) == pytest.approx(SCORES)
    # The whole inputs of two linear layers, 2 + 2 s b h, are kept.
    kept = replace(MEGATRON, regathers=False)
    difference = layer_bytes("none", 8, sequence_parallel=True, framework=kept) - layer_bytes(
        "none", 8, sequence_parallel=True
    )
    assert difference == pytest.approx(4 * (1 - 1 / 8))


def test_layer_bytes_scale_with_micro_batch() -> None:
    assert layer_bytes("none", 8, sequence_parallel=True, micro_batch=4) == pytest.approx(
        layer_bytes("none", 8, sequence_parallel=True)
    )
