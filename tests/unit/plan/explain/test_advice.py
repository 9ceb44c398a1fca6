"""The plan's advice on the learning rate for its batch, on memory and on dimensions."""

from __future__ import annotations

import msgspec
import pytest

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.data import DataSpec
from clustertrain.config.job import JobSpec, RunSpec
from clustertrain.config.model import ConvnetSpec, ModelSpec
from clustertrain.config.optim import OptimSpec
from clustertrain.config.optimizers import OptimizerName
from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.config.train import Precision, TrainSpec
from clustertrain.errors import ConfigError
from clustertrain.plan.explain import advice
from clustertrain.plan.explain.advice import LINEAR_POWER, SQRT_POWER, scale_lr
from clustertrain.plan.layout import Batch, Layout
from clustertrain.plan.planner import Plan, plan

LR = OptimSpec().lr


def make_plan(
    *,
    batch: int = 0,
    lr_reference_batch: int = 0,
    gpus: int = 2,
    model: ModelSpec | None = None,
    name: OptimizerName = "adamw",
    precision: Precision = "auto",
    tp: int = 0,
) -> Plan:
    recipe = Recipe(
        model=model or ModelSpec(),
        data=DataSpec(seq_len=128),
        train=TrainSpec(global_batch=batch, precision=precision),
        optim=OptimSpec(name=name, lr_reference_batch=lr_reference_batch),
    )
    return plan(RunSpec(job=JobSpec(gpus=gpus, tp=tp, gpu_type="h100"), recipe=recipe), ClusterProfile(), "cuda")


def reason_starting(result: Plan, start: str) -> str:
    (reason,) = [r for r in result.reasons if r.startswith(start)]
    return reason


@pytest.mark.parametrize(
    ("times", "power", "lr"),
    [
        (4, LINEAR_POWER, 4e-3),
        (4, SQRT_POWER, 2e-3),
        (0.25, SQRT_POWER, 5e-4),
        (1, LINEAR_POWER, 1e-3),
        (2, SQRT_POWER, 1.41e-3),
    ],
)
def test_scale_lr(times: float, power: float, lr: float) -> None:
    assert scale_lr(1e-3, times, power) == lr


def test_batch_reason_shows_tokens() -> None:
    assert "64 x 128 = 8,192 tokens per step" in reason_starting(make_plan(batch=64), "batch: 64 = ")
    assert "2,048 x 128 = 262,144 tokens per step" in reason_starting(make_plan(batch=2048), "batch: 2,048 = ")
    images = make_plan(batch=64, model=ModelSpec(kind="convnet", convnet=ConvnetSpec()))
    assert "tokens" not in reason_starting(images, "batch: 64 = ")


def test_set_batch_keeps_lr_on_any_ranks() -> None:
    for gpus in (1, 2, 8):
        result = make_plan(batch=64, gpus=gpus)
        assert result.batch.global_batch == 64
        assert reason_starting(result, "lr ").startswith(f"lr {LR:g}: independent of the number of ranks")


@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 16])
def test_effective_batch_equals_set_batch(gpus: int) -> None:
    result = make_plan(batch=64, gpus=gpus)
    assert result.batch.micro_batch * result.batch.grad_accum * result.layout.data_parallel == 64


def test_derived_batch_explains_how_to_keep_it() -> None:
    result = make_plan(gpus=48)
    reason = reason_starting(result, "lr ")
    assert result.batch.global_batch == 48
    assert "a batch of 48, which follows from 48 data-parallel ranks" in reason
    assert "train.global_batch = 48" in reason
    assert "twice the batch, adamw needs optim.lr = 0.000424 (x sqrt(2), arXiv 2205.10287)" in reason
    sgd_reason = reason_starting(make_plan(gpus=48, name="sgd"), "lr ")
    assert "twice the batch, sgd needs optim.lr = 0.0006 (x 2, arXiv 1706.02677)" in sgd_reason


