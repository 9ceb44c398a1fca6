"""Offload of activations to host memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from clustertrain.config.job import RunSpec
from clustertrain.config.model import ModelSpec
from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.plan import checks
from clustertrain.plan.layout import Layout
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.distributed.parallelize import parallelize
from clustertrain.train.models.decoder import Decoder
from tests.unit.train.single_process import ALONE


def run_backward(offload: bool) -> tuple[list[torch.Tensor], int]:
    """Return the gradients of one backward pass, and the bytes that autograd saved on the device."""
    spec = RunSpec(recipe=Recipe(parallel=ParallelSpec(activation_offload=offload)))
    with torch.device("meta"):
        model = Decoder(ModelSpec(dim=32, layers=2, heads=4, kv_heads=2))
    model = parallelize(model, dataclasses.replace(ALONE, spec=spec), ProcessGroups(None, None, None, None), 3)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved_bytes: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in parameters:
            saved_bytes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    tokens = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(1))
    # Outer hooks see only tensors that the layers' hooks did not move.
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(tokens).square().mean()
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None], sum(saved_bytes.values())


def test_offload_moves_activations_with_equal_gradients() -> None:
    expected, bytes_without_offload = run_backward(False)
    offloaded, bytes_with_offload = run_backward(True)
    assert len(expected) == len(offloaded) > 10
    assert all(torch.equal(a, b) for a, b in zip(expected, offloaded, strict=True))
    assert bytes_with_offload < bytes_without_offload / 2  # the embedding, head and loss are not offloaded


def test_useless_offload_raises() -> None:
    on = ParallelSpec(activation_offload=True)
    checks.check_device("bf16", on, Layout(), "cuda", None)
    for layout, device, message in (
        (Layout(), "cpu", "no GPU memory to relieve"),
        (Layout(activation_checkpointing="full"), "cuda", "keeps nothing to move"),
        (Layout(strategy="ddp", tp=2), "cuda", "split layers"),
    ):
        with pytest.raises(ConfigError, match=message):
            checks.check_device("bf16", on, layout, device, None)
