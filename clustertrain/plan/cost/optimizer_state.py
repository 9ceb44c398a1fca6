"""Bytes of optimizer state and of its update from the shapes of the parameters.

The bytes are those of the classes of torch, pytorch-optimizer and torchao; a test compares them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from clustertrain.config.optim import OptimSpec
from clustertrain.config.optimizers import OPTIMIZERS, OptimizerName
from clustertrain.plan.cost.adapter_shape import AdapterShape
from clustertrain.plan.cost.model_shape import DecoderShape, iter_shapes
from clustertrain.plan.optimizer_checks import check_modules

MAX_PRECONDITIONED_DIM = 10_000  # SOAP skips longer dimensions
_QUANT_BLOCK, _MIN_QUANTIZED = 256, 4096  # 8-bit moments: elements per block, and the smallest quantized size


def state_bytes(spec: OptimSpec, shape: Sequence[int], *, is_hidden_matrix: bool) -> int:
    """Return the bytes of state of one trained parameter, without counters of a few bytes.

    Args:
        is_hidden_matrix: the parameter is a matrix of a layer.
    """
    size, name = math.prod(shape), spec.name
    if OPTIMIZERS[name].matrices_only and not is_hidden_matrix:
        name = "adamw"
    match name:
        case "sgd" | "lars":
            return 4 * size if spec.effective_momentum else 0
        case "lion" | "muon":
            return 4 * size
        case "adafactor" if len(shape) > 1:
            return 4 * (size // shape[-1] + size // shape[-2])
        case "adafactor":
            return 4 * size
        case "soap" if len(shape) > 1:
            return 8 * size + 2 * sum(4 * n * n for n in shape if n <= MAX_PRECONDITIONED_DIM)
        case "shampoo":
            return 2 * sum(4 * n * n for n in shape) + 4 * size  # including its last update, which it keeps
        case "adamw8bit" if size >= _MIN_QUANTIZED and size % _QUANT_BLOCK == 0:
            return 2 * (size + 4 * size // _QUANT_BLOCK)
        case _:
            return 8 * size


def temporary_bytes(spec: OptimSpec, shape: Sequence[int], *, is_hidden_matrix: bool) -> float:
    """Return the bytes that the update of a parameter allocates and frees, as torch's memory tracker counts them."""
    size = math.prod(shape)
    match spec.name:
        case "soap" if len(shape) > 1:
            return 4 * (4.8 * size + 0.9 * max((n * n for n in shape if n <= MAX_PRECONDITIONED_DIM), default=0))
        case "shampoo" if is_hidden_matrix:
            return 4 * 4 * max(n * n for n in shape)
        case "lion" | "lamb" | "adafactor":
            return 4 * size
        case _:
            return 0.0


def _add_temporaries(name: OptimizerName, total: float, more: float) -> float:
    """Return the temporary bytes of an update of further parameters: lion and lamb update all at the same time."""
    return total + more if name in ("lion", "lamb") else max(total, more)


@dataclass(frozen=True)
class OptimizerStateSize:
    """Size of the optimizer state of a whole model."""

    bytes_per_param: float
    trained_fraction: float
    """Fraction of the parameters that are trained."""
    largest_bytes: int
    """Largest state of a single parameter, which one rank holds regardless of the number of ranks."""


def estimate_state(spec: OptimSpec, model: DecoderShape) -> OptimizerStateSize:
    """Return the size of the state of ``model``. Raise ConfigError as :func:`check_modules`."""
    module_shapes = list(iter_shapes(model))
    trained_modules = check_modules(spec, [module for module, _ in module_shapes])
    trained = [
        (shape, module.startswith("layers.") and len(shape) > 1)
        for module, shape in module_shapes
        if module in trained_modules
    ]
    total_params = sum(math.prod(shape) for _, shape in module_shapes)
    sizes = [state_bytes(spec, shape, is_hidden_matrix=hidden) for shape, hidden in trained]
    return OptimizerStateSize(
        sum(sizes) / total_params, sum(math.prod(shape) for shape, _ in trained) / total_params, max(sizes)
    )


