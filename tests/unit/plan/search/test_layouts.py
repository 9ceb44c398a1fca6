"""The layout search: valid results, safe pruning, and preferences."""

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
    count_parallelisms,
    penalized_step_s,
    search,
)
from clustertrain.plan.search.problem import SearchProblem
from tests.unit.plan.problems import GPT_125M, LLAMA_8B, LLAMA_405B, SHALLOW, all_candidates, problem

pytestmark = pytest.mark.long

TINY = ModelSpec()


def fastest(candidates: list[Candidate]) -> dict[str, float]:
    """Return the shortest step in seconds by family."""
    seconds: dict[str, float] = {}
    for c in candidates:
        seconds[c.family] = min(c.step_s, seconds.get(c.family, c.step_s))
    return seconds


# Small enough to enumerate: 1500 to 4000 candidates.
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


@pytest.mark.parametrize("name", SMALL)
def test_pruning_keeps_best_of_each_family(name: str) -> None:
    """Compare with all candidates, for the least memory of each family and recomputation, and for ample memory."""
    small = SMALL[name]
    candidates = list(all_candidates(small))
    least_memory: dict[tuple[str, str], float] = {}
    for c in candidates:
        key = c.family, c.layout.activation_checkpointing
        least_memory[key] = min(c.peak_gib, least_memory.get(key, c.peak_gib))
    for limit in {*least_memory.values(), max(c.peak_gib for c in candidates)}:
        outcome = search(dataclasses.replace(small, limit_gib=limit))
        fits = [c for c in candidates if c.peak_gib <= limit]
        fastest_possible, fastest_found = fastest(fits), fastest(list(outcome.fitting))
        too_slow = {
            family
            for family in fastest_possible.keys() - fastest_found.keys()
            if fastest_possible[family] > MAX_SLOWDOWN * min(fastest_possible.values())
        }
        assert fastest_found == pytest.approx(
            {family: s for family, s in fastest_possible.items() if family not in too_slow}
        ), limit
        assert outcome.best is not None and penalized_step_s(outcome.best) <= (1 + TIE_MARGIN) * min(
            map(penalized_step_s, fits)
        ) * (1 + 1e-9)
        for smallest in outcome.smallest:
            assert smallest.peak_gib > limit
            needed = min(c.peak_gib for c in candidates if c.family == smallest.family)
            # With one layer per stage, full recomputation may need slightly more.
            assert needed <= smallest.peak_gib * (1 + 1e-9) < 1.02 * needed, smallest.family


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
        candidates = search(small).fitting
        similar = [
            c for c in candidates if penalized_step_s(c) <= (1 + TIE_MARGIN) * min(map(penalized_step_s, candidates))
        ]
        assert candidates[0] in similar and count_parallelisms(candidates[0].layout) == min(
            count_parallelisms(c.layout) for c in similar
        )
        fastest = min(candidates, key=lambda c: c.step_s)
        extra = count_parallelisms(fastest.layout) - count_parallelisms(candidates[0].layout)
        assert candidates[0].step_s <= fastest.step_s * (1 + SIMPLICITY_MARGIN) ** extra * (1 + TIE_MARGIN) * (1 + 1e-9)
        assert [c.step_s for c in candidates[1:]] == sorted(c.step_s for c in candidates[1:])


def test_small_model_is_replicated() -> None:
    for gpu, nodes in (("h100", 2), ("a100", 8), ("v100", 1)):
        best = search(problem(TINY, gpu, world=8 * nodes, global_batch=128 * nodes, seq_len=256)).best
        assert best is not None and best.layout.strategy == "ddp" and not best.layout.is_model_parallel


def test_larger_models_are_sharded_then_split() -> None:
    best = search(problem(LLAMA_8B, world=16, seq_len=8192)).best
    assert best is not None and best.layout.is_sharded and best.peak_gib < 64
    best = search(problem(LLAMA_405B, world=512, seq_len=8192, global_batch=512)).best
    assert best is not None and best.layout.is_model_parallel and best.layout.is_sharded


def test_larger_gpu_recomputes_no_more_and_is_no_slower() -> None:
    recomputation, seconds = [], []
    for limit in (20.0, 40.0, 120.0):
        best = search(problem(LLAMA_8B, world=64, seq_len=8192, global_batch=256, limit_gib=limit)).best
        assert best is not None
        recomputation.append(CHECKPOINTING_MODES.index(best.layout.activation_checkpointing))
        seconds.append(best.step_s)
    assert recomputation[0] > recomputation[-1]
    # The search may prefer a simpler layout within SIMPLICITY_MARGIN and TIE_MARGIN.
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
    candidates = search(problem(dataclasses.replace(SHALLOW, dim=2048), **fixed)).fitting
    assert candidates
    in_layout = {n: v for n, v in fixed.items() if n != "micro_batch"}
    for c in candidates:
        assert {name: getattr(c.layout, name) for name in in_layout} == in_layout
        assert fixed.get("micro_batch", c.config.micro_batch) == c.config.micro_batch


def test_shard_groups_stay_within_published_size() -> None:
    candidates = search(problem(LLAMA_8B, world=2048, global_batch=2048)).fitting
    assert candidates and max(c.layout.dp_shard * c.layout.cp for c in candidates) <= 512
    requested = search(problem(LLAMA_8B, world=2048, global_batch=2048, strategy="fsdp", tp=1, cp=1, pp=1)).best
    assert requested is not None and requested.layout.dp_shard == 2048


def test_pairs_of_odd_sequences_are_not_split_by_length() -> None:
    odd = problem(LLAMA_8B, world=8, seq_len=2 * 2049, sequences_per_sample=2)
    candidates = search(odd).fitting
    assert candidates and {(c.layout.tp, c.layout.cp) for c in candidates} == {(1, 1)}
    even = search(dataclasses.replace(odd, seq_len=2 * 2048)).fitting
    assert {1, 2} <= {c.layout.tp for c in even}


def test_offload_applies_to_sharded_layouts() -> None:
    parallel = problem(LLAMA_8B).parallel
    offloaded = dataclasses.replace(problem(LLAMA_8B, world=8), parallel=type(parallel)(offload=True))
    for c in search(offloaded).fitting:
        assert c.layout.offload is c.layout.is_fully_sharded


def test_search_on_largest_cluster() -> None:
    outcome = search(problem(LLAMA_405B, world=16_384, seq_len=8192, global_batch=2048))
    assert outcome.considered > 5000
    assert outcome.best is not None and outcome.best.layout.world_size == 16_384
    assert outcome.best.layout.tp > 1 and outcome.best.layout.pp > 1  # as the model's authors did


def test_no_fit_returns_smallest_per_family() -> None:
    outcome = search(problem(LLAMA_8B, "t4", world=4, gpus_per_node=4))
    assert outcome.best is None and outcome.fitting == ()
    assert {"ddp", "fsdp", "tensor parallel", "pipeline"} <= {c.family for c in outcome.smallest}
    assert all(c.peak_gib > 12 for c in outcome.smallest)
