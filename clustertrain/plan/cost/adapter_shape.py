"""Sizes of adapters and of the frozen base under them, on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from clustertrain.config.adapter import AdapterSpec
from clustertrain.config.checks.module_patterns import matches
from clustertrain.config.low_bit import BLOCK, BasePrecision, packed_shape
from clustertrain.plan.cost.model_shape import DecoderShape, iter_shapes

FP32 = 4
_SPLIT_BY_INPUTS = ("attention.out", "ffn.down")  # by tensor parallelism; the others are split by outputs
ROW_CHUNK = 1 << 24  # elements of a matrix that are unpacked at the same time


@dataclass(frozen=True)
class AdapterShape:
    """Adapters of a decoder."""

    rank: int
    shares: tuple[tuple[str, float], ...]
    """By linear layer of a block (``attention.q``): the fraction of the blocks in which it has an adapter."""
    head: bool = False
    """Whether the output layer has one too."""
    has_magnitude: bool = False
    """DoRA: a trained magnitude for each output."""
    has_dropout: bool = False
    base_precision: BasePrecision = "unchanged"

    @cached_property
    def share_of(self) -> Mapping[str, float]:
        return dict(self.shares)

    @property
    def is_stored_apart(self) -> bool:
        """Whether the base has a format of its own: it is neither cast by autocast nor gathered in another type."""
        return self.base_precision != "unchanged"

    @property
    def is_packed(self) -> bool:
        """Whether the base is in 8 or 4 bits."""
        return self.base_precision in ("int8", "nf4")

    @property
    def table_bytes(self) -> int:
        """Bytes of a stored element of the embedding and the output layer."""
        return 2 if self.is_stored_apart else FP32

    def adapter_shapes(self, rows: int, columns: int) -> list[tuple[int, ...]]:
        """Return the shapes of the trained tensors of an adapter of a (rows, columns) matrix."""
        shapes: list[tuple[int, ...]] = [(self.rank, columns), (rows, self.rank)]
        return [*shapes, (rows,)] if self.has_magnitude else shapes

    def split_matrices(self, model: DecoderShape, tp: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of the matrices of a block on a rank by name."""
        return {name: _split(name, *shape, tp) for name, shape in block_matrices(model).items()}

    def output_elements(self, model: DecoderShape, tp: int) -> float:
        """Return the elements per token of the products with both matrices of the adapters of a block."""
        return sum(
            self.share_of.get(name, 0.0) * (self.rank + rows)
            for name, (rows, _) in self.split_matrices(model, tp).items()
        )

    def block_adapters(self, model: DecoderShape, tp: int = 1) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Yield (share of the blocks, shape on a rank) of the trained tensors of a block."""
        for name, (rows, columns) in self.split_matrices(model, tp).items():
            if share := self.share_of.get(name, 0.0):
                yield from ((share, shape) for shape in self.adapter_shapes(rows, columns))

    def head_adapters(self, model: DecoderShape, tp: int = 1) -> list[tuple[int, ...]]:
        """Return the shapes of the trained tensors of the output layer on a rank."""
        return self.adapter_shapes(model.vocab_size // tp, model.dim) if self.head else []

    def block_elements(self, model: DecoderShape, tp: int = 1, shards: int = 1) -> float:
        """Return the trained elements of a block on one of the ``shards`` ranks that share them.

        Rows are shared out, and the first rank has the most of them.
        """
        return sum(share * padded_elements(shape, shards) for share, shape in self.block_adapters(model, tp))

    def head_elements(self, model: DecoderShape, tp: int = 1, shards: int = 1) -> float:
        return sum(padded_elements(shape, shards) for shape in self.head_adapters(model, tp))

    def matrix_bytes(self, model: DecoderShape, tp: int = 1, shards: int = 1, *, plain_bytes: int = FP32) -> float:
        """Return the bytes of the frozen matrices of a block on a rank.

        Args:
            plain_bytes: per element of a base without an own precision: 4 as stored, fewer as gathered.
        """
        total = 0
        for shape in self.split_matrices(model, tp).values():
            if self.is_packed:
                packed = packed_shape(self.base_precision, *shape)  # type: ignore[arg-type]
                total += padded_elements(packed, shards)
            else:
                total += padded_elements(shape, shards) * (2 if self.is_stored_apart else plain_bytes)
        return float(total)

    def allows_tp(self, model: DecoderShape, tp: int) -> bool:
        """Return whether the trainer splits the layers over ``tp`` ranks."""
        if tp > 1 and self.has_dropout:
            return False
        return not self.is_packed or not any(
            columns % (BLOCK * tp) for name, (_, columns) in block_matrices(model).items() if name in _SPLIT_BY_INPUTS
        )

    def trained_elements(self, model: DecoderShape, tp: int = 1) -> float:
        """Return the trained elements of the whole model, of which tensor parallelism splits some."""
        return model.layers * self.block_elements(model, tp) + self.head_elements(model, tp)

    def gathered_bytes(self, model: DecoderShape, tp: int, compute_bytes: int) -> float:
        """Return the bytes of all parameters as ``fully_shard`` gathers them."""
        tables = (1 if model.tie_embeddings else 2) * model.vocab_size * model.dim / tp
        return (
            model.layers * self.matrix_bytes(model, tp, plain_bytes=compute_bytes)
            + tables * min(compute_bytes, self.table_bytes)
            + compute_bytes * self.trained_elements(model, tp)
        )

    def norm_bytes(self, model: DecoderShape, tp: int) -> float:
        """Return the bytes of the fp32 matrices from which DoRA computes the norms of the largest adapted layer.

        These are the base, if it has a format of its own, B A and its multiple.
        """
        if not self.has_magnitude:
            return 0.0
        matrices = self.split_matrices(model, tp)
        largest = max(
            (rows * columns for name, (rows, columns) in matrices.items() if name in self.share_of), default=0
        )
        return float(FP32 * (2 + self.is_stored_apart) * largest)

    def unpack_bytes(self, model: DecoderShape, tp: int, compute_bytes: int) -> float:
        """Return the bytes of the largest matrix of a block while it is unpacked or cast for a product."""
        if not self.is_stored_apart or (self.base_precision == "bf16" and compute_bytes == 2):
            return 0.0
        elements = max(model.dim * model.hidden, model.dim * model.attention_dim) / tp
        # fp32 values of some rows, and 4-bit codes also as 32-bit indices of two values each.
        per_element = {"bf16": 0, "int8": FP32, "nf4": FP32 + 2}[self.base_precision]
        return compute_bytes * elements + per_element * min(elements, ROW_CHUNK)


def find_adapter(spec: AdapterSpec, model: DecoderShape) -> AdapterShape | None:
    """Return the adapters of a decoder; None if it has none."""
    if not spec.is_enabled:
        return None
    layers = range(model.layers)
    shares = {
        name: sum(_is_target(spec, f"layers.{i}.{name}") for i in layers) / model.layers
        for name in block_matrices(model)
    }
    return AdapterShape(
        rank=spec.rank,
        shares=tuple((name, share) for name, share in shares.items() if share),
        head=not model.tie_embeddings and _is_target(spec, "head"),
        has_magnitude=spec.kind == "dora",
        has_dropout=spec.dropout > 0,
        base_precision=spec.base_precision,
    )


def _is_target(spec: AdapterSpec, module: str) -> bool:
    return any(matches(pattern, module) for pattern in spec.target_modules)


def block_matrices(model: DecoderShape) -> dict[str, tuple[int, int]]:
    """Return the shapes of the matrices of a block by name."""
    return {
        module.removeprefix("layers.0."): (shape[0], shape[1])
        for module, shape in iter_shapes(model, layers=1)
        if module.startswith("layers.") and len(shape) == 2
    }


def padded_elements(shape: tuple[int, ...], shards: int) -> int:
    """Return the elements of the largest of ``shards`` parts of a tensor, which is split by rows."""
    elements = -(-shape[0] // shards)
    for size in shape[1:]:
        elements *= size
    return elements


def _split(name: str, rows: int, columns: int, tp: int) -> tuple[int, int]:
    return (rows, columns // tp) if name in _SPLIT_BY_INPUTS else (rows // tp, columns)
