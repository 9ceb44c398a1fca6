"""The search: what it may return, what it must not lose, and what it prefers."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest

from clustertrain.config.model import ModelSpec
from clustertrain.plan import pipeline_schedules
from clustertrain.plan.cost.step_time import estimate_step
from clustertrain.plan.search.layouts import (
    CHECKPOINTING_MODES,
    MAX_SLOWDOWN,
    SIMPLICITY_MARGIN,
    TIE_MARGIN,
    Candidate,
    SearchProblem,
    count_parallelisms,
    penalized_step_s,
    search,
)
from tests.unit.plan.problems import GPT_125M, LLAMA_8B, LLAMA_405B, SHALLOW, every, problem

pytestmark = pytest.mark.long

TINY = ModelSpec()


def fastest(candidates: list[Candidate]) -> dict[str, float]:
    """Of each family, seconds."""
    found: dict[str, float] = {}
    for c in candidates:
        found[c.family] = min(c.step_s, found.get(c.family, c.step_s))
    return found


# Small enough to look at every answer: 1500 to 4000 of them.
SMALL: dict[str, SearchProblem] = {
    "two-nodes": problem(SHALLOW, world=8, gpus_per_node=4, global_batch=16),
    "one-node": problem(GPT_125M, world=8, global_batch=32),
    "large-vocabulary": problem(
        dataclasses.replace(SHALLOW, vocab_size=256_000, dim=1024, hidden=4096),
        world=8, gpus_per_node=4, global_batch=32,
    ),
    "slow-gpus-odd-nodes": problem(SHALLOW, "v100", world=12, gpus_per_node=6, global_batch=48, seq_len=1536),
    "large-states": problem(LLAMA_8B, world=4, gpus_per_node=4, global_batch=8, seq_len=4096),
    "long-sequences": problem(SHALLOW, world=8, gpus_per_node=4, global_batch=8, seq_len=32_768),
}  # fmt: skip
AT_ONCE = ("two-nodes", "large-states")  # that are looked at with every change


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if n not in AT_ONCE else []) for n in SMALL])
def test_pruning_keeps_best_of_each_family(name: str) -> None:
    """Against every answer, with as much memory as each family just needs with each recomputation, and with plenty."""
    small = SMALL[name]
    answers = list(every(small))
    least: dict[tuple[str, str], float] = {}
    for c in answers:
        how = c.family, c.layout.activation_checkpointing
        least[how] = min(c.peak_gib, least.get(how, c.peak_gib))
    for limit in {*least.values(), max(c.peak_gib for c in answers)}:
        found = search(dataclasses.replace(small, limit_gib=limit))
        fits = [c for c in answers if c.peak_gib <= limit]
        best, seen = fastest(fits), fastest(list(found.fitting))
        hopeless = {kind for kind in best.keys() - seen.keys() if best[kind] > MAX_SLOWDOWN * min(best.values())}
        assert seen == pytest.approx({kind: s for kind, s in best.items() if kind not in hopeless}), limit
        assert found.best is not None and penalized_step_s(found.best) <= (1 + TIE_MARGIN) * min(
            map(penalized_step_s, fits)
        ) * (1 + 1e-9)
        for small_one in found.smallest:
            assert small_one.peak_gib > limit
            needed = min(c.peak_gib for c in answers if c.family == small_one.family)
            # Of a stage with a single layer recomputing all may need a little more.
            assert needed <= small_one.peak_gib * (1 + 1e-9) < 1.02 * needed, small_one.family


@pytest.mark.parametrize("name", SMALL)
def test_candidates_are_valid_and_match_models(name: str) -> None:
    small = SMALL[name]
    model = small.model
    for c in search(small).fitting:
        layout, run = c.layout, c.config
        assert layout.world_size == small.world_size
        assert run.micro_batch * run.grad_accum * layout.data_parallel == small.global_batch
        assert not any(size % layout.tp for size in (model.heads, model.kv_heads, model.hidden, model.vocab_size))
        assert small.seq_len % (layout.cp * layout.tp) == 0 and small.gpus_per_node % layout.tp == 0
        assert (
            pipeline_schedules.unsupported_reason(layout, run.grad_accum) == ""
            and pipeline_schedules.num_stages(layout) <= model.layers + 2
        )
        assert c.peak_gib <= small.limit_gib
        assert c.step == estimate_step(model, layout, run, small.framework, small.machine)


def test_first_candidate_is_simplest_of_similar_speed() -> None:
    for small in SMALL.values():
        found = search(small).fitting
        near = [c for c in found if penalized_step_s(c) <= (1 + TIE_MARGIN) * min(map(penalized_step_s, found))]
        assert found[0] in near and count_parallelisms(found[0].layout) == min(
            count_parallelisms(c.layout) for c in near
        )
        fastest = min(found, key=lambda c: c.step_s)
        more = count_parallelisms(fastest.layout) - count_parallelisms(found[0].layout)
        assert found[0].step_s <= fastest.step_s * (1 + SIMPLICITY_MARGIN) ** more * (1 + TIE_MARGIN) * (1 + 1e-9)
        assert [c.step_s for c in found[1:]] == sorted(c.step_s for c in found[1:])


def test_a_small_model_is_replicated() -> None:
    for gpu, nodes in (("h100", 2), ("a100", 8), ("v100", 1)):
        best = search(problem(TINY, gpu, world=8 * nodes, global_batch=128 * nodes, seq_len=256)).best
        assert best is not None and best.layout.strategy == "ddp" and not best.layout.is_model_parallel


def test_larger_models_are_sharded_then_split() -> None:
    best = search(problem(LLAMA_8B, world=16, seq_len=8192)).best
    assert best is not None and best.layout.is_sharded and best.peak_gib < 64
    best = search(problem(LLAMA_405B, world=512, seq_len=8192, global_batch=512)).best
    assert best is not None and best.layout.is_model_parallel and best.layout.is_sharded


def test_larger_gpu_recomputes_no_more_and_is_no_slower() -> None:
    redone, seconds = [], []
    for limit in (20.0, 40.0, 120.0):
        best = search(problem(LLAMA_8B, world=64, seq_len=8192, global_batch=256, limit_gib=limit)).best
        assert best is not None
        redone.append(CHECKPOINTING_MODES.index(best.layout.activation_checkpointing))
        seconds.append(best.step_s)
    assert redone[0] > redone[-1]
    # A simpler layout may be taken for up to SIMPLER of the time, and TIE.
    assert all(later <= (1 + SIMPLICITY_MARGIN) * (1 + TIE_MARGIN) * earlier for earlier, later in pairwise(seconds))


@pytest.mark.parametrize(
    "fixed",
    [
        {"tp": 2, "cp": 1, "pp": 1},
        {"tp": 1, "cp": 1, "pp": 4},
        {"tp": 2, "cp": 2, "pp": 2},
        {"strategy": "hybrid-shard", "tp": 1, "cp": 1, "pp": 1},
        {"strategy": "fsdp", "tp": 4, "cp": 1, "pp": 1},
        {"strategy": "hybrid-shard", "tp": 1, "cp": 1, "pp": 1, "dp_shard": 4, "dp_replicate": 4},
        {"strategy": "zero1", "tp": 1, "cp": 1, "pp": 1},
        {"micro_batch": 2},
        {"activation_checkpointing": "selective"},
        {"tp": 1, "cp": 1, "pp": 2, "schedule": "gpipe", "virtual_stages": 1},
        {"tp": 1, "cp": 1, "pp": 2, "schedule": "zbv", "virtual_stages": 2},
    ],
    ids=lambda fixed: "-".join(f"{name}-{value}" for name, value in fixed.items()),
)
def test_constraints_are_respected(fixed: dict[str, Any]) -> None:
    found = search(problem(dataclasses.replace(SHALLOW, dim=2048), **fixed)).fitting
    assert found
    in_layout = {n: v for n, v in fixed.items() if n != "micro_batch"}
    for c in found:
        assert {name: getattr(c.layout, name) for name in in_layout} == in_layout
        assert fixed.get("micro_batch", c.config.micro_batch) == c.config.micro_batch


def test_shard_groups_stay_within_published_size() -> None:
    found = search(problem(LLAMA_8B, world=2048, global_batch=2048)).fitting
    assert found and max(c.layout.dp_shard * c.layout.cp for c in found) <= 512
    asked = search(problem(LLAMA_8B, world=2048, global_batch=2048, strategy="fsdp", tp=1, cp=1, pp=1)).best
    assert asked is not None and asked.layout.dp_shard == 2048


def test_offload_applies_to_sharded_layouts() -> None:
    parallel = problem(LLAMA_8B).parallel
    offloaded = dataclasses.replace(problem(LLAMA_8B, world=8), parallel=type(parallel)(offload=True))
    for c in search(offloaded).fitting:
        assert c.layout.offload is c.layout.is_fully_sharded


def test_search_on_largest_cluster() -> None:
    found = search(problem(LLAMA_405B, world=16_384, seq_len=8192, global_batch=2048))
    assert found.considered > 5000
    assert found.best is not None and found.best.layout.world_size == 16_384
    assert found.best.layout.tp > 1 and found.best.layout.pp > 1  # as the model's authors did


def test_no_fit_returns_smallest_per_family() -> None:
    found = search(problem(LLAMA_8B, "t4", world=4, gpus_per_node=4))
    assert found.best is None and found.fitting == ()
    assert {"ddp", "fsdp", "tensor parallel", "pipeline"} <= {c.family for c in found.smallest}
    assert all(c.peak_gib > 12 for c in found.smallest)
