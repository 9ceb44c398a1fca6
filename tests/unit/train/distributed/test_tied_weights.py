"""Tied parameters stay tied in every layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Layout
from clustertrain.train.distributed import data_parallel, tensor_parallel
from tests.unit.train.single_process import ALONE, build_on_cpu

TP = replace(ALONE, world_size=2, layout=Layout(tp=2))
FSDP = replace(ALONE, world_size=2, layout=Layout(strategy="fsdp", dp_shard=2))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Yield a mesh of two ranks with a fake process group, in a single process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    dist.destroy_process_group()


class TiedModel(nn.Module):
    """Model whose embedding and head share a table, two layers a matrix, and the last two layers a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4, bias=False)) for _ in range(4))
        norm = nn.LayerNorm(4)
        for layer in self.layers[2:]:
            layer.append(norm)
        self.head.weight = self.embed.weight
        self.layers[2][0].weight = self.layers[0][0].weight

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        tensor.normal_(generator=generator)

    @property
    def tied(self) -> bool:
        layers: Any = self.layers
        return self.head.weight is self.embed.weight and layers[0][0].weight is layers[2][0].weight


def test_ties_survive_leaving_the_meta_device() -> None:
    with torch.device("meta"):
        model = TiedModel()
    build_on_cpu(model)
    assert model.tied
    assert len(list(model.parameters())) == 6
    assert all(p.std() > 0 for p in model.parameters())


PLAN = {"embed": "embedding", "head": "head", "layers.*.0": "replicated", "layers.*.1": "sequence"}


def test_ties_survive_tensor_parallelism(mesh: DeviceMesh) -> None:
    model: Any = TiedModel()
    model.tp_plan = PLAN
    tensor_parallel.check(model, TP)
    tensor_parallel.apply(model, TP, mesh)
    assert model.tied
    assert isinstance(model.head.weight, DTensor) and model.head.weight.to_local().shape == (4, 4)


def test_tied_weights_split_differently_raise(mesh: DeviceMesh) -> None:
    model: Any = TiedModel()
    model.tp_plan = {**PLAN, "head": "replicated"}
    with pytest.raises(ConfigError) as caught:
        tensor_parallel.apply(model, TP, mesh)
    assert "embed.weight and head.weight are one parameter" in caught.value.message
    assert "Shard(dim=0) and Replicate()" in caught.value.message


def test_each_holder_of_a_tied_parameter_needs_a_pattern() -> None:
    model: Any = TiedModel()
    model.tp_plan = {k: v for k, v in PLAN.items() if k != "head"}
    with pytest.raises(ConfigError, match=r"no pattern covers parameter head\.weight"):
        tensor_parallel.check(model, TP)


def test_ties_survive_fully_shard(mesh: DeviceMesh) -> None:
    model = TiedModel()
    data_parallel.shard(model, FSDP, mesh)
    assert model.tied
    assert all(isinstance(p, DTensor) for p in model.parameters())
    # Only the layer that shares nothing is a separate unit.
    assert [n for n, m in model.named_modules() if hasattr(m, "unshard")] == ["", "layers.1"]
