"""Conversion of dtypes without torch matches torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from clustertrain.checkpoint.format import dtypes
from clustertrain.errors import CheckpointError


def raw(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint8).numpy().reshape(-1, tensor.element_size())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16], ids=str)
def test_every_bit_pattern_decodes_as_in_torch(dtype: torch.dtype) -> None:
    codes = torch.arange(2 ** (8 * dtype.itemsize)).to(torch.uint8 if dtype.itemsize == 1 else torch.uint16)
    tensor = codes.view(dtype)
    decoded = dtypes.decode(raw(tensor), str(dtype).removeprefix("torch."))
    assert decoded is not None
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(decoded.astype(np.float64), tensor.double().numpy())


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_rounding_matches_torch(source: torch.dtype, target: torch.dtype) -> None:
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    # Ties, the largest values, and values that round to them.
    edges = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F7F7FFF, 0x00000001, 0x7F800000, 0x7FC00000, 0])
    values = torch.cat((bits, edges.to(torch.int32))).view(torch.float32).to(source)
    numbers = dtypes.decode(raw(values), str(source).removeprefix("torch."))
    assert numbers is not None
    encoded = dtypes.encode(numbers, str(target).removeprefix("torch."))
    rounded = torch.from_numpy(encoded.reshape(-1).copy()).view(target)
    torch.testing.assert_close(rounded, values.to(target), rtol=0, atol=0, equal_nan=True)


def test_overflow_is_refused_but_infinity_is_not() -> None:
    fits = torch.tensor([65504.0, float("inf"), float("nan")])
    list(dtypes.convert(raw(fits), "float32", "float16", "w"))
    with pytest.raises(CheckpointError, match=r"w: 7e\+04 is more than float16 can hold"):
        list(dtypes.convert(raw(torch.tensor([1.0, -7e4, float("inf")])), "float32", "float16", "w"))


def test_blocks_concatenate_to_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "BLOCK_ELEMENTS", 7)
    values = torch.randn(100)
    pieces = list(dtypes.convert(raw(values), "float32", "bfloat16", "w"))
    assert len(pieces) == 15
    assert b"".join(pieces) == values.bfloat16().view(torch.uint8).numpy().tobytes()


def test_unknown_and_integer_dtypes_are_not_converted() -> None:
    assert dtypes.decode(raw(torch.ones(4).to(torch.float8_e8m0fnu)), "float8_e8m0fnu") is None
    assert list(dtypes.convert(raw(torch.arange(3)), "int64", "bfloat16", "n")) == [
        torch.arange(3).view(torch.uint8).numpy().data
    ]
