"""Numbers without torch are torch's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from clustertrain.checkpoint.format import dtypes
from clustertrain.errors import CheckpointError


def raw(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint8).numpy().reshape(-1, tensor.element_size())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16])
def test_every_code_is_the_number_that_torch_reads(dtype: torch.dtype) -> None:
    codes = torch.arange(2 ** (8 * dtype.itemsize)).to(torch.uint8 if dtype.itemsize == 1 else torch.uint16)
    tensor = codes.view(dtype)
    found = dtypes.decode(raw(tensor), str(dtype).removeprefix("torch."))
    assert found is not None
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(found.astype(np.float64), tensor.double().numpy())


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16])
def test_rounding_is_torchs(source: torch.dtype, target: torch.dtype) -> None:
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    # Ties, the largest ones, and what rounds to them.
    edges = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F7F7FFF, 0x00000001, 0x7F800000, 0x7FC00000, 0])
    values = torch.cat((bits, edges.to(torch.int32))).view(torch.float32).to(source)
    numbers = dtypes.decode(raw(values), str(source).removeprefix("torch."))
    assert numbers is not None
    found = dtypes.encode(numbers, str(target).removeprefix("torch."))
    back = torch.from_numpy(found.reshape(-1).copy()).view(target)
    torch.testing.assert_close(back, values.to(target), rtol=0, atol=0, equal_nan=True)


def test_what_is_too_large_is_refused_and_infinities_are_not() -> None:
    fits = torch.tensor([65504.0, float("inf"), float("nan")])
    list(dtypes.convert(raw(fits), "float32", "float16", "w"))
    with pytest.raises(CheckpointError, match=r"w: 7e\+04 is more than float16 can hold"):
        list(dtypes.convert(raw(torch.tensor([1.0, -7e4, float("inf")])), "float32", "float16", "w"))


def test_blocks_together_are_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "BLOCK_ELEMENTS", 7)
    values = torch.randn(100)
    pieces = list(dtypes.convert(raw(values), "float32", "bfloat16", "w"))
    assert len(pieces) == 15
    assert b"".join(pieces) == values.bfloat16().view(torch.uint8).numpy().tobytes()


def test_no_number_is_made_up_for_a_dtype_that_is_not_known() -> None:
    assert dtypes.decode(raw(torch.ones(4).to(torch.float8_e8m0fnu)), "float8_e8m0fnu") is None
    assert list(dtypes.convert(raw(torch.arange(3)), "int64", "bfloat16", "n")) == [
        torch.arange(3).view(torch.uint8).numpy().data
    ]
