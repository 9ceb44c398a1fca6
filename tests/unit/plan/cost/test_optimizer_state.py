"""The optimizer in the plan: its memory, refusals and warnings."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import JobSpec, RunSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.plan.cost.optimizer_state import OwnedParams, find_heaviest_owner
from clustertrain.plan.planner import Plan, plan

GIB = 1024**3
MODEL = {"dim": 512, "layers": 8, "heads": 8, "kv_heads": 8, "vocab_size": 8192}


def make_plan(
    optim: dict[str, Any], *, model: dict[str, Any] | None = None, device: str = "cpu", **tables: Any
) -> Plan:
    job = {"nodes": 1, "gpus": 4, "layout": "ddp", **tables.pop("job", {})}
    recipe = build({"model": model or MODEL, "optim": optim, **tables}, Recipe, "recipe")
    return plan(RunSpec(job=JobSpec(**job), recipe=recipe), ClusterProfile(), device)


def parameters() -> int:
    return build({"model": MODEL}, Recipe, "recipe").model.parameters()


@pytest.mark.parametrize(
    ("name", "bytes_per_parameter"), [("adamw", 8), ("lamb", 8), ("sgd", 4), ("lion", 4), ("lars", 4), ("adam", 8)]
)
def test_rank_holds_the_state_of_its_parameters(name: str, bytes_per_parameter: int) -> None:
    assert make_plan({"name": name}).memory.optimizer_gib == pytest.approx(parameters() * bytes_per_parameter / GIB)
    sharded = make_plan({"name": name}, job={"layout": "fsdp"})
    # Whole parameters cannot be shared out quite evenly.
    assert sharded.memory.optimizer_gib == pytest.approx(parameters() * bytes_per_parameter / 4 / GIB, rel=0.01)


def test_shape_dependent_state_is_counted() -> None:
    base = make_plan({}).memory.optimizer_gib or 0.0
    adafactor, soap, muon, eight = (
        make_plan({"name": n}).memory.optimizer_gib or 0.0 for n in ("adafactor", "soap", "muon", "adamw8bit")
    )
    assert adafactor < 0.01 * base < eight < 0.27 * base < muon < base < 2 * base < soap


def test_one_rank_holds_largest_state() -> None:
    """One rank holds the embedding's second moments and preconditioners, regardless of the number of ranks."""
    small, large, larger = (
        make_plan({"name": "soap"}, job={"layout": "fsdp", "gpus": n}).memory.optimizer_gib or 0.0 for n in (4, 64, 512)
    )
    embedding_bytes = 8 * 8192 * 512 + 8 * (8192**2 + 512**2)
    assert min(small, large) >= embedding_bytes / GIB and large == pytest.approx(larger, rel=0.01)


def test_update_needs_temporary_memory() -> None:
    """The owner of the embedding needs its value and gradient, the state, and temporary tensors of the update."""
    recipe = build({"model": MODEL}, Recipe, "recipe")

    def owner(name: str, ranks: int) -> OwnedParams:
        optim = build({"optim": {"name": name}}, Recipe, "recipe").optim
        return find_heaviest_owner(optim, recipe.model, 8, embedding=True, head=True, ranks=ranks, zero1=False)

    embedding = 4 * 8192 * 512
    assert owner("lars", 64).temporary_bytes == 0
    assert owner("lamb", 64).temporary_bytes == embedding < owner("lamb", 2).temporary_bytes
    assert owner("soap", 64).temporary_bytes == owner("soap", 2).temporary_bytes > 4.8 * embedding
    assert owner("shampoo", 64).temporary_bytes == 16 * recipe.model.hidden**2


def test_frozen_parameters_have_no_gradients_or_state() -> None:
    whole, head = make_plan({}).memory, make_plan({"freeze": ["embed", "layers.*"]}).memory
    share = (8192 * 512 + 512) / parameters()
    assert head.optimizer_gib == pytest.approx((whole.optimizer_gib or 0) * share)
    assert head.grads_gib == pytest.approx((whole.grads_gib or 0) * share)
    later = make_plan({"freeze": ["embed", "layers.*"], "unfreeze": [{"step": 2, "modules": ["embed", "layers.*"]}]})
    assert later.memory.optimizer_gib == whole.optimizer_gib


def test_plan_describes_groups_and_state() -> None:
    optim = {"name": "muon", "layer_decay": 0.8, "lr_scale": {"head": 10.0}, "freeze": ["embed"],
             "unfreeze": [{"step": 5, "modules": ["layers.0"]}]}  # fmt: skip
    description = make_plan(optim, job={"layout": "fsdp"}).training["optimizer"]
    for phrase in (
        "muon: ", "bytes of state per parameter", "hidden matrices", "the rank that holds its state",
        "weight decay 0.1",
        "lr x 0.8 for each layer", "lr x 10 in head", "frozen: embed", "frozen until step 5: layers.0",
    ):  # fmt: skip
        assert phrase in description
    assert "the rank that holds its state" not in make_plan(optim).training["optimizer"]


@pytest.mark.parametrize(
    ("optim", "message", "fix"),
    [
        ({"freeze": ["layer.0"]}, r"optim\.freeze: no module .* matches 'layer\.0'", "layers.0"),
        ({"lr_scale": {"heed": 2.0}}, r"optim\.lr_scale: .*'heed'", "head"),
        ({"unfreeze": [{"step": 2, "modules": ["embedding"]}]}, r"optim\.unfreeze\.modules: .*'embedding'", "embed"),
        ({"freeze": ["*"]}, "nothing is left to train", "remove a module"),
    ],
)
def test_invalid_pattern_is_refused(optim: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        make_plan(optim)
    assert fix in error.value.fix


@pytest.mark.parametrize("name", ["muon", "shampoo"])
def test_matrix_optimizer_needs_matrices(name: str) -> None:
    with pytest.raises(ConfigError, match="a convnet lacks") as error:
        make_plan({"name": name}, model={"kind": "convnet"})
    assert "'sgd'" in error.value.fix
    assert make_plan({"name": name}, model={"kind": "two-tower"}).memory.optimizer_gib is None


@pytest.mark.parametrize("name", ["muon", "soap", "lamb", "adafactor", "adamw8bit"])
def test_whole_parameter_optimizer_refuses_offload(name: str) -> None:
    offloaded: dict[str, Any] = {"device": "cuda", "job": {"layout": "fsdp"}, "parallel": {"offload": True}}
    with pytest.raises(ConfigError, match=f"'{name}' with parallel.offload") as error:
        make_plan({"name": name}, **offloaded)
    assert "'adamw'" in error.value.fix
    assert make_plan({"name": "lion"}, **offloaded).layout.offload


def test_slow_optimizers_are_noted() -> None:
    assert any("without torch.compile" in w for w in make_plan({"name": "adamw8bit"}).warnings)
    assert any("compiles its update" in w for w in make_plan({"name": "adamw8bit"}, device="cuda").warnings)
    assert any("decomposes" in w for w in make_plan({"name": "shampoo"}).warnings)
    assert not any("optim.name" in w for w in make_plan({}).warnings)


@pytest.mark.parametrize("name", ["adam", "sgd", "lars", "shampoo"])
def test_large_coupled_decay_is_noted(name: str) -> None:
    def decay_warnings(**optim: Any) -> list[str]:
        return [w for w in make_plan(optim).warnings if "weight_decay" in w]

    assert any("weight_decay = 0.1 " in w and "(L2)" in w for w in decay_warnings(name=name))
    assert not decay_warnings(name=name, weight_decay=1e-4) and not decay_warnings(name="lion") and not decay_warnings()
