"""Tensors of a model in a checkpoint, or in safetensors files, in one form."""

from __future__ import annotations

from pathlib import Path

from clustertrain.checkpoint.format import json_tags
from clustertrain.checkpoint.format.manifest import MANIFEST, Manifest, TensorRecord, check_sizes, read_manifest
from clustertrain.checkpoint.format.safetensors_files import WeightFiles, read_weight_files
from clustertrain.errors import ConfigError


def is_checkpoint(path: Path) -> bool:
    """Return whether ``path`` is a checkpoint of a run, not files of another program."""
    return (path / MANIFEST).is_file()


def read_weights(path: Path) -> WeightFiles:
    """Return the tensors of the model in the checkpoint ``path``, or else of safetensors files. No tensor is read.

    Raises:
        NotFound: a file is missing.
        ConfigError: a safetensors file is damaged, or the checkpoint has no model, or one with adapters.
        CheckpointError: the checkpoint is not committed, or damaged.
    """
    if not is_checkpoint(path):
        return read_weight_files(path)
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    tensors = find_model_tensors(manifest)
    if not tensors:
        raise ConfigError(f"{path}: contains no model", fix="choose a checkpoint of a run that saved its model")
    if manifest.about.get("adapter") and any(name.endswith(".lora_A") for name in tensors):
        raise ConfigError(
            f"{path}: contains a model with adapters, which are stored beside the base weights",
            fix="start from its export with `clustertrain checkpoint export --merge`; or from the same base, with the "
            "export of the adapter in adapter.init",
        )
    return WeightFiles(path, manifest.files, tensors, {})


def find_model_tensors(manifest: Manifest) -> dict[str, TensorRecord]:
    """Return the parameters and persistent buffers by their names in the module's state_dict.

    If the state has several modules, each name is prefixed with the module's key and a dot. Tensors inside extra state
    have no such name and are omitted.
    """
    tensors = {t.name: t for t in manifest.tensors if t.kind == "model"}
    modules: dict[str, dict[str, TensorRecord]] = {}
    for key, value in manifest.values.items():
        for fqn, leaf in value.items() if isinstance(value, dict) else ():
            name = leaf.get(json_tags.TENSOR) if isinstance(leaf, dict) else None
            if name in tensors:
                modules.setdefault(key, {})[fqn] = tensors[name]
    if len(modules) == 1:
        return next(iter(modules.values()))
    return {f"{key}.{fqn}": t for key, module_tensors in modules.items() for fqn, t in module_tensors.items()}
