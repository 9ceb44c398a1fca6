"""Weights that a model starts from, read from safetensors files or from a checkpoint of another run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from clustertrain import clock
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.state_dict import clean_fqn
from clustertrain.checkpoint.format import model_tensors, safetensors_files
from clustertrain.checkpoint.load.pretrained import load_pretrained
from clustertrain.config.huggingface import tensor_names
from clustertrain.config.model import ModelSpec
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
            CheckpointError: a checkpoint is not committed, or damaged.
        """
        tensors = {clean_fqn(name): tensor for name, tensor in self.model.state_dict(keep_vars=True).items()}
        shapes = {file_name: tuple(tensors[name].shape) for name, file_name in self.names.items()}
        integers = {self.names[name] for name, t in tensors.items() if name in self.names and not t.is_floating_point()}
        safetensors_files.check_tensors(
            model_tensors.read_weights(self.path),
            shapes,
            type(self.model).__name__,
            integers=integers,
            ignored=tensors.keys() - self.names.keys(),  # tied
        )


def find_rename(model: ModelSpec) -> Callable[[str], str] | None:
    """Return what translates a built-in model's names of tensors to those in ``model.init``; None if they are equal.

    Only the decoder has other names than the files of transformers. Checkpoints and files for other models have the
    names of the module.
    """
    if not model.is_decoder or model_tensors.is_checkpoint(Path(model.init)):
        return None
    return {name: hf_name for name, (hf_name, _) in tensor_names.list_tensors(model).items()}.__getitem__


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


def load(runtime: SessionRuntime, model: nn.Module, weights: PretrainedWeights) -> None:
    """Load ``weights`` into the parallelized ``model``, but not into its adapters. Collective.

    Raises:
        CheckpointError, StorageError: on all ranks, if any rank could not read.
    """
    started = clock.now()
    attempt = runtime.context.attempt.n if runtime.context.attempt is not None else 0
    ranks, adapters = Ranks(runtime.groups.checkpoint), adapted_linear.adapter_parameter_names(model)
    load_pretrained(model, weights.path, weights.names, ranks, token=f"pretrained-{attempt}", untouched=adapters)
    runtime.events.emit(
        "pretrained_loaded",
        path=str(weights.path),
        tensors=len(weights.names),
        t_begin=started,
        load_s=clock.now() - started,
    )
