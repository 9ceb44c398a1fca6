"""What is to be known of each parameter before a layout takes the model apart: whether it decays, how deep it lies,
which modules it is in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from clustertrain.checkpoint.core.state_dict import clean, unwrap
from clustertrain.config.module_patterns import fits, near
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
class Described:
    """``modules``: the names of those that hold it themselves, several where it is shared. ``hidden``: a matrix of a
    layer, neither table nor head. ``depth``: how many layers lie above, 0 for the head; None where that is not known.
    """

    modules: tuple[str, ...]
    decays: bool
    hidden: bool
    depth: int | None


@dataclass(frozen=True)
class Parameters:
    """``by_name`` has every name of every parameter of the whole model; ``no_depth`` says why no depth is known."""

    by_name: Mapping[str, Described]
    no_depth: str = ""

    def fitting(self, pattern: str, key: str) -> list[str]:
        """Names of the parameters in the modules whose names fit ``pattern``, and in all that these contain.

        Raises:
            ConfigError: there is none; ``key`` is what the pattern stands in.
        """
        found = [n for n, d in self.by_name.items() if any(fits(pattern, m) for m in d.modules)]
        if not found:
            modules = {m for d in self.by_name.values() for m in d.modules}
            raise ConfigError(f"{key}: no module with parameters fits {pattern!r}", fix=near(pattern, modules))
        return found

    def check_depth(self, layer_decay: float) -> None:
        """Raises ConfigError where rates are to go by a depth that is not known."""
        if layer_decay != 1.0 and self.no_depth:
            raise ConfigError(
                f"optim.layer_decay = {layer_decay:g}: {self.no_depth}",
                fix="declare pipeline_units, the names of its parts in the order of execution, or use optim.lr_scale",
            )


def describe(model: nn.Module) -> Parameters:
    """Of the whole ``model``, before it is parallelised."""
    model = unwrap(model)
    holders: dict[int, list[tuple[str, str, nn.Module]]] = {}
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(p), []).append((clean(path), name, module))
            names.setdefault(id(p), []).append(clean(f"{path}.{name}" if path else name))
            params[id(p)] = p
    hidden = _hidden(model)
    depths, why = _depths(model)
    found: dict[str, Described] = {}
    for key, p in params.items():
        depth = max((depths[n] for n in names[key]), default=0) if depths is not None else None
        decays = p.numel() > 1 and not any(_without_decay(name, module) for _, name, module in holders[key])
        described = Described(tuple(path for path, _, _ in holders[key]), decays, key in hidden, depth)
        found.update(dict.fromkeys(names[key], described))
    return Parameters(found, why)


def _without_decay(name: str, module: nn.Module) -> bool:
    """Norms, biases, embeddings. A norm that is no class of torch's is told by its class's name."""
    # torch's recurrent layers have bias_ih_l0, its attention bias_k and in_proj_bias.
    if isinstance(module, (*_EMBEDDINGS, *_NORMS)) or "bias" in name.split("_"):
        return True
    vectors = all(p.dim() <= 1 for p in module.parameters(recurse=False))
    return vectors and type(module).__name__.lower().endswith("norm")


def _hidden(model: nn.Module) -> set[int]:
    """id() of the matrices in the repeated layers; without such layers of all matrices but the last one, the head."""
    layers = [m for _, m in data_parallel.units(model)]
    tables = {id(p) for m in model.modules() if isinstance(m, _EMBEDDINGS) for p in m.parameters(recurse=False)}
    among = [p for layer in layers for p in layer.parameters()] if layers else list(model.parameters())
    matrices = [id(p) for p in among if p.dim() == 2 and p.numel() > 1 and id(p) not in tables]
    return set(matrices if layers else matrices[:-1])


# -- depth


def _depths(model: nn.Module) -> tuple[dict[str, int] | None, str]:
    """By parameter name how many layers lie above it, or why that is not known."""
    named = [(clean(n), n) for n, _ in model.named_parameters(remove_duplicate=False)]
    order = [n for n, _ in named]
    if isinstance(model, nn.Sequential) or hasattr(model, "pipeline_units"):
        try:
            units = pipeline_stages.units(model)
        except ConfigError as e:
            return None, e.message
        held = [[n for n in order if any(n.startswith(f"{m}.") for m in unit)] for unit in units]
        held = [names for names in held if names]
        found: dict[str, int] = {}
        for depth, names in enumerate(reversed(held)):
            found.update(dict.fromkeys(names, depth))  # what is in several units counts for the deepest
        return found, ""
    towers = _towers(model)
    if not towers:
        return None, f"{type(model).__name__} has no list of layers (nn.ModuleList) and declares no pipeline_units"
    tables = {
        clean(f"{path}.{name}" if path else name)
        for path, m in model.named_modules(remove_duplicate=False)
        if isinstance(m, _EMBEDDINGS)
        for name, _ in m.named_parameters(recurse=False)
    }
    return {n: _depth_in(_tower_of(n, towers), n, order, n in tables) for n in order}, ""


def _towers(model: nn.Module) -> list[tuple[str, list[str]]]:
    """Where layers lie one above the other: (what all names in it begin with, names of the layers). Lists of layers
    follow each other in the order of registration, but stand side by side in modules of one class, as two towers."""
    lists: dict[str, list[str]] = {}
    for name, layer in data_parallel.units(model):
        if any(True for _ in layer.parameters()):
            lists.setdefault(name.rpartition(".")[0], []).append(name)
    parents = [path.rpartition(".")[0] for path in lists]
    kinds = {type(model.get_submodule(parent)) for parent in parents}
    if len(lists) > 1 and len(kinds) == 1 and len(set(parents)) == len(parents):
        return [
            (f"{clean(parent)}.", list(map(clean, lists[path]))) for parent, path in zip(parents, lists, strict=True)
        ]
    return [("", [clean(name) for layers in lists.values() for name in layers])] if lists else []


def _tower_of(name: str, towers: Sequence[tuple[str, list[str]]]) -> list[str]:
    own = next((layers for begin, layers in towers if name.startswith(begin)), None)
    return own if own is not None else max((layers for _, layers in towers), key=len)


def _depth_in(layers: list[str], name: str, order: list[str], table: bool) -> int:
    """The top layer has 1; what comes after it, the head, 0; what comes before a layer one more than that layer."""
    for depth, layer in enumerate(reversed(layers), start=1):
        if name.startswith(f"{layer}."):
            return depth
    if table:
        return len(layers) + 1
    after = order[order.index(name) :]
    following = [
        d for d, layer in enumerate(reversed(layers), start=1) if any(n.startswith(f"{layer}.") for n in after)
    ]
    return max(following) + 1 if following else 0


# -- frozen


def freeze(model: nn.Module, known: Parameters, patterns: Sequence[str], later: Mapping[str, int]) -> None:
    """Take what ``patterns`` name out of training, but for what is thawed later. Before the layout, which reduces no
    gradients and keeps no optimizer state of what is frozen.

    Args:
        later: names of parameters that :func:`thaws` found.

    Raises:
        ConfigError: a pattern that fits nothing, or nothing is left to train.
    """
    named = dict(unwrap(model).named_parameters(remove_duplicate=False))
    named = {clean(n): p for n, p in named.items()}
    for pattern in patterns:
        for name in known.fitting(pattern, "optim.freeze"):
            if name not in later:
                named[name].requires_grad_(False)
    if patterns and not any(p.requires_grad for p in named.values()):
        raise ConfigError("optim.freeze: nothing is left to train", fix="leave a module out of it")


def thaws(known: Parameters, when: Iterable[tuple[int, Sequence[str]]]) -> dict[str, int]:
    """By parameter name the first optimizer step, counted from 1, that trains it; of several the earliest.

    Raises:
        ConfigError: a pattern that fits nothing.
    """
    found: dict[str, int] = {}
    for step, patterns in when:
        for pattern in patterns:
            for name in known.fitting(pattern, "optim.unfreeze.modules"):
                found[name] = min(step, found.get(name, step))
    return found
