"""Warnings and notes of plans that are allowed."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.contract import ContractSpec
from clustertrain.config.job import JobSpec, RunSpec, ScriptSpec
from clustertrain.config.model import ModelSpec
from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.config.train import TrainSpec
from clustertrain.plan.explain import warnings
from clustertrain.plan.layout import Batch, Layout
from clustertrain.plan.planner import Plan, plan

DDP = Layout(strategy="ddp", dp_replicate=4)
FSDP = Layout(strategy="fsdp", dp_shard=4)
LARGE = ModelSpec(vocab_size=32000, dim=4096, layers=32, heads=32, kv_heads=32)


def make_plan(
    job: dict[str, Any],
    *,
    model: ModelSpec | None = None,
    parallel: dict[str, Any] | None = None,
    batch: int = 64,
    script: bool = False,
) -> Plan:
    recipe = Recipe(
        model=model or ModelSpec(), parallel=ParallelSpec(**(parallel or {})), train=TrainSpec(global_batch=batch)
    )
    spec = RunSpec(
        job=JobSpec(**{"nodes": 2, "gpus": 8, **job}),
        recipe=recipe,
        script=ScriptSpec(path="train.py", cwd="/") if script else None,
    )
    return plan(spec, ClusterProfile(), "cuda")


@pytest.mark.parametrize(
    ("layout", "options", "unused"),
    [
        (DDP, {"offload": True, "prefetch": 2, "static_graph": True}, ["offload", "prefetch"]),
        (FSDP, {"offload": True, "prefetch": 2}, []),
        (FSDP, {"compress_gradients": True, "static_graph": True}, ["static_graph"]),
        (Layout(strategy="ddp", dp_replicate=2, tp=2), {"compress_gradients": True}, []),
        (Layout(), {"compress_gradients": True}, ["compress_gradients"]),
        (Layout(), {"offload": True, "bucket_mib": 50}, ["offload", "bucket_mib"]),
        (Layout(), {}, []),
        (DDP, {"defer_reduction": True}, ["defer_reduction"]),
        (
            FSDP,
            {"sequence_parallel": False, "context_parallel_method": "ring", "split": ("a",)},
            ["sequence_parallel", "context_parallel_method", "split"],
        ),
        (Layout(tp=2, pp=2), {"sequence_parallel": False, "schedule": "1f1b"}, []),
        (Layout(tp=2, sequence_parallel=False), {"async_tp": True, "compile": True}, ["async_tp"]),
        (Layout(tp=2, sequence_parallel=True), {"async_tp": True, "compile": True}, []),
    ],
)
def test_options_of_other_layouts_have_no_effect(layout: Layout, options: dict[str, Any], unused: list[str]) -> None:
    notes = warnings.unused_option_warnings(layout, ParallelSpec(**options))
    assert [note.partition(" has no effect")[0] for note in notes] == [f"parallel.{name}" for name in unused]


def test_notes_appear_in_plan() -> None:
    (note,) = make_plan({"layout": "ddp", "gpu_type": "h100"}, parallel={"offload": True}).warnings
    assert note == "parallel.offload has no effect: ddp shards no parameters"
    (note,) = make_plan({"nodes": 1, "dp_replicate": 2, "dp_shard": 4}).warnings
    assert "hybrid-shard 2 x 4 inside one node" in note
    assert make_plan({"dp_replicate": 2, "dp_shard": 8}).warnings == ()


def test_channels_last_applies_to_model_entries() -> None:
    def notes_for(**model: Any) -> list[str]:
        recipe = Recipe(model=ModelSpec(**model), parallel=ParallelSpec(channels_last=True))
        return warnings.channels_last_warnings(recipe)

    assert notes_for(entry="mine:make") == []
    assert notes_for(kind="convnet") == [
        "parallel.channels_last has no effect on a convnet, which always uses it: it is for model.entry"
    ]
    assert make_plan({"layout": "ddp", "gpu_type": "h100"}, parallel={"channels_last": True}).warnings == tuple(
        notes_for()
    )
    assert make_plan({}, parallel={"channels_last": True}, script=True).warnings == ()


def test_layerwise_options_on_model_without_layers() -> None:
    parallel = ParallelSpec(compile=True, prefetch=2)
    full = Layout(strategy="fsdp", dp_shard=4, activation_checkpointing="full")
    notes = warnings.layerless_warnings(full, parallel, "mine:make")
    assert [note.partition(" has no effect")[0] for note in notes] == [
        "parallel.activation_checkpointing",
        "parallel.compile",
        "parallel.prefetch",
    ]
    assert notes[0].endswith("mine:make has no list of layers (nn.ModuleList)")
    assert warnings.layerless_warnings(DDP, ParallelSpec(), "mine:make") == []


def test_custom_loss_may_not_give_deciding_metric() -> None:
    def notes_for(metric: str, **tables: Any) -> list[str]:
        document = {
            "contract": {"metric": metric},
            "model": {"entry": "mine:make"},
            "data": {"validation": 0.1},
            **tables,
        }
        return warnings.model_loss_warnings(build(document, Recipe, "recipe"))

    (note,) = notes_for("validation_accuracy")
    assert (
        "only if mine:make does not compute its loss itself" in note and "add 'accuracy' to evaluation.metrics" in note
    )
    assert notes_for("validation_accuracy", evaluation={"metrics": ["accuracy"]}) == [] == notes_for("validation_loss")
    assert notes_for("validation_accuracy", objective={"kind": "cross-entropy"}) == []


def test_unbuilt_model_requirements() -> None:
    (note,) = make_plan({"tp": 2, "pp": 2}, script=True).warnings
    assert "the model of a script" in note and "a tp_plan (tp 2) or pipeline_units (pp 2)" in note
    (note,) = make_plan({"cp": 2}, model=ModelSpec(entry="mine:make")).warnings
    assert "the model of mine:make" in note and "SelfAttention (cp 2)" in note
    assert make_plan({}, script=True).warnings == () == make_plan({"tp": 2}).warnings


def test_underfilled_pipeline_warns() -> None:
    result = make_plan({"pp": 4}, batch=32)
    assert result.time.bubble_fraction == pytest.approx(3 / 11)
    (note,) = result.warnings
    assert "8 micro-batches on a pipeline of 4 ranks leave a bubble of 27% of the step" in note
    assert "16 or more would leave 16%: a larger train.global_batch" in note and "smaller" not in note
    filled = make_plan({"pp": 4})
    assert filled.warnings == () and filled.time.bubble_fraction == pytest.approx(3 / 19)
    (note,) = warnings.bubble_warnings(Layout(pp=2, schedule="zbv", virtual_stages=2), Batch(micro_batch=4))
    assert note.startswith("1 micro-batch on") and "leave a bubble; 8 or more would leave 0%" in note
    assert note.endswith("or a smaller train.micro_batch")


@pytest.mark.long
def test_bubble_warning_only_for_requested_pipeline() -> None:
    result = make_plan({"pp": 4, "gpu_type": "h100"}, batch=16)
    (note,) = result.warnings
    assert "on a pipeline of 4 ranks leave a bubble" in note and "smaller train.micro_batch" not in note
    large = ModelSpec(vocab_size=32000, dim=16384, layers=64, heads=128, kv_heads=8)
    searched = make_plan({"nodes": 32, "gpu_type": "a100"}, model=large, batch=32)
    assert searched.layout.pp > 1 and searched.batch.grad_accum < 4 * searched.layout.pp
    assert not any("bubble" in note for note in searched.warnings)


def test_unknown_gpu_may_not_fit() -> None:
    for layout in ("ddp", "auto"):
        result = make_plan({"nodes": 1, "gpus": 2, "layout": layout}, model=LARGE)
        assert any("may not fit: " in note and "set --gpu-type" in note for note in result.warnings)
    assert make_plan({"layout": "ddp"}).warnings == ()


def test_fsdp_traffic_note_in_pipeline() -> None:
    assert "3/2" in make_plan({}).rejected[0].reason
    assert "3/2" not in make_plan({"pp": 2}).rejected[0].reason


def test_exceeded_budget_warns() -> None:
    contract = ContractSpec(gpu_hours=2.0, wall_hours=10.0)
    (note,) = warnings.budget_warnings(contract, 9.0, 400, 4)  # 1 h on 4 ranks
    assert note == (
        "400 steps of 9 s on 4 ranks need more than contract.gpu_hours = 2 (4 predicted): the run "
        "stops at about step 200, "
        "sooner with start-up, evaluations and checkpoints"
    )
    assert warnings.budget_warnings(contract, 9.0, 200, 4) == [] == warnings.budget_warnings(contract, None, 10**9, 4)
    assert warnings.budget_warnings(ContractSpec(), 9.0, 10**9, 4) == []
    (note,) = warnings.budget_warnings(ContractSpec(cost=1.0, gpu_hour_cost=3.0, on_budget_spent="warn"), 36.0, 100, 1)
    assert "contract.cost = 1 (3 predicted): there is a warning at about step 33" in note


def test_budget_warning_appears_in_plan() -> None:
    recipe = Recipe(model=LARGE, contract=ContractSpec(gpu_hours=0.01), train=TrainSpec(global_batch=64, steps=1000))
    spec = RunSpec(job=JobSpec(nodes=1, gpus=8, gpu_type="h100"), recipe=recipe)
    assert any("contract.gpu_hours = 0.01" in w for w in plan(spec, ClusterProfile(), "cuda").warnings)
