"""Weights in 8 and 4 bits: error, independence of their parts, and the unpacking of exports."""

from __future__ import annotations

import pytest
import torch

from clustertrain.checkpoint.format import low_bit
from clustertrain.checkpoint.offline.adapter import unpack
from clustertrain.config.low_bit import LowBit, packed_shape

PRECISIONS: tuple[LowBit, ...] = ("int8", "nf4")


def matrix(rows: int = 96, columns: int = 200) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 0.02


@pytest.mark.parametrize(("precision", "error"), [("int8", 0.007), ("nf4", 0.095)])
def test_mean_error_is_that_of_the_format(precision: LowBit, error: float) -> None:
    """bitsandbytes 0.50 has 0.090 for NF4 with blocks of 64, torchao 0.18 0.091."""
    weight = matrix()
    packed = low_bit.quantize(weight, precision)
    assert packed.shape == packed_shape(precision, *weight.shape) and low_bit.is_packed(packed)
    difference = low_bit.dequantize(packed, weight.shape[1], torch.float32) - weight
    assert 0.8 * error < float(difference.abs().mean() / weight.abs().mean()) < error


@pytest.mark.parametrize("precision", PRECISIONS)
def test_parts_are_those_of_the_whole(precision: LowBit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and blocks are independent, whatever is converted at the same time."""
    weight = matrix()
    packed = low_bit.quantize(weight, precision)
    dense = low_bit.dequantize(packed, 200, torch.float32)
    assert torch.equal(low_bit.quantize(weight[10:20], precision), packed[10:20])
    assert torch.equal(low_bit.quantize(weight[:, 64:128], precision), packed[:, 1:2])
    assert torch.equal(low_bit.dequantize(packed[:, 1:2].contiguous(), 64, torch.float32), dense[:, 64:128])
    monkeypatch.setattr(low_bit, "CHUNK", 7 * 200)
    assert torch.equal(low_bit.quantize(weight, precision), packed)
    assert torch.equal(low_bit.dequantize(packed, 200, torch.float32), dense)
    assert torch.equal(torch.from_numpy(unpack(packed.numpy(), 200)), dense)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_values_of_the_format_stay_exact(precision: LowBit) -> None:
    weight = torch.zeros(2, 64)
    weight[1, 3], weight[1, 4] = -0.5, 0.5
    dense = low_bit.dequantize(low_bit.quantize(weight, precision), 64, torch.float32)
    assert torch.allclose(dense, weight, rtol=1e-6, atol=0)
