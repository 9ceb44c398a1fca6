"""Facts about each parameter, collected before the layout splits the model: weight decay, depth and modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from clustertrain.checkpoint.core.state_dict import clean_fqn, unwrap
from clustertrain.config.checks.module_patterns import matches, suggest_modules
from clustertrain.errors import ConfigError
from clustertrain.train.distributed import data_parallel, pipeline_stages

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# By type rather than name, so that any name of a norm layer works.
_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
)


@dataclass(frozen=True)
class ParamInfo:
    """Facts about a parameter."""

    modules: tuple[str, ...]
    """Names of the modules that hold it directly; several if it is shared."""
    decays: bool
    """Whether weight decay applies."""
    hidden: bool
    """Whether it is a matrix of a layer, neither embedding nor head."""
    depth: int | None
    """Number of layers above it, 0 for the head; None if unknown."""


@dataclass(frozen=True)
class ParamTable:
    """Facts about all parameters of a model."""

    by_name: Mapping[str, ParamInfo]
    """Facts by parameter name of the whole model; a shared parameter appears under each name."""
    no_depth_reason: str = ""
    """Why depths are unknown; empty if they are known."""

    def match_names(self, pattern: str, key: str) -> list[str]:
        """Return the names of parameters in modules that match ``pattern``, including their submodules.

        Raises:
            ConfigError: there are none. The message names ``key``, the recipe key of the pattern.
        """
        names = [name for name, info in self.by_name.items() if any(matches(pattern, m) for m in info.modules)]
        if not names:
            modules = {m for info in self.by_name.values() for m in info.modules}
            raise ConfigError(
                f"{key}: no module with parameters matches {pattern!r}", fix=suggest_modules(pattern, modules)
            )
        return names

    def check_layer_decay(self, layer_decay: float) -> None:
        """Raise ConfigError if ``layer_decay`` is not 1 and depths are unknown."""
        if layer_decay != 1.0 and self.no_depth_reason:
            raise ConfigError(
                f"optim.layer_decay = {layer_decay:g}: {self.no_depth_reason}",
                fix="declare pipeline_units, the names of its parts in execution order, or use optim.lr_scale",
            )


def build_param_table(model: nn.Module) -> ParamTable:
    """Collect the facts of the whole ``model``, before it is parallelized."""
    model = unwrap(model)
    holders: dict[int, list[tuple[str, str, nn.Module]]] = {}
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(p), []).append((clean_fqn(path), name, module))
            names.setdefault(id(p), []).append(clean_fqn(f"{path}.{name}" if path else name))
            params[id(p)] = p
    hidden = _hidden_matrix_ids(model)
    depths, reason = _layer_depths(model)
    by_name: dict[str, ParamInfo] = {}
    for key, p in params.items():
        depth = max((depths[n] for n in names[key]), default=0) if depths is not None else None
        decays = p.numel() > 1 and not any(_is_decay_exempt(name, module) for _, name, module in holders[key])
        info = ParamInfo(tuple(path for path, _, _ in holders[key]), decays, key in hidden, depth)
        by_name.update(dict.fromkeys(names[key], info))
    return ParamTable(by_name, reason)


def _is_decay_exempt(name: str, module: nn.Module) -> bool:
    """Return whether the parameter belongs to a norm or embedding or is a bias.

    A norm that is not one of torch's classes is recognized by its class name.
    """
    # torch's recurrent layers have bias_ih_l0, its attention bias_k and in_proj_bias.
    if isinstance(module, (*_EMBEDDINGS, *_NORMS)) or "bias" in name.split("_"):
        return True
    all_vectors = all(p.dim() <= 1 for p in module.parameters(recurse=False))
    return all_vectors and type(module).__name__.lower().endswith("norm")


def _hidden_matrix_ids(model: nn.Module) -> set[int]:
    """Return the id() of each matrix in the repeated layers; without such layers, of all matrices but the last, the
    head."""
    layers = [m for _, m in data_parallel.repeated_layers(model)]
    embedding_ids = {id(p) for m in model.modules() if isinstance(m, _EMBEDDINGS) for p in m.parameters(recurse=False)}
    candidates = [p for layer in layers for p in layer.parameters()] if layers else list(model.parameters())
    matrices = [id(p) for p in candidates if p.dim() == 2 and p.numel() > 1 and id(p) not in embedding_ids]
    return set(matrices if layers else matrices[:-1])


# -- depth


def _layer_depths(model: nn.Module) -> tuple[dict[str, int] | None, str]:
    """Return the number of layers above each parameter by name, or None and the reason why it is unknown."""
    cleaned = [(clean_fqn(n), n) for n, _ in model.named_parameters(remove_duplicate=False)]
    order = [n for n, _ in cleaned]
    if isinstance(model, nn.Sequential) or hasattr(model, "pipeline_units"):
        try:
            units = pipeline_stages.list_units(model)
        except ConfigError as e:
            return None, e.message
        names_by_unit = [[n for n in order if any(n.startswith(f"{m}.") for m in unit)] for unit in units]
        names_by_unit = [names for names in names_by_unit if names]
        depths: dict[str, int] = {}
        for depth, names in enumerate(reversed(names_by_unit)):
            depths.update(dict.fromkeys(names, depth))  # a parameter in several units gets the greatest depth
        return depths, ""
    towers = _find_towers(model)
    if not towers:
        return None, f"{type(model).__name__} has no list of layers (nn.ModuleList) and declares no pipeline_units"
    embedding_names = {
        clean_fqn(f"{path}.{name}" if path else name)
        for path, m in model.named_modules(remove_duplicate=False)
        if isinstance(m, _EMBEDDINGS)
        for name, _ in m.named_parameters(recurse=False)
    }
    return {n: _depth_in_tower(_find_tower(n, towers), n, order, n in embedding_names) for n in order}, ""


def _find_towers(model: nn.Module) -> list[tuple[str, list[str]]]:
    """Return stacks of layers as (common name prefix, names of the layers).

    Lists of layers form one stack in order of registration, unless they are in separate modules of one class, such as
    two towers.
    """
    lists: dict[str, list[str]] = {}
    for name, layer in data_parallel.repeated_layers(model):
        if any(True for _ in layer.parameters()):
            lists.setdefault(name.rpartition(".")[0], []).append(name)
    parents = [path.rpartition(".")[0] for path in lists]
    parent_types = {type(model.get_submodule(parent)) for parent in parents}
    if len(lists) > 1 and len(parent_types) == 1 and len(set(parents)) == len(parents):
        return [
            (f"{clean_fqn(parent)}.", list(map(clean_fqn, lists[path])))
            for parent, path in zip(parents, lists, strict=True)
        ]
    return [("", [clean_fqn(name) for layers in lists.values() for name in layers])] if lists else []


def _find_tower(name: str, towers: Sequence[tuple[str, list[str]]]) -> list[str]:
    tower = next((layers for prefix, layers in towers if name.startswith(prefix)), None)
    return tower if tower is not None else max((layers for _, layers in towers), key=len)


def _depth_in_tower(layers: list[str], name: str, order: list[str], is_embedding: bool) -> int:
    """Return 1 for the top layer, 0 after it (the head), and one more than the next layer for a parameter before a
    layer."""
    for depth, layer in enumerate(reversed(layers), start=1):
        if name.startswith(f"{layer}."):
            return depth
    if is_embedding:
        return len(layers) + 1
    remaining = order[order.index(name) :]
    following = [
        d for d, layer in enumerate(reversed(layers), start=1) if any(n.startswith(f"{layer}.") for n in remaining)
    ]
    return max(following) + 1 if following else 0


# -- frozen


def freeze(
    model: nn.Module, param_table: ParamTable, patterns: Sequence[str], unfreeze_steps: Mapping[str, int]
) -> None:
    """Freeze the parameters that match ``patterns``, except those that unfreeze later.

    Call it before parallelizing: the layout then reduces no gradients and keeps no optimizer state for frozen
    parameters.

    Args:
        unfreeze_steps: result of :func:`find_unfreeze_steps`.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    by_name = dict(unwrap(model).named_parameters(remove_duplicate=False))
    by_name = {clean_fqn(n): p for n, p in by_name.items()}
    for pattern in patterns:
        for name in param_table.match_names(pattern, "optim.freeze"):
            if name not in unfreeze_steps:
                by_name[name].requires_grad_(False)
    if patterns and not any(p.requires_grad for p in by_name.values()):
        raise ConfigError("optim.freeze: nothing is left to train", fix="remove a module from it")


def find_unfreeze_steps(param_table: ParamTable, schedule: Iterable[tuple[int, Sequence[str]]]) -> dict[str, int]:
    """Return the first optimizer step, counted from 1, that trains each parameter, by name; the earliest entry applies.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    first_steps: dict[str, int] = {}
    for step, patterns in schedule:
        for pattern in patterns:
            for name in param_table.match_names(pattern, "optim.unfreeze.modules"):
                first_steps[name] = min(step, first_steps.get(name, step))
    return first_steps
