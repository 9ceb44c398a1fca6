"""Parameter groups, freezing, optimizers by name and the size of their state, in one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import pytest
import torch
from torch import nn

import clustertrain as ct
from clustertrain.config.model import ConvnetSpec, ModelSpec, TwoTowerSpec
from clustertrain.config.optim import OptimSpec, UnfreezeSpec
from clustertrain.config.optimizers import OPTIMIZERS, OptimizerName
from clustertrain.config.parsing.documents import build as build_config
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError, UnsuitableEnvironment, UsageError
from clustertrain.plan.cost.optimizer_state import estimate_state, state_bytes
from clustertrain.plan.optimizer_checks import list_modules
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.models import build
from clustertrain.train.models.decoder import Decoder
from clustertrain.train.optim import build as optimizer_build
from clustertrain.train.optim import registry
from clustertrain.train.optim.param_groups import parameter_groups
from clustertrain.train.optim.param_info import build_param_table
from clustertrain.train.optim.unsharded_update import UnshardedOptimizer, assign_owners
from clustertrain.train.optim.wrapper import OptimizerPair
from tests.harness.optimizers import cells
from tests.unit.train.single_process import ALONE, build_on_cpu

CPU = torch.device("cpu")
# The import of pytorch_optimizer or torchao takes up to a second in each process of pytest.
NAMES = [
    pytest.param(name, marks=[pytest.mark.long] if entry.package else [], id=name)
    for name, entry in OPTIMIZERS.items()
]  # fmt: skip
SMALL = ModelSpec(dim=16, layers=3, heads=2, kv_heads=2, vocab_size=32)


class ThirdPartyRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.norm = ThirdPartyRMSNorm()


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


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = Tower(2), Tower(4)


def depths(model: nn.Module, *names: str) -> list[int | None]:
    table = build_param_table(model).by_name
    return [table[name].depth for name in names]


def test_norms_of_any_library_have_no_decay() -> None:
    table = build_param_table(Net()).by_name
    assert [n for n, d in table.items() if d.decays] == [
        "stem.weight", "body.layers.0.up.weight", "body.layers.1.up.weight", "body.layers.2.up.weight",
        "body.project.weight",
    ]  # fmt: skip


def test_biases_of_torch_layers_have_no_decay() -> None:
    model = nn.ModuleDict({"lstm": nn.LSTM(3, 4), "attention": nn.MultiheadAttention(4, 2, add_bias_kv=True)})
    assert [n for n, d in build_param_table(model).by_name.items() if d.decays] == [
        "lstm.weight_ih_l0", "lstm.weight_hh_l0", "attention.in_proj_weight", "attention.out_proj.weight",
    ]  # fmt: skip


def test_depth_counts_layers_from_the_head() -> None:
    with torch.device("meta"):
        decoder = Decoder(SMALL)
    assert depths(decoder, "embed.weight", "layers.0.ffn.up.weight", "layers.2.attention_norm.weight", "norm.weight",
                  "head.weight") == [4, 3, 1, 0, 0]  # fmt: skip
    assert depths(Net(), "stem.weight", "body.embed.weight", "body.layers.0.up.bias", "body.layers.2.up.weight",
                  "body.project.weight", "scale") == [4, 4, 3, 1, 0, 4]  # fmt: skip
    sequence = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert depths(sequence, "0.weight", "2.weight", "4.bias") == [2, 1, 0]


def test_towers_have_separate_depths() -> None:
    names = ("text.embed.weight", "image.embed.weight", "text.layers.1.up.weight", "image.layers.3.up.bias")
    assert depths(TwoTowers(), *names, "text.project.weight") == [3, 5, 1, 1, 0]


def test_tied_weight_has_the_depth_of_the_embedding() -> None:
    model = Net()
    model.body.project.weight = nn.Parameter(model.body.embed.weight[:2].detach().clone())
    model.body.project.weight = model.body.embed.weight  # type: ignore[assignment]
    table = build_param_table(model).by_name
    assert table["body.embed.weight"] is table["body.project.weight"]
    assert (table["body.embed.weight"].depth, table["body.embed.weight"].decays) == (4, False)


def test_lr_scale_by_depth_and_module() -> None:
    model = build_on_cpu(Decoder(SMALL))
    factors = {"layers.*": 1.0, "layers.0": 3.0, "head": 10.0}
    groups = parameter_groups(model, build_param_table(model), weight_decay=0.1, layer_decay=0.5, lr_scale=factors)
    scale = {id(p): g["lr_scale"] for g in groups for p in g["params"]}
    parameters = dict(model.named_parameters())
    assert len(scale) == len(parameters)
    for name, expected in {
        "head.weight": 10.0,
        "norm.weight": 1.0,
        "layers.2.ffn.up.weight": 0.5,
        "embed.weight": 0.5**4,
        "layers.0.attention.q.weight": 3 * 0.5**3,
    }.items():
        assert scale[id(parameters[name])] == expected, name
    assert {g["group"] for g in groups} >= {"decay, lr x 10", "no decay", "no decay, lr x 0.0625"}


def test_weight_decay_by_module_spares_what_never_decays() -> None:
    model = build_on_cpu(Decoder(SMALL))
    factors = {"layers.*": 0.1, "layers.0": 0.5, "head": 0.0, "norm": 7.0}
    table = build_param_table(model)
    groups = parameter_groups(model, table, weight_decay=0.1, lr_scale={"head": 10.0}, weight_decay_scale=factors)
    decay = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
    parameters = dict(model.named_parameters())
    assert len(decay) == len(parameters)
    for name, expected in {
        "head.weight": 0.0,
        "norm.weight": 0.0,
        "embed.weight": 0.0,
        "layers.2.ffn.up.weight": 0.1 * 0.1,
        "layers.0.attention.q.weight": 0.1 * 0.5,
    }.items():
        assert decay[id(parameters[name])] == expected, name
    assert {g["group"] for g in groups} == {"decay x 0.5", "decay x 0.1", "no decay, lr x 10", "no decay"}


def test_negative_weight_decay_of_a_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight_decay_scale.head = -1.0: must be 0"):
        build_config({"optim": {"weight_decay_scale": {"head": -1.0}}}, Recipe, "a.toml")


@pytest.mark.parametrize("key", ["freeze", "unfreeze", "lr_scale", "weight_decay_scale"])
def test_unmatched_pattern_suggests_a_module(key: str, session: ct.Session) -> None:
    with pytest.raises(ConfigError, match=rf"optim\.{key}.*'layer\.0'") as caught:
        if key.endswith("scale"):
            session.parallelize(Net())
            session.parameter_groups(**{key: {"layer.0": 2.0}})
        else:
            session.parallelize(Net(), **{key: ["layer.0"] if key == "freeze" else [(2, ["layer.0"])]})
    assert "body.layers.0" in caught.value.fix


def test_layer_decay_with_unknown_layers_raises(session: ct.Session) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    session.parallelize(Flat())
    with pytest.raises(ConfigError, match=r"layer_decay = 0\.8: Flat has no list of layers") as caught:
        session.parameter_groups(layer_decay=0.8)
    assert "pipeline_units" in caught.value.fix


# -- frozen layers


def make_batch(batch: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(batch * 4.0).reshape(batch, 4) / 8, torch.ones(batch, 2)


def squared_error(output: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (output - expected).square().mean()


def three_layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize(("name", "options"), [("adamw", {}), ("sgd", {"momentum": 0.9})])
def test_frozen_layers_train_from_their_unfreeze_step(name: str, options: dict[str, Any], session: ct.Session) -> None:
    model = session.parallelize(three_layers(), freeze=["0", "2"], unfreeze=[(3, ["2"])])
    optimizer = session.optimizer(name, lr=0.1, **options)
    first = {n: p.detach().clone() for n, p in model.named_parameters()}
    norms = []
    for step in session.steps(total=4):
        norms.append(float(session.train_step(make_batch(), squared_error).grad_norm))
        unchanged = {n for n, p in model.named_parameters() if torch.equal(p, first[n])}
        assert unchanged == ({"0.weight", "0.bias"} | ({"2.weight", "2.bias"} if step + 1 < 3 else set())), step
    assert {id(p) for p in optimizer.state} == {id(p) for n, p in model.named_parameters() if n[0] in "24"}
    assert not model[0].weight.requires_grad  # type: ignore[index]
    # The gradient norm excludes frozen parameters.
    assert norms[0] == pytest.approx(float(_norm_of_head(first)), rel=1e-5)


def _norm_of_head(first: dict[str, torch.Tensor]) -> torch.Tensor:
    model = three_layers()
    model.load_state_dict(first)
    squared_error(model(make_batch()[0]), make_batch()[1]).backward()  # type: ignore[no-untyped-call]
    return torch.stack([p.grad.square().sum() for p in model[4].parameters() if p.grad is not None]).sum().sqrt()


def test_freezing_everything_raises(session: ct.Session) -> None:
    with pytest.raises(ConfigError, match="nothing is left to train"):
        session.parallelize(three_layers(), freeze=["*"])


# -- optimizers by name


@pytest.mark.parametrize("name", NAMES)
def test_each_optimizer_trains_with_recipe_options(name: str, session: ct.Session) -> None:
    session.parallelize(three_layers())
    spec = OptimSpec(name=name, lr=0.05)  # type: ignore[arg-type]
    groups = session.parameter_groups(name, weight_decay=spec.weight_decay)
    optimizer = session.optimizer(name, groups, **registry.build_options(spec, is_text=False, device=CPU))
    losses = []
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 if step else 0.01  # as a schedule does
        losses.append(float(session.train_step(make_batch(), squared_error).loss))
    assert losses[-1] < losses[0]
    assert isinstance(optimizer, OptimizerPair) == OPTIMIZERS[name].matrices_only


def test_every_optimizer_is_in_the_table_and_is_checked_in_a_layout() -> None:
    assert set(OPTIMIZERS) == set(get_args(OptimizerName))
    assert {cell["name"] for cell in cells.CELLS.values()} == set(OPTIMIZERS)


@pytest.mark.parametrize("name", NAMES)
def test_class_is_known_to_need_unsharded_params(name: OptimizerName) -> None:
    entry = OPTIMIZERS[name]
    assert registry.needs_unsharded_params(registry.load_class(entry)) == entry.needs_unsharded


@pytest.mark.parametrize("name", NAMES)
def test_decay_added_to_the_gradient_changes_the_state(name: OptimizerName) -> None:
    entry = OPTIMIZERS[name]
    cls, states = registry.load_class(entry), []
    options = registry.accepted_options(cls, registry.build_options(OptimSpec(name=name), is_text=True, device=CPU))
    for decay in (0.0, 0.5):
        p = nn.Parameter(torch.ones(64, 64))
        p.grad = torch.arange(64.0 * 64).reshape(64, 64) % 7
        optimizer = cls([p], **{**options, "weight_decay": decay})
        for _ in range(2):  # some start their state in the second step
            optimizer.step()
        states.append([t.detach().clone() for t in iterate_tensors(optimizer.state[p]) if t.dim()])
    assert states[0]
    is_equal = all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert is_equal != entry.has_coupled_decay


def test_recipe_defaults() -> None:
    spec = OptimSpec()
    options_built = registry.build_options(spec, is_text=True, device=CPU)
    assert (options_built["lr"], options_built["betas"], options_built["eps"], spec.weight_decay) == (
        3e-4,
        (0.9, 0.95),
        1e-8,
        0.1,
    )
    assert (spec.name, spec.clip, spec.clip_norm) == ("adamw", "norm", 1.0)
    assert registry.build_options(spec, is_text=False, device=CPU)["betas"] == (0.9, 0.999)
    assert registry.build_options(OptimSpec(name="lion"), is_text=True, device=CPU)["betas"] == (0.9, 0.99)
    assert registry.build_options(OptimSpec(name="sgd"), is_text=True, device=CPU)["momentum"] == 0.9
    assert registry.build_options(OptimSpec(name="muon"), is_text=True, device=CPU)["momentum"] == 0.95
    assert registry.build_options(OptimSpec(name="sgd"), is_text=True, device=torch.device("cuda"))["fused"] is True


@pytest.mark.parametrize(("cls", "is_fused"), [(torch.optim.SGD, False), (torch.optim.AdamW, True)])
def test_only_fused_kernels_for_dtensors_are_used_on_them(cls: type[torch.optim.Optimizer], is_fused: bool) -> None:
    options = registry.adapt_to_dtensors(cls, {"lr": 0.1, "fused": True, "foreach": None})
    assert options == {"lr": 0.1, "fused": is_fused, "foreach": None if is_fused else True}


def test_sgd_with_unfreeze_is_not_fused() -> None:
    """Fused SGD needs momentum for all or none of a group's parameters."""
    spec = OptimSpec(name="sgd", freeze=("embed",), unfreeze=(UnfreezeSpec(step=3, modules=("embed",)),))
    options_built = registry.build_options(spec, is_text=True, device=torch.device("cuda"))
    assert options_built["foreach"] is True and not options_built.get("fused")


