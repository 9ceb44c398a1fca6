"""The plan's count of activations and parameters of one rank against what torch holds after a forward pass.

One process takes the place of one rank of several: in torch's fake process group collectives move nothing, and shapes
and lifetimes are the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
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

BATCH, LENGTH, VOCABULARY = 2, 128, 4000
MODEL = ModelSpec(vocab_size=500, dim=128, layers=2, heads=4, kv_heads=2)
LAYOUTS = {
    "single": Layout(),
    "tp": Layout(tp=2),
    "tp-sp": Layout(tp=2, sequence_parallel=True),
    "cp": Layout(cp=2),
}


@contextmanager
def last_of(world_size: int) -> Iterator[Any]:
    """The mesh of a rank that is alone, as the last of ``world_size``."""
    dist.init_process_group("fake", store=FakeStore(), rank=world_size - 1, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def held(layout: Layout, mode: str) -> dict[str, int]:
    """Bytes of parameters and activations (without the logits) that the last rank of ``layout`` holds."""
    context = SimpleNamespace(layout=layout, precision="fp32", parallel=ParallelSpec(), device=torch.device("cpu"))
    model = Decoder(MODEL).train()
    if mode == "cast":
        model = model.to(torch.bfloat16)
    with last_of(layout.tp * layout.cp) as mesh:
        if layout.tp > 1:
            tensor_parallel.apply(model, context, mesh)  # type: ignore[arg-type]
        if layout.cp > 1:
            context_parallel.apply(model, context, mesh)  # type: ignore[arg-type]
        block_transforms.apply(model, context)  # type: ignore[arg-type]
        tokens = torch.randint(0, MODEL.vocab_size, (BATCH, LENGTH // layout.cp))
        tracker = MemTracker()
        tracker.track_external(model, tokens)
        with tracker, tensor_parallel.loss_context(context):  # type: ignore[arg-type]
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast"):
                logits = model(tokens)
            (found,) = tracker.get_tracker_snapshot("current").values()
    sizes = {str(kind).rpartition(".")[2]: size for kind, size in found.items()}
    local = logits.to_local() if hasattr(logits, "to_local") else logits
    return {"params": sizes["PARAM"], "activations": sizes["ACT"] - local.numel() * local.element_size()}


@pytest.mark.parametrize("mode", ["fp32", pytest.param("cast", marks=pytest.mark.long)])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_activation_count_matches_torch(name: str, checkpointing: str, mode: str) -> None:
    plain = LAYOUTS[name]
    layout = msgspec.structs.replace(plain, activation_checkpointing=checkpointing)
    run = PassConfig(LENGTH, BATCH, precision="fp32" if mode == "fp32" else "bf16")
    counted = activation_bytes(MODEL, run, layout)
    if checkpointing != "none":  # room for the block that is redone, which is not there yet
        counted -= activation_bytes(MODEL, run, plain, RankStage(1)) - activation_bytes(MODEL, run, plain, RankStage(0))
    found = held(layout, mode)
    tables = 3 * LENGTH * MODEL.dim // MODEL.heads * 4  # of the rotary embedding, once a model
    assert counted == pytest.approx(found["activations"], rel=0.005, abs=tables)


def peak_of_loss(dtype: torch.dtype) -> int:
    """Bytes at the peak of a smoothed loss and its backward pass, with the logits that are split over two ranks."""
    context = SimpleNamespace(layout=Layout(tp=2), parallel=ParallelSpec())
    with last_of(2) as mesh, tensor_parallel.loss_context(context):  # type: ignore[arg-type]
        part = torch.randn(BATCH, LENGTH, VOCABULARY // 2, dtype=dtype, requires_grad=True)
        targets = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
        tracker = MemTracker()
        tracker.track_external(part)
        with tracker:
            logits = DTensor.from_local(part, mesh, [Shard(-1)], run_check=False)
            loss, _ = losses.cross_entropy(logits, targets, smoothing=0.1)
            loss.backward()
        (found,) = tracker.get_tracker_snapshot("peak").values()
    return int(found["Total"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_label_smoothing_needs_whole_logits(dtype: torch.dtype) -> None:
    model, split = msgspec.structs.replace(MODEL, vocab_size=VOCABULARY), Layout(tp=2)
    run = PassConfig(LENGTH, BATCH, precision="fp32" if dtype == torch.float32 else "bf16")
    counted = logits_bytes(model, run, split, replace(CLUSTERTRAIN, whole_logits=True))
    assert counted == pytest.approx(peak_of_loss(dtype), rel=0.05) and counted > 1.5 * logits_bytes(model, run, split)


@pytest.mark.parametrize("name", ["single", "tp", "tp-sp"])
def test_rank_parameters_match_torch(name: str) -> None:
    planned = estimate_memory(MODEL, LAYOUTS[name], PassConfig(LENGTH, BATCH), None)
    assert planned.params_gib == pytest.approx(held(LAYOUTS[name], "fp32")["params"] / GIB)
