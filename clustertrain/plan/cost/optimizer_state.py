"""Bytes of optimizer state, from the shapes of the parameters; what an optimizer asks of layout and model.

They are what the classes of torch, pytorch-optimizer and torchao keep, and a test compares them with those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clustertrain.config.checks.module_patterns import matches, suggest_modules
from clustertrain.config.model import ModelSpec
from clustertrain.config.optim import OptimizerName, OptimSpec
from clustertrain.errors import ConfigError
from clustertrain.plan.cost.model_shape import DecoderShape
from clustertrain.plan.layout import Layout

WHOLE_PARAM_OPTIMIZERS: frozenset[OptimizerName] = frozenset(
    {"adafactor", "lamb", "lars", "muon", "soap", "shampoo", "adamw8bit"}
)  # their update needs whole parameters
COUPLED_DECAY_OPTIMIZERS: frozenset[OptimizerName] = frozenset(
    {"adam", "sgd", "lars", "shampoo"}
)  # the decay goes into the gradient
MAX_COUPLED_DECAY = 0.01
MATRIX_OPTIMIZERS: frozenset[OptimizerName] = frozenset({"muon", "shampoo"})  # the rest of the model has AdamW
SHAPE_DEPENDENT_STATE: frozenset[OptimizerName] = frozenset({"adafactor", "muon", "soap", "shampoo", "adamw8bit"})
MAX_PRECONDITIONED_DIM = 10_000  # SOAP: a longer dimension is left alone
_QUANT_BLOCK, _MIN_QUANTIZED = 256, 4096  # of 8-bit moments: elements a block, and fewer elements stay fp32
# Where whole parameters are gathered: value and gradient of what a rank owns, and both on their way.
GATHER_BYTES = 16


def state_bytes(spec: OptimSpec, shape: Sequence[int], *, is_hidden_matrix: bool) -> int:
    """Of one trained parameter; ``is_hidden_matrix``: it is a matrix of a layer. Counters of a few bytes are left
    out."""
    size, name = math.prod(shape), spec.name
    if name in MATRIX_OPTIMIZERS and not is_hidden_matrix:
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
            return 2 * sum(4 * n * n for n in shape) + 4 * size  # and its last step, which it has no use for
        case "adamw8bit" if size >= _MIN_QUANTIZED and size % _QUANT_BLOCK == 0:
            return 2 * (size + 4 * size // _QUANT_BLOCK)
        case _:
            return 8 * size


@dataclass(frozen=True)
class OptimizerStateSize:
    """Of a whole model: bytes of state and how many parameters are trained, a parameter; ``largest_bytes``: bytes of
    the parameter that has most, which one rank keeps however many there are."""

    bytes_per_param: float
    trained_fraction: float
    largest_bytes: int


def estimate_state(spec: OptimSpec, model: DecoderShape) -> OptimizerStateSize:
    """Raises ConfigError: a pattern that fits nothing, or nothing is left to train."""
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


def check_modules(spec: OptimSpec, modules: Sequence[str]) -> set[str]:
    """Those of ``list_modules``, which have parameters, that are trained at some time.

    Raises:
        ConfigError: a pattern that fits none of them, or nothing is left to train.
    """
    unfrozen = [p for u in spec.unfreeze for p in u.modules]
    _check_patterns("optim.freeze", spec.freeze, modules)
    _check_patterns("optim.lr_scale", list(spec.lr_scale), modules)
    _check_patterns("optim.unfreeze.modules", unfrozen, modules)
    trained_modules = {
        m for m in modules if not any(matches(p, m) for p in spec.freeze) or any(matches(p, m) for p in unfrozen)
    }
    if not trained_modules:
        raise ConfigError("optim.freeze: nothing is left to train", fix="leave a module out of it")
    return trained_modules


def _check_patterns(key: str, patterns: Sequence[str], modules: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(matches(pattern, module) for module in modules):
            raise ConfigError(
                f"{key}: no module with parameters fits {pattern!r}", fix=suggest_modules(pattern, modules)
            )


def _iter_shapes(model: DecoderShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The shapes of the decoder's parameters, with the module that each is in."""
    dim, hidden, kv = model.dim, model.hidden, model.kv_heads * (model.dim // model.heads)
    yield "embed", (model.vocab_size, dim)
    feed_forward = {"gate": (hidden, dim)} if model.gated else {}
    matrices = {
        **{f"attention.{n}": shape for n, shape in {"q": (dim, dim), "k": (kv, dim), "v": (kv, dim)}.items()},
        "attention.out": (dim, dim),
        **{f"ffn.{n}": shape for n, shape in {**feed_forward, "up": (hidden, dim), "down": (dim, hidden)}.items()},
    }
    for i in range(model.layers):
        yield from ((f"layers.{i}.{name}", shape) for name, shape in matrices.items())
        yield from ((f"layers.{i}.{name}", (dim,)) for name in ("attention_norm", "ffn_norm"))
    yield "norm", (dim,)
    if not model.tie_embeddings:
        yield "head", (model.vocab_size, dim)


def list_modules(model: ModelSpec) -> list[str]:
    """Names of the modules of a built-in model that is not the decoder that have parameters of their own."""
    if model.kind == "convnet":
        names = ["stem", "stem_norm", "head"]
        for i, (in_width, width, stride) in enumerate(model.convnet.block_shapes()):
            names += [f"blocks.{i}.{name}" for name in ("conv1", "norm1", "conv2", "last_norm")]
            if stride > 1 or in_width != width:
                names += [f"blocks.{i}.{name}" for name in ("project", "project_norm")]
        return names
    tower = [*(module for module, _ in _iter_shapes(model) if module != "head"), "project"]
    temperature = [""] if model.two_tower.learn_temperature else []  # the temperature is the model's own
    return [f"{prefix}.{module}" for prefix in ("first", "second") for module in tower] + temperature


def check_optimizer(spec: OptimSpec, layout: Layout, model_kind: str, device: str) -> list[str]:
    """Notes on what runs, but not well.

    Args:
        kind: of the model, as ``model.model_kind``; empty where it is not known.

    Raises:
        ConfigError: the optimizer cannot work with the layout or the model.
    """
    name = spec.name
    if name in MATRIX_OPTIMIZERS and model_kind == "convnet":
        raise ConfigError(
            f"optim.name = {name!r} is for the matrices of hidden layers, and a convnet has none: its filters have "
            "four dimensions",
            fix="use optim.name = 'sgd' with momentum, 'lars' or 'adamw'",
        )
    if layout.offload and name in WHOLE_PARAM_OPTIMIZERS:
        raise ConfigError(
            f"optim.name = {name!r} with parallel.offload: its update needs whole parameters, and in host memory they "
            "would be gathered and updated by the processors",
            fix="use optim.name = 'adamw', 'adam', 'sgd' or 'lion', or parallel.offload = false",
        )
    notes = []
    if name == "adamw8bit" and device == "cpu":
        notes.append("optim.name = 'adamw8bit' on the CPU: it runs without torch.compile there, slower than adamw")
    elif name == "adamw8bit":
        notes.append(
            "optim.name = 'adamw8bit' compiles its update for each shape of a parameter: the first step takes up to a "
            "minute longer"
        )
    if name in COUPLED_DECAY_OPTIMIZERS and spec.weight_decay > MAX_COUPLED_DECAY:
        notes.append(
            f"optim.weight_decay = {spec.weight_decay:g} with optim.name = {name!r}: it is added to the gradient (L2), "
            "where adamw takes it off the weights (arXiv 1711.05101): far less is usual with this one, such as 1e-4"
        )
    if name == "shampoo":
        notes.append(
            "optim.name = 'shampoo' decomposes both sides of every hidden matrix in every step: minutes where they are "
            "thousands wide; soap does so every tenth step"
        )
    return notes


def describe_optimizer(spec: OptimSpec, layout: Layout, state: OptimizerStateSize | None, *, text: bool) -> str:
    """``state``: where it is known. ``text``: the model reads tokens."""
    parts = [f"{spec.name}{_describe_constants(spec, text=text)}"]
    if state is not None:
        parts.append(f"{state.bytes_per_param:.3g} bytes of state a parameter")
    if state is not None and state.trained_fraction < 1:
        parts.append(f"{state.trained_fraction:.0%} of the parameters are trained")
    if spec.name in MATRIX_OPTIMIZERS:
        parts.append("for the hidden matrices, adamw for the rest")
    if spec.name in WHOLE_PARAM_OPTIMIZERS and needs_gather(spec, layout):
        parts.append(
            "each parameter is updated whole by the one rank that has its state, in two exchanges a step, "
            "which the predicted time leaves out"
        )
    parts.append(f"weight decay {spec.weight_decay:g} but for norms, biases and embeddings")
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
    """Whether parameters that lie in shards are gathered for the update."""
    return spec.name in WHOLE_PARAM_OPTIMIZERS and (
        layout.tp > 1 or (layout.is_sharded and layout.dp_shard * layout.cp > 1)
    )
