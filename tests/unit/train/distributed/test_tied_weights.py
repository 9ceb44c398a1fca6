"""What two modules of a model share stays one parameter in every layout."""

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
from tests.unit.train.alone import ALONE, built

TP = replace(ALONE, world_size=2, layout=Layout(tp=2))
FSDP = replace(ALONE, world_size=2, layout=Layout(strategy="fsdp", dp_shard=2))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of a rank that is alone, as the first of two."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    dist.destroy_process_group()


class Text(nn.Module):
    """Embedding and head share their table, the first and the last layer a matrix, and all layers a norm."""

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


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Text()
    built(model)
    assert model.tied
    assert len(list(model.parameters())) == 6
    assert all(p.std() > 0 for p in model.parameters())


PLAN = {"embed": "embedding", "head": "head", "layers.*.0": "replicated", "layers.*.1": "sequence"}


def test_in_tensor_parallel(mesh: DeviceMesh) -> None:
    model: Any = Text()
    model.tp_plan = PLAN
    tensor_parallel.check(model, TP)
    tensor_parallel.apply(model, TP, mesh)
    assert model.tied
    assert isinstance(model.head.weight, DTensor) and model.head.weight.to_local().shape == (4, 4)


def test_what_tensor_parallel_would_split_in_two_ways_is_refused(mesh: DeviceMesh) -> None:
    model: Any = Text()
    model.tp_plan = {**PLAN, "head": "replicated"}
    with pytest.raises(ConfigError) as caught:
        tensor_parallel.apply(model, TP, mesh)
    assert "embed.weight and head.weight are one parameter" in caught.value.message
    assert "Shard(dim=0) and Replicate()" in caught.value.message


def test_each_module_that_has_a_shared_parameter_needs_a_word() -> None:
    model: Any = Text()
    model.tp_plan = {k: v for k, v in PLAN.items() if k != "head"}
    with pytest.raises(ConfigError, match=r"no pattern covers parameter head\.weight"):
        tensor_parallel.check(model, TP)


def test_in_shards(mesh: DeviceMesh) -> None:
    model = Text()
    data_parallel.shard(model, FSDP, mesh)
    assert model.tied
    assert all(isinstance(p, DTensor) for p in model.parameters())
    # Only the one layer that shares nothing is gathered by itself.
    assert [n for n, m in model.named_modules() if hasattr(m, "unshard")] == ["", "layers.1"]
