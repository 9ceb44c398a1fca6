"""What is to be known of each parameter before a layout takes the model apart: whether it decays, how deep it lies,
which modules it is in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from clustertrain.checkpoint.core.state_dict import clean_fqn, unwrap
from clustertrain.config.checks.module_patterns import matches, suggest_modules
from clustertrain.errors import ConfigError
from clustertrain.train.distributed import data_parallel, pipeline_stages

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# By module type and not by name: a norm is a norm whatever it is called.
_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
)


@dataclass(frozen=True)
class ParamInfo:
    """``modules``: the names of those that hold it themselves, several where it is shared. ``hidden``: a matrix of a
    layer, neither table nor head. ``depth``: how many layers lie above, 0 for the head; None where that is not known.
    """

    modules: tuple[str, ...]
    decays: bool
    hidden: bool
    depth: int | None


@dataclass(frozen=True)
class ParamTable:
    """``by_name`` has every name of every parameter of the whole model; ``no_depth_reason`` says why no depth is
    known."""

    by_name: Mapping[str, ParamInfo]
    no_depth_reason: str = ""

    def match_names(self, pattern: str, key: str) -> list[str]:
        """Names of the parameters in the modules whose names fit ``pattern``, and in all that these contain.

        Raises:
            ConfigError: there is none; ``key`` is what the pattern stands in.
        """
        names = [n for n, d in self.by_name.items() if any(matches(pattern, m) for m in d.modules)]
        if not names:
            modules = {m for d in self.by_name.values() for m in d.modules}
            raise ConfigError(
                f"{key}: no module with parameters matches {pattern!r}", fix=suggest_modules(pattern, modules)
            )
        return names

    def check_layer_decay(self, layer_decay: float) -> None:
        """Raises ConfigError where rates are to go by a depth that is not known."""
        if layer_decay != 1.0 and self.no_depth_reason:
            raise ConfigError(
                f"optim.layer_decay = {layer_decay:g}: {self.no_depth_reason}",
                fix="declare pipeline_units, the names of its parts in the order of execution, or use optim.lr_scale",
            )


def build_param_table(model: nn.Module) -> ParamTable:
    """Of the whole ``model``, before it is parallelised."""
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
    """Norms, biases, embeddings. A norm that is no class of torch's is told by its class's name."""
    # torch's recurrent layers have bias_ih_l0, its attention bias_k and in_proj_bias.
    if isinstance(module, (*_EMBEDDINGS, *_NORMS)) or "bias" in name.split("_"):
        return True
    all_vectors = all(p.dim() <= 1 for p in module.parameters(recurse=False))
    return all_vectors and type(module).__name__.lower().endswith("norm")


def _hidden_matrix_ids(model: nn.Module) -> set[int]:
    """id() of the matrices in the repeated layers; without such layers of all matrices but the last one, the head."""
    layers = [m for _, m in data_parallel.repeated_layers(model)]
    embedding_ids = {id(p) for m in model.modules() if isinstance(m, _EMBEDDINGS) for p in m.parameters(recurse=False)}
    candidates = [p for layer in layers for p in layer.parameters()] if layers else list(model.parameters())
    matrices = [id(p) for p in candidates if p.dim() == 2 and p.numel() > 1 and id(p) not in embedding_ids]
    return set(matrices if layers else matrices[:-1])


# -- depth


def _layer_depths(model: nn.Module) -> tuple[dict[str, int] | None, str]:
    """By parameter name how many layers lie above it, or why that is not known."""
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
            depths.update(dict.fromkeys(names, depth))  # what is in several units counts for the deepest
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
    """Where layers lie one above the other: (what all names in it begin with, names of the layers). Lists of layers
    follow each other in the order of registration, but stand side by side in modules of one class, as two towers."""
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
    """The top layer has 1; what comes after it, the head, 0; what comes before a layer one more than that layer."""
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
    """Take what ``patterns`` name out of training, but for what is thawed later. Before the layout, which reduces no
    gradients and keeps no optimizer state of what is frozen.

    Args:
        later: names of parameters that :func:`find_unfreeze_steps` found.

    Raises:
        ConfigError: a pattern that fits nothing, or nothing is left to train.
    """
    by_name = dict(unwrap(model).named_parameters(remove_duplicate=False))
    by_name = {clean_fqn(n): p for n, p in by_name.items()}
    for pattern in patterns:
        for name in param_table.match_names(pattern, "optim.freeze"):
            if name not in unfreeze_steps:
                by_name[name].requires_grad_(False)
    if patterns and not any(p.requires_grad for p in by_name.values()):
        raise ConfigError("optim.freeze: nothing is left to train", fix="leave a module out of it")


def find_unfreeze_steps(param_table: ParamTable, schedule: Iterable[tuple[int, Sequence[str]]]) -> dict[str, int]:
    """By parameter name the first optimizer step, counted from 1, that trains it; of several the earliest.

    Raises:
        ConfigError: a pattern that fits nothing.
    """
    first_steps: dict[str, int] = {}
    for step, patterns in schedule:
        for pattern in patterns:
            for name in param_table.match_names(pattern, "optim.unfreeze.modules"):
                first_steps[name] = min(step, first_steps.get(name, step))
    return first_steps
