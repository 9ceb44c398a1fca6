"""Load the weights of safetensors files or of a checkpoint into a model, in whatever layout.

Each rank reads the bytes that it needs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec
from torch import nn

from clustertrain import clock
from clustertrain.checkpoint.core.failures import Failure, error_from_failures, failure_from_exception
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.format.manifest import FORMAT_VERSION, Manifest
from clustertrain.checkpoint.format.model_tensors import read_weights
from clustertrain.checkpoint.format.safetensors_files import WeightFiles
from clustertrain.checkpoint.load.reader import CheckpointReader
from clustertrain.errors import CheckpointError, ClusterTrainError

log = logging.getLogger(__name__)

_KEY = "model"  # of the module in the state that is loaded


def load_pretrained(model: nn.Module, path: Path, names: Mapping[str, str], ranks: Ranks, *, token: str) -> None:
    """Fill ``model`` with the tensors of the safetensors files or the checkpoint ``path``. Collective.

    They are converted to the dtypes of ``model``.

    Args:
        names: the file's name of each tensor, by its name in the whole model. Other tensors of the files are ignored.
        token: identifies this load on all ranks of a node.

    Raises:
        CheckpointError: on all ranks, if any rank could not read, or a tensor is missing or has another shape.
        StorageError: on all ranks, if the file system of any rank failed.
    """
    started = clock.monotonic()
    reader: CheckpointReader | None = None
    failure: Failure | None = None
    finish = None
    try:
        files = read_weights(path)
        reader = CheckpointReader(files.folder, _to_manifest(files, names, token), ranks)
        finish = reader.load({_KEY: model})
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
    if ranks.rank == 0:
        log.info("%s: %d tensors loaded in %.1f s", path, len(names), clock.monotonic() - started)


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
        values={_KEY: {name: {"__tensor__": f"{_KEY}/{name}"} for name in names}},
    )
