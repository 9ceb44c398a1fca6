"""Groups of ranks that communicate much and do not lie inside a node: allowed, and said with what it costs."""

from __future__ import annotations

from dataclasses import dataclass

from clustertrain.config import hardware
from clustertrain.config.hardware import GpuType
from clustertrain.config.recipe import ModelSpec
from clustertrain.plan.cost.activations import Pass
from clustertrain.plan.layout import Layout

# Where the GPU is not known, for an order of magnitude.
_ASSUMED = "h100"
_MIB, _GIB = 1024**2, 1024**3


@dataclass(frozen=True)
class Work:
    """What one rank does in a step; its ``model`` is a script's own business where there is no Work."""

    model: ModelSpec
    run: Pass
    gpu: GpuType | None = None


def warnings(layout: Layout, nodes: int, gpus: int, device: str, work: Work | None) -> list[str]:
    """One sentence for each kind of group that crosses a border between nodes, ``gpus`` ranks each."""
    if nodes == 1:
        return []
    found = []
    inner = layout.tp * layout.cp
    if layout.tp > 1 and gpus % layout.tp:
        moved = _tensor_bytes(layout, work) if work else None
        found.append(f"tp {layout.tp} crosses nodes of {gpus}: {_cost(moved, device, work)}")
    elif layout.cp > 1 and gpus % inner:
        moved = _context_bytes(layout, work) if work else None
        found.append(f"tp {layout.tp} x cp {layout.cp} crosses nodes of {gpus}: {_cost(moved, device, work)}")
    group = inner * layout.dp_shard
    if layout.strategy == "hybrid-shard" and group > gpus:
        inside = gpus // inner
        advice = f"; --dp-shard {inside} would stay inside" if inside > 1 else ""
        found.append(
            f"hybrid-shard: a shard group of tp {layout.tp} x cp {layout.cp} x dp_shard {layout.dp_shard} = {group} "
            f"ranks does not fit a node of {gpus}, so parameters are gathered over the network{advice}"
        )
    if layout.sharded and gpus % group and group % gpus:
        found.append(
            f"the groups of {group} ranks that share parameters do not line up with nodes of {gpus}: some lie across "
            "a border and the others wait for them"
        )
    return found


def _tensor_bytes(layout: Layout, work: Work) -> float:
    """A rank's, of one layer in one step: four all-reduces of the activations a micro-batch (arXiv 1909.08053, section
    3; with sequence parallel as many bytes), 2 (t - 1) / t of their size each on a ring."""
    run = work.run
    activations = run.micro_batch * run.seq_len / layout.cp * work.model.dim * run.compute_bytes
    return run.grad_accum * 4 * activations * 2 * (layout.tp - 1) / layout.tp


def _context_bytes(layout: Layout, work: Work) -> float:
    """A rank's, of one layer in one step: keys and values of the others in the forward pass, their gradients back."""
    run, model = work.run, work.model
    width = 2 * model.kv_heads * (model.dim // model.heads) / layout.tp
    chunk = run.micro_batch * run.seq_len / layout.cp * width * run.compute_bytes
    return run.grad_accum * 2 * chunk * (layout.cp - 1)


def _cost(moved: float | None, device: str, work: Work | None) -> str:
    if moved is None or work is None:
        return "its activations go through the network in every layer; keep the product within a node where you can"
    size = f"{moved / _GIB:.1f} GiB" if moved >= _GIB else f"{moved / _MIB:.1f} MiB"
    text = f"{size} of activations a rank, layer and step go through the network"
    if device == "cpu":
        return text
    gpu = work.gpu or hardware.find(_ASSUMED)
    if gpu is None:
        return text
    total = moved * work.model.layers / 1e9
    links = f", over its links {total / gpu.link_gb_s:.2g} s" if gpu.link_gb_s else ""
    return (
        f"{text}; for {work.model.layers} layers about {total / gpu.fabric_gb_s:.2g} s a step at the "
        f"{gpu.fabric_gb_s:g} GB/s that a GPU usually has across nodes ({gpu.name}){links}"
    )
