"""Tensor parallelism: layers split over ranks according to a plan that maps module name patterns to styles.

Layers are split as in Shoeybi et al., arXiv 1909.08053, and the residual stream between them along the sequence as in
Korthikanti et al., arXiv 2205.05198. Between modules all tensors are plain and local: each rank holds the full residual
stream, or with sequence parallelism its part of (batch, length, ...). Every parameter becomes a DTensor, so that the
optimizer, gradient norm and checkpoint treat all alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from clustertrain.errors import ConfigError, UnsuitableEnvironment
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed import adapted_linear, divisibility, dropout, low_bit, tied_weights

STYLES: Mapping[str, str] = {
    "colwise": "a Linear split by outputs; takes the residual stream, returns this rank's features",
    "rowwise": "a Linear split by inputs; takes this rank's features, returns the residual stream",
    "embedding": "an Embedding split by rows; takes all indices, returns the residual stream",
    "gather": "takes the residual stream, gathered once for all colwise layers inside",
    "sequence": "works on the residual stream without gathering (norms)",
    "heads": "works on this rank's heads, (batch, length, heads, head_dim), each alike (norms of queries and keys)",
    "replicated": "works on full tensors, the same on each rank",
    "head": "a Linear, or a module that takes the weight, split by outputs; returns logits, split for loss_parallel",
}
_RECURSIVE_STYLES = ("sequence", "heads", "replicated")


def match_plan(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str, nn.Module, str]]:
    """Yield (pattern, name, module, style) in the order of ``plan``; ``*`` matches one part of a dotted name."""
    for pattern, style in plan.items():
        pattern_parts = pattern.split(".")
        for name, module in model.named_modules():
            name_parts = name.split(".")
            if len(name_parts) == len(pattern_parts) and all(map(fnmatchcase, name_parts, pattern_parts)):
                yield pattern, name, module, style


def check(model: nn.Module, context: RankContext) -> None:
    """Raise as :func:`check_plan` does, and UnsuitableEnvironment for async_tp without GPUs."""
    if context.parallel.async_tp and context.device.type == "cpu":
        raise UnsuitableEnvironment(
            "parallel.async_tp overlaps collectives with matmuls through GPU memory, and the device is cpu",
            fix="remove it",
        )
    check_plan(model, context.layout.tp)


def check_plan(model: nn.Module, tp: int) -> None:
    """Raise if ``model``, the whole model, cannot be split over ``tp`` ranks according to its ``tp_plan``.

    Its optional ``tp_divides`` lists sizes that must divide over the ranks but are not visible in its layers, such as
    heads.

    Raises:
        ConfigError: there is no plan, a style is unknown, a pattern matches no module, two patterns match one module, a
            parameter has no pattern, a size does not divide, or dropout would differ between ranks.
    """
    plan: Mapping[str, str] | None = getattr(model, "tp_plan", None)
    if not plan:
        raise ConfigError(
            f"tp {tp}: {type(model).__name__} has no tp_plan",
            fix='pass one to session.parallelize(model, tp_plan={"layers.*.up": "colwise", ...}), or use tp = 1',
        )
    for pattern, style in plan.items():
        if style not in STYLES:
            raise ConfigError(f"tp_plan: {pattern!r}: {style!r} is not one of {', '.join(STYLES)}")
    matched = list(match_plan(model, plan))
    for pattern in plan:
        if not any(p == pattern for p, *_ in matched):
            raise ConfigError(
                f"tp_plan: {pattern!r} matches no module of {type(model).__name__}",
                fix="use names from model.named_modules(); * matches one part of a name",
            )
    _check_no_overlap(matched)
    for size_name, size in getattr(model, "tp_divides", {}).items():
        divisibility.check(size_name, size, "tp", tp)
    for _, name, module, style in matched:
        _check_layer(name, module, style, tp)
    _check_covered(model, matched)
    for name, module in adapted_linear.iter_adapted(model):
        if module.low_rank.dropout:
            raise ConfigError(
                f"{name}: the dropout of its adapter would differ between the {tp} ranks that share the layer",
                fix="set the dropout of the adapters to 0, or use tp = 1",
            )
    dropout.check_no_attention_dropout(model, f"tp {tp}")
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ConfigError(
                f"{name}: {type(module).__name__} would drop different values on the {tp} ranks that share them",
                fix="use clustertrain.train.distributed.dropout.Dropout",
            )


def _check_no_overlap(matched: list[tuple[str, str, nn.Module, str]]) -> None:
    """Raise ConfigError if two patterns split one module.

    ``gather`` only gathers the input for the split layers inside, so it can be combined with another style.
    """
    first_patterns: dict[tuple[str, bool], str] = {}
    for pattern, name, _, style in matched:
        other = first_patterns.setdefault((name, style == "gather"), pattern)
        if other != pattern:
            raise ConfigError(
                f"tp_plan: {other!r} and {pattern!r} both match {name}, which can be split only once",
                fix="narrow or remove one of them",
            )


def _check_layer(name: str, module: nn.Module, style: str, tp: int) -> None:
    expected_type = nn.Embedding if style == "embedding" else nn.Linear
    if style in ("colwise", "rowwise", "embedding") and not isinstance(module, expected_type):
        raise ConfigError(f"tp_plan: {name} is a {type(module).__name__}; {style!r} is for {expected_type.__name__}")
    if isinstance(module, nn.Linear) and style in ("colwise", "head"):
        divisibility.check(f"{name}.out_features", module.out_features, "tp", tp)
    elif isinstance(module, nn.Linear) and style == "rowwise":
        divisibility.check(f"{name}.in_features", module.in_features, "tp", tp)
        low_bit.check_split_by_inputs(name, module, tp)
    elif isinstance(module, nn.Embedding) and style == "embedding":
        divisibility.check(f"{name}.num_embeddings", module.num_embeddings, "tp", tp)


def _check_covered(model: nn.Module, matched: list[tuple[str, str, nn.Module, str]]) -> None:
    covered: set[int] = set()
    for _, _, module, style in matched:
        if style != "gather":
            covered |= {id(m) for m in (module.modules() if style in _RECURSIVE_STYLES else [module])}
    for location in tied_weights.iter_param_locations(model):
        if id(location.module) not in covered:
            raise ConfigError(
                f"tp_plan: no pattern covers parameter {location.name}, whose gradient could then cover only one rank's"
                " part",
                fix='add its module: "sequence" if it works on the residual stream, "replicated" for full tensors',
            )


def apply(model_part: nn.Module, context: RankContext, mesh: DeviceMesh) -> None:
    """Split ``model_part``, a model that passed :func:`check` or a stage of it, over ``mesh`` in place.

    Raises:
        ConfigError: two modules share a parameter that the plan splits differently.
    """
    if context.parallel.async_tp:
        import torch._inductor.config as inductor

        inductor._micro_pipeline_tp = True
    builders = _style_builders(context)
    with tied_weights.preserve_ties(model_part):
        for _, _, module, style in match_plan(model_part, model_part.tp_plan):  # type: ignore[arg-type]
            for parallel_style in builders[style](module):
                # All ranks have the same values or none yet, so each takes its shard without communication.
                parallelize_module(module, mesh, parallel_style, src_data_rank=None)


def loss_context(context: RankContext) -> AbstractContextManager[object]:
    """Return a context for forward, loss and backward in which cross-entropy accepts logits split over the
    vocabulary."""
    if context.layout.tp > 1 and context.parallel.loss_parallel:
        return loss_parallel()
    return nullcontext()


def _style_builders(context: RankContext) -> dict[str, Callable[[nn.Module], list[ParallelStyle]]]:
    """Return, for each style of a plan, a function that builds torch's parallel styles for a module."""
    stream: Placement = Shard(1) if context.layout.sequence_parallel else Replicate()
    split = context.parallel.loss_parallel
    logits: Placement = Shard(-1) if split else Replicate()

    def head(module: nn.Module) -> list[ParallelStyle]:
        if isinstance(module, nn.Linear):
            return [_Colwise(input_layouts=stream, output_layouts=logits, use_local_output=not split)]
        output_style = PrepareModuleOutput(
            output_layouts=Shard(-1), desired_output_layouts=logits, use_local_output=not split
        )
        return [_GatherInput(stream), output_style]

    return {
        "colwise": lambda _: [_Colwise(input_layouts=stream)],
        "rowwise": lambda _: [_Rowwise(output_layouts=stream)],
        "embedding": lambda _: [_Rowwise(input_layouts=Replicate(), output_layouts=stream)],
        "gather": lambda _: [_GatherInput(stream)],
        "sequence": lambda _: [_ReplicateParameters(stream)],
        "heads": lambda _: [_ReplicateParameters(Shard(2))],
        "replicated": lambda _: [_ReplicateParameters(Replicate())],
        "head": head,
    }


