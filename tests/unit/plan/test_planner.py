"""The chosen layout, its reasons and its JSON."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.data import DataSpec
from clustertrain.config.job import JobSpec, RunSpec, ScriptSpec
from clustertrain.config.model import ModelSpec
from clustertrain.config.objective import ObjectiveSpec
from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.recipe import Recipe
from clustertrain.config.train import TrainSpec
from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Layout
from clustertrain.plan.planner import Plan, check_fits, flops_per_step, plan

SMALL = ModelSpec()
LARGE = ModelSpec(vocab_size=32000, dim=4096, layers=32, heads=32, kv_heads=32, ffn_dim=11008)


def spec(model: ModelSpec = SMALL, *, batch: int = 64, seq_len: int = 256, micro: int = 0, **job: Any) -> RunSpec:
    recipe = Recipe(
        model=model, data=DataSpec(seq_len=seq_len), train=TrainSpec(global_batch=batch, micro_batch=micro)
    )  # fmt: skip
    return RunSpec(job=JobSpec(**{"nodes": 2, "gpus": 8, **job}), recipe=recipe)


def make_plan(request: RunSpec, device: str = "cuda", profile: ClusterProfile | None = None) -> Plan:
    return plan(request, profile or ClusterProfile(), device)


def test_one_rank_is_single() -> None:
    for layout in ("auto", "ddp", "fsdp", "hybrid-shard"):
        result = make_plan(spec(nodes=1, gpus=1, layout=layout))
        assert result.layout.strategy == "single" and result.layout.world_size == 1


def test_small_model_is_replicated() -> None:
    result = make_plan(spec(gpu_type="h100"))
    assert (result.layout.strategy, result.layout.dp_replicate, result.layout.dp_shard) == ("ddp", 16, 1)
    assert result.memory.capacity_gib == 80 and result.memory.fits is True
    rejected = {r.strategy: r.reason for r in result.rejected}
    assert "ddp" not in rejected and "s per step" in rejected["fsdp"]


def test_large_model_is_sharded() -> None:
    result = make_plan(spec(LARGE, gpu_type="h100", seq_len=2048))
    assert (result.layout.strategy, result.layout.dp_replicate, result.layout.dp_shard) == ("fsdp", 1, 16)
    assert result.memory.fits is True
    rejected = {r.strategy: r.reason for r in result.rejected}
    assert "more than 64.0 GiB" in rejected["ddp"]


def test_micro_batch_fits_memory() -> None:
    micro_batches = []
    for gpu_type in ("h100", "h200", "b200"):
        result = make_plan(spec(LARGE, layout="fsdp", gpu_type=gpu_type, seq_len=2048, batch=1024))
        assert result.memory.fits is True
        micro_batches.append(result.batch.micro_batch)
    assert micro_batches == sorted(micro_batches) and micro_batches[0] < micro_batches[-1]


def test_defer_reduction_needs_memory() -> None:
    for gpu_type, deferred in (("a100", False), ("b200", True)):
        result = make_plan(spec(LARGE, layout="fsdp", gpu_type=gpu_type, seq_len=2048, batch=512))
        assert result.batch.grad_accum > 1 and result.memory.fits is True
        assert result.layout.defer_reduction is deferred
    request = spec(LARGE, layout="fsdp", gpu_type="a100", seq_len=2048, batch=512, micro=1)
    recipe = msgspec.structs.replace(request.recipe, parallel=ParallelSpec(defer_reduction=True))
    requested = make_plan(msgspec.structs.replace(request, recipe=recipe))
    assert requested.layout.defer_reduction and (requested.memory.grads_gib or 0) * 2**30 > 4 * LARGE.parameters()


def test_default_global_batch_divides() -> None:
    result = make_plan(spec(batch=0))
    assert result.batch.global_batch == 32 and any("the recipe sets no global batch" in r for r in result.reasons)
    assert make_plan(spec(batch=0, nodes=3, gpus=7)).batch.global_batch == 42
    batch = make_plan(spec(batch=0, micro=3, nodes=3, gpus=7)).batch
    assert (batch.global_batch, batch.micro_batch, batch.grad_accum) == (63, 3, 1)


def test_unknown_gpu_is_assumed_16_gib() -> None:
    result = make_plan(spec(gpu_type="x9000"))
    assert result.layout.strategy == "ddp"
    assert result.memory.capacity_gib is None and result.memory.fits is None
    assert "16 GiB, assumed because GPU type 'x9000' is unknown" in " ".join(result.reasons)
    assert make_plan(spec(LARGE, seq_len=2048)).layout.strategy == "fsdp"


def test_requested_layout_is_used() -> None:
    result = make_plan(spec(layout="fsdp", gpu_type="h100"))
    assert result.layout.strategy == "fsdp" and "requested" in result.reasons[0]


@pytest.mark.long
def test_plan_that_does_not_fit_is_refused_at_submit() -> None:
    result = make_plan(spec(LARGE, layout="ddp", gpu_type="a100", seq_len=2048))
    assert result.memory.fits is False
    assert any("does not fit" in reason for reason in result.reasons)
    assert any("needs the least memory" in reason for reason in result.reasons)
    with pytest.raises(ConfigError, match="--layout auto") as e:
        check_fits(result)
    assert e.value.exit_code == 78
    tiny = make_plan(spec(LARGE, nodes=1, gpus=2, gpu_type="t4", seq_len=2048))
    with pytest.raises(ConfigError, match=r"\d+ nodes of 2 t4"):
        check_fits(tiny)


def test_fit_without_margin_is_tight() -> None:
    with_margin = make_plan(spec(LARGE, nodes=1, gpus=4, gpu_type="a100", seq_len=2048))
    assert with_margin.memory.fits is True and (with_margin.memory.peak_gib or 0) <= 32 and with_margin.warnings == ()
    tight = make_plan(spec(LARGE, nodes=1, gpus=8, gpu_type="rtx-4090", seq_len=4096, layout="fsdp"))
    assert tight.memory.fits is True and 0.8 * 24 < (tight.memory.peak_gib or 0) <= 24
    (warning,) = tight.warnings
    assert warning.startswith("tight: ") and "80% of the 24 GiB of rtx-4090" in warning
    check_fits(tight)


def test_unknown_capacity_is_never_refused() -> None:
    check_fits(make_plan(spec(LARGE, layout="ddp", seq_len=2048)))


def test_global_batch_must_divide() -> None:
    with pytest.raises(ConfigError, match="100 / 16"):
        make_plan(spec(batch=100))


def test_script_gets_ddp_and_empty_batch() -> None:
    request = RunSpec(job=JobSpec(gpus=4), script=ScriptSpec(path="train.py", cwd="/"))
    result = make_plan(request)
    assert result.layout.strategy == "ddp" and result.layout.dp_replicate == 4
    assert result.batch.global_batch == 0 and result.memory.peak_gib is None and result.time.flops_per_step is None
    assert "script" in result.reasons[0]
    sharded = make_plan(msgspec.structs.replace(request, job=JobSpec(gpus=4, layout="fsdp")))
    assert sharded.layout.dp_shard == 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_json_keys(device: str) -> None:
    result = json.loads(msgspec.json.encode(make_plan(spec(gpu_type="h100"), device)))
    assert {"layout", "batch", "memory", "time", "nccl", "reasons", "rejected"} <= set(result)
    assert {"strategy", "dp_replicate", "dp_shard", "zero1", "tp", "sequence_parallel", "cp", "pp", "schedule",
            "virtual_stages", "activation_checkpointing", "reshard_after_forward", "offload"
            } <= set(result["layout"])  # fmt: skip
    assert set(result["batch"]) == {"micro_batch", "grad_accum", "global_batch", "tokens_per_step"}
    assert {"params_gib", "grads_gib", "optimizer_gib", "activations_gib", "overhead_gib", "peak_gib", "capacity_gib",
            "fits"} <= set(result["memory"])  # fmt: skip
    assert {"step_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "bubble_fraction", "comm_s"} <= set(
        result["time"]
    )
    for name in ("device", "precision", "world_size", "nodes", "gpus_per_node", "env", "signal_lead_s"):
        assert name in result
    assert result["world_size"] == 16 and result["precision"] == ("bf16" if device == "cuda" else "fp32")


def test_unknown_times_are_none() -> None:
    time = make_plan(spec()).time
    assert time.step_s is None and time.mfu is None and time.comm_s is None


def test_flops_are_about_six_per_parameter_and_token() -> None:
    request = spec(LARGE, batch=4, seq_len=2048)
    tokens = 4 * 2048
    # Llama 2 7B at 2048 tokens: attention adds about an eighth.
    assert 1.0 < flops_per_step(request, 4) / (6 * LARGE.parameters() * tokens) < 1.15


def test_profile_interface_is_used_on_slurm_only() -> None:
    profile = ClusterProfile(fabric_interface="ib0")
    assert make_plan(spec(backend="slurm"), profile=profile).nccl["NCCL_SOCKET_IFNAME"].value == "ib0"
    assert "NCCL_SOCKET_IFNAME" not in make_plan(spec(backend="local"), profile=profile).nccl


def test_user_env_names_are_not_planned() -> None:
    request = msgspec.structs.replace(spec(), env={"TORCH_FR_BUFFER_SIZE": "1"})
    result = plan(request, ClusterProfile(), "cuda", inherited_env={"OMP_NUM_THREADS"})
    assert "TORCH_FR_BUFFER_SIZE" not in result.nccl and "OMP_NUM_THREADS" not in result.env


def test_signal_lead_fits_time_limit() -> None:
    assert make_plan(spec()).signal_lead_s == 120
    assert make_plan(spec(time="1:00:00")).signal_lead_s == 120
    short = make_plan(spec(time="3"))
    assert short.signal_lead_s == 90
    assert any("time limit of 180 s" in reason for reason in short.reasons)


def test_plan_has_whole_layout() -> None:
    recipe = Recipe(
        model=SMALL,
        parallel=ParallelSpec(schedule="interleaved", activation_checkpointing="full", offload=True),
        train=TrainSpec(global_batch=64),
    )
    result = make_plan(RunSpec(job=JobSpec(nodes=2, gpus=8, layout="fsdp", tp=2, cp=2, pp=2), recipe=recipe))
    assert result.layout == Layout(
        strategy="fsdp", dp_shard=2, tp=2, sequence_parallel=True, cp=2, pp=2, schedule="interleaved",
        virtual_stages=2, activation_checkpointing="full", reshard_after_forward=False, offload=True,
    )  # fmt: skip
    assert result.layout.world_size == result.world_size == 16
    assert any("reshard_after_forward off" in reason for reason in result.reasons)


@pytest.mark.parametrize(
    ("layout", "degrees", "expected"),
    [
        ("zero1", {}, {"dp_replicate": 16, "zero1": True, "reshard_after_forward": True}),
        ("fsdp-grad-op", {}, {"dp_shard": 16, "reshard_after_forward": False}),
        ("hybrid-shard", {}, {"dp_replicate": 2, "dp_shard": 8, "reshard_after_forward": True}),
        ("hybrid-shard", {"dp_shard": 4}, {"dp_replicate": 4, "dp_shard": 4}),
        ("ddp", {"tp": 2}, {"dp_replicate": 8, "tp": 2, "schedule": None, "virtual_stages": 1}),
    ],
    ids=["zero1", "fsdp-grad-op", "hybrid-shard", "hybrid-shard with dp_shard", "ddp with tp"],
)
def test_requested_strategy(layout: str, degrees: dict[str, int], expected: dict[str, Any]) -> None:
    result = make_plan(spec(layout=layout, gpu_type="h100", **degrees)).layout
    assert result.strategy == layout
    assert {name: getattr(result, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("degrees", "strategy"),
    [
        ({"dp_shard": 16}, "fsdp"),
        ({"dp_replicate": 16}, "ddp"),
        ({"dp_shard": 8}, "hybrid-shard"),
        ({"dp_replicate": 2}, "hybrid-shard"),
        ({"dp_replicate": 1}, "fsdp"),
        ({"dp_shard": 1}, "ddp"),
        ({"dp_shard": 8, "tp": 2}, "fsdp"),
    ],
    ids=str,
)
def test_strategy_follows_from_degrees(degrees: dict[str, int], strategy: str) -> None:
    result = make_plan(spec(gpu_type="h100", **degrees))
    assert result.layout.strategy == strategy
    assert any("--dp-replicate and --dp-shard" in reason for reason in result.reasons)


def test_auto_strategy_uses_memory_after_other_degrees() -> None:
    large = {"gpu_type": "h100", "seq_len": 2048}
    assert make_plan(spec(LARGE, **large)).layout.strategy == "fsdp"
    tp_8 = make_plan(spec(LARGE, tp=8, **large))
    assert (tp_8.layout.strategy, tp_8.layout.dp_replicate, tp_8.layout.tp) == ("ddp", 2, 8)
    assert tp_8.memory.fits is True
    tp_2 = make_plan(spec(LARGE, tp=2, **large))
    assert (tp_2.layout.strategy, tp_2.layout.dp_shard) == ("fsdp", 8)


def test_label_smoothing_with_tp_needs_more_memory() -> None:
    split = spec(nodes=1, gpus=2, tp=2)
    smoothed = msgspec.structs.replace(split.recipe, objective=ObjectiveSpec(label_smoothing=0.1))
    result, plain = make_plan(msgspec.structs.replace(split, recipe=smoothed), "cpu"), make_plan(split, "cpu")
    assert (result.memory.logits_gib or 0.0) > 1.5 * (plain.memory.logits_gib or 0.0)
    (reason,) = [r for r in result.reasons if r.startswith("label smoothing with tp 2")]
    assert reason.endswith("that memory is in the estimate")


def test_one_data_parallel_rank_is_single() -> None:
    for layout in ("auto", "ddp", "fsdp", "fsdp-grad-op", "hybrid-shard"):
        result = make_plan(spec(nodes=1, layout=layout, tp=2, pp=4, gpu_type="h100"))
        assert (result.layout.strategy, result.layout.data_parallel) == ("single", 1)
        assert "single: tp 2 x pp 4 uses all 8 ranks" in result.reasons[0]


def test_cp_ranks_may_share_parameters() -> None:
    job = {"nodes": 1, "gpu_type": "h100", "cp": 8, "seq_len": 2048}
    assert make_plan(spec(nodes=1, cp=8, gpu_type="h100")).layout.strategy == "single"
    for layout in ("auto", "fsdp"):
        result = make_plan(spec(LARGE, layout=layout, **job)).layout
        assert (result.strategy, result.dp_shard, result.is_fully_sharded) == ("fsdp", 1, True)


def test_pipeline_gets_many_equal_micro_batches() -> None:
    result = make_plan(spec(nodes=1, pp=4, layout="ddp", batch=128))
    assert (result.layout.dp_replicate, result.batch.grad_accum, result.batch.micro_batch) == (2, 16, 4)
    few = make_plan(spec(nodes=1, pp=4, layout="ddp", batch=12))
    assert (few.batch.grad_accum, few.batch.micro_batch) == (6, 1)
    for gpu_type in ("", "h100"):
        default = make_plan(spec(nodes=8, pp=4, layout="ddp", gpu_type=gpu_type, batch=0))
        assert default.batch.grad_accum % 4 == 0 and default.batch.global_batch == 64
    searched = make_plan(spec(LARGE, nodes=1, pp=4, layout="ddp", gpu_type="h100", batch=128, seq_len=2048))
    assert searched.batch.grad_accum * searched.batch.micro_batch == 64
    assert searched.batch.grad_accum >= 16  # if compute dominates, a well-filled pipeline wins


def test_node_crossing_is_reason_and_warning() -> None:
    wide = ModelSpec(dim=1024, heads=16, kv_heads=16)
    result = make_plan(spec(wide, tp=16, gpu_type="h100"))
    warning = next(w for w in result.warnings if w.startswith("tp 16 crosses nodes of 8: "))
    assert warning in result.reasons
    assert make_plan(spec(wide, tp=8, gpu_type="h100")).warnings == ()


@pytest.mark.long
def test_plan_that_does_not_fit_suggests_changes() -> None:
    result = make_plan(spec(LARGE, nodes=1, gpus=1, gpu_type="t4", seq_len=2048))
    with pytest.raises(ConfigError, match=r"\d+ nodes of 1 t4") as e:
        check_fits(result)
    assert e.value.fix == f"{result.suggested_changes}"


def test_gpus_without_bf16_get_fp32() -> None:
    result = make_plan(spec(gpu_type="v100"))
    assert result.precision == "fp32" and result.warnings == ()
    assert any("v100 has no bf16 in hardware; train.precision = 'fp16' is possible" in r for r in result.reasons)
    assert make_plan(spec(gpu_type="a100")).precision == "bf16"
