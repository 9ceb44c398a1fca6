"""Sizes of a decoder that the estimates need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol


class DecoderShape(Protocol):
    """Sizes of a decoder; ``ModelSpec`` has them for the built-in one, ``DecoderSizes`` for any other."""

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
    def attention_dim(self) -> int: ...
    @property
    def kv_dim(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def gated(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def tie_embeddings(self) -> bool: ...
    @property
    def dropout(self) -> float: ...
    def block_parameters(self) -> int: ...
    def block_vectors(self) -> Mapping[str, int]: ...
    def block_vector_elements(self) -> int: ...
    def parameters(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """Sizes of a decoder from a table. ``gated``: three matrices in the feed-forward layer (SwiGLU) instead of two."""

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    gated: bool = True
    qk_norm: bool = False
    tie_embeddings: bool = False
    dropout: float = 0.0

    @property
    def attention_dim(self) -> int:
        return self.dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * (self.dim // self.heads)

    def block_vectors(self) -> Mapping[str, int]:
        return {"attention_norm": self.dim, "ffn_norm": self.dim}

    def block_vector_elements(self) -> int:
        return 2 * self.dim

    @cached_property
    def _block_params(self) -> int:
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_dim
        return attention + (3 if self.gated else 2) * self.dim * self.hidden + 2 * self.dim

    def block_parameters(self) -> int:
        return self._block_params

    def parameters(self) -> int:
        embeddings = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return self.layers * self._block_params + embeddings + self.dim


def iter_shapes(model: DecoderShape, layers: int | None = None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (module, shape) of each parameter of the decoder, or of one with another number of ``layers``."""
    dim, hidden, attention, kv = model.dim, model.hidden, model.attention_dim, model.kv_dim
    yield "embed", (model.vocab_size, dim)
    feed_forward = {"gate": (hidden, dim)} if model.gated else {}
    matrices = {
        **{f"attention.{n}": shape for n, shape in {"q": (attention, dim), "k": (kv, dim), "v": (kv, dim)}.items()},
        "attention.out": (dim, attention),
        **{f"ffn.{n}": shape for n, shape in {**feed_forward, "up": (hidden, dim), "down": (dim, hidden)}.items()},
    }
    for i in range(model.layers if layers is None else layers):
        yield from ((f"layers.{i}.{name}", shape) for name, shape in matrices.items())
        yield from ((f"layers.{i}.{name}", (size,)) for name, size in model.block_vectors().items())
    yield "norm", (dim,)
    if not model.tie_embeddings:
        yield "head", (model.vocab_size, dim)


def matmul_parameters(model: DecoderShape) -> int:
    """Return the number of parameters used in matmuls: all except the embedding's and the norms'."""
    return model.layers * block_matrices(model) + model.vocab_size * model.dim


def block_matrices(model: DecoderShape) -> int:
    """Return the number of parameters in the matrices of a block."""
    return model.block_parameters() - model.block_vector_elements()


def attention_flops(model: DecoderShape, seq_len: int, *, causal: bool) -> float:
    """Return the FLOPs per token of scores and weighted values, forward and backward.

    12 L s h (arXiv 2205.05198, appendix A), half of it with a causal mask.
    """
    return (6.0 if causal else 12.0) * model.layers * seq_len * model.attention_dim