def test_lr_for_other_batch_suggests_scaled_lr() -> None:
    reason = reason_starting(make_plan(batch=64, lr_reference_batch=16), "lr ")
    assert "4 times that. Nothing is scaled: set optim.lr = 0.0006 and optim.lr_reference_batch = 64" in reason
    suggested = OptimSpec(lr=6e-4, lr_reference_batch=64)
    request = RunSpec(recipe=Recipe(optim=suggested, train=TrainSpec(global_batch=64)))
    assert "independent of the number of ranks" in reason_starting(plan(request, ClusterProfile(), "cpu"), "lr ")


def test_smaller_batch_suggests_smaller_lr() -> None:
    assert "0.25 times that. Nothing is scaled: set optim.lr = 0.00015 and" in reason_starting(
        make_plan(batch=16, lr_reference_batch=64), "lr "
    )


@pytest.mark.parametrize(("batch", "warned"), [(512, False), (520, True), (1024, True)])
def test_batch_beyond_32_times_warns(batch: int, warned: bool) -> None:
    result = make_plan(batch=batch, lr_reference_batch=16)
    notes = [w for w in result.warnings if "optim.lr was tuned" in w]
    assert bool(notes) is warned
    if warned:
        assert "train.global_batch = 512 or less" in notes[0] and notes[0] in result.reasons
        assert not any(r.startswith("lr ") for r in result.reasons)


def test_negative_reference_batch_is_refused() -> None:
    assert build({"optim": {"lr_reference_batch": 256}}, Recipe, "r.toml").optim.lr_reference_batch == 256
    with pytest.raises(ConfigError, match="lr_reference_batch = -1: must be 0"):
        build({"optim": {"lr_reference_batch": -1}}, Recipe, "r.toml")


def keys_of(fixes: list[str]) -> list[str]:
    return [fix.split(":")[0].split(" = ")[0] for fix in fixes]


def test_memory_advice_order() -> None:
    ddp = Layout(strategy="ddp", dp_replicate=4)
    suggestions = advice.advise_memory(ddp, Batch(micro_batch=6, grad_accum=2, global_batch=48), ParallelSpec())
    assert keys_of(suggestions) == [
        "train.micro_batch",
        "parallel.activation_checkpointing",
        "--layout zero1, then fsdp-grad-op, then fsdp",
        "parallel.activation_offload",
        "more GPUs with fsdp or tp",
    ]
    assert suggestions[0].startswith("train.micro_batch = 3: 4 micro-batches per step instead of 2")


def test_memory_advice_skips_options_in_use() -> None:
    layout = Layout(
        strategy="fsdp", dp_shard=4, activation_checkpointing="full", reshard_after_forward=True, offload=True
    )
    assert keys_of(advice.advise_memory(layout, Batch(), ParallelSpec())) == ["more GPUs with fsdp or tp"]


GPT2 = ModelSpec(dim=768, layers=2, heads=12, kv_heads=12, vocab_size=50257)


def test_misaligned_dimensions_name_next_multiple() -> None:
    (note,) = [w for w in make_plan(model=GPT2, precision="bf16").warnings if "matrix units" in w]
    assert "not a multiple of 8" in note and "model.vocab_size 50257 (next: 50304)" in note
    assert "model.dim" not in note
    even = msgspec.structs.replace(GPT2, vocab_size=50304)
    assert not any("matrix units" in w for w in make_plan(model=even, precision="bf16").warnings)
    assert not any("matrix units" in w for w in make_plan(model=GPT2, precision="fp32").warnings)


def test_alignment_is_checked_per_rank() -> None:
    odd = msgspec.structs.replace(GPT2, vocab_size=50304, ffn_dim=2080)
    assert "model.ffn_dim 2080" in reason_starting(make_plan(model=odd, precision="bf16"), "multiples of 8")
    notes = [w for w in make_plan(model=odd, precision="bf16", gpus=4, tp=4).warnings if "matrix units" in w]
    assert not notes  # 520 is a multiple of 8
    odd = msgspec.structs.replace(odd, ffn_dim=2064)
    (note,) = [w for w in make_plan(model=odd, precision="bf16", gpus=4, tp=4).warnings if "matrix units" in w]
    assert "model.ffn_dim 516 (next: 576), per rank with tp 4" in note
