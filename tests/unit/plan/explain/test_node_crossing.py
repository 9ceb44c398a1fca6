"""Warnings about groups that cross nodes."""

from __future__ import annotations

from typing import Any

from clustertrain.config.model import ModelSpec
from clustertrain.plan.cost.activations import PassConfig
from clustertrain.plan.explain.node_crossing import RankWorkload, crossing_warnings
from clustertrain.plan.layout import Layout

MODEL = ModelSpec(dim=4096, layers=32, heads=32, kv_heads=8)
WORK = RankWorkload(MODEL, PassConfig(seq_len=4096, micro_batch=1, grad_accum=4, precision="bf16", device="cuda"))


def warnings_for(
    nodes: int = 4, gpus: int = 8, device: str = "cuda", work: RankWorkload | None = WORK, **layout: Any
) -> list[str]:
    return crossing_warnings(Layout(**layout), nodes, gpus, device, work)


def test_groups_inside_a_node_are_not_mentioned() -> None:
    assert warnings_for(strategy="fsdp", dp_shard=4, tp=8) == []
    assert warnings_for(strategy="fsdp", dp_shard=32) == [] and warnings_for(strategy="ddp", dp_replicate=32) == []
    assert warnings_for(strategy="hybrid-shard", dp_replicate=4, dp_shard=4, tp=2) == []
    assert warnings_for(nodes=1, gpus=8, strategy="fsdp", dp_shard=1, tp=3) == []


def test_tp_across_nodes_shows_cost() -> None:
    (warning,) = warnings_for(strategy="fsdp", dp_shard=2, tp=16)
    # 4 micro-batches x 4 all-reduces of 4096 x 4096 bf16, each 2 x 15/16 of its size: 960 MiB per layer.
    assert "tp 16 crosses nodes of 8: 960.0 MiB" in warning
    # 32 layers: 32.2 GB over 50 GB/s.
    assert "0.64 s per step at the 50 GB/s" in warning and "over its links 0.072 s" in warning
    assert "NVLink" not in warnings_for(strategy="fsdp", dp_shard=2, tp=16, device="cpu")[0]


def test_tp_that_does_not_divide_node_crosses_it() -> None:
    (warning,) = warnings_for(nodes=3, gpus=8, strategy="ddp", dp_replicate=8, tp=3)
    assert "tp 3 crosses nodes of 8" in warning


def test_context_parallel_across_nodes() -> None:
    (warning,) = warnings_for(strategy="ddp", dp_replicate=2, tp=2, cp=8)
    assert "tp 2 x cp 8 crosses nodes of 8" in warning and "MiB" in warning


def test_script_model_has_no_cost_estimate() -> None:
    (warning,) = warnings_for(strategy="ddp", dp_replicate=2, tp=16, work=None)
    assert "in every layer" in warning and "GiB" not in warning


def test_hybrid_shard_group_across_nodes() -> None:
    (warning,) = warnings_for(strategy="hybrid-shard", dp_replicate=2, dp_shard=16)
    assert "16 ranks does not fit a node of 8" in warning and "--dp-shard 8 would stay inside" in warning


def test_misaligned_shard_groups() -> None:
    (warning,) = warnings_for(nodes=3, gpus=8, strategy="hybrid-shard", dp_replicate=4, dp_shard=6)
    assert "groups of 6 ranks" in warning and "do not align with nodes of 8" in warning
    (warning,) = warnings_for(nodes=3, gpus=8, strategy="fsdp", dp_shard=12, pp=2, schedule="1f1b")
    assert "groups of 12 ranks" in warning
