"""Conversion of inputs to the channels-last format."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from clustertrain.config.job import RunSpec
from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.recipe import Recipe
from clustertrain.train.distributed import block_transforms
from tests.unit.train.single_process import ALONE


def test_inputs_are_converted_to_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(1))
    plain = model(x)
    spec = RunSpec(recipe=Recipe(parallel=ParallelSpec(channels_last=True)))
    block_transforms.apply(model, dataclasses.replace(ALONE, spec=spec))
    seen: list[torch.Tensor] = []
    model[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    output = model(x)
    assert seen[0].is_contiguous(memory_format=torch.channels_last) and not seen[0].is_contiguous()
    assert output.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(output, plain)
