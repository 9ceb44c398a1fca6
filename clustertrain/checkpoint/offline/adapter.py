"""The adapter in a checkpoint: its export for PEFT, and its product with the weights of the base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from clustertrain.checkpoint.format import dtypes
from clustertrain.checkpoint.format.adapter_files import peft_name, to_peft_config
from clustertrain.checkpoint.format.manifest import Manifest, TensorRecord
from clustertrain.checkpoint.format.storage import Folder
from clustertrain.checkpoint.offline.inspect import assemble_tensor
from clustertrain.config.adapter import AdapterSpec
from clustertrain.config.low_bit import BLOCK, NF4_VALUES, SCALE_BYTES, block_bytes
from clustertrain.config.parsing.documents import build
from clustertrain.errors import CheckpointError

_A, _B, _MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter in a checkpoint."""

    folder: Folder
    spec: AdapterSpec
    base: str
    """Where the weights of the base were read from; empty if this is unknown."""
    base_sha256: str
    """Hash of these weights; empty if this is unknown."""
    tensors: Mapping[str, TensorRecord]
    """All tensors of the model, by name."""

    packed: Mapping[str, TensorRecord]
    """The records, as they are stored, of the matrices in 8 or 4 bits, by their names in the checkpoint. In ``tensors``
    they are fp32 matrices."""

    @property
    def layers(self) -> list[str]:
        """Names of the layers that have an adapter."""
        return [name.removesuffix(f".{_A}") for name in self.tensors if name.endswith(f".{_A}")]

    @property
    def base_tensors(self) -> dict[str, TensorRecord]:
        """The tensors of the model without adapters."""
        own = {f"{layer}.{name}" for layer in self.layers for name in (_A, _B, _MAGNITUDE)}
        return {name: t for name, t in self.tensors.items() if name not in own}

    def name_for_peft(self, names: Mapping[str, str]) -> list[tuple[str, TensorRecord]]:
        """Return the tensors of the adapter with their names in PEFT.

        Args:
            names: the layers' names in the model that PEFT adapts, by their names here.
        """
        return [
            (peft_name(names[layer], own), self.tensors[f"{layer}.{own}"])
            for layer in self.layers
            for own in (_A, _B, _MAGNITUDE)
            if f"{layer}.{own}" in self.tensors
        ]

    def peft_config(self, names: Mapping[str, str], task_type: str | None) -> dict[str, Any]:
        """Return the content of ``adapter_config.json``; ``names`` as for :meth:`name_for_peft`."""
        all_names = names.values()
        return to_peft_config(self.spec, [names[layer] for layer in self.layers], all_names, self.base, task_type)

    def read(self, record: TensorRecord) -> dtypes.Raw:
        """Return the bytes of a tensor of ``tensors``, (elements, itemsize); packed ones are unpacked to fp32."""
        stored = self.packed.get(record.name)
        if stored is None:
            return assemble_tensor(self.folder, record).reshape(-1, record.itemsize)
        blocks = assemble_tensor(self.folder, stored).reshape(stored.shape)
        return dtypes.encode(unpack(blocks, record.shape[1]).reshape(-1), "float32")

    def merge(self, name: str, raw: dtypes.Raw) -> dtypes.Raw:
        """Return the weight ``name`` of an adapted layer in fp32, with the adapter's change.

        Args:
            raw: the tensor's bytes, (elements, itemsize).

        Raises:
            CheckpointError: the tensor is not in a floating-point dtype.
        """
        layer = name.removesuffix(".weight")
        record = self.tensors[name]
        values = dtypes.decode(raw, record.dtype)
        if values is None or not dtypes.is_float(record.dtype):
            raise CheckpointError(f"{name}: an adapter cannot be merged into {record.dtype}", fix="export the adapter")
        weight = values.astype(np.float32).reshape(record.shape)
        merged = weight + np.float32(self.spec.scaling) * (self._read(layer, _B) @ self._read(layer, _A))
        if self.spec.kind == "dora":
            norms = np.linalg.norm(merged, axis=1)
            merged *= (self._read(layer, _MAGNITUDE) / norms)[:, None]
        return dtypes.encode(merged.reshape(-1), "float32")

    def _read(self, layer: str, own: str) -> NDArray[np.float32]:
        record = self.tensors[f"{layer}.{own}"]
        values = dtypes.decode(assemble_tensor(self.folder, record).reshape(-1, record.itemsize), record.dtype)
        assert values is not None  # adapters are floating-point
        return values.astype(np.float32).reshape(record.shape)


def find_adapter(folder: Folder, manifest: Manifest, tensors: Mapping[str, TensorRecord]) -> SavedAdapter | None:
    """Return the adapter in the checkpoint ``folder``, whose model has ``tensors``; None if it has none."""
    about = manifest.about.get("adapter")
    if not isinstance(about, dict) or not any(name.endswith(f".{_A}") for name in tensors):
        return None
    spec = build(about.get("spec", {}), AdapterSpec, f"{folder}: adapter")
    shapes: Mapping[str, Any] = about.get("packed", {})
    packed = {tensors[name].name: tensors[name] for name in shapes if name in tensors}
    logical = {
        name: replace(t, dtype="float32", itemsize=4, shape=tuple(shapes[name])) if t.name in packed else t
        for name, t in tensors.items()
    }
    return SavedAdapter(folder, spec, str(about.get("base", "")), str(about.get("base_sha256", "")), logical, packed)


def unpack(blocks: NDArray[np.uint8], columns: int) -> NDArray[np.float32]:
    """Return the matrix (rows, ``columns``) of packed ``blocks``; see :mod:`clustertrain.checkpoint.format.low_bit`."""
    scales = np.ascontiguousarray(blocks[..., :SCALE_BYTES]).view(np.float32)
    codes = np.ascontiguousarray(blocks[..., SCALE_BYTES:])
    if blocks.shape[-1] == block_bytes("int8"):
        values = codes.view(np.int8).astype(np.float32)
    else:
        values = np.array(NF4_VALUES, np.float32)[np.stack((codes & 15, codes >> 4), axis=-1)]
    return (values.reshape(*blocks.shape[:2], BLOCK) * scales).reshape(len(blocks), -1)[:, :columns]
