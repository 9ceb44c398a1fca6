"""Plans of models other than the decoder, and of a decoder too large to build."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import JobSpec, RunSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.parsing.presets import apply_preset
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.plan.planner import Plan, plan

GIB = 1024**3


def make_plan(
    model: dict[str, Any],
    *,
    train: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    objective: dict[str, Any] | None = None,
    **job: Any,
) -> Plan:
    tables = {"model": model, "train": train or {}, "optim": optim or {}, "objective": objective or {}}
    recipe = build(apply_preset(tables), Recipe, "recipe")
    spec = RunSpec(job=JobSpec(**{"nodes": 1, "gpus": 4, **job}), recipe=recipe)
    return plan(spec, ClusterProfile(), "cuda")


@pytest.mark.parametrize("kind", ["convnet", "two-tower"])
def test_states_are_estimated_without_activations(kind: str) -> None:
    replicated, sharded = make_plan({"kind": kind}), make_plan({"kind": kind}, layout="fsdp")
    count = build({"model": {"kind": kind}}, Recipe, "recipe").model.parameters()
    assert replicated.layout.strategy == "ddp" and "not estimated" in replicated.reasons[0]
    assert replicated.memory.params_gib == count * 4 / GIB
    assert sharded.memory.optimizer_gib == count * 8 / 4 / GIB
    for result in (replicated, sharded):
        assert result.memory.activations_gib is None and result.memory.peak_gib is None and result.memory.fits is None
        assert result.time.flops_per_step is None


@pytest.mark.parametrize(
    ("kind", "optim", "message", "fix"),
    [
        ("convnet", {"freeze": ["block.*"]}, "optim.freeze: no module with parameters matches 'block.*'", "blocks"),
        (
            "convnet",
            {"lr_scale": {"zzz": 0.5}},
            "optim.lr_scale: no module with parameters matches",
            "top-level modules",
        ),
        ("convnet", {"freeze": ["*"]}, "optim.freeze: nothing is left to train", "remove a module"),
        ("two-tower", {"freeze": ["embed"]}, "optim.freeze: no module with parameters matches 'embed'", "first.embed"),
        (
            "two-tower",
            {"unfreeze": [{"step": 5, "modules": ["first.layer"]}]},
            "optim.unfreeze.modules: no module with parameters matches 'first.layer'",
            "first.layers",
        ),
    ],
)
def test_unmatched_pattern_is_refused(kind: str, optim: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(ConfigError) as e:
        make_plan({"kind": kind}, optim=optim)
    assert message in e.value.message and fix in str(e.value.fix)
    make_plan({"kind": kind}, optim={"freeze": ["*"], "unfreeze": [{"step": 5, "modules": ["*norm"]}]})


def test_entry_has_no_estimate() -> None:
    result = make_plan({"entry": "package:function"})
    assert result.layout.strategy == "ddp" and result.memory.params_gib is None and result.memory.fits is None
    assert result.batch.tokens_per_step == result.batch.global_batch * 256


def test_tokens_per_step_by_kind() -> None:
    assert make_plan({"kind": "convnet"}).batch.tokens_per_step == 0
    result = make_plan({"kind": "two-tower"})
    assert result.batch.tokens_per_step == result.batch.global_batch * 512


@pytest.mark.parametrize("degree", ["tp", "cp", "pp"])
def test_splitting_non_decoder_is_refused(degree: str) -> None:
    for kind in ("convnet", "two-tower"):
        with pytest.raises(ConfigError, match=f"{degree} 2: a {kind} cannot be split"):
            make_plan({"kind": kind}, **{degree: 2})
    assert getattr(make_plan({"entry": "package:function"}, **{degree: 2}).layout, degree) == 2


def test_groups_stay_in_one_micro_batch() -> None:
    eight = {"group": 8}
    assert make_plan({"kind": "two-tower"}, objective=eight).batch.micro_batch == 8
    result = make_plan({"kind": "two-tower"}, objective={"group": 6}, train={"global_batch": 72})
    assert (result.batch.micro_batch, result.batch.grad_accum) == (18, 1)
    with pytest.raises(ConfigError, match=r"micro_batch = 12 does not divide into groups of 8 .*12 / 8 = 1.5"):
        make_plan({"kind": "two-tower"}, objective=eight, train={"micro_batch": 12, "global_batch": 96})
    with pytest.raises(ConfigError, match=r"global_batch = 48 over 4 data-parallel ranks does not divide into groups"):
        make_plan({"kind": "two-tower"}, objective=eight, train={"global_batch": 48})


def test_whole_batch_as_negatives() -> None:
    """Any micro-batch will do. The plan shows what comparing all samples costs."""
    result = make_plan({"kind": "two-tower"}, train={"global_batch": 4096, "micro_batch": 4})
    text = result.training["objective"]
    assert "against the others of the global batch of 4,096" in text
    assert "a rank holds 64 MiB of similarities" in text  # 1024 x 4096 x 4 bytes, twice, in two directions
    assert "gathers 2 MiB of embeddings" in text  # 4096 x 64 x 4 bytes, of two towers
    assert "the 256 micro-batches run forward twice" in text
    text = make_plan({"kind": "two-tower"}, objective={"group": 8}).training["objective"]
    assert text == "nt-xent, each sample against the others of its group of 8"
    entry = {"entry": "package:function"}
    for degree in ("tp", "cp", "pp"):
        with pytest.raises(ConfigError, match=f"{degree} 2: objective.kind = 'nt-xent' compares the whole"):
            make_plan(entry, objective={"kind": "nt-xent"}, **{degree: 2})
    make_plan(entry, objective={"kind": "nt-xent", "group": 4}, tp=2)


def test_large_unestimated_batch_is_split() -> None:
    result = make_plan({"kind": "convnet"}, train={"global_batch": 512})
    assert (result.batch.micro_batch, result.batch.grad_accum) == (32, 4)


@pytest.mark.long
def test_405b_model_is_planned() -> None:
    result = make_plan({"preset": "llama3.1-405b"}, nodes=512, gpus=8, layout="fsdp", gpu_type="h100")
    assert result.world_size == 4096 and result.memory.params_gib is not None
    assert result.memory.params_gib > 405.85e9 * 4 / 4096 / GIB
