"""Weights that a model starts from, read from safetensors files or from a checkpoint of another run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from clustertrain import clock, errors
from clustertrain.checkpoint.core import state_dict
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.state_dict import clean_fqn
from clustertrain.checkpoint.format import model_tensors, safetensors_files
from clustertrain.checkpoint.load.pretrained import load_pretrained
from clustertrain.checkpoint.offline.start_weights import resolve_weights
from clustertrain.errors import ConfigError, NotFound, PermissionDenied
from clustertrain.plan.layout import Layout
from clustertrain.train.distributed import adapted_linear, low_bit
from clustertrain.train.session.runtime import SessionRuntime

log = logging.getLogger(__name__)

MAX_UNPACKED = 1 << 28  # elements of the matrices that are in memory in fp32 at the same time: 1 GiB


@dataclass(frozen=True)
class PretrainedWeights:
    """The files with the weights of a model."""

    model: nn.Module
    """The whole model or a module of it, before it is parallelized."""
    path: Path
    names: Mapping[str, str]
    """The file's name of each tensor, by its name in the model."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Further names of tensors in ``names``, with the name there."""

    def check(self) -> None:
        """Check the headers of the files.

        Raises:
            NotFound: a file is missing.
            ConfigError: a file is damaged, or its tensors are not those of the model.
            CheckpointError: a checkpoint is not committed, or damaged.
        """
        tensors = {clean_fqn(name): tensor for name, tensor in self.model.state_dict(keep_vars=True).items()}
        packed = low_bit.packed_shapes(self.model)
        shapes = {file_name: packed.get(name) or tuple(tensors[name].shape) for name, file_name in self.names.items()}
        integers = {
            self.names[name]
            for name, t in tensors.items()
            if name in self.names and name not in packed and not t.is_floating_point()
        }
        safetensors_files.check_tensors(
            model_tensors.read_weights(self.path),
            shapes,
            type(self.model).__name__,
            integers=integers,
            ignored=self.tied.keys(),
        )


