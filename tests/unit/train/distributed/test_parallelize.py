"""Parallelized models: buffers, matmul precision and rejected combinations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from clustertrain.checkpoint.core.state_dict import is_dtensor
from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Layout
from clustertrain.train.distributed import pipeline, precision
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.distributed.parallelize import parallelize
from tests.unit.train.single_process import ALONE, build_on_cpu, single_process_group


class Shifted(nn.Module):
    """A module on the meta device with a buffer on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, device="meta"))
        self.register_buffer("shift", torch.arange(4.0))

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        tensor.fill_(0.5)


def test_buffers_keep_values_when_leaving_meta() -> None:
    model: Any = build_on_cpu(Shifted())
    assert (model.weight.tolist(), model.shift.tolist()) == ([0.5] * 4, [0.0, 1.0, 2.0, 3.0])


@pytest.fixture
def matmul_settings() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.usefixtures("matmul_settings")
def test_matmul_precision_follows_each_session() -> None:
    for requested, matmul, convolution in (
        ("fp32", "highest", False),
        ("tf32", "high", True),
        ("fp32", "highest", False),
    ):
        precision.apply_matmul_precision(replace(ALONE, precision=requested))  # type: ignore[arg-type]
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (matmul, convolution)


@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv"])
def test_selective_checkpointing_with_split_backward_raises(schedule: str) -> None:
    layout = Layout(pp=2, schedule=schedule, virtual_stages=2, activation_checkpointing="selective")
    mesh: Any = None  # never used, because the check fails first
    with pytest.raises(ConfigError, match=f"selective activation checkpointing with schedule {schedule}"):
        pipeline.split(nn.Linear(2, 2), replace(ALONE, layout=layout), mesh)


def test_sharding_never_has_the_whole_module_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr(nn.Module, "to", mock.Mock(side_effect=AssertionError("moved as a whole")))
    with single_process_group():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
        context = replace(ALONE, layout=Layout(strategy="fsdp", dp_shard=1))
        parallelized = parallelize(model, context, ProcessGroups(mesh, None, None, None), 3)
        values = {
            name: value.full_tensor() if is_dtensor(value) else value
            for name, value in parallelized.state_dict().items()
        }
    assert values.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in values.items())
