"""The layouts that run on the emulated device, with the recipes that they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clustertrain.plan.layout import Layout


@dataclass(frozen=True)
class Case:
    """A layout, and the arguments of :func:`tests.ranks.rank_pool.make_run` for it."""

    layout: Layout
    options: Mapping[str, Any] = field(default_factory=dict)


_DDP = Layout(strategy="ddp", dp_replicate=2)
_FSDP = Layout(strategy="fsdp", dp_shard=2)
_TP = Layout(tp=2, sequence_parallel=True)
_DOCUMENTS = {
    "kind": "custom",
    "attention": "document",
    "entry": "tests.harness.parity.documents:build",
    "args": {"seq_len": 16, "max_bytes": 100_000},
}
_FOUR_LAYERS = {"model": {"layers": 4}}

CASES: Mapping[str, Case] = {
    "ddp": Case(_DDP),
    "zero1": Case(Layout(strategy="zero1", dp_replicate=2, zero1=True)),
    "fsdp": Case(_FSDP),
    "fsdp-grad-op": Case(Layout(strategy="fsdp-grad-op", dp_shard=2, reshard_after_forward=False)),
    "fsdp-reduce-each": Case(Layout(strategy="fsdp", dp_shard=2, defer_reduction=False)),
    "fsdp-prefetch": Case(_FSDP, {"parallel": {"prefetch": 2}}),
    "hsdp": Case(Layout(strategy="hybrid-shard", dp_replicate=2, dp_shard=2)),
    "tp": Case(Layout(tp=2)),
    "tp+sp": Case(_TP),
    "tp-whole-loss": Case(_TP, {"parallel": {"loss_parallel": False}}),
    "fsdp+tp": Case(Layout(strategy="fsdp", dp_shard=2, tp=2, sequence_parallel=True)),
    "cp": Case(Layout(cp=2)),
    "fsdp+cp": Case(Layout(strategy="fsdp", cp=2, dp_shard=2)),
    "cp+tp": Case(Layout(cp=2, tp=2, sequence_parallel=True)),
    "pp-gpipe": Case(Layout(pp=2, schedule="gpipe")),
    "pp-1f1b": Case(Layout(pp=2, schedule="1f1b")),
    "pp-interleaved": Case(Layout(pp=2, schedule="interleaved", virtual_stages=2), _FOUR_LAYERS),
    "pp-zero-bubble": Case(Layout(pp=2, schedule="zero-bubble", virtual_stages=2), _FOUR_LAYERS),
    "pp-zbv": Case(Layout(pp=2, schedule="zbv", virtual_stages=2), _FOUR_LAYERS),
    "pp-tied": Case(Layout(pp=2, schedule="1f1b"), {"model": {"tie_embeddings": True}}),
    "ddp+pp": Case(Layout(pp=2, dp_replicate=2, schedule="1f1b")),
    "fsdp+pp": Case(Layout(strategy="fsdp", pp=2, dp_shard=2, schedule="1f1b")),
    "tp+pp": Case(Layout(pp=2, tp=2, sequence_parallel=True, schedule="1f1b")),
    "ddp-bf16": Case(_DDP, {"precision": "bf16"}),
    "fsdp-bf16": Case(_FSDP, {"precision": "bf16"}),
    "tp-bf16": Case(_TP, {"precision": "bf16"}),
    "ddp-fp16": Case(_DDP, {"precision": "fp16"}),
    "fsdp-fp16": Case(_FSDP, {"precision": "fp16"}),
    "ddp-compressed": Case(_DDP, {"parallel": {"compress_gradients": True}}),
    "ddp-static": Case(_DDP, {"parallel": {"static_graph": True}}),
    "fsdp-selective": Case(
        Layout(strategy="fsdp", dp_shard=2, activation_checkpointing="selective"), {"precision": "bf16"}
    ),
    "tp-full": Case(Layout(tp=2, sequence_parallel=True, activation_checkpointing="full")),
    "fsdp-offload": Case(Layout(strategy="fsdp", dp_shard=2, offload=True), {"parallel": {"offload": True}}),
    "ddp-activation-offload": Case(_DDP, {"parallel": {"activation_offload": True}}),
    "fsdp-activation-offload": Case(_FSDP, {"precision": "bf16", "parallel": {"activation_offload": True}}),
    "ddp-documents-activation-offload": Case(_DDP, {"data": _DOCUMENTS, "parallel": {"activation_offload": True}}),
    "fsdp-documents": Case(_FSDP, {"data": _DOCUMENTS, "precision": "bf16"}),
    "cp-documents": Case(Layout(cp=2), {"data": _DOCUMENTS}),
    "ddp-layer-stats": Case(_DDP, {"tables": {"stability": {"layer_stats_every": 1}}}),
    "tp-layer-stats": Case(_TP, {"tables": {"stability": {"layer_stats_every": 1}}}),
    "ddp-sgd": Case(_DDP, {"tables": {"optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}}),
    "fsdp-sgd": Case(_FSDP, {"tables": {"optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}}),
    "tp-sgd": Case(_TP, {"tables": {"optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}}),
    **{
        f"fsdp-{name}": Case(_FSDP, {"tables": {"optim": {"name": name}}})
        for name in ("adam", "lion", "muon", "adafactor", "lamb", "lars", "soap", "shampoo", "adamw8bit")
    },
    "tp-muon": Case(_TP, {"tables": {"optim": {"name": "muon"}}}),
    "zero1-muon": Case(Layout(strategy="zero1", dp_replicate=2, zero1=True), {"tables": {"optim": {"name": "muon"}}}),
}
NOT_ON_CPU = frozenset(
    {"fsdp-offload", "ddp-activation-offload", "fsdp-activation-offload", "ddp-documents-activation-offload"}
)
"""Cases that need a GPU's own memory, and so have nothing to compare with."""
COVERING = frozenset(
    {"zero1", "fsdp", "hsdp", "fsdp+tp", "cp", "pp-1f1b", "fsdp-offload", "ddp-fp16", "fsdp-sgd", "cp-documents"}
)
"""What ``make test`` runs; ``make cuda-emulated`` runs all."""