def estimate_adapter_state(spec: OptimSpec, model: DecoderShape, adapter: AdapterShape) -> OptimizerStateSize:
    """Return the size of the state of the adapters of ``model``, per trained parameter.

    Raises:
        ConfigError: a pattern of ``spec`` matches no module.
    """
    block, head = list(adapter.block_adapters(model)), adapter.head_adapters(model)
    state = [model.layers * share * state_bytes(spec, shape, is_hidden_matrix=len(shape) > 1) for share, shape in block]
    state += [state_bytes(spec, shape, is_hidden_matrix=False) for shape in head]
    check_modules(spec, [module for module, _ in iter_shapes(model)])
    trained = adapter.trained_elements(model)
    largest = max(state_bytes(spec, shape, is_hidden_matrix=True) for shape in [*(s for _, s in block), *head])
    return OptimizerStateSize(sum(state) / trained, trained / (model.parameters() + trained), largest)


class OwnedParams(NamedTuple):
    """Whole parameters whose optimizer state one rank holds."""

    elements: int = 0
    state_bytes: int = 0
    temporary_bytes: float = 0.0
    """Of their update."""


def find_heaviest_owner(
    spec: OptimSpec,
    model: DecoderShape,
    blocks: int,
    *,
    embedding: bool,
    head: bool,
    ranks: int,
    zero1: bool,
    adapter: AdapterShape | None = None,
) -> OwnedParams:
    """Return what the rank with the most state owns, if ``ranks`` ranks share out whole parameters.

    Each goes to the rank with the fewest elements so far, the largest first: in torch's ZeroRedundancyOptimizer, which
    takes one parameter group after another, and in ``unsharded_update.assign_owners``, which gets only the hidden
    matrices if the optimizer is for these.

    Args:
        blocks, embedding, head: the part of the model that is on the ranks.
        adapter: only these are trained.
    """
    if adapter is None:
        params = _list_params(model, blocks, embedding=embedding, head=head)
    else:
        params = _list_adapters(model, blocks, adapter, head=head)
    by_group: dict[str, list[OwnedParams]] = {"hidden": [], "decayed": [], "rest": []}
    for group, count, shape in params:
        is_hidden = group == "hidden"
        entry = OwnedParams(
            math.prod(shape),
            state_bytes(spec, shape, is_hidden_matrix=is_hidden),
            temporary_bytes(spec, shape, is_hidden_matrix=is_hidden),
        )
        by_group[group] += [entry] * count
    hidden, decayed, rest = by_group["hidden"], by_group["decayed"], by_group["rest"]
    matrices_only = OPTIMIZERS[spec.name].matrices_only
    if zero1:
        groups = [hidden, decayed, rest] if matrices_only else [hidden + decayed, rest]
    else:
        groups = [hidden] if matrices_only else [hidden + decayed + rest]
    return _share_out(spec.name, tuple(tuple(sorted(group, reverse=True)) for group in groups), ranks)


def _list_params(
    model: DecoderShape, blocks: int, *, embedding: bool, head: bool
) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Yield (group, number, shape) of the parameters of a part of the model."""
    is_tied = model.tie_embeddings and embedding and head
    counts = {"embed": embedding, "norm": head, "head": head and not is_tied}
    shapes = list(iter_shapes(model, layers=1))
    if model.tie_embeddings:
        shapes.append(("head", (model.vocab_size, model.dim)))  # without the embedding, a stage has its own copy
    for module, shape in shapes:
        is_hidden = module.startswith("layers.") and len(shape) > 1
        group = "hidden" if is_hidden else "decayed" if module == "head" else "rest"
        yield group, blocks if module.startswith("layers.") else counts[module], shape


def _list_adapters(
    model: DecoderShape, blocks: int, adapter: AdapterShape, *, head: bool
) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Yield (group, number, shape) of the adapters of a part of the model."""
    for share, shape in adapter.block_adapters(model):
        yield "hidden" if len(shape) > 1 else "decayed", round(share * blocks), shape
    yield from (("decayed", int(head), shape) for shape in adapter.head_adapters(model))


@cache
def _share_out(name: OptimizerName, groups: tuple[tuple[OwnedParams, ...], ...], ranks: int) -> OwnedParams:
    loads = [(0, rank) for rank in range(ranks)]  # a heap
    owned = [OwnedParams()] * ranks
    for group in groups:
        for params in group:
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + params.elements, rank))
            owned[rank] = OwnedParams(
                load + params.elements,
                owned[rank].state_bytes + params.state_bytes,
                _add_temporaries(name, owned[rank].temporary_bytes, params.temporary_bytes),
            )
    return max(owned, key=lambda params: params.state_bytes)
