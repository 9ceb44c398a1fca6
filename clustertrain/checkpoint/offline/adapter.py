"""The adapter in a checkpoint: its export for PEFT, and its product with the weights of the base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clustertrain.checkpoint.format import dtypes
from clustertrain.checkpoint.format.adapter_files import peft_name, to_peft_config
from clustertrain.checkpoint.format.manifest import Manifest, TensorRecord
from clustertrain.checkpoint.format.storage import Folder
from clustertrain.checkpoint.offline.inspect import assemble_tensor
from clustertrain.config.adapter import AdapterSpec
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
    return SavedAdapter(folder, spec, str(about.get("base", "")), str(about.get("base_sha256", "")), tensors)
