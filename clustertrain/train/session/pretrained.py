"""Weights that a model starts from, read from safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from clustertrain import clock
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.state_dict import clean_fqn
from clustertrain.checkpoint.format import safetensors_files
from clustertrain.checkpoint.load.pretrained import load_pretrained
from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Layout
from clustertrain.train.session.runtime import SessionRuntime


@dataclass(frozen=True)
class PretrainedWeights:
    """The files with the weights of a model."""

    model: nn.Module
    """The whole model or a module of it, before it is parallelized."""
    path: Path
    names: Mapping[str, str]
    """The file's name of each tensor, by its name in the model."""

    def check(self) -> None:
        """Check the headers of the files.

        Raises:
            NotFound: a file is missing.
            ConfigError: a file is damaged, or its tensors are not those of the model.
        """
        tensors = {clean_fqn(name): tensor for name, tensor in self.model.state_dict(keep_vars=True).items()}
        shapes = {file_name: tuple(tensors[name].shape) for name, file_name in self.names.items()}
        safetensors_files.check_tensors(
            safetensors_files.read_weight_files(self.path), shapes, type(self.model).__name__
        )


def name_weights(model: nn.Module, path: Path, rename: Callable[[str], str] | None) -> PretrainedWeights:
    """Return the weights for ``model`` without reading them; see ``Session.load_pretrained``."""
    tensors = {clean_fqn(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    names: dict[str, str] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if id(tensor) in seen:  # tied to a tensor that has another name
            continue
        seen.add(id(tensor))
        names[name] = rename(name) if rename is not None else name
    return PretrainedWeights(model, path.expanduser(), names)


@dataclass(frozen=True)
class SelectedWeights:
    """Weights of the model that is parallelized, or of one of its modules."""

    weights: PretrainedWeights
    module: str
    """Name of the module in the model; empty: the model itself."""

    def parameter_names(self) -> list[str]:
        """Return the names in the model of the tensors that are loaded."""
        return [f"{self.module}.{name}" if self.module else name for name in self.weights.names]


def select(weights: Sequence[PretrainedWeights], model: nn.Module, layout: Layout) -> list[SelectedWeights]:
    """Return the ``weights`` of ``model`` and of its modules; others belong to another model.

    Raises:
        ConfigError: a pipeline would split a module with weights of its own, or two files have the same tensors.
    """
    names = {id(module): clean_fqn(name) for name, module in model.named_modules()}
    selected = [SelectedWeights(w, names[id(w.model)]) for w in weights if id(w.model) in names]
    if layout.pp > 1 and any(s.module for s in selected):
        raise ConfigError(
            f"pp {layout.pp}: weights of parts of a model cannot be loaded into pipeline stages",
            fix="load the weights of the whole model, or use another layout",
        )
    seen: set[str] = set()
    for s in selected:
        if twice := seen.intersection(s.parameter_names()):
            raise ConfigError(
                f"load_pretrained: {min(twice)} would be loaded twice: its module is part of another one with weights",
                fix="load each module once",
            )
        seen.update(s.parameter_names())
    return selected


def load_unless_resuming(runtime: SessionRuntime, model: nn.Module, selected: Sequence[SelectedWeights]) -> None:
    """Load the weights into the parallelized ``model``, unless a checkpoint will replace them. Collective.

    Raises:
        CheckpointError, StorageError: on all ranks, if any rank could not read.
    """

    def load() -> None:
        attempt = runtime.context.attempt.n if runtime.context.attempt is not None else 0
        ranks = Ranks(runtime.groups.checkpoint)
        for i, part in enumerate(selected):
            started, weights = clock.now(), part.weights
            # Layouts other than pipelines change a module in place.
            target = weights.model if part.module else model
            load_pretrained(target, weights.path, weights.names, ranks, token=f"pretrained-{attempt}-{i}")
            runtime.events.emit(
                "pretrained_loaded",
                path=str(weights.path),
                tensors=len(weights.names),
                t_begin=started,
                load_s=clock.now() - started,
            )

    if runtime.checkpointer.has_committed():
        runtime.state.load_initial_weights = load
    else:
        load()