def test_muon_takes_only_hidden_matrices() -> None:
    model = build_on_cpu(Decoder(SMALL))
    groups = parameter_groups(model, build_param_table(model), weight_decay=0.1, split_hidden=True)
    hidden = {id(p) for g in groups if g["matrices"] for p in g["params"]}
    assert {n for n, p in model.named_parameters() if id(p) in hidden} == {
        n for n, p in model.named_parameters() if n.startswith("layers.") and p.dim() == 2
    }


def test_muon_without_matrices_or_marked_groups_raises(session: ct.Session) -> None:
    model = session.parallelize(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 2)))
    with pytest.raises(ConfigError, match="the model has none"):
        session.optimizer("muon", lr=0.1)
    with pytest.raises(ConfigError, match="'matrices'") as caught:
        session.optimizer("muon", [{"params": list(model.parameters())}], lr=0.1)
    assert "session.parameter_groups('muon'" in caught.value.fix
    with pytest.raises(ConfigError, match="'muom' is unknown") as caught:
        session.optimizer("muom", lr=0.1)
    assert "muon" in caught.value.fix


def test_optimizer_without_parameters_raises(session: ct.Session) -> None:
    session.parallelize(three_layers())
    for empty in ([], [{"params": []}]):
        with pytest.raises(ConfigError, match="nothing to train on this rank") as caught:
            session.optimizer("adamw", empty, lr=0.1)
    assert "pipeline stage" in caught.value.fix


