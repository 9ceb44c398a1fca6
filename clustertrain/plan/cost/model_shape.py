"""The sizes of a decoder that the estimates need, whoever trains it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol


class DecoderShape(Protocol):
    """What ``ModelSpec`` says of the built-in decoder, and ``DecoderSizes`` of anybody's."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def gated(self) -> bool: ...
    @property
    def tie_embeddings(self) -> bool: ...
    @property
    def dropout(self) -> float: ...
    def block_parameters(self) -> int: ...
    def parameters(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """A decoder that is only described: ``gated`` has three matrices in its feed-forward layer (SwiGLU), else two."""

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    gated: bool = True
    tie_embeddings: bool = False
    dropout: float = 0.0

    @cached_property
    def _block_params(self) -> int:
        head = self.dim // self.heads
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * head
        return attention + (3 if self.gated else 2) * self.dim * self.hidden + 2 * self.dim

    def block_parameters(self) -> int:
        return self._block_params

    def parameters(self) -> int:
        embeddings = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return self.layers * self._block_params + embeddings + self.dim


def matmul_parameters(model: DecoderShape) -> int:
    """Those that every token is multiplied with: all but the embedding's and the norms'."""
    blocks = model.layers * (model.block_parameters() - 2 * model.dim)
    return blocks + model.vocab_size * model.dim


def attention_flops(model: DecoderShape, seq_len: int, *, causal: bool) -> float:
    """Of queries times keys and weights times values, forward and backward, a token: 12 L s h (arXiv 2205.05198,
    appendix A), of which a causal mask needs half."""
    return (6.0 if causal else 12.0) * model.layers * seq_len * model.dim
