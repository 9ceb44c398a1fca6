"""The plan's estimate of a rank's activations and parameters, compared with what torch holds after a forward pass.

One process stands for one of several ranks: in torch's fake process group, collectives move no data, but shapes and
lifetimes are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from clustertrain.config.model import ModelSpec
from clustertrain.config.parallel import ParallelSpec
from clustertrain.plan.cost.activations import PassConfig, RankStage, activation_bytes, logits_bytes
from clustertrain.plan.cost.frameworks import CLUSTERTRAIN
from clustertrain.plan.cost.memory import GIB, estimate_memory
from clustertrain.plan.layout import Layout
from clustertrain.train.distributed import block_transforms, context_parallel, tensor_parallel
from clustertrain.train.models import losses
from clustertrain.train.models.decoder import Decoder

if TYPE_CHECKING:  # takes half a second, in each process that collects the tests
    from torch.distributed._tools.mem_tracker import MemTracker

BATCH, LENGTH, VOCABULARY = 2, 128, 4000
MODEL = ModelSpec(vocab_size=500, dim=128, layers=2, heads=4, kv_heads=2)
LAYOUTS = {
    "single": Layout(),
    "tp": Layout(tp=2),
    "tp-sp": Layout(tp=2, sequence_parallel=True),
    "cp": Layout(cp=2),
}


@contextmanager
def mesh_of_last_rank(world_size: int) -> Iterator[Any]:
    """Yield the mesh of the last of ``world_size`` ranks, the only one that runs."""
    dist.init_process_group("fake", store=FakeStore(), rank=world_size - 1, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def make_tracker() -> MemTracker:
    from torch.distributed._tools.mem_tracker import MemTracker

    return MemTracker()


def measure_bytes(layout: Layout, mode: str, *, documents: bool = False) -> dict[str, int]:
    """Return the bytes of parameters and activations (without logits) that the last rank of ``layout`` holds."""
    context = SimpleNamespace(layout=layout, precision="fp32", parallel=ParallelSpec(), device=torch.device("cpu"))
    model = Decoder(MODEL).train()
    if mode == "cast":
        model = model.to(torch.bfloat16)
    with mesh_of_last_rank(layout.tp * layout.cp) as mesh:
        if layout.tp > 1:
            tensor_parallel.apply(model, context, mesh)  # type: ignore[arg-type]
        if layout.cp > 1:
            context_parallel.apply(model, context, mesh)  # type: ignore[arg-type]
        block_transforms.apply(model, context)  # type: ignore[arg-type]
        tokens = torch.randint(0, MODEL.vocab_size, (BATCH, LENGTH // layout.cp))
        starts = torch.zeros_like(tokens) if documents else None
        tracker = make_tracker()
        tracker.track_external(model, tokens)
        with tracker, tensor_parallel.loss_context(context):  # type: ignore[arg-type]
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast"):
                logits = model(tokens, document_starts=starts)
            (measured,) = tracker.get_tracker_snapshot("current").values()
    sizes = {str(kind).rpartition(".")[2]: size for kind, size in measured.items()}
    local = logits.to_local() if hasattr(logits, "to_local") else logits
    return {"params": sizes["PARAM"], "activations": sizes["ACT"] - local.numel() * local.element_size()}


@pytest.mark.parametrize("mode", ["fp32", pytest.param("cast", marks=pytest.mark.long)])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full", "full/2"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_activation_count_matches_torch(name: str, checkpointing: str, mode: str) -> None:
    plain = LAYOUTS[name]
    layout = msgspec.structs.replace(plain, activation_checkpointing=checkpointing)
    run = PassConfig(LENGTH, BATCH, precision="fp32" if mode == "fp32" else "bf16")
    estimated = activation_bytes(MODEL, run, layout)
    if checkpointing != "none":  # the estimate includes the block that is recomputed later
        estimated -= activation_bytes(MODEL, run, plain, RankStage(1)) - activation_bytes(
            MODEL, run, plain, RankStage(0)
        )
    measured = measure_bytes(layout, mode)
    tables = 3 * LENGTH * MODEL.dim // MODEL.heads * 4  # of the rotary embedding, once per model
    assert estimated == pytest.approx(measured["activations"], rel=0.005, abs=tables)


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [("single", "none"), pytest.param("tp-sp", "full", marks=pytest.mark.long), ("cp", "none")],
)
def test_mask_of_documents_is_counted_once(name: str, checkpointing: str) -> None:
    layout = msgspec.structs.replace(LAYOUTS[name], activation_checkpointing=checkpointing)
    masked = PassConfig(LENGTH, BATCH, has_document_mask=True)
    extra = activation_bytes(MODEL, masked, layout) - activation_bytes(
        MODEL, replace(masked, has_document_mask=False), layout
    )
    measured = (
        measure_bytes(layout, "fp32", documents=True)["activations"] - measure_bytes(layout, "fp32")["activations"]
    )
    tables = 4 * BATCH * LENGTH * MODEL.dim // MODEL.heads * 4
    assert extra == pytest.approx(measured, abs=tables)


def measure_loss_peak(dtype: torch.dtype) -> int:
    """Return the peak bytes of a smoothed loss and its backward pass with logits split over two ranks."""
    context = SimpleNamespace(layout=Layout(tp=2), parallel=ParallelSpec())
    with mesh_of_last_rank(2) as mesh, tensor_parallel.loss_context(context):  # type: ignore[arg-type]
        part = torch.randn(BATCH, LENGTH, VOCABULARY // 2, dtype=dtype, requires_grad=True)
        targets = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
        tracker = make_tracker()
        tracker.track_external(part)
        with tracker:
            logits = DTensor.from_local(part, mesh, [Shard(-1)], run_check=False)
            loss, _ = losses.cross_entropy(logits, targets, smoothing=0.1)
            loss.backward()
        (measured,) = tracker.get_tracker_snapshot("peak").values()
    return int(measured["Total"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_label_smoothing_needs_whole_logits(dtype: torch.dtype) -> None:
    model, split = msgspec.structs.replace(MODEL, vocab_size=VOCABULARY), Layout(tp=2)
    run = PassConfig(LENGTH, BATCH, precision="fp32" if dtype == torch.float32 else "bf16")
    estimated = logits_bytes(model, run, split, replace(CLUSTERTRAIN, whole_logits=True))
    assert estimated == pytest.approx(measure_loss_peak(dtype), rel=0.05) and estimated > 1.5 * logits_bytes(
        model, run, split
    )


@pytest.mark.parametrize("name", ["single", "tp", "tp-sp"])
def test_rank_parameters_match_torch(name: str) -> None:
    planned = estimate_memory(MODEL, LAYOUTS[name], PassConfig(LENGTH, BATCH), None)
    assert planned.params_gib == pytest.approx(measure_bytes(LAYOUTS[name], "fp32")["params"] / GIB)
