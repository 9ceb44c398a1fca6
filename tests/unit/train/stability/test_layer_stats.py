"""Layer statistics on one process, compared with their definitions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import clustertrain as ct
from clustertrain.config.stability import StabilitySpec
from clustertrain.train.core.context import RankContext
from clustertrain.train.session.session import get_runtime
from clustertrain.train.stability.layer_stats import MAX_SAMPLED_ELEMENTS, LayerStats, find_unit_name
from clustertrain.train.stability.monitor import StabilityMonitor
from clustertrain.train.stability.step_guard import StepGuard
from tests.unit.train.single_process import ALONE


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 6)])
        self.relus = nn.ModuleList([nn.ReLU(), nn.ReLU()])
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, relu in zip(self.layers, self.relus, strict=True):
            x = relu(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("embed.weight", "embed"),
        ("layers.0.attention.wq.weight", "layers.0"),
        ("encoder.layers.11.norm.weight", "encoder.layers.11"),
        ("0.weight", "0"),
        ("stage1.2.conv1.weight", "stage1.2"),
        ("temperature", "temperature"),
        ("conv1.weight", "conv1"),
        ("layers.3", "layers.3"),
    ],
)
def test_unit_names(name: str, unit: str) -> None:
    assert find_unit_name(name) == unit


def test_statistics_match_their_definitions(session: ct.Session) -> None:
    torch.manual_seed(3)
    model = session.parallelize(Net())
    net: Any = model
    with torch.no_grad():
        net.layers[1].bias[:2] = -100.0  # two of the six units are dead
    session.optimizer(torch.optim.SGD, lr=0.1)
    collector = LayerStats(model, get_runtime(session).context)
    batch = [(torch.randn(n, 4), torch.randn(n, 1)) for n in (3, 2)]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    result = get_runtime(session).state.train_step(batch, None, loss, ct.Clipping(), collector)  # type: ignore[misc]
    assert result.layers is not None
    columns = result.layers.to_dict()
    assert collector.units == ["head", "layers.0", "layers.1"]
    for unit in collector.units:
        names = [n for n in before if find_unit_name(n) == unit]
        update = torch.cat([(p.detach() - before[n]).flatten() for n, p in model.named_parameters() if n in names])
        gradient = update / -0.1
        assert columns[f"grad_norm/{unit}"] == pytest.approx(gradient.norm().item(), rel=1e-4)
        weights = torch.cat([before[n].flatten() for n in names])
        assert columns[f"weight_norm/{unit}"] == pytest.approx(weights.norm().item(), rel=1e-6)
        ratio = (update.norm() / weights.norm()).item()
        assert columns[f"update_ratio/{unit}"] == pytest.approx(ratio, rel=1e-3)
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(before[n])
        hidden = torch.cat([net.layers[0](x).relu() for x, _ in batch])
        outputs = torch.cat([model(x) for x, _ in batch])
        last = net.layers[1](hidden).relu()
    assert columns["dead/relus.0"] == (hidden == 0).all(0).double().mean().item()
    assert columns["dead/relus.1"] == (last == 0).all(0).double().mean().item() >= 2 / 6
    assert columns["activation/head"] == pytest.approx(outputs.abs().mean().item(), rel=1e-5)


def test_share_of_saturated_outputs(session: ct.Session) -> None:
    model: Any = session.parallelize(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2), nn.Sigmoid()))
    with torch.no_grad():
        for layer, bias in ((model[0], [0.0, 100.0, -100.0, 0.5]), (model[2], [-100.0, 0.0])):
            layer.weight.zero_()
            layer.bias.copy_(torch.tensor(bias))
    session.optimizer(torch.optim.SGD, lr=0.1)
    collector = LayerStats(model, get_runtime(session).context)
    batch = [(torch.randn(n, 1), torch.zeros(n, 2)) for n in (3, 2)]
    result = get_runtime(session).state.train_step(batch, None, loss, ct.Clipping(), collector)  # type: ignore[misc]
    assert result.layers is not None
    columns = result.layers.to_dict()
    assert (columns["saturated/1"], columns["saturated/3"]) == (0.5, 0.5)
    assert not [name for name in columns if name.startswith("dead/")]


def test_hooks_are_removed(session: ct.Session) -> None:
    model = session.parallelize(Net())
    session.optimizer(torch.optim.SGD, lr=0.1)
    layer_stats = LayerStats(model, get_runtime(session).context)
    with pytest.raises(RuntimeError), layer_stats.hooks():
        model(torch.zeros(1, 9))
    assert not any(m._forward_hooks for m in model.modules())


def test_layer_stats_are_due_every_n_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for every, expected_steps in ((3, [3, 6, 9]), (0, [])):
        spec = msgspec.structs.replace(StabilitySpec(), layer_stats_every=every)
        monkeypatch.setattr(RankContext, "stability", property(lambda self, spec=spec: spec))
        stability_monitor = StabilityMonitor(Net(), StepGuard(spec, ALONE.device), ALONE)
        assert [n for n in range(1, 11) if stability_monitor.layer_stats_for(n) is not None] == expected_steps


def test_update_ratio_of_a_large_parameter_is_sampled(session: ct.Session) -> None:
    torch.manual_seed(4)
    model = session.parallelize(nn.Linear(500, 2 * MAX_SAMPLED_ELEMENTS // 500 + 1, bias=False))
    session.optimizer(torch.optim.SGD, lr=0.1)
    layer_stats = LayerStats(model, get_runtime(session).context)
    (before,) = [p.detach().clone() for p in model.parameters()]
    batch = (torch.randn(8, 500), torch.randn(8, before.shape[0]))
    result = get_runtime(session).state.train_step(batch, None, loss, ct.Clipping(), layer_stats)  # type: ignore[misc]
    assert result.layers is not None
    (after,) = model.parameters()
    ratio = ((after.detach() - before).norm() / before.norm()).item()
    assert result.layers.to_dict()["update_ratio/weight"] == pytest.approx(ratio, rel=0.02)


def test_packed_matrices_are_no_weights(session: ct.Session) -> None:
    model = session.parallelize(session.add_adapters(Net(), ["layers"], rank=2, base_precision="nf4"))
    session.optimizer(torch.optim.SGD, lr=0.1)
    collector = LayerStats(model, get_runtime(session).context)
    batch = (torch.ones(3, 4), torch.ones(3, 1))
    rest = ("layers.0.bias", "layers.0.lora_A")  # B is zero
    norm = torch.cat([p.detach().flatten() for n, p in model.named_parameters() if n in rest])
    result = get_runtime(session).state.train_step(batch, None, loss, ct.Clipping(), collector)  # type: ignore[misc]
    assert result.layers is not None
    assert result.layers.to_dict()["weight_norm/layers.0"] == pytest.approx(norm.norm().item(), rel=1e-5)
