"""Requests that the plan refuses, with arithmetic and a fix, and those that it only notes."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.data import DataSpec
from clustertrain.config.job import JobSpec, RunSpec, ScriptSpec
from clustertrain.config.model import ModelSpec
from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.recipe import Recipe
from clustertrain.config.train import TrainSpec
from clustertrain.errors import ConfigError
from clustertrain.plan.planner import Plan, plan

DOCUMENTS = {"kind": "tokens", "path": "/shards", "pack": True, "attention": "document"}
MODEL = ModelSpec(vocab_size=256, dim=64, layers=8, heads=8, kv_heads=4)


def make_plan(
    job: dict[str, Any],
    *,
    parallel: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    model: ModelSpec = MODEL,
    seq_len: int = 256,
    data: dict[str, Any] | None = None,
    device: str = "cuda",
    script: bool = False,
) -> Plan:
    recipe = Recipe(
        model=model,
        data=DataSpec(**{"seq_len": seq_len, **(data or {})}),
        parallel=ParallelSpec(**(parallel or {})),
        train=TrainSpec(**{"global_batch": 64, **(train or {})}),
    )
    spec = RunSpec(
        job=JobSpec(**{"nodes": 2, "gpus": 8, **job}),
        recipe=recipe,
        script=ScriptSpec(path="train.py", cwd="/") if script else None,
    )
    return plan(spec, ClusterProfile(), device)


Case = tuple[dict[str, Any], dict[str, Any], str, str]
REFUSED: dict[str, Case] = {
    "product": ({"tp": 3}, {}, "16 / 3 = 5.33333", "divides the world size"),
    "dp-product": ({"layout": "hybrid-shard", "dp_shard": 3}, {}, "but there are 16 ranks", "= 16"),
    "one-node": ({"layout": "hybrid-shard", "nodes": 1}, {}, "one node of 8", "--layout fsdp"),
    "zero1-tp": ({"layout": "zero1", "tp": 2}, {}, "tp 2 splits them", "fsdp-grad-op"),
    "zero1-cp-pp": ({"layout": "zero1", "cp": 2, "pp": 2}, {}, "cp 2, pp 2", "fsdp-grad-op"),
    "deep": ({"pp": 16}, {}, "16 stages, but the model has only 10 parts", "--pp 8, or model.layers"),
    "deep-virtual": (
        {"pp": 8},
        {"parallel": {"schedule": "interleaved"}},
        "pp 8 x virtual_stages 2 = 16 stages",
        "one stage per rank, or --pp 4, or model.layers of at least 14",
    ),
    "split": ({"pp": 4}, {"parallel": {"split": ("layers.4",)}}, "need 3", "give 3 parts"),
    "split-name": ({"pp": 2}, {"parallel": {"split": ("layer.4",)}}, "no part 'layer.4'", "layers.4"),
    "split-order": (
        {"nodes": 1, "gpus": 6, "pp": 3},
        {"parallel": {"split": ("layers.4", "layers.2")}, "train": {"global_batch": 60}},
        "before the previous one",
        "order of execution",
    ),
    "heads": ({"tp": 16}, {}, "model.heads = 8 (8 / 16 = 0.5)", "--tp 2 or 4"),
    "kv-heads": ({"tp": 8}, {}, "tp 8 does not divide model.kv_heads = 4 (4 / 8 = 0.5)", "--tp 2 or 4"),
    "ffn": (
        {"tp": 2},
        {"model": ModelSpec(dim=64, heads=8, kv_heads=4, ffn_dim=99)},
        "model.ffn_dim = 99 (99 / 2 = 49.5)",
        "remove --tp",
    ),
    "vocabulary": (
        {"tp": 4},
        {"model": ModelSpec(vocab_size=50258, dim=64, heads=8, kv_heads=4)},
        "model.vocab_size = 50258 (50258 / 4 = 12564.5)",
        "--tp 2,",
    ),
    "sequence-cp": ({"cp": 4}, {"seq_len": 250}, "(cp 4): 250 / 4 = 62.5", "248 or 252"),
    "sequence-tp": (
        {"tp": 4},
        {"seq_len": 250},
        "tp 4 with sequence parallel): 250 / 4",
        "sequence_parallel = false",
    ),
    "sequence-both": ({"tp": 4, "cp": 4}, {"seq_len": 248}, "16 parts (cp 4 x tp 4", "240 or 256"),
    "1f1b": (
        {"pp": 8},
        {"train": {"global_batch": 8}},
        "1f1b needs at least as many micro-batches as stages, 8, but there would be 4",
        "a global batch of 16",
    ),
    "1f1b-single": ({"pp": 8}, {"train": {"micro_batch": 32}}, "there would be 1", "micro_batch = 4 or 2 or 1"),
    "interleaved": (
        {"nodes": 1, "gpus": 4, "pp": 4},
        {"parallel": {"schedule": "interleaved"}, "train": {"global_batch": 11, "micro_batch": 1}},
        "11 // pp 4 = 2 rounds of equal size, but 11 / 2 = 5.5",
        "parallel.schedule = 'gpipe'",
    ),
    "interleaved-virtual": (
        {"nodes": 1, "gpus": 4, "pp": 4},
        {
            "parallel": {"schedule": "interleaved", "virtual_stages": 2},
            "train": {"global_batch": 11, "micro_batch": 1},
        },
        "11 / 2 = 5.5",
        "a global batch of 12\n",
    ),
    "batch": ({"tp": 2}, {"train": {"global_batch": 60}}, "60 / 8 = 7.5", "56 or 64"),
    "fp8-old": ({"gpu_type": "a100"}, {"train": {"precision": "fp8"}}, "matrix units of a100", "'bf16'"),
    "fp8-cpu": ({}, {"train": {"precision": "fp8"}, "device": "cpu"}, "CPUs have no fp8", "'bf16' or 'fp32'"),
    "async-tp-cpu": (
        {"tp": 2},
        {"parallel": {"async_tp": True, "compile": True}, "device": "cpu"},
        "parallel.async_tp",
        "remove it",
    ),
    "ring-cpu": (
        {"cp": 2},
        {"parallel": {"context_parallel_method": "ring"}, "device": "cpu"},
        "ring attention",
        "'all-gather'",
    ),
    "offload-cpu": ({"layout": "fsdp"}, {"parallel": {"offload": True}, "device": "cpu"}, "no GPU memory", "remove it"),
    "compiled-halves": (
        {"pp": 2},
        {"parallel": {"compile": True, "schedule": "zero-bubble"}},
        "parallel.compile with schedule zero-bubble",
        "remove one",
    ),
    "compiled-halves-cpu": (
        {"pp": 2},
        {"parallel": {"compile": True, "schedule": "zbv"}, "train": {"precision": "fp16"}, "device": "cpu"},
        "parallel.compile with schedule zbv",
        "remove one",
    ),
    "compiled-halves-fp8": (
        {"pp": 2},
        {"parallel": {"compile": True, "schedule": "zbv"}, "train": {"precision": "fp8"}},
        "parallel.compile with schedule zbv",
        "remove one",
    ),
    "documents-ring": (
        {"cp": 2},
        {"data": DOCUMENTS, "parallel": {"context_parallel_method": "ring"}},
        "takes no mask",
        '"all-gather"',
    ),
    "efficient-cpu": ({}, {"train": {"attention_backend": "efficient"}, "device": "cpu"}, "GPUs only", '"flash" or'),
    "cudnn-fp32": (
        {},
        {"train": {"attention_backend": "cudnn", "precision": "fp32"}},
        'train.attention_backend = "cudnn": it computes in 16 bits only, and the precision is fp32',
        '"efficient"',
    ),
    "flash-old": (
        {"gpu_type": "v100-32gb"},
        {"train": {"attention_backend": "flash", "precision": "fp16"}},
        "needs Ampere or a later GPU, not v100",
        '"efficient"',
    ),
    "flash-documents": (
        {"gpu_type": "h100"},
        {"train": {"attention_backend": "flash"}, "data": DOCUMENTS},
        'it takes no mask, which data.attention = "document"',
        '"auto"',
    ),
    "flash-cp": (
        {"gpu_type": "h100", "cp": 2},
        {"train": {"attention_backend": "flash"}},
        "it takes no mask, which cp 2",
        '"ring"',
    ),
    "math-ring": (
        {"gpu_type": "h100", "cp": 2},
        {"train": {"attention_backend": "math"}, "parallel": {"context_parallel_method": "ring"}},
        "needs a fused kernel",
        '"all-gather"',
    ),
    "selective-halves": (
        {"pp": 2},
        {"parallel": {"activation_checkpointing": "selective", "schedule": "zero-bubble"}, "device": "cpu"},
        "selective activation checkpointing with schedule zero-bubble",
        "'full' or 'none'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_layout_shows_arithmetic_and_fix(case: str) -> None:
    job, rest, message, fix = REFUSED[case]
    with pytest.raises(ConfigError) as e:
        make_plan(job, **rest)
    assert message in e.value.message
    assert e.value.fix is not None and fix in e.value.fix + "\n"
    assert e.value.exit_code == 78


@pytest.mark.parametrize(
    ("job", "rest"),
    [
        ({"pp": 8}, {}),
        ({"pp": 4}, {"parallel": {"schedule": "interleaved"}}),
        ({"pp": 4}, {"parallel": {"schedule": "zbv", "activation_checkpointing": "full"}}),
        ({}, {"parallel": {"schedule": "zbv", "activation_checkpointing": "selective", "compile": True}}),
        ({"pp": 4}, {"parallel": {"split": ("layers.1", "layers.2", "layers.3")}}),
        ({"tp": 4}, {"seq_len": 250, "parallel": {"sequence_parallel": False}}),
        ({"pp": 8}, {"parallel": {"schedule": "gpipe"}, "train": {"micro_batch": 32}}),
        ({"gpu_type": "h100"}, {"train": {"precision": "fp8"}}),
        ({"gpu_type": "h100", "cp": 2}, {"data": DOCUMENTS}),
        ({}, {"data": DOCUMENTS, "train": {"attention_backend": "flash"}, "device": "cpu"}),
        # Options of other layouts have no effect.
        ({"layout": "ddp"}, {"parallel": {"offload": True, "context_parallel_method": "ring"}, "device": "cpu"}),
        ({}, {"parallel": {"async_tp": True, "compile": True}, "device": "cpu"}),
        # The model of a script is unknown before it runs.
        ({"tp": 16}, {"script": True}),
        ({"pp": 16}, {"script": True}),
    ],
    ids=[
        "pp",
        "interleaved",
        "zbv with full checkpointing",
        "schedule without pipeline",
        "split",
        "tp without sequence parallel",
        "gpipe with one micro-batch",
        "fp8",
        "documents with cp",
        "documents with flash on the CPU",
        "options of other layouts",
        "async tp without tp",
        "script with tp",
        "script with pp",
    ],
)
def test_possible_layout_is_accepted(job: dict[str, Any], rest: dict[str, Any]) -> None:
    make_plan(job, **rest)


def test_slow_or_uncertain_precision_is_noted() -> None:
    result = make_plan({}, train={"precision": "fp16"}, device="cpu")
    assert any("fp16 on the CPU" in note for note in result.warnings)
    result = make_plan({"gpu_type": "x9000"}, train={"precision": "fp8"})
    assert any("compute capability 8.9" in note for note in result.warnings)
    assert set(result.warnings) <= set(result.reasons)
    result = make_plan({}, train={"precision": "tf32"}, device="cpu")
    assert any("matmuls stay fp32" in note for note in result.warnings)
    for precision in ("bf16", "tf32"):
        result = make_plan({"gpu_type": "v100"}, train={"precision": precision})
        assert any(f"precision {precision}: v100 lacks it in hardware" in note for note in result.warnings)
        assert make_plan({"gpu_type": "a100"}, train={"precision": precision}).warnings == ()
    assert make_plan({"gpu_type": "h100"}, train={"precision": "fp8"}).warnings == ()
