"""Bytes of optimizer state from the shapes of the parameters, and requirements of optimizers on layout and model.

The bytes are those of the classes of torch, pytorch-optimizer and torchao; a test compares them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from clustertrain.config.checks.module_patterns import matches, suggest_modules
from clustertrain.config.model import ModelSpec
from clustertrain.config.optim import OptimSpec
from clustertrain.config.optimizers import OPTIMIZERS, OptimizerName
from clustertrain.errors import ConfigError
from clustertrain.plan.cost.model_shape import DecoderShape
from clustertrain.plan.layout import Layout

MAX_COUPLED_DECAY = 0.01
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
    module_shapes = list(_iter_shapes(model))
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


class OwnedParams(NamedTuple):
    """Whole parameters whose optimizer state one rank holds."""

    elements: int = 0
    state_bytes: int = 0
    temporary_bytes: float = 0.0
    """Of their update."""


def find_heaviest_owner(
    spec: OptimSpec, model: DecoderShape, blocks: int, *, embedding: bool, head: bool, ranks: int, zero1: bool
) -> OwnedParams:
    """Return what the rank with the most state owns, if ``ranks`` ranks share out whole parameters.

    Each goes to the rank with the fewest elements so far, the largest first: in torch's ZeroRedundancyOptimizer, which
    takes one parameter group after another, and in ``unsharded_update.assign_owners``, which gets only the hidden
    matrices if the optimizer is for these.

    Args:
        blocks, embedding, head: the part of the model that is on the ranks.
    """
    hidden: list[OwnedParams] = []
    decayed: list[OwnedParams] = []
    rest: list[OwnedParams] = []
    is_tied = model.tie_embeddings and embedding and head
    counts = {"embed": embedding, "norm": head, "head": head and not is_tied}
    shapes = list(_iter_shapes(model, layers=1))
    if model.tie_embeddings:
        shapes.append(("head", (model.vocab_size, model.dim)))  # without the embedding, a stage has its own copy
    for module, shape in shapes:
        is_hidden = module.startswith("layers.") and len(shape) > 1
        group = hidden if is_hidden else decayed if module == "head" else rest
        entry = OwnedParams(
            math.prod(shape),
            state_bytes(spec, shape, is_hidden_matrix=is_hidden),
            temporary_bytes(spec, shape, is_hidden_matrix=is_hidden),
        )
        group += [entry] * (blocks if module.startswith("layers.") else counts[module])
    matrices_only = OPTIMIZERS[spec.name].matrices_only
    if zero1:
        groups = [hidden, decayed, rest] if matrices_only else [hidden + decayed, rest]
    else:
        groups = [hidden] if matrices_only else [hidden + decayed + rest]
    return _share_out(spec.name, tuple(tuple(sorted(group, reverse=True)) for group in groups), ranks)


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


def check_modules(spec: OptimSpec, modules: Sequence[str]) -> set[str]:
    """Return those of ``modules`` (the modules with parameters) that are trained at some time.

    Raises:
        ConfigError: a pattern matches no module, or nothing is left to train.
    """
    unfrozen = [p for u in spec.unfreeze for p in u.modules]
    _check_patterns("optim.freeze", spec.freeze, modules)
    _check_patterns("optim.lr_scale", list(spec.lr_scale), modules)
    _check_patterns("optim.unfreeze.modules", unfrozen, modules)
    trained_modules = {
        m for m in modules if not any(matches(p, m) for p in spec.freeze) or any(matches(p, m) for p in unfrozen)
    }
    if not trained_modules:
        raise ConfigError("optim.freeze: nothing is left to train", fix="remove a module from it")
    return trained_modules


def _check_patterns(key: str, patterns: Sequence[str], modules: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(matches(pattern, module) for module in modules):
            raise ConfigError(
                f"{key}: no module with parameters matches {pattern!r}", fix=suggest_modules(pattern, modules)
            )


def _iter_shapes(model: DecoderShape, layers: int | None = None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (module, shape) of each parameter of the decoder, or of one with another number of ``layers``."""
    dim, hidden, kv = model.dim, model.hidden, model.kv_heads * (model.dim // model.heads)
    yield "embed", (model.vocab_size, dim)
    feed_forward = {"gate": (hidden, dim)} if model.gated else {}
    matrices = {
        **{f"attention.{n}": shape for n, shape in {"q": (dim, dim), "k": (kv, dim), "v": (kv, dim)}.items()},
        "attention.out": (dim, dim),
        **{f"ffn.{n}": shape for n, shape in {**feed_forward, "up": (hidden, dim), "down": (dim, hidden)}.items()},
    }
    for i in range(model.layers if layers is None else layers):
        yield from ((f"layers.{i}.{name}", shape) for name, shape in matrices.items())
        yield from ((f"layers.{i}.{name}", (dim,)) for name in ("attention_norm", "ffn_norm"))
    yield "norm", (dim,)
    if not model.tie_embeddings:
        yield "head", (model.vocab_size, dim)


def list_modules(model: ModelSpec) -> list[str]:
    """Return the names of the modules with parameters of a convnet or a two-tower model."""
    if model.kind == "convnet":
        names = ["stem", "stem_norm", "head"]
        for i, (in_width, width, stride) in enumerate(model.convnet.block_shapes()):
            names += [f"blocks.{i}.{name}" for name in ("conv1", "norm1", "conv2", "last_norm")]
            if stride > 1 or in_width != width:
                names += [f"blocks.{i}.{name}" for name in ("project", "project_norm")]
        return names
    tower = [*(module for module, _ in _iter_shapes(model) if module != "head"), "project"]
    temperature = [""] if model.two_tower.learn_temperature else []  # a parameter of the model itself
    return [f"{prefix}.{module}" for prefix in ("first", "second") for module in tower] + temperature


def check_optimizer(spec: OptimSpec, layout: Layout, model_kind: str, device: str) -> list[str]:
    """Return notes on settings that work poorly.

    Args:
        model_kind: as ``model.kind``; empty if unknown.

    Raises:
        ConfigError: the optimizer does not support the layout or the model.
    """
    name = spec.name
    if OPTIMIZERS[name].matrices_only and model_kind == "convnet":
        raise ConfigError(
            f"optim.name = {name!r} is for the matrices of hidden layers, which a convnet lacks: its filters have "
            "four dimensions",
            fix="use optim.name = 'sgd' with momentum, 'lars' or 'adamw'",
        )
    if layout.offload and OPTIMIZERS[name].needs_unsharded:
        raise ConfigError(
            f"optim.name = {name!r} with parallel.offload: its update needs whole parameters, which "
            "would be gathered in host memory and updated by the CPUs",
            fix="use optim.name = 'adamw', 'adam', 'sgd' or 'lion', or parallel.offload = false",
        )
    notes = []
    if name == "adamw8bit" and device == "cpu":
        notes.append("optim.name = 'adamw8bit' on the CPU: it runs without torch.compile, slower than adamw")
    elif name == "adamw8bit":
        notes.append(
            "optim.name = 'adamw8bit' compiles its update for each parameter shape: the first step takes up to a "
            "minute longer"
        )
    if OPTIMIZERS[name].has_coupled_decay and spec.weight_decay > MAX_COUPLED_DECAY:
        notes.append(
            f"optim.weight_decay = {spec.weight_decay:g} with optim.name = {name!r}: it is added to the gradient (L2), "
            "while adamw subtracts it from the weights (arXiv 1711.05101): far less is usual here, such as 1e-4"
        )
    if name == "shampoo":
        notes.append(
            "optim.name = 'shampoo' decomposes both sides of every hidden matrix in every step: minutes if they are "
            "thousands wide; soap does so every tenth step"
        )
    return notes


def describe_optimizer(spec: OptimSpec, layout: Layout, state: OptimizerStateSize | None, *, text: bool) -> str:
    """Return a one-line description.

    Args:
        state: size of the state; None if unknown.
        text: the model reads tokens.
    """
    parts = [f"{spec.name}{_describe_constants(spec, text=text)}"]
    if state is not None:
        parts.append(f"{state.bytes_per_param:.3g} bytes of state per parameter")
    if state is not None and state.trained_fraction < 1:
        parts.append(f"{state.trained_fraction:.0%} of the parameters are trained")
    if OPTIMIZERS[spec.name].matrices_only:
        parts.append("for the hidden matrices, adamw for the rest")
    if OPTIMIZERS[spec.name].needs_unsharded and needs_gather(spec, layout):
        parts.append(
            "each parameter is updated whole by the rank that holds its state, with two exchanges per step "
            "that the predicted time excludes"
        )
    parts.append(f"weight decay {spec.weight_decay:g} except for norms, biases and embeddings")
    if spec.layer_decay != 1:
        parts.append(f"lr x {spec.layer_decay:g} for each layer below the head")
    parts += [f"lr x {factor:g} in {pattern}" for pattern, factor in spec.lr_scale.items()]
    parts += [f"frozen: {', '.join(spec.freeze)}"] if spec.freeze else []
    parts += [f"frozen until step {u.step}: {', '.join(u.modules)}" for u in spec.unfreeze]
    return "; ".join(parts)


def _describe_constants(spec: OptimSpec, *, text: bool) -> str:
    momentum = f": momentum {spec.effective_momentum:g}" + ", nesterov" * (spec.nesterov and spec.name == "sgd")
    betas = "betas {:g} and {:g}".format(*spec.resolve_betas(is_text=text))
    descriptions = {"sgd": momentum, "lars": momentum, "muon": f"{momentum}, {betas}", "adafactor": ""}
    return descriptions.get(spec.name, f": {betas}")


def needs_gather(spec: OptimSpec, layout: Layout) -> bool:
    """Return whether sharded parameters are gathered for the update."""
    return OPTIMIZERS[spec.name].needs_unsharded and (
        layout.tp > 1 or (layout.is_sharded and layout.dp_shard * layout.cp > 1)
    )
