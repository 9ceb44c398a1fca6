"""Model statistics from shapes, and traced memory compared with a real step."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import default_collate

from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.plan.cost.user_model import ModelStats, ModuleStats
from clustertrain.plan.layout import Layout
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed import block_transforms
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.models import build as models
from clustertrain.train.optim import registry
from clustertrain.train.optim.param_groups import groups_for_unsharded
from clustertrain.train.stability.clipping import Clipping
from clustertrain.train.step.train_step import TrainStep
from clustertrain.train.tools import model_stats
from tests.unit.train.single_process import ALONE

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, dim=32, layers=3):
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
            for _ in range(layers)
        )
        self.head = nn.Linear(dim, 256, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(5, dtype=torch.bfloat16))
        self.layers[0][0].weight.requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

class Valued(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(int(torch.ones(3).sum().item())))

class ReadsValues(Net):
    def forward(self, tokens):
        return super().forward(tokens) * (2.0 if tokens.sum().item() else 1.0)

class ValuedWithLoss(Valued):
    def loss(self, output, target):
        return output.mean()

def fails():
    raise KeyError("no such width")

def leaves():
    raise SystemExit("not on this machine")
"""


@pytest.fixture(autouse=True)
def _nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "counted_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    sys.modules.pop("counted_nets", None)


VALUED_WITH_LOSS = {"entry": "counted_nets:ValuedWithLoss"}


def request(entry: str, **step: Any) -> dict[str, Any]:
    recipe = {"model": {"entry": f"counted_nets:{entry}"}, "data": {"seq_len": 32, "max_bytes": 100_000}}
    whole = {"micro_batch": 8, "precision": "fp32", "activation_checkpointing": "none", "sharded": False, **step}
    return {"recipe": recipe, "step": whole if step else None, "split": {}}


def count(entry: str, **step: Any) -> ModelStats:
    return msgspec.convert(model_stats.handle_request(request(entry, **step))["stats"], ModelStats)


def test_model_is_counted_on_the_meta_device() -> None:
    counted = count("Net")
    layer = 2 * 32 + (32 + 1) * 128 + (128 + 1) * 32
    parameters = 256 * 32 + 3 * layer  # the head shares the embedding's weight
    assert (counted.parameters, counted.parameter_bytes, counted.trainable) == (
        parameters,
        4 * parameters,
        parameters - 32,
    )
    assert (counted.buffers, counted.buffer_bytes, counted.built_on, counted.dtypes) == (
        1,
        10,
        "meta",
        {"float32": parameters},
    )
    assert counted.units == tuple(ModuleStats(f"layers.{i}", layer) for i in range(3))
    assert counted.largest == ModuleStats("embed", 256 * 32)


def test_constructor_that_needs_values_runs_on_cpu() -> None:
    counted = count("Valued")
    assert (counted.parameters, counted.built_on, counted.largest.name) == (3, "cpu", "the model itself")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("fails", "counted_nets:fails': KeyError: 'no such width' ("),
        ("leaves", "counted_nets:leaves': SystemExit: not on this machine ("),
        ("Nothing", "has no attribute 'Nothing'"),
    ],
)
def test_errors_of_user_code_are_returned(entry: str, message: str) -> None:
    answer = model_stats.handle_request(request(entry))
    assert message in answer["error"] and answer["fix"]


@pytest.mark.parametrize(
    ("tables", "split", "message"),
    [
        ({"optim": {"layer_decay": 0.8}}, {}, "layer_decay = 0.8: Valued has no list of layers"),
        ({"optim": {"freeze": ["layrs"]}}, {}, "optim.freeze: no module with parameters matches 'layrs'"),
        (
            {"contract": {"metric": "validation_accuracy"}, "data": {"validation": 0.1}, "model": VALUED_WITH_LOSS},
            {},
            "contract.metric = 'validation_accuracy': counted_nets:ValuedWithLoss computes its loss itself",
        ),
        ({}, {"tp": 2}, "tp 2: Valued has no tp_plan"),
        ({}, {"stages": 2}, "Valued cannot be split into pipeline stages"),
    ],
    ids=["layer_decay", "freeze", "metric", "tp", "stages"],
)
def test_recipe_errors_are_returned(tables: dict[str, Any], split: dict[str, int], message: str) -> None:
    valued = request("Valued")
    answer = model_stats.handle_request({**valued, "recipe": {**valued["recipe"], **tables}, "split": split})
    assert message in answer["error"] and answer["fix"]