def name_weights(model: nn.Module, path: Path, rename: Callable[[str], str] | None) -> PretrainedWeights:
    """Return the weights for ``model`` without reading them; see ``Session.load_pretrained``."""
    tensors = {clean_fqn(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    names: dict[str, str] = {}
    tied: dict[str, str] = {}
    seen: dict[int, str] = {}
    adapters = adapted_linear.adapter_parameter_names(model)
    for name, tensor in tensors.items():
        if name in adapters:
            continue
        first = seen.setdefault(id(tensor), name)
        if first != name:
            tied[name] = first
        else:
            names[name] = rename(name) if rename is not None else name
    return PretrainedWeights(model, path.expanduser(), names, tied)


def resolve(runtime: SessionRuntime, weights: PretrainedWeights) -> PretrainedWeights:
    """Return ``weights`` with the checkpoint that a run's name stands for, the same one on all ranks. Collective.

    Raises:
        NotFound, PermissionDenied: on all ranks, if rank 0 finds no such file, run or checkpoint.
    """
    ranks = Ranks(runtime.groups.checkpoint)
    outcome: dict[str, Any] = {}
    if ranks.rank == 0:
        try:
            outcome["path"] = str(resolve_weights(str(weights.path), Path.cwd()))
        except (NotFound, PermissionDenied) as e:
            outcome |= {"error": type(e).__name__, "message": e.message, "fix": e.fix}
    outcome = ranks.broadcast(outcome)
    if "error" in outcome:
        raise getattr(errors, outcome["error"])(outcome["message"], fix=outcome["fix"])
    return replace(weights, path=Path(outcome["path"]))


def follow_replacements(
    weights: Sequence[PretrainedWeights], replaced: Mapping[nn.Module, nn.Module]
) -> list[PretrainedWeights]:
    """Return ``weights`` with the module that now stands for each of ``replaced``."""
    return [replace(w, model=replaced.get(w.model, w.model)) for w in weights]


@dataclass(frozen=True)
class SelectedWeights:
    """Weights of the model that is parallelized, or of one of its modules."""

    weights: PretrainedWeights
    module: str
    """Name of the module in the model; empty: the model itself."""

    def parameter_names(self) -> list[str]:
        """Return the names in the model of the tensors that are loaded."""
        return [f"{self.module}.{name}" if self.module else name for name in self.weights.names]


def find_whole(selected: Sequence[SelectedWeights]) -> PretrainedWeights | None:
    """Return the weights of the whole model; None if there are only some of its modules."""
    return next((s.weights for s in selected if not s.module), None)


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


def load(
    runtime: SessionRuntime,
    model: nn.Module,
    selected: Sequence[SelectedWeights],
    packed: Mapping[str, tuple[int, int]],
) -> None:
    """Load the weights into the parallelized ``model``, but not into its adapters. Collective.

    Args:
        packed: shapes of the matrices of the whole model that are stored in 8 or 4 bits.

    Raises:
        CheckpointError, StorageError: on all ranks, if any rank could not read.
    """
    attempt = runtime.context.attempt.n if runtime.context.attempt is not None else 0
    ranks = Ranks(runtime.groups.checkpoint)
    for i, part in enumerate(selected):
        started, weights = clock.now(), part.weights
        # Layouts other than pipelines change a module in place.
        target, prefix = (weights.model, f"{part.module}.") if part.module else (model, "")
        own = {name.removeprefix(prefix): shape for name, shape in packed.items() if name.startswith(prefix)}
        _load(target, weights, own, ranks, f"pretrained-{attempt}-{i}")
        load_s = clock.now() - started
        runtime.events.emit(
            "pretrained_loaded", path=str(weights.path), tensors=len(weights.names), t_begin=started, load_s=load_s
        )
        if runtime.is_main:
            log.info("%s: %d tensors loaded in %.1f s", weights.path, len(weights.names), load_s)


def _load(
    model: nn.Module, weights: PretrainedWeights, packed: Mapping[str, tuple[int, int]], ranks: Ranks, token: str
) -> None:
    """Load everything that is stored as it is, then the matrices that each rank packs, some at a time.

    A rank packs the rows, or the whole blocks of each row, that it keeps. Blocks do not depend on each other, so the
    result is the same under every layout.
    """
    adapters = adapted_linear.adapter_parameter_names(model)
    plain = {name: file_name for name, file_name in weights.names.items() if name not in packed}
    local, all_stages = state_dict.module_state_dict(model), state_dict.all_stage_fqns(model)
    still_tied = {
        name for name, first in weights.tied.items() if not all_stages and local.get(name) is local.get(first)
    }
    plain |= {name: weights.names[first] for name, first in weights.tied.items() if name not in still_tied}
    load_pretrained(model, weights.path, plain, ranks, token=token, untouched=adapters | packed.keys() | still_tied)
    modules = low_bit.packed_layers(model)
    all_names = set(local) | all_stages
    for n, batch in enumerate(_split_into_batches(packed)):
        matrices = {name: modules[name].empty_matrix() for name in batch if name in modules}
        names = {name: weights.names[name] for name in batch}
        load_pretrained(
            model,
            weights.path,
            names,
            ranks,
            token=f"{token}-{n}",
            untouched=all_names - names.keys(),
            instead=matrices,
        )
        for name, matrix in matrices.items():
            modules[name].load_matrix(matrix)


def _split_into_batches(packed: Mapping[str, tuple[int, int]]) -> Iterator[list[str]]:
    """Yield the names of matrices that are in memory at the same time, at least one."""
    batch: list[str] = []
    elements = 0
    for name, (rows, columns) in packed.items():
        if batch and elements + rows * columns > MAX_UNPACKED:
            yield batch
            batch, elements = [], 0
        batch.append(name)
        elements += rows * columns
    if batch:
        yield batch
