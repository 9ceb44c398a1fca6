"""What a model has once it is in its layout, and in which number format fp32 computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Layout
from clustertrain.train.distributed import pipeline, precision
from tests.unit.train.alone import ALONE, built


class Shifted(nn.Module):
    """On the meta device, with a buffer that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, device="meta"))
        self.register_buffer("shift", torch.arange(4.0))

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        tensor.fill_(0.5)


def test_buffers_keep_their_values_when_a_model_leaves_the_meta_device() -> None:
    model: Any = built(Shifted())
    assert (model.weight.tolist(), model.shift.tolist()) == ([0.5] * 4, [0.0, 1.0, 2.0, 3.0])


@pytest.fixture
def matmul_settings() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.usefixtures("matmul_settings")
def test_fp32_is_fp32_also_for_convolutions_and_after_a_session_in_tf32() -> None:
    for asked, matmul, convolution in (("fp32", "highest", False), ("tf32", "high", True), ("fp32", "highest", False)):
        precision.apply_matmul_precision(replace(ALONE, precision=asked))  # type: ignore[arg-type]
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (matmul, convolution)


@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv"])
def test_a_backward_in_two_parts_cannot_recompute_selectively(schedule: str) -> None:
    layout = Layout(pp=2, schedule=schedule, virtual_stages=2, activation_checkpointing="selective")
    mesh: Any = None  # refused before it is looked at
    with pytest.raises(ConfigError, match=f"selective activation checkpointing with schedule {schedule}"):
        pipeline.split(nn.Linear(2, 2), replace(ALONE, layout=layout), mesh)
