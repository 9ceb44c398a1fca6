"""Layouts of the presets on 16 to 512 ranks: every combination, and a small set with every pair of values."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import JobSpec, RunSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.parsing.presets import apply_preset
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.plan import pipeline_schedules
from clustertrain.plan.checks import check_device
from clustertrain.plan.layout import Batch, Layout, Strategy
from clustertrain.plan.request import PlanRequest

GPUS_PER_NODE = 8
SEED, DRAWS = 0, 6000

# The values of each factor.
FACTORS: Mapping[str, tuple[Any, ...]] = {
    "preset": ("125m", "llama3.2-1b", "llama3.1-8b", "llama3.1-70b", "llama3.1-405b"),
    "ranks": (16, 32, 64, 128, 256, 512),
    "tp": (1, 2, 4, 8, 16),
    "cp": (1, 2, 4, 8),
    "pp": (1, 2, 4, 8, 16),
    "schedule": ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv"),  # with a pipeline
    "strategy": ("ddp", "zero1", "fsdp", "fsdp-grad-op", "hybrid-shard"),
    "sequence_parallel": (True, False),
    "loss_parallel": (True, False),
    "recompute": ("none", "selective", "full"),
    "precision": ("bf16", "fp16", "fp32"),
}


@dataclass(frozen=True)
class LayoutCell:
    """A preset in a layout; ``refusal`` is the planner's error if it refuses the combination."""

    name: str
    recipe: Recipe
    layout: Layout
    batch: Batch
    precision: str
    refusal: str = ""


def draw_all() -> Iterator[LayoutCell]:
    """Yield every combination once: without a pipeline there is one schedule, without tp one kind of loss."""
    seen: set[str] = set()
    for values in itertools.product(*FACTORS.values()):
        cell = _build(dict(zip(FACTORS, values, strict=True)))
        if cell is not None and cell.name not in seen:
            seen.add(cell.name)
            yield cell


def draw_covering() -> list[LayoutCell]:
    """Return few cells that the planner accepts, with every pair of values of two factors that such cells have.

    They are chosen from random ones, greedily: the cell with the most new pairs next.
    """
    rng = random.Random(SEED)
    pairs: dict[str, set[tuple[Any, ...]]] = {}
    cells: dict[str, LayoutCell] = {}
    for _ in range(DRAWS):
        values = {name: rng.choice(choices) for name, choices in FACTORS.items()}
        cell = _build(values, adjust_ranks=True)
        if cell is not None and not cell.refusal and cell.name not in cells:
            cells[cell.name] = cell
            pairs[cell.name] = set(itertools.combinations(_effective(values, cell).items(), 2))
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        name = max(pairs, key=lambda name: len(pairs[name] & missing))
        missing -= pairs[name]
        chosen.append(cells[name])
    return chosen


def _effective(values: Mapping[str, Any], cell: LayoutCell) -> dict[str, Any]:
    """Return the values of the factors that matter in the cell."""
    effective = {**values, "ranks": cell.layout.world_size}
    if cell.layout.pp == 1:
        del effective["schedule"]
    if cell.layout.tp == 1:
        del effective["sequence_parallel"], effective["loss_parallel"]
    return effective


def build_cell(**values: Any) -> LayoutCell:
    """Return the cell with ``values`` of factors, and the first value of the others."""
    cell = _build({name: values.get(name, choices[0]) for name, choices in FACTORS.items()})
    assert cell is not None, values
    return cell


def _build(values: Mapping[str, Any], *, adjust_ranks: bool = False) -> LayoutCell | None:
    """Return the cell, None if the degrees do not divide the ranks.

    Args:
        adjust_ranks: take the next larger number of ranks that they divide.
    """
    tp, cp, pp, strategy = values["tp"], values["cp"], values["pp"], values["strategy"]
    ranks = math.lcm(values["ranks"], tp * cp * pp) if adjust_ranks else values["ranks"]
    if ranks % (tp * cp * pp) or ranks > max(FACTORS["ranks"]):
        return None
    schedule = values["schedule"] if pp > 1 else "auto"
    recompute = values["recompute"]
    dp = ranks // (tp * cp * pp)
    parallel = {"activation_checkpointing": recompute, "sequence_parallel": values["sequence_parallel"],
                "loss_parallel": values["loss_parallel"], "schedule": schedule}  # fmt: skip
    micro_batches = 2 * pp if pp > 1 else 1
    recipe = build(
        apply_preset({
            "model": {"preset": values["preset"]}, "data": {"seq_len": 1024}, "parallel": parallel,
            "train": {"micro_batch": 1, "global_batch": micro_batches * dp, "precision": values["precision"]},
        }),
        Recipe, "recipe",
    )  # fmt: skip
    job = JobSpec(nodes=-(-ranks // GPUS_PER_NODE), gpus=GPUS_PER_NODE, layout=strategy, tp=tp, cp=cp, pp=pp)
    parts = [
        f"{ranks} ranks", strategy, f"tp {tp}" + " + sp" * values["sequence_parallel"] if tp > 1 else "",
        f"cp {cp}" if cp > 1 else "", f"pp {pp} ({schedule})" if pp > 1 else "",
        f"recompute {recompute}" if recompute != "none" else "", values["precision"],
        "whole logits" if tp > 1 and not values["loss_parallel"] else "",
    ]  # fmt: skip
    name = f"{values['preset']}: " + ", ".join(part for part in parts if part)
    batch = Batch(micro_batch=1, grad_accum=micro_batches, global_batch=micro_batches * dp)
    layout, refusal = _plan_layout(RunSpec(job=job, recipe=recipe), strategy)
    return LayoutCell(name, recipe, layout, batch, values["precision"], refusal)


def _plan_layout(spec: RunSpec, strategy: Strategy) -> tuple[Layout, str]:
    """Return the planner's layout and its refusal; a refused layout is built from the degrees alone."""
    request = PlanRequest(spec, "cuda", ClusterProfile())
    try:
        layout = request.build_layout(strategy)
        check_device(spec.recipe.train.precision, spec.recipe.parallel, layout, "cuda", None)
    except ConfigError as e:
        return _bare_layout(spec, strategy), e.message
    reason = pipeline_schedules.unsupported_reason(layout, spec.recipe.train.global_batch // layout.data_parallel)
    return layout, reason


def _bare_layout(spec: RunSpec, strategy: Strategy) -> Layout:
    job, parallel = spec.job, spec.recipe.parallel
    dp = job.nodes * job.gpus // (job.tp * job.cp * job.pp)
    replicated = strategy in ("ddp", "zero1")
    return Layout(
        strategy=strategy, dp_replicate=dp if replicated else 1, dp_shard=1 if replicated else dp, tp=job.tp, cp=job.cp,
        pp=job.pp, sequence_parallel=parallel.sequence_parallel and job.tp > 1,
        schedule=parallel.schedule if job.pp > 1 else None,
        virtual_stages=parallel.stages_per_rank if job.pp > 1 else 1,
        activation_checkpointing=parallel.activation_checkpointing, zero1=strategy == "zero1",
    )  # fmt: skip


def shorten(cell: LayoutCell) -> LayoutCell:
    """Return ``cell`` with one layer per stage: what a layout splits besides stages does not depend on their number."""
    layers = min(cell.recipe.model.layers, max(2, pipeline_schedules.num_stages(cell.layout)))
    model = msgspec.structs.replace(cell.recipe.model, layers=layers)
    recipe = msgspec.structs.replace(cell.recipe, model=model)
    return LayoutCell(cell.name, recipe, cell.layout, cell.batch, cell.precision, cell.refusal)
