"""Groups by module type, depth and pattern; what is frozen; names, options, bytes of state. One process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import clustertrain as ct
from clustertrain.config.model import ConvnetSpec, ModelSpec, TwoTowerSpec
from clustertrain.config.optim import OptimSpec, UnfreezeSpec
from clustertrain.errors import ConfigError, UnsuitableEnvironment, UsageError
from clustertrain.plan.cost.optimizer_state import (
    MATRIX_OPTIMIZERS,
    SHAPE_DEPENDENT_STATE,
    WHOLE_PARAM_OPTIMIZERS,
    estimate_state,
    list_modules,
    state_bytes,
)
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.models import build
from clustertrain.train.models.decoder import Decoder
from clustertrain.train.optim import build as making
from clustertrain.train.optim import registry
from clustertrain.train.optim.param_groups import parameter_groups
from clustertrain.train.optim.param_info import build_param_table
from clustertrain.train.optim.unsharded_update import UnshardedOptimizer, assign_owners
from clustertrain.train.optim.wrapper import OptimizerPair
from tests.unit.train.alone import ALONE, built

CPU = torch.device("cpu")
NAMES = tuple(registry.OPTIMIZERS)
SMALL = ModelSpec(dim=16, layers=3, heads=2, kv_heads=2, vocab_size=32)


class TheirRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.norm = TheirRMSNorm()


class Tower(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.project = nn.Linear(4, 2)


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.body = Tower(layers)
        self.scale = nn.Parameter(torch.ones(1))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = Tower(2), Tower(4)


@pytest.fixture
def session() -> Iterator[ct.Session]:
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    with ct.session(device="cpu") as opened:
        yield opened
    torch.set_num_threads(threads)
    torch.set_rng_state(generator)


def depths(model: nn.Module, *names: str) -> list[int | None]:
    known = build_param_table(model).by_name
    return [known[name].depth for name in names]


def test_decay_goes_by_the_type_of_the_module_whoever_has_written_the_norm() -> None:
    known = build_param_table(Net()).by_name
    assert [n for n, d in known.items() if d.decays] == [
        "stem.weight", "body.layers.0.up.weight", "body.layers.1.up.weight", "body.layers.2.up.weight",
        "body.project.weight",
    ]  # fmt: skip


def test_the_many_biases_of_torchs_own_layers_have_no_decay() -> None:
    model = nn.ModuleDict({"lstm": nn.LSTM(3, 4), "attention": nn.MultiheadAttention(4, 2, add_bias_kv=True)})
    assert [n for n, d in build_param_table(model).by_name.items() if d.decays] == [
        "lstm.weight_ih_l0", "lstm.weight_hh_l0", "attention.in_proj_weight", "attention.out_proj.weight",
    ]  # fmt: skip


def test_depth_is_counted_in_layers_from_the_head() -> None:
    with torch.device("meta"):
        decoder = Decoder(SMALL)
    assert depths(decoder, "embed.weight", "layers.0.ffn.up.weight", "layers.2.attention_norm.weight", "norm.weight",
                  "head.weight") == [4, 3, 1, 0, 0]  # fmt: skip
    assert depths(Net(), "stem.weight", "body.embed.weight", "body.layers.0.up.bias", "body.layers.2.up.weight",
                  "body.project.weight", "scale") == [4, 4, 3, 1, 0, 4]  # fmt: skip
    sequence = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert depths(sequence, "0.weight", "2.weight", "4.bias") == [2, 1, 0]


def test_towers_stand_side_by_side() -> None:
    assert depths(Two(), "text.embed.weight", "image.embed.weight", "text.layers.1.up.weight", "image.layers.3.up.bias",
                  "text.project.weight") == [3, 5, 1, 1, 0]  # fmt: skip


def test_a_shared_table_is_as_deep_as_the_embedding() -> None:
    model = Net()
    model.body.project.weight = nn.Parameter(model.body.embed.weight[:2].detach().clone())
    model.body.project.weight = model.body.embed.weight  # type: ignore[assignment]
    known = build_param_table(model).by_name
    assert known["body.embed.weight"] is known["body.project.weight"]
    assert (known["body.embed.weight"].depth, known["body.embed.weight"].decays) == (4, False)


def test_rates_by_depth_and_by_module() -> None:
    model = built(Decoder(SMALL))
    factors = {"layers.*": 1.0, "layers.0": 3.0, "head": 10.0}
    groups = parameter_groups(model, build_param_table(model), weight_decay=0.1, layer_decay=0.5, lr_scale=factors)
    scale = {id(p): g["lr_scale"] for g in groups for p in g["params"]}
    named = dict(model.named_parameters())
    assert len(scale) == len(named)
    for name, wanted in {"head.weight": 10.0, "norm.weight": 1.0, "layers.2.ffn.up.weight": 0.5, "embed.weight": 0.5**4,
                         "layers.0.attention.q.weight": 3 * 0.5**3}.items():  # fmt: skip
        assert scale[id(named[name])] == wanted, name
    assert {g["group"] for g in groups} >= {"decay, lr x 10", "no decay", "no decay, lr x 0.0625"}


@pytest.mark.parametrize("key", ["freeze", "unfreeze", "lr_scale"])
def test_a_pattern_that_fits_nothing_names_what_is_near(key: str, session: ct.Session) -> None:
    with pytest.raises(ConfigError, match=rf"optim\.{key}.*'layer\.0'") as caught:
        if key == "lr_scale":
            session.parallelize(Net())
            session.parameter_groups(lr_scale={"layer.0": 2.0})
        else:
            session.parallelize(Net(), **{key: ["layer.0"] if key == "freeze" else [(2, ["layer.0"])]})
    assert "body.layers.0" in caught.value.fix


def test_layers_that_cannot_be_told_have_no_decay_by_depth(session: ct.Session) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    session.parallelize(Flat())
    with pytest.raises(ConfigError, match=r"layer_decay = 0\.8: Flat has no list of layers") as caught:
        session.parameter_groups(layer_decay=0.8)
    assert "pipeline_units" in caught.value.fix


# -- frozen


def target(batch: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(batch * 4.0).reshape(batch, 4) / 8, torch.ones(batch, 2)


def squared(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (output - wanted).square().mean()


def three() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize(("name", "options"), [("adamw", {}), ("sgd", {"momentum": 0.9})])
def test_what_is_frozen_moves_at_its_step_and_has_no_state_before(
    name: str, options: dict[str, Any], session: ct.Session
) -> None:
    model = session.parallelize(three(), freeze=["0", "2"], unfreeze=[(3, ["2"])])
    optimizer = session.optimizer(name, lr=0.1, **options)
    first = {n: p.detach().clone() for n, p in model.named_parameters()}
    norms = []
    for step in session.steps(total=4):
        norms.append(float(session.train_step(target(), squared).grad_norm))
        still = {n for n, p in model.named_parameters() if torch.equal(p, first[n])}
        assert still == ({"0.weight", "0.bias"} | ({"2.weight", "2.bias"} if step + 1 < 3 else set())), step
    assert {id(p) for p in optimizer.state} == {id(p) for n, p in model.named_parameters() if n[0] in "24"}
    assert not model[0].weight.requires_grad  # type: ignore[index]
    # A frozen gradient is in no norm: that of the head alone is smaller.
    assert norms[0] == pytest.approx(float(_norm_of_head(first)), rel=1e-5)


def _norm_of_head(first: dict[str, torch.Tensor]) -> torch.Tensor:
    model = three()
    model.load_state_dict(first)
    squared(model(target()[0]), target()[1]).backward()  # type: ignore[no-untyped-call]
    return torch.stack([p.grad.square().sum() for p in model[4].parameters() if p.grad is not None]).sum().sqrt()


def test_something_must_be_left_to_train(session: ct.Session) -> None:
    with pytest.raises(ConfigError, match="nothing is left to train"):
        session.parallelize(three(), freeze=["*"])


# -- by name


@pytest.mark.parametrize("name", NAMES)
def test_every_name_trains_with_the_recipes_options(name: str, session: ct.Session) -> None:
    session.parallelize(three())
    spec = OptimSpec(name=name, lr=0.05)  # type: ignore[arg-type]
    groups = session.parameter_groups(name, weight_decay=spec.weight_decay)
    optimizer = session.optimizer(name, groups, **registry.build_options(spec, is_text=False, device=CPU))
    losses = []
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 if step else 0.01  # what a schedule does
        losses.append(float(session.train_step(target(), squared).loss))
    assert losses[-1] < losses[0]
    assert isinstance(optimizer, OptimizerPair) == (name in MATRIX_OPTIMIZERS)


def test_the_planner_knows_the_same_of_each_as_the_trainer() -> None:
    assert {n for n, k in registry.OPTIMIZERS.items() if k.needs_unsharded} == WHOLE_PARAM_OPTIMIZERS
    assert {n for n, k in registry.OPTIMIZERS.items() if k.matrices_only} == MATRIX_OPTIMIZERS
    assert all(registry.needs_unsharded_params(k.load()) == k.needs_unsharded for k in registry.OPTIMIZERS.values())


def test_defaults_of_the_recipe() -> None:
    spec = OptimSpec()
    given = registry.build_options(spec, is_text=True, device=CPU)
    assert (given["lr"], given["betas"], given["eps"], spec.weight_decay) == (3e-4, (0.9, 0.95), 1e-8, 0.1)
    assert (spec.name, spec.clip, spec.clip_norm) == ("adamw", "norm", 1.0)
    assert registry.build_options(spec, is_text=False, device=CPU)["betas"] == (0.9, 0.999)
    assert registry.build_options(OptimSpec(name="lion"), is_text=True, device=CPU)["betas"] == (0.9, 0.99)
    assert registry.build_options(OptimSpec(name="sgd"), is_text=True, device=CPU)["momentum"] == 0.9
    assert registry.build_options(OptimSpec(name="muon"), is_text=True, device=CPU)["momentum"] == 0.95
    assert registry.build_options(OptimSpec(name="sgd"), is_text=True, device=torch.device("cuda"))["fused"] is True


def test_sgd_of_layers_that_thaw_is_not_the_fused_one() -> None:
    """Which wants momentum of all parameters of a group or of none."""
    thawing = OptimSpec(name="sgd", freeze=("embed",), unfreeze=(UnfreezeSpec(step=3, modules=("embed",)),))
    given = registry.build_options(thawing, is_text=True, device=torch.device("cuda"))
    assert given["foreach"] is True and not given.get("fused")


def test_muon_takes_hidden_matrices_and_nothing_else() -> None:
    model = built(Decoder(SMALL))
    groups = parameter_groups(model, build_param_table(model), weight_decay=0.1, split_hidden=True)
    hidden = {id(p) for g in groups if g["matrices"] for p in g["params"]}
    assert {n for n, p in model.named_parameters() if id(p) in hidden} == {
        n for n, p in model.named_parameters() if n.startswith("layers.") and p.dim() == 2
    }


def test_muon_without_matrices_or_without_groups_is_refused(session: ct.Session) -> None:
    model = session.parallelize(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 2)))
    with pytest.raises(ConfigError, match="the model has none"):
        session.optimizer("muon", lr=0.1)
    with pytest.raises(ConfigError, match="'matrices'") as caught:
        session.optimizer("muon", [{"params": list(model.parameters())}], lr=0.1)
    assert "session.parameter_groups('muon'" in caught.value.fix
    with pytest.raises(ConfigError, match="'muom' is not known") as caught:
        session.optimizer("muom", lr=0.1)
    assert "muon" in caught.value.fix


def test_an_optimizer_without_parameters_says_so(session: ct.Session) -> None:
    session.parallelize(three())
    for nothing in ([], [{"params": []}]):
        with pytest.raises(ConfigError, match="nothing to train on this rank") as caught:
            session.optimizer("adamw", nothing, lr=0.1)
    assert "pipeline stage" in caught.value.fix


def test_a_missing_package_says_what_to_install(session: ct.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    session.parallelize(three())
    with pytest.raises(UnsuitableEnvironment) as caught:
        session.optimizer("lamb", lr=0.1)
    assert "pip install 'clustertrain[optimizers]'" in caught.value.fix


def test_a_rate_of_a_group_is_scaled_without_a_schedule_too(session: ct.Session) -> None:
    session.parallelize(three())
    made = session.optimizer("sgd", session.parameter_groups(lr_scale={"4": 10.0}), lr=0.1, momentum=0.9)
    assert {round(g["lr"], 6) for g in made.param_groups} == {0.1, 1.0}


# -- inside


def test_owners_have_about_as_much_each() -> None:
    sizes = [100, 90, 50, 40, 30, 20, 10, 0]
    found = assign_owners(sizes, 3)
    load = [sum(s for s, o in zip(sizes, found, strict=True) if o == rank) for rank in range(3)]
    assert max(load) - min(load) <= 20 and sum(load) == sum(sizes)
    assert assign_owners([5, 5], 4) == [0, 1]


def test_a_pair_has_no_state_dict_that_would_be_half_of_it() -> None:
    model = three()
    known = build_param_table(model)
    groups = ProcessGroups(None, None, None, None)
    made = making.build_optimizer(
        "muon", None, {"lr": 0.1}, model=model, param_table=known, context=ALONE, groups=groups
    )
    with pytest.raises(UsageError, match="no state_dict"):
        made.state_dict()
    with pytest.raises(UsageError, match="no further groups"):
        made.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})


def test_gathered_on_one_rank_is_the_optimizer_itself() -> None:
    a, b = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    gathered = UnshardedOptimizer([{"params": [a]}], lambda groups: torch.optim.Adafactor(groups, lr=0.1), None)
    plain = torch.optim.Adafactor([b], lr=0.1)
    for _ in range(3):
        a.grad = b.grad = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
        gathered.step()
        plain.step()
    assert torch.equal(a, b) and not torch.equal(a, torch.ones(3, 2))


# -- bytes


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        yield from tensors(inner)


SHAPES: Sequence[tuple[int, ...]] = ((64, 64), (24, 40), (7,), (5, 3, 2), (1,))


@pytest.mark.parametrize("name", NAMES)
def test_state_is_as_large_as_the_plan_says(name: str) -> None:
    spec = OptimSpec(name=name)  # type: ignore[arg-type]
    hidden = [True, True, False, False, False]
    for shape, matrix in zip(SHAPES, hidden, strict=True):
        p = nn.Parameter(torch.ones(shape))
        kind = registry.OPTIMIZERS[spec.name]
        options = registry.build_options(spec, is_text=True, device=CPU)
        cls = kind.load() if matrix or not kind.matrices_only else torch.optim.AdamW
        made = cls(
            [p], **registry.accepted_options(cls, {**options, "eps": 1e-8} if cls is torch.optim.AdamW else options)
        )
        p.grad = torch.ones(shape)
        made.step()
        kept = sum(t.nbytes for t in tensors(made.state[p]) if t.dim())  # counters and ratios are single numbers
        assert kept == state_bytes(spec, shape, is_hidden_matrix=matrix), (name, shape)


def test_adam_of_seven_thousand_million_parameters_takes_112_gb() -> None:
    model = ModelSpec(preset="", dim=4096, layers=32, heads=32, kv_heads=32, ffn_dim=11008, vocab_size=32000)
    state = estimate_state(OptimSpec(), model)
    assert (state.bytes_per_param, state.trained_fraction) == (8.0, 1.0)
    whole = model.parameters() * (4 + 4 + state.bytes_per_param)
    assert whole / 16 == model.parameters() and 107e9 < whole < 112e9
    assert 0 < estimate_state(OptimSpec(name="adafactor"), model).bytes_per_param < 0.01
    assert estimate_state(OptimSpec(freeze=("layers.*",)), model).trained_fraction < 0.05
    with pytest.raises(ConfigError, match=r"optim\.freeze: no module with parameters matches 'layer'"):
        estimate_state(OptimSpec(freeze=("layer",)), model)


def test_the_plans_shapes_are_the_decoders() -> None:
    for tied in (False, True):
        spec = ModelSpec(dim=24, layers=2, heads=6, kv_heads=2, ffn_dim=40, vocab_size=32, tie_embeddings=tied)
        with torch.device("meta"):
            model = Decoder(spec)
        known = build_param_table(model).by_name
        for name in sorted(SHAPE_DEPENDENT_STATE | {"adamw"}):
            optim = OptimSpec(name=name)  # type: ignore[arg-type]
            counted = [
                state_bytes(optim, p.shape, is_hidden_matrix=known[n].hidden) for n, p in model.named_parameters()
            ]
            state = estimate_state(optim, spec)
            assert state.bytes_per_param * spec.parameters() == pytest.approx(
                sum(counted)
            ) and state.largest_bytes == max(counted)


@pytest.mark.parametrize(
    "spec",
    [
        ModelSpec(kind="convnet", convnet=ConvnetSpec(width=8, blocks=(2, 1), groups=4)),
        ModelSpec(kind="two-tower", dim=16, layers=2, heads=2),
        ModelSpec(kind="two-tower", dim=16, layers=1, heads=2, two_tower=TwoTowerSpec(learn_temperature=False)),
    ],
)
def test_the_plans_module_names_are_those_of_the_built_in_models(spec: ModelSpec) -> None:
    known = build_param_table(build.build_model(spec)).by_name.values()
    assert sorted(list_modules(spec)) == sorted({m for described in known for m in described.modules})