MARK = 7_777_777


def mark_update(*_: Any) -> None:
    """Mark the start of the optimizer step in the allocator's events."""
    torch.empty(MARK, dtype=torch.uint8)


def measure_real_peak(recipe: Recipe, micro_batch: int, checkpointing: str) -> tuple[int, int]:
    """Return the peak bytes that the allocator reports for a real step: overall, and before the update."""
    task = models.build_task(recipe)
    spec = ALONE.__dict__ | {"layout": Layout(activation_checkpointing=checkpointing)}
    context = RankContext(**spec)
    block_transforms.apply(task.model, context)
    groups = groups_for_unsharded(task.model, 0.1)
    options = registry.build_options(recipe.optim, is_text=recipe.is_text, device=context.device)
    optimizer = torch.optim.AdamW(groups, **options)
    step = TrainStep(task.model, optimizer, context, ProcessGroups(None, None, None, None), None)
    batch = default_collate([task.dataset[i] for i in range(micro_batch)])
    optimizer.register_step_pre_hook(mark_update)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as prof:
        step([tuple(batch)], None, task.loss, Clipping(norm=1.0))
    now = passes = peak = 0
    raw: Any = prof.profiler.kineto_results.events()
    for event in sorted((e for e in raw if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        size = event.nbytes()
        if abs(size) == MARK:
            passes = passes or peak
            continue
        now += size
        peak = max(peak, now)
    return peak, passes


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_traced_memory_matches_a_real_step(checkpointing: str) -> None:
    counted = count("Net", micro_batch=8, activation_checkpointing=checkpointing)
    assert counted.trace_error == "" and counted.memory_trace is not None
    recipe = build(request("Net")["recipe"], Recipe, "recipe")
    peak, passes = measure_real_peak(recipe, 8, checkpointing)
    traced = counted.memory_trace.peak_bytes
    # A real step starts with its parameters and its batch allocated.
    initial = traced["parameter"] + traced["buffer"] + traced["other"]
    assert initial == counted.parameter_bytes + counted.buffer_bytes + 2 * 8 * 32 * 8
    assert sum(traced.values()) - initial == pytest.approx(peak, rel=0.02)
    assert counted.memory_trace.activations_bytes == pytest.approx(passes, rel=0.1)


@pytest.mark.long
def test_trace_reflects_checkpointing_and_precision() -> None:
    plain, recomputed, half = (
        count("Net", **step).memory_trace
        for step in ({"micro_batch": 8}, {"activation_checkpointing": "full"}, {"precision": "bf16", "sharded": True})
    )
    assert plain is not None and recomputed is not None and half is not None
    assert recomputed.activations_bytes < plain.activations_bytes
    assert half.peak_bytes["parameter"] < plain.peak_bytes["parameter"]


def test_untraceable_step_is_counted_with_a_reason() -> None:
    counted = count("ReadsValues", micro_batch=2)
    assert counted.memory_trace is None and counted.parameters > 0
    assert counted.trace_error.startswith("the trace failed: ") and "DataDependent" in counted.trace_error


def test_missing_mem_tracker_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed._tools.mem_tracker", None)
    counted = count("Net", micro_batch=2)
    assert "has no MemTracker" in counted.trace_error and math.isfinite(counted.parameters)


def test_adapters_are_counted_with_their_frozen_base() -> None:
    adapter = {"kind": "lora", "rank": 2, "target_modules": ["layers"], "base_precision": "nf4"}
    recipe = build({"model": {"entry": "counted_nets:Net"}, "adapter": adapter}, Recipe, "recipe")
    stats = model_stats.inspect_model(recipe, None, model_stats.SplitRequest())
    adapters = 3 * 2 * 2 * (32 + 128)
    assert stats.trainable == adapters and stats.state_bytes == 8 * adapters
    plain = model_stats.inspect_model(
        build({"model": {"entry": "counted_nets:Net"}}, Recipe, "recipe"), None, model_stats.SplitRequest()
    )
    assert stats.parameters == plain.parameters + adapters and stats.parameter_bytes < plain.parameter_bytes
