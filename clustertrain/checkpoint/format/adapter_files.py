"""Adapters in the format of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

Names and keys follow PEFT 0.21. An adapter of clustertrain also records the hash of its base, in the metadata of the
safetensors file, because PEFT warns of unknown keys in ``adapter_config.json``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from clustertrain import reading
from clustertrain.checkpoint.format.safetensors_files import WeightFiles, read_weight_files
from clustertrain.checkpoint.format.tensor_differences import list_differences
from clustertrain.config.adapter import AdapterSpec
from clustertrain.errors import ConfigError, NotFound

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
BASE_HASH = "clustertrain_base_sha256"
"""Key of the base's hash in the metadata of the safetensors file."""

_PREFIX = "base_model.model."
_SUFFIXES = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "lora_magnitude_vector": "lora_magnitude_vector"}
_READ_BYTES = 1 << 22
# Keys that select what PEFT computes in another way, with the values that mean that it does not.
_UNSUPPORTED = {
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    # The others, such as pissa, change the base.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
}


def peft_name(layer: str, own: str) -> str:
    """Return PEFT's name of the parameter ``own`` of an adapter, such as lora_A, of ``layer`` in the adapted model."""
    return f"{_PREFIX}{layer}.{_SUFFIXES[own]}"


def to_peft_config(
    spec: AdapterSpec, layers: Iterable[str], all_layers: Collection[str], base: str, task_type: str | None
) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``.

    Args:
        layers: names of the layers with an adapter.
        all_layers: names of all layers that could have one.
        base: name or path of the base; empty if unknown.
    """
    return {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base or None,
        "inference_mode": True,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "use_rslora": spec.rank_stabilized,
        "use_dora": spec.kind == "dora",
        "target_modules": _shorten(set(layers), all_layers),
        "bias": "none",
        "fan_in_fan_out": False,
    }


def _shorten(layers: set[str], all_layers: Collection[str]) -> list[str]:
    """Return the last parts of the names if these select exactly ``layers``, as people write them, else the names."""
    suffixes = {name.rpartition(".")[2] for name in layers}
    selected = {name for name in all_layers if name.rpartition(".")[2] in suffixes}
    return sorted(suffixes if selected == layers else layers)


def read_adapter(folder: Path) -> tuple[dict[str, Any], WeightFiles]:
    """Return the configuration of the adapter in ``folder``, and its tensors from the header of its file.

    Raises:
        NotFound: a file is missing.
        ConfigError: a file is damaged.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise NotFound(
                f"adapter.init = {str(folder)!r}: has no file {name}",
                fix="name a folder that `clustertrain checkpoint export` or PEFT's save_pretrained has written; every "
                "node must see it",
            )
    try:
        document = reading.read_json(folder / CONFIG_FILE)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{folder / CONFIG_FILE}: cannot be read: {e}", fix="export the adapter again") from e
    if not isinstance(document, dict):
        raise ConfigError(f"{folder / CONFIG_FILE}: is not an object", fix="export the adapter again")
    return document, read_weight_files(folder / WEIGHTS_FILE)


def check_adapter(
    folder: Path, spec: AdapterSpec, shapes: Mapping[str, tuple[int, ...]] | None, base_sha256: str | None
) -> None:
    """Check that the adapter in ``folder`` is one of ``spec`` and has the expected tensors.

    Args:
        shapes: shapes of the tensors by PEFT's names; None if they are not known.
        base_sha256: hash of the base's weights; None if it is not known.

    Raises:
        NotFound: a file is missing.
        ConfigError: a file is damaged, or the adapter is another one; the message lists the differences.
    """
    document, files = read_adapter(folder)
    differences = [
        f"{key} = {document.get(key, default)!r} in {CONFIG_FILE}, but {expected!r} here"
        for key, expected, default in (
            ("peft_type", "LORA", None),
            ("use_dora", spec.kind == "dora", False),
            ("r", spec.rank, 8),
            ("lora_alpha", spec.alpha, 8),
            ("use_rslora", spec.rank_stabilized, False),
        )
        if document.get(key, default) != expected
    ]
    differences += [
        f"{key} = {document[key]!r} in {CONFIG_FILE}, which is not supported"
        for key, neutral in _UNSUPPORTED.items()
        if document.get(key) not in neutral and key in document
    ]
    if differences:
        raise ConfigError(
            f"adapter.init = {str(folder)!r}: the adapter is another one: {'; '.join(differences)}",
            fix="set the keys of [adapter] to this adapter's",
        )
    if shapes is not None:
        _check_tensors(folder, files, shapes)
    recorded = files.metadata.get(BASE_HASH, "")
    if recorded and base_sha256 is not None and recorded != base_sha256:
        raise ConfigError(
            f"adapter.init = {str(folder)!r}: was trained on a different base: model.init has the hash "
            f"{base_sha256[:12]}…, and the adapter's base {recorded[:12]}… "
            f"({document.get('base_model_name_or_path') or 'its path is unknown'})",
            fix="set model.init to the base of this adapter, unchanged and in the same dtype",
        )


def _check_tensors(folder: Path, files: WeightFiles, shapes: Mapping[str, tuple[int, ...]]) -> None:
    lines = list_differences(files.tensors, shapes, not_expected="is in no adapted layer")
    if lines:
        raise ConfigError(
            f"adapter.init = {str(folder)!r}: the tensors do not match adapter.target_modules:\n  "
            + "\n  ".join(lines),
            fix="choose the target_modules that this adapter was trained with, and the same model",
        )


def hash_tensors(files: WeightFiles, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each of the tensors ``names``, of its bytes in the files.

    Raises:
        OSError: a file cannot be read.
    """
    digests = {}
    for name in names:
        record = files.tensors[name]
        digest = hashlib.sha256(f"{record.dtype} {list(record.shape)}\n".encode())
        (shard,) = record.shards
        with (files.folder / shard.file).open("rb") as f:
            f.seek(shard.offset)
            remaining = shard.nbytes
            while remaining:
                data = f.read(min(remaining, _READ_BYTES))
                if not data:
                    raise OSError(f"{shard.file} ends too early")
                digest.update(data)
                remaining -= len(data)
        digests[name] = digest.hexdigest()
    return digests


def combine_hashes(digests: Mapping[str, str]) -> str:
    """Return one hash of a base from its tensors' hashes, however they are split into files."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()
