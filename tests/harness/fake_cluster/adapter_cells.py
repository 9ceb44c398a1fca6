"""Fine-tunes whose peak memory is compared with torch's tracker: full, LoRA and QLoRA under every kind of layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.plan.layout import Batch, Layout
from tests.harness.fake_cluster.memory_cells import MODELS, MemoryCell

# Tables [adapter] by kind of fine-tune.
FINE_TUNES: Mapping[str, Mapping[str, Any]] = {
    "qlora": {"kind": "lora", "base_precision": "nf4", "rank": 64},
    "lora": {"kind": "lora"},
    "full": {},
}
# In the first layouts only.
MORE_FINE_TUNES: Mapping[str, Mapping[str, Any]] = {
    "lora, bf16 base": {"kind": "lora", "base_precision": "bf16"},
    "lora, int8 base": {"kind": "lora", "base_precision": "int8", "target_modules": ["*.attention.[qv]"]},
    "qdora": {"kind": "dora", "base_precision": "nf4", "target_modules": ["*.ffn"]},
}
# (model, layout, samples per micro-batch, micro-batches, precision)
_FSDP: dict[str, Any] = {"strategy": "fsdp"}
LAYOUTS: tuple[tuple[str, Layout, int, int, str], ...] = (
    ("1b", Layout(), 2, 1, "bf16"),
    ("1b", Layout(), 1, 2, "fp32"),
    ("8b", Layout(activation_checkpointing="full"), 2, 2, "bf16"),
    ("3b", Layout(strategy="ddp", dp_replicate=8), 1, 2, "bf16"),
    ("1b", Layout(strategy="zero1", dp_replicate=8, zero1=True), 2, 1, "bf16"),
    ("8b", Layout(**_FSDP, dp_shard=8), 1, 1, "bf16"),
    ("8b", Layout(**_FSDP, dp_shard=16, activation_checkpointing="selective"), 2, 2, "bf16"),
    ("13b", Layout(**_FSDP, dp_shard=32, activation_checkpointing="full", defer_reduction=False), 1, 2, "bf16"),
    ("3b", Layout(strategy="fsdp-grad-op", dp_shard=8, reshard_after_forward=False), 1, 1, "bf16"),
    ("8b", Layout(strategy="hybrid-shard", dp_replicate=4, dp_shard=8), 1, 2, "bf16"),
    ("8b", Layout(tp=4, sequence_parallel=True), 2, 1, "bf16"),
    ("70b", Layout(**_FSDP, dp_shard=8, tp=8, sequence_parallel=True, activation_checkpointing="full"), 1, 1, "bf16"),
    ("3b", Layout(**_FSDP, dp_shard=4, cp=2), 1, 1, "bf16"),
    ("8b", Layout(pp=2, schedule="1f1b", reshard_after_forward=False), 1, 4, "bf16"),
    ("8b", Layout(**_FSDP, dp_shard=4, pp=2, schedule="1f1b", reshard_after_forward=False), 1, 4, "bf16"),
)  # fmt: skip
SEQ_LEN = 2048
LAYERS = 4  # instead of up to 80: the bytes per layer are those of the model, and a trace takes less long


def list_cells() -> Iterator[tuple[str, MemoryCell]]:
    """Yield the kind of fine-tune and the cell of each job."""
    for kind, adapter in FINE_TUNES.items():
        yield from ((kind, _build_cell(adapter, *job)) for job in LAYOUTS)
    for kind, adapter in MORE_FINE_TUNES.items():
        yield from ((kind, _build_cell(adapter, *job)) for job in LAYOUTS[:: len(LAYOUTS) // 2][:2])


def _build_cell(
    adapter: Mapping[str, Any], model: str, layout: Layout, micro_batch: int, grad_accum: int, precision: str
) -> MemoryCell:
    document = {"model": {**MODELS[model], "layers": LAYERS}, "data": {"seq_len": SEQ_LEN}}
    recipe = build({**document, **({"adapter": adapter} if adapter else {})}, Recipe, "recipe")
    samples = micro_batch * grad_accum * layout.data_parallel
    batch = Batch(
        micro_batch=micro_batch, grad_accum=grad_accum, global_batch=samples, tokens_per_step=samples * SEQ_LEN
    )
    return MemoryCell(model, recipe, layout, batch, precision)  # type: ignore[arg-type]
