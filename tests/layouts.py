"""Layouts of two and four ranks that several test tables share."""

from __future__ import annotations

from collections.abc import Mapping

from clustertrain.plan.layout import Layout

# Data parallel, or tensor parallel.
PLAIN: Mapping[str, Layout] = {
    "ddp": Layout(strategy="ddp", dp_replicate=4),
    "zero1": Layout(strategy="zero1", dp_replicate=4, zero1=True),
    "fsdp": Layout(strategy="fsdp", dp_shard=4),
    "fsdp-grad-op": Layout(strategy="fsdp-grad-op", dp_shard=4, reshard_after_forward=False),
    "hsdp": Layout(strategy="hybrid-shard", dp_replicate=2, dp_shard=2),
    "tp": Layout(tp=2),
    "tp+sp": Layout(tp=2, sequence_parallel=True),
}
PP = Layout(pp=2, schedule="1f1b")
CP = Layout(cp=2)
FSDP_TP = Layout(strategy="fsdp", dp_shard=2, tp=2, sequence_parallel=True)
TP_PP = Layout(tp=2, sequence_parallel=True, pp=2, schedule="1f1b")
