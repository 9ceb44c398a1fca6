"""Masks that keep the attention of packed samples inside each document.

``document_starts`` (batch, length) int64 gives for each token the position in the sample of the first token of its
document. Documents are contiguous, so query i sees the keys from ``document_starts[i]`` to i. The starts of a chunk of
queries therefore suffice, whichever rank holds the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

AttentionMask: TypeAlias = "torch.Tensor | BlockMask"


class DocumentAttention:
    """What all layers share to attend inside the documents of packed samples.

    Not a tuple or dataclass: ``fully_shard`` would cast the tables to 16 bits on their way into a layer.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, mask: AttentionMask) -> None:
        """Store the mask, and the rotary tables of each token's position in its document.

        Args:
            cos: (batch, 1, length, head_dim / 2) in fp32; ``sin`` likewise.
        """
        self.cos, self.sin, self.mask = cos, sin, mask

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.cos, self.sin, self.mask) if isinstance(t, torch.Tensor)]


class FlexKernel:
    """torch's ``flex_attention`` and the function that builds its masks, compiled on GPUs.

    Uncompiled, it computes all scores in fp32, which serves tests only. All layers share one object, and so one
    compiled kernel.
    """

    def __init__(self, *, compiled: bool) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.attend: Callable[..., Any] = flex_attention
        self._create_block_mask: Callable[..., Any] = create_block_mask
        if compiled:
            self.attend = torch.compile(flex_attention, dynamic=False)
            # Uncompiled, it would first build the mask of all positions.
            self._create_block_mask = torch.compile(create_block_mask, dynamic=False)

    def build_mask(self, document_starts: torch.Tensor, first: int) -> BlockMask:
        """Return the mask of queries from position ``first`` on; arguments as for :func:`build_dense_mask`."""
        batch, length = document_starts.shape

        def is_visible(b: torch.Tensor, _head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (k <= q + first) & (k >= document_starts[b, q])

        mask: BlockMask = self._create_block_mask(
            is_visible, batch, None, length, first + length, device=document_starts.device
        )
        return mask


def build_dense_mask(document_starts: torch.Tensor, first: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what is added to the scores: (batch, 1, length, first + length), 0 or -inf.

    In the type of the queries: torch converts a mask of booleans anew in each layer, and each layer would keep its copy
    for the backward pass.

    Args:
        document_starts: of the queries, (batch, length) int64.
        first: position in the sample of the first query.
    """
    length, device = document_starts.shape[1], document_starts.device
    keys = torch.arange(first + length, device=device)
    is_visible = (keys <= keys[first:, None]) & (keys >= document_starts[..., None])
    zero = torch.zeros((), dtype=dtype, device=device)
    return torch.where(is_visible, zero, -torch.inf)[:, None]
