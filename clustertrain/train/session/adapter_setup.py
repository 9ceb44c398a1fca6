"""The adapters of a session's model: what their checkpoints record, and the values that they start from."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.state_dict import clean_fqn, model_parts
from clustertrain.checkpoint.format import adapter_files, model_tensors, safetensors_files
from clustertrain.checkpoint.load.pretrained import load_pretrained
from clustertrain.config.adapter import AdapterSpec
from clustertrain.errors import CheckpointError, ClusterTrainError
from clustertrain.train.distributed import adapted_linear, low_bit
from clustertrain.train.models import adapters
from clustertrain.train.session.pretrained import PretrainedWeights
from clustertrain.train.session.runtime import SessionRuntime

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdapterSetup:
    """The adapters of a model, before it is parallelized."""

    model: nn.Module
    spec: AdapterSpec
    names: dict[str, str]
    """PEFT's name of each parameter of an adapter, by its name in the model."""
    shapes: dict[str, tuple[int, ...]]
    """Shape of each of these parameters, by PEFT's name."""
    packed: dict[str, tuple[int, int]]
    """Shapes of the matrices in 8 or 4 bits, by the names of the weights."""

    @property
    def init(self) -> Path | None:
        return Path(self.spec.init).expanduser() if self.spec.init else None

    def describe(self, weights: PretrainedWeights | None) -> dict[str, Any]:
        """Return what checkpoints record. ``weights`` are the files of the base; None if the model has its values."""
        # transformers' models know where their weights are from.
        known = getattr(getattr(self.model, "config", None), "_name_or_path", "")
        base = str(weights.path) if weights is not None else known if isinstance(known, str) else ""
        return {
            "spec": msgspec.to_builtins(self.spec),
            "base": base,
            **({"packed": self.packed} if self.packed else {}),
        }


def add(model: nn.Module, spec: AdapterSpec, seed: int, rename: Callable[[str], str] | None) -> AdapterSetup:
    """Give ``model`` its adapters; see ``Session.add_adapters``.

    Raises:
        ConfigError: see :func:`clustertrain.train.models.adapters.add_adapters`.
        NotFound: a file of the adapter to start from is missing.
    """
    layers = adapters.add_adapters(model, spec, seed)
    names: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, module in adapted_linear.iter_adapted(model):
        for own in adapted_linear.PARAMETER_NAMES:
            p = module._parameters.get(own)
            if p is not None:
                name = names[f"{layer}.{own}"] = adapter_files.peft_name(rename(layer) if rename else layer, own)
                shapes[name] = tuple(p.shape)
    setup = AdapterSetup(model, spec, names, shapes, low_bit.packed_shapes(model))
    if setup.init is not None:
        adapter_files.check_adapter(setup.init, spec, shapes, None)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    matrices = low_bit.frozen_matrices(model)
    total = sum(
        math.prod(matrices[n].matrix_shape) if n in matrices else p.numel()
        for n, p in ((clean_fqn(n), p) for n, p in model.named_parameters())
    )
    log.info(
        "%s, rank %d: %d layers, %s of %s parameters", spec.kind, spec.rank, len(layers), f"{trained:,}", f"{total:,}"
    )
    return setup


def hash_base(runtime: SessionRuntime, weights: PretrainedWeights) -> str:
    """Return the hash of the files' tensors. Each rank reads a part of them. Collective.

    Raises:
        CheckpointError: on all ranks, if any rank could not read.
    """
    ranks = Ranks(runtime.groups.checkpoint)
    outcome: dict[str, Any] = {}
    try:
        files = safetensors_files.read_weight_files(weights.path)
        own = sorted(weights.names.values())[ranks.rank :: ranks.world_size]
        outcome["digests"] = adapter_files.hash_tensors(files, own)
    except (OSError, ClusterTrainError) as e:
        outcome["failure"] = str(e)
    gathered = ranks.all_gather_optional(outcome)
    for rank, entry in enumerate(gathered):
        if "failure" in entry:
            raise CheckpointError(f"{weights.path}: rank {rank} cannot read the weights: {entry['failure']}")
    return adapter_files.combine_hashes({name: d for entry in gathered for name, d in entry["digests"].items()})


def load(runtime: SessionRuntime, model: nn.Module, setup: AdapterSetup, weights: PretrainedWeights | None) -> None:
    """Record the hash of the base in ``weights``, and fill the adapters of the parallelized ``model``. Collective.

    Raises:
        ConfigError: the adapter to start from was trained on another base.
        CheckpointError, StorageError: on all ranks, if any rank could not read.
    """
    # A checkpoint's shards follow from its layout, so its bytes cannot be compared with those of files.
    has_files = weights is not None and not model_tensors.is_checkpoint(weights.path)
    base_sha256 = hash_base(runtime, weights) if weights is not None and has_files else None
    if runtime.checkpointer.adapter is not None and base_sha256 is not None:
        runtime.checkpointer.adapter["base_sha256"] = base_sha256
    adapted_linear.fill_magnitudes(model)
    if setup.init is None:
        return
    adapter_files.check_adapter(setup.init, setup.spec, setup.shapes, base_sha256)
    base = {clean_fqn(name) for part in model_parts(model) for name in part.state_dict()} - setup.names.keys()
    attempt = runtime.context.attempt.n if runtime.context.attempt is not None else 0
    path = setup.init / adapter_files.WEIGHTS_FILE
    load_pretrained(
        model, path, setup.names, Ranks(runtime.groups.checkpoint), token=f"adapter-{attempt}", untouched=base
    )
