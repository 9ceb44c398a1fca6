"""Warnings for communication-heavy groups of ranks that cross nodes, with the cost."""

from __future__ import annotations

from dataclasses import dataclass

from clustertrain.config import hardware
from clustertrain.config.hardware import GpuType
from clustertrain.config.model import ModelSpec
from clustertrain.plan.cost.activations import PassConfig
from clustertrain.plan.layout import Layout

# Used for an order of magnitude if the GPU is unknown.
_DEFAULT_GPU = "h100"
_MIB, _GIB = 1024**2, 1024**3


@dataclass(frozen=True)
class RankWorkload:
    """Work of one rank in a step, from which the traffic is computed."""

    model: ModelSpec
    config: PassConfig
    gpu: GpuType | None = None


def crossing_warnings(layout: Layout, nodes: int, gpus: int, device: str, workload: RankWorkload | None) -> list[str]:
    """Return one sentence per kind of group that crosses nodes of ``gpus`` ranks."""
    if nodes == 1:
        return []
    messages = []
    model_ranks = layout.tp * layout.cp
    if layout.tp > 1 and gpus % layout.tp:
        moved_bytes = _tensor_bytes(layout, workload) if workload else None
        messages.append(f"tp {layout.tp} crosses nodes of {gpus}: {_format_cost(moved_bytes, device, workload)}")
    elif layout.cp > 1 and gpus % model_ranks:
        moved_bytes = _context_bytes(layout, workload) if workload else None
        messages.append(
            f"tp {layout.tp} x cp {layout.cp} crosses nodes of {gpus}: {_format_cost(moved_bytes, device, workload)}"
        )
    group = model_ranks * layout.dp_shard
    if layout.strategy == "hybrid-shard" and group > gpus:
        dp_per_node = gpus // model_ranks
        advice = f"; --dp-shard {dp_per_node} would stay inside" if dp_per_node > 1 else ""
        messages.append(
            f"hybrid-shard: a shard group of tp {layout.tp} x cp {layout.cp} x dp_shard {layout.dp_shard} = {group} "
            f"ranks does not fit a node of {gpus}, so parameters are gathered over the network{advice}"
        )
    if layout.is_sharded and gpus % group and group % gpus:
        messages.append(
            f"the groups of {group} ranks that share parameters do not align with nodes of {gpus}: some cross "
            "nodes, and the others wait for them"
        )
    return messages


def _tensor_bytes(layout: Layout, workload: RankWorkload) -> float:
    """Return the bytes that a rank sends per layer and step.

    Four all-reduces of the activations per micro-batch (arXiv 1909.08053, section 3; the same bytes with sequence
    parallel), each 2 (t - 1) / t of their size on a ring.
    """
    config = workload.config
    activations = config.micro_batch * config.seq_len / layout.cp * workload.model.dim * config.compute_bytes
    return config.grad_accum * 4 * activations * 2 * (layout.tp - 1) / layout.tp


def _context_bytes(layout: Layout, workload: RankWorkload) -> float:
    """Return the bytes that a rank receives and sends per layer and step: keys and values, and their gradients."""
    config, model = workload.config, workload.model
    width = 2 * model.kv_dim / layout.tp
    chunk = config.micro_batch * config.seq_len / layout.cp * width * config.compute_bytes
    return config.grad_accum * 2 * chunk * (layout.cp - 1)


def _format_cost(moved_bytes: float | None, device: str, workload: RankWorkload | None) -> str:
    if moved_bytes is None or workload is None:
        return "its activations cross the network in every layer; keep the product within a node if possible"
    size = f"{moved_bytes / _GIB:.1f} GiB" if moved_bytes >= _GIB else f"{moved_bytes / _MIB:.1f} MiB"
    text = f"{size} of activations per rank, layer and step cross the network"
    if device == "cpu":
        return text
    gpu = workload.gpu or hardware.find_gpu_type(_DEFAULT_GPU)
    if gpu is None:
        return text
    total_gb = moved_bytes * workload.model.layers / 1e9
    link_note = f", over its links {total_gb / gpu.link_gb_s:.2g} s" if gpu.link_gb_s else ""
    return (
        f"{text}; for {workload.model.layers} layers about {total_gb / gpu.fabric_gb_s:.2g} s per step at the "
        f"{gpu.fabric_gb_s:g} GB/s that a GPU usually has across nodes ({gpu.name}){link_note}"
    )
