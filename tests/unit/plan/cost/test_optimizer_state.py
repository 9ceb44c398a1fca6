"""What a plan says of the optimizer: its memory, what it refuses, what it warns of."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import JobSpec, RunSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.plan.cost.optimizer_state import GATHER_BYTES
from clustertrain.plan.planner import Plan, plan

GIB = 1024**3
MODEL = {"dim": 512, "layers": 8, "heads": 8, "kv_heads": 8, "vocab_size": 8192}


def chosen(optim: dict[str, Any], *, model: dict[str, Any] | None = None, device: str = "cpu", **more: Any) -> Plan:
    job = {"nodes": 1, "gpus": 4, "layout": "ddp", **more.pop("job", {})}
    recipe = build({"model": model or MODEL, "optim": optim, **more}, Recipe, "recipe")
    return plan(RunSpec(job=JobSpec(**job), recipe=recipe), ClusterProfile(), device)


def parameters() -> int:
    return build({"model": MODEL}, Recipe, "recipe").model.parameters()


@pytest.mark.parametrize(
    ("name", "bytes_each"), [("adamw", 8), ("lamb", 8), ("sgd", 4), ("lion", 4), ("lars", 4), ("adam", 8)]
)
def test_rank_state_is_that_of_its_parameters(name: str, bytes_each: int) -> None:
    assert chosen({"name": name}).memory.optimizer_gib == pytest.approx(parameters() * bytes_each / GIB)
    sharded = chosen({"name": name}, job={"layout": "fsdp"})
    assert sharded.memory.optimizer_gib == pytest.approx(parameters() * bytes_each / 4 / GIB, rel=1e-4)


def test_shape_dependent_state_is_counted() -> None:
    base = chosen({}).memory.optimizer_gib or 0.0
    adafactor, soap, muon, eight = (
        chosen({"name": n}).memory.optimizer_gib or 0.0 for n in ("adafactor", "soap", "muon", "adamw8bit")
    )
    assert adafactor < 0.01 * base < eight < 0.27 * base < muon < base < 2 * base < soap


def test_one_rank_holds_largest_state() -> None:
    """The embedding's second moments and preconditioners are one rank's, however many there are."""
    few, many = (chosen({"name": "soap"}, job={"layout": "fsdp", "gpus": n}).memory for n in (4, 64))
    table = 8 * 8192 * 512 + 8 * (8192**2 + 512**2)
    assert few.optimizer_gib is not None and few.optimizer_gib >= table / GIB
    assert many.optimizer_gib == pytest.approx(table / GIB)
    one, lamb = (chosen({"name": n}, job={"layout": "fsdp"}).memory for n in ("adamw", "lamb"))
    assert one.peak_gib is not None and lamb.peak_gib is not None
    assert 0 <= lamb.peak_gib - one.peak_gib <= parameters() / 4 * GATHER_BYTES / GIB


def test_frozen_parameters_have_no_gradients_or_state() -> None:
    whole, head = chosen({}).memory, chosen({"freeze": ["embed", "layers.*"]}).memory
    share = (8192 * 512 + 512) / parameters()
    assert head.optimizer_gib == pytest.approx((whole.optimizer_gib or 0) * share)
    assert head.grads_gib == pytest.approx((whole.grads_gib or 0) * share)
    later = chosen({"freeze": ["embed", "layers.*"], "unfreeze": [{"step": 2, "modules": ["embed", "layers.*"]}]})
    assert later.memory.optimizer_gib == whole.optimizer_gib


def test_plan_describes_groups_and_state() -> None:
    optim = {"name": "muon", "layer_decay": 0.8, "lr_scale": {"head": 10.0}, "freeze": ["embed"],
             "unfreeze": [{"step": 5, "modules": ["layers.0"]}]}  # fmt: skip
    said = chosen(optim, job={"layout": "fsdp"}).training["optimizer"]
    for words in (
        "muon: ", "bytes of state per parameter", "hidden matrices", "the rank that holds its state",
        "weight decay 0.1",
        "lr x 0.8 for each layer", "lr x 10 in head", "frozen: embed", "frozen until step 5: layers.0",
    ):  # fmt: skip
        assert words in said
    assert "the rank that holds its state" not in chosen(optim).training["optimizer"]


@pytest.mark.parametrize(
    ("optim", "words", "fix"),
    [
        ({"freeze": ["layer.0"]}, r"optim\.freeze: no module .* matches 'layer\.0'", "layers.0"),
        ({"lr_scale": {"heed": 2.0}}, r"optim\.lr_scale: .*'heed'", "head"),
        ({"unfreeze": [{"step": 2, "modules": ["embedding"]}]}, r"optim\.unfreeze\.modules: .*'embedding'", "embed"),
        ({"freeze": ["*"]}, "nothing is left to train", "remove a module"),
    ],
)
def test_invalid_pattern_is_refused(optim: dict[str, Any], words: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        chosen(optim)
    assert fix in caught.value.fix


@pytest.mark.parametrize("name", ["muon", "shampoo"])
def test_matrix_optimizer_needs_matrices(name: str) -> None:
    with pytest.raises(ConfigError, match="a convnet lacks") as caught:
        chosen({"name": name}, model={"kind": "convnet"})
    assert "'sgd'" in caught.value.fix
    assert chosen({"name": name}, model={"kind": "two-tower"}).memory.optimizer_gib is None


@pytest.mark.parametrize("name", ["muon", "soap", "lamb", "adafactor", "adamw8bit"])
def test_whole_parameter_optimizer_refuses_offload(name: str) -> None:
    asked: dict[str, Any] = {"device": "cuda", "job": {"layout": "fsdp"}, "parallel": {"offload": True}}
    with pytest.raises(ConfigError, match=f"'{name}' with parallel.offload") as caught:
        chosen({"name": name}, **asked)
    assert "'adamw'" in caught.value.fix
    assert chosen({"name": "lion"}, **asked).layout.offload


def test_slow_optimizers_are_noted() -> None:
    assert any("without torch.compile" in w for w in chosen({"name": "adamw8bit"}).warnings)
    assert any("compiles its update" in w for w in chosen({"name": "adamw8bit"}, device="cuda").warnings)
    assert any("decomposes" in w for w in chosen({"name": "shampoo"}).warnings)
    assert not any("optim.name" in w for w in chosen({}).warnings)


@pytest.mark.parametrize("name", ["adam", "sgd", "lars", "shampoo"])
def test_large_coupled_decay_is_noted(name: str) -> None:
    def told(**optim: Any) -> list[str]:
        return [w for w in chosen(optim).warnings if "weight_decay" in w]

    assert any("weight_decay = 0.1 " in w and "(L2)" in w for w in told(name=name))
    assert not told(name=name, weight_decay=1e-4) and not told(name="lion") and not told()
