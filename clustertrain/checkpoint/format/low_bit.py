"""Weights in 8 or 4 bits: blocks of a row with an fp32 scale each, in one uint8 tensor (rows, blocks, bytes).

A block is its scale and its codes, so a part of the rows, or of the blocks of each row, is complete in itself: layouts
split the tensor as they split the matrix. ``int8`` is symmetric. ``nf4`` is the 4-bit NormalFloat of QLoRA (arXiv
2305.14314, appendix E), with scales that are not quantized again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from clustertrain.config.low_bit import BLOCK, NF4_VALUES, SCALE_BYTES, LowBit, block_bytes

_INT8_MAX = 127
CHUNK = 1 << 24  # elements that are converted at the same time, which bounds the temporary tensors


def quantize(weight: torch.Tensor, precision: LowBit) -> torch.Tensor:
    """Return ``weight`` (rows, columns) as packed uint8 (rows, blocks, bytes). Rows are independent."""
    rows, columns = weight.shape
    blocks = -(-columns // BLOCK)
    packed = torch.empty(rows, blocks, block_bytes(precision), dtype=torch.uint8, device=weight.device)
    nf4 = torch.tensor(NF4_VALUES, device=weight.device)
    midpoints = (nf4[1:] + nf4[:-1]) / 2
    for part in _row_chunks(rows, columns):
        values = F.pad(weight[part].float(), (0, blocks * BLOCK - columns)).view(-1, blocks, BLOCK)
        largest = values.abs().amax(-1, keepdim=True)
        scale = largest if precision == "nf4" else largest / _INT8_MAX
        scaled = values / torch.where(scale > 0, scale, 1.0)
        packed[part, :, :SCALE_BYTES] = scale.view(torch.uint8)
        if precision == "int8":
            packed[part, :, SCALE_BYTES:] = scaled.round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int8).view(torch.uint8)
        else:
            codes = torch.bucketize(scaled, midpoints, out_int32=True).to(torch.uint8)
            packed[part, :, SCALE_BYTES:] = codes[..., ::2] | (codes[..., 1::2] << 4)
    return packed


def dequantize(packed: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix (rows, ``columns``) of ``packed``, computed in fp32 and cast to ``dtype``."""
    rows, blocks, size = packed.shape
    weight = torch.empty(rows, columns, dtype=dtype, device=packed.device)
    for part in _row_chunks(rows, columns):
        codes = packed[part, :, SCALE_BYTES:]
        if size == block_bytes("int8"):
            values = codes.view(torch.int8).float()
        else:
            values = F.embedding(codes.int(), nf4_pairs(packed.device)).view(-1, blocks, BLOCK)
        values *= packed[part, :, :SCALE_BYTES].contiguous().view(torch.float32)
        weight[part] = values.view(-1, blocks * BLOCK)[:, :columns]
    return weight


def is_packed(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is the weight of a linear layer in 8 or 4 bits."""
    return (
        tensor.dtype == torch.uint8
        and tensor.dim() == 3
        and tensor.shape[-1] in (block_bytes("int8"), block_bytes("nf4"))
    )


def _row_chunks(rows: int, columns: int) -> list[slice]:
    step = max(1, CHUNK // max(1, columns))
    return [slice(row, min(row + step, rows)) for row in range(0, rows, step)]


def nf4_pairs(device: torch.device) -> torch.Tensor:
    """Return the two values of each byte, (256, 2).

    Kept per device: a copy to a GPU makes the host wait. torch.compile warns of functools.cache.
    """
    if device not in _pairs:
        values, codes = torch.tensor(NF4_VALUES), torch.arange(256)
        _pairs[device] = torch.stack((values[codes & 15], values[codes >> 4]), dim=1).to(device)
    return _pairs[device]


_pairs: dict[torch.device, torch.Tensor] = {}