def test_missing_package_raises_with_install_command(session: ct.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    session.parallelize(three_layers())
    with pytest.raises(UnsuitableEnvironment) as caught:
        session.optimizer("lamb", lr=0.1)
    assert "pip install 'clustertrain[optimizers]'" in caught.value.fix


def test_lr_scale_applies_without_a_schedule(session: ct.Session) -> None:
    session.parallelize(three_layers())
    optimizer = session.optimizer("sgd", session.parameter_groups(lr_scale={"4": 10.0}), lr=0.1, momentum=0.9)
    assert {round(g["lr"], 6) for g in optimizer.param_groups} == {0.1, 1.0}


# -- internals


def test_owners_are_balanced() -> None:
    sizes = [100, 90, 50, 40, 30, 20, 10, 0]
    owners = assign_owners(sizes, 3)
    load = [sum(s for s, o in zip(sizes, owners, strict=True) if o == rank) for rank in range(3)]
    assert max(load) - min(load) <= 20 and sum(load) == sum(sizes)
    assert assign_owners([5, 5], 4) == [0, 1]


def test_optimizer_pair_has_no_state_dict() -> None:
    model = three_layers()
    table = build_param_table(model)
    groups = ProcessGroups(None, None, None, None)
    optimizer = optimizer_build.build_optimizer(
        "muon", None, {"lr": 0.1}, model=model, param_table=table, context=ALONE, groups=groups
    )
    with pytest.raises(UsageError, match="no state_dict"):
        optimizer.state_dict()
    with pytest.raises(UsageError, match="no further groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})


def test_unsharded_update_on_one_rank_matches_plain_optimizer() -> None:
    a, b = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    unsharded = UnshardedOptimizer([{"params": [a]}], lambda groups: torch.optim.Adafactor(groups, lr=0.1), None)
    plain = torch.optim.Adafactor([b], lr=0.1)
    for _ in range(3):
        a.grad = b.grad = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
        unsharded.step()
        plain.step()
    assert torch.equal(a, b) and not torch.equal(a, torch.ones(3, 2))


# -- state size


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        yield from iterate_tensors(inner)


SHAPES: Sequence[tuple[int, ...]] = ((64, 64), (24, 40), (7,), (5, 3, 2), (1,))


@pytest.mark.parametrize("name", NAMES)
def test_state_size_matches_the_plan(name: str) -> None:
    spec = OptimSpec(name=name)  # type: ignore[arg-type]
    hidden = [True, True, False, False, False]
    for shape, matrix in zip(SHAPES, hidden, strict=True):
        p = nn.Parameter(torch.ones(shape))
        entry = OPTIMIZERS[spec.name]
        options = registry.build_options(spec, is_text=True, device=CPU)
        cls = registry.load_class(entry) if matrix or not entry.matrices_only else torch.optim.AdamW
        optimizer = cls(
            [p], **registry.accepted_options(cls, {**options, "eps": 1e-8} if cls is torch.optim.AdamW else options)
        )
        p.grad = torch.ones(shape)
        optimizer.step()
        measured_bytes = sum(
            t.nbytes for t in iterate_tensors(optimizer.state[p]) if t.dim()
        )  # counters and ratios are single numbers
        assert measured_bytes == state_bytes(spec, shape, is_hidden_matrix=matrix), (name, shape)


def test_state_estimate_of_a_7b_model() -> None:
    model = ModelSpec(preset="", dim=4096, layers=32, heads=32, kv_heads=32, ffn_dim=11008, vocab_size=32000)
    state = estimate_state(OptimSpec(), model)
    assert (state.bytes_per_param, state.trained_fraction) == (8.0, 1.0)
    whole = model.parameters() * (4 + 4 + state.bytes_per_param)
    assert whole / 16 == model.parameters() and 107e9 < whole < 112e9
    assert 0 < estimate_state(OptimSpec(name="adafactor"), model).bytes_per_param < 0.01
    assert estimate_state(OptimSpec(freeze=("layers.*",)), model).trained_fraction < 0.05
    with pytest.raises(ConfigError, match=r"optim\.freeze: no module with parameters matches 'layer'"):
        estimate_state(OptimSpec(freeze=("layer",)), model)


def test_planned_state_matches_the_decoder() -> None:
    for tied in (False, True):
        spec = ModelSpec(dim=24, layers=2, heads=6, kv_heads=2, ffn_dim=40, vocab_size=32, tie_embeddings=tied)
        with torch.device("meta"):
            model = Decoder(spec)
        table = build_param_table(model).by_name
        for name in ["adamw", *(name for name, entry in OPTIMIZERS.items() if entry.has_shape_dependent_state)]:
            optim = OptimSpec(name=name)  # type: ignore[arg-type]
            counted = [
                state_bytes(optim, p.shape, is_hidden_matrix=table[n].hidden) for n, p in model.named_parameters()
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
    ids=["convnet", "two-tower", "fixed temperature"],
)
def test_planned_module_names_match_the_models(spec: ModelSpec) -> None:
    table = build_param_table(build.build_model(spec)).by_name.values()
    assert sorted(list_modules(spec)) == sorted({m for described in table for m in described.modules})
