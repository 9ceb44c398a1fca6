"""Weights that a model starts from, read from safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from clustertrain import clock
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.state_dict import clean_fqn
from clustertrain.checkpoint.format import safetensors_files
from clustertrain.checkpoint.load.pretrained import load_pretrained
from clustertrain.train.distributed import adapted_linear
from clustertrain.train.session.runtime import SessionRuntime


@dataclass(frozen=True)
class PretrainedWeights:
    """The files with the weights of a model."""

    model: nn.Module
    """The whole model, before it is parallelized."""
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
    adapters = adapted_linear.adapter_parameter_names(model)
    for name, tensor in tensors.items():
        if id(tensor) in seen or name in adapters:  # tied to a tensor that has another name, or not of the base
            continue
        seen.add(id(tensor))
        names[name] = rename(name) if rename is not None else name
    return PretrainedWeights(model, path.expanduser(), names)


def load_unless_resuming(runtime: SessionRuntime, model: nn.Module, weights: PretrainedWeights) -> None:
    """Load ``weights`` into the parallelized ``model``, unless a checkpoint will replace them. Collective.

    Raises:
        CheckpointError, StorageError: on all ranks, if any rank could not read.
    """

    def load() -> None:
        started = clock.now()
        attempt = runtime.context.attempt.n if runtime.context.attempt is not None else 0
        ranks = Ranks(runtime.groups.checkpoint)
        adapters = adapted_linear.adapter_parameter_names(model)
        load_pretrained(model, weights.path, weights.names, ranks, token=f"pretrained-{attempt}", untouched=adapters)
        adapted_linear.fill_magnitudes(model)
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
