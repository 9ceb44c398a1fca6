"""Load the weights of safetensors files or of a checkpoint into a model, in whatever layout.

Each rank reads the bytes that it needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from clustertrain.checkpoint.core import state_dict
from clustertrain.checkpoint.core.failures import Failure, error_from_failures, failure_from_exception
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.format import json_tags
from clustertrain.checkpoint.format.manifest import FORMAT_VERSION, Manifest
from clustertrain.checkpoint.format.model_tensors import read_weights
from clustertrain.checkpoint.format.safetensors_files import WeightFiles
from clustertrain.checkpoint.load.reader import CheckpointReader
from clustertrain.errors import CheckpointError, ClusterTrainError

_KEY = "model"  # of the module in the state that is loaded


def load_pretrained(
    model: nn.Module,
    path: Path,
    names: Mapping[str, str],
    ranks: Ranks,
    *,
    token: str,
    untouched: Collection[str] = (),
    instead: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Fill ``model`` with the tensors of the safetensors files or the checkpoint ``path``. Collective.

    They are converted to the dtypes of ``model``.

    Args:
        names: the file's name of each tensor, by its name in the whole model. Other tensors of the files are ignored.
            Tensors of the model whose name is in ``untouched`` keep their values.
        token: identifies this load on all ranks of a node.
        instead: tensors to fill instead of those of the model, by their names.

    Raises:
        CheckpointError: on all ranks, if any rank could not read, or a tensor is missing or has another shape.
        StorageError: on all ranks, if the file system of any rank failed.
    """
    reader: CheckpointReader | None = None
    failure: Failure | None = None
    finish = None
    try:
        files = read_weights(path)
        reader = CheckpointReader(files.folder, _to_manifest(files, names, token), ranks)
        finish = reader.load({_KEY: _Selection(model, untouched, instead or {}) if untouched or instead else model})
    except ClusterTrainError as e:
        failure = Failure(message=e.message, kind="objects")
    try:
        failures = ranks.all_gather_failures(failure)
        if not failures and reader is not None:
            failures = ranks.all_gather_failures(_complete(reader))
    finally:
        if reader is not None:
            reader.close()
    if failures:
        raise error_from_failures(f"{path}: the weights cannot be loaded", failures)
    if finish is not None:
        finish()


class _Selection(nn.Module):
    """The tensors of a model, in its stages, except those that keep their values."""

    def __init__(self, model: nn.Module, untouched: Collection[str], instead: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.pipeline_stages = [_SelectionOfPart(part, untouched, instead) for part in state_dict.model_parts(model)]
        self.global_fqns = frozenset(state_dict.all_stage_fqns(model)) - frozenset(untouched)


class _SelectionOfPart(nn.Module):
    def __init__(self, part: nn.Module, untouched: Collection[str], instead: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._part = [part]  # in a list, so that its parameters do not get other names here
        self._untouched = untouched
        self._instead = instead

    def state_dict(self, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        content = {state_dict.clean_fqn(name): value for name, value in self._part[0].state_dict(**options).items()}
        return {name: self._instead.get(name, value) for name, value in content.items() if name not in self._untouched}


def _complete(reader: CheckpointReader) -> Failure | None:
    try:
        reader.complete()
    except CheckpointError as e:
        return failure_from_exception(e)
    return None


def _to_manifest(files: WeightFiles, names: Mapping[str, str], token: str) -> Manifest:
    """Return a manifest of the tensors, renamed, as if a checkpoint had been saved by one rank."""
    missing = [hf_name for hf_name in names.values() if hf_name not in files.tensors]
    if missing:
        raise CheckpointError(f"{files.folder}: contains no {', '.join(missing[:3])}", fix="check model.init")
    tensors = tuple(
        msgspec.structs.replace(files.tensors[hf_name], name=f"{_KEY}/{name}") for name, hf_name in names.items()
    )
    return Manifest(
        format=FORMAT_VERSION,
        torch="",
        step=0,
        made_in=token,
        world_size=1,
        engine="raw",
        layout={},
        files=dict(files.sizes),
        tensors=tensors,
        values={_KEY: {name: {json_tags.TENSOR: f"{_KEY}/{name}"} for name in names}},
    )