class _Colwise(ColwiseParallel):
    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        # torch's own splits all parameters by rows, also A of an adapter.
        _split_parameters(module, device_mesh, {"lora_A": Replicate()}, default=Shard(0))


class _Rowwise(RowwiseParallel):
    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        # torch's own knows only weight and bias.
        by_columns = {"weight": Shard(1), "lora_A": Shard(1)}
        _split_parameters(module, device_mesh, by_columns, default=Replicate())

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        if output_layouts == (Shard(1),):
            divisibility.check("the sequence length (of one rank's part)", outputs.shape[1], "tp", device_mesh.size())
        return RowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)  # type: ignore[no-untyped-call]


def _split_parameters(
    module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement], default: Placement
) -> None:
    """Replace each parameter of ``module`` itself by a DTensor; all ranks have the same values or none yet."""
    for name, p in module.named_parameters(recurse=False):
        split = distribute_tensor(p, mesh, [placements.get(name, default)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split, requires_grad=p.requires_grad))


class _GatherInput(ParallelStyle):
    """Gathering of a module's first argument. torch's PrepareModuleInput needs a layout for every argument."""

    def __init__(self, stream: Placement) -> None:
        self._stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather_input(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            split = DTensor.from_local(inputs[0], device_mesh, [self._stream], run_check=False)
            return (split.redistribute(placements=[Replicate()], async_op=True), *inputs[1:])

        module.register_forward_pre_hook(gather_input)
        return module


class _ReplicateParameters(ParallelStyle):
    """Full parameters, with inputs and outputs placed as ``stream``; like SequenceParallel, but for modules with
    children."""

    def __init__(self, stream: Placement) -> None:
        self._stream = (stream,)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            None,
            functools.partial(SequenceParallel._prepare_input_fn, self._stream),
            functools.partial(SequenceParallel._prepare_output_fn, True),
        )
