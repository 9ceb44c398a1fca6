"""Descriptions of adapters, of the frozen base under them, and of the weights that a run starts from."""

from __future__ import annotations

from pathlib import Path

from clustertrain.config.adapter import AdapterSpec
from clustertrain.config.model import ModelSpec
from clustertrain.plan.cost.adapter_shape import find_adapter
from clustertrain.plan.cost.memory import GIB
from clustertrain.plan.layout import pluralize

READ_GB_S = 1.0  # assumed for a node and shared storage; NFS servers and striped file systems lie around it
_BASES = {"unchanged": "in fp32", "bf16": "in bf16", "int8": "in 8 bits", "nf4": "in 4 bits (NF4)"}


def describe_adapter(spec: AdapterSpec, model: ModelSpec) -> str:
    """Return what is trained, and what the frozen base takes."""
    kind = f"{spec.kind}, rank {spec.rank}, scaling {spec.scaling:g}"
    adapter = find_adapter(spec, model) if model.is_decoder else None
    if adapter is None:
        return f"{kind}; the base is frozen, {_BASES[spec.base_precision]}"
    trained, total = adapter.trained_elements(model), model.parameters()
    layers = [name for name, _ in adapter.shares] + ["head"] * adapter.head
    base = f"{model.layers * adapter.matrix_bytes(model) / GIB:.3g} GiB"
    tables = (1 if model.tie_embeddings else 2) * model.vocab_size * model.dim * adapter.table_bytes
    return (
        f"{kind}, on {', '.join(layers)}: {trained:,.0f} trained parameters, {100 * trained / total:.2g}% of the base; "
        f"the base is frozen, without gradients and optimizer state: its layers {_BASES[spec.base_precision]} take "
        f"{base}, embedding and head {tables / GIB:.3g} GiB, before a layout splits them"
    )


def describe_weights(model: ModelSpec, nodes: int) -> str:
    """Return how much of ``model.init`` is read when the run starts, and about how long that takes."""
    path = Path(model.init)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files) / 1e9
    what = f"{size:.3g} GB" if size else "the weights"
    time = f", about {size / READ_GB_S:.2g} s at an assumed {READ_GB_S:g} GB/s" if size else ""
    where = "the node" if nodes == 1 else f"each of {pluralize(nodes, 'node')}, or its part in a sharded layout,"
    return f"from {model.init}: {what}, read once by {where} at the first start{time}"
