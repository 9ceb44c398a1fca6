"""The plan's reasons against rejected layouts and its suggested changes: they have numbers, and hold."""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any

import msgspec
import pytest

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.data import DataSpec
from clustertrain.config.job import JobSpec, RunSpec
from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.recipe import Recipe
from clustertrain.config.train import TrainSpec
from clustertrain.plan.cost.model_shape import DecoderSizes
from clustertrain.plan.explain import search_result
from clustertrain.plan.planner import Plan, plan
from clustertrain.plan.search.layouts import FAMILIES, search
from clustertrain.plan.search.problem import SearchProblem
from tests.unit.plan.problems import LLAMA_8B, problem

pytestmark = pytest.mark.long


def explain(search_problem: SearchProblem) -> dict[str, str]:
    return dict(search_result.explain_rejected(search_problem, search(search_problem)))


def random_problem(rng: random.Random) -> SearchProblem:
    dim, heads = rng.choice((256, 1024, 4096)), rng.choice((4, 8, 32))
    model = DecoderSizes(
        vocab_size=rng.choice((256, 32_000, 50_257)), dim=dim, layers=rng.choice((1, 3, 8, 32)), heads=heads,
        kv_heads=rng.choice((heads, 4)), hidden=dim * rng.choice((3, 4)),
    )  # fmt: skip
    gpus = rng.choice((1, 4, 8))
    world = gpus * rng.choice((1, 2, 3, 8, 100))
    batch = world * rng.choice((1, 4, 16)) if rng.random() < 0.7 else rng.choice((1, 7, 32, 1000))
    gpu = rng.choice(("v100", "a100", "h100", "b200", "l4", "gb200"))
    seq_len = rng.choice((128, 2048, 8192, 1001))
    return problem(model, gpu, world=world, gpus_per_node=gpus, global_batch=batch, seq_len=seq_len)


def test_every_rejected_family_has_a_number() -> None:
    rng = random.Random(20)
    for _ in range(60):
        search_problem = random_problem(rng)
        outcome = search(search_problem)
        reasons = dict(search_result.explain_rejected(search_problem, outcome))
        chosen = {outcome.best.family} if outcome.best else set()
        for family in set(FAMILIES) - chosen:
            if (family == "single") == (search_problem.world_size == 1):
                assert re.search(r"\d", reasons[family]), (family, search_problem)
        assert not chosen & set(reasons)


def test_rejected_family_exceeds_memory() -> None:
    search_problem = problem(LLAMA_8B, world=8, limit_gib=62.0)
    reasons = explain(search_problem)
    needed = re.search(r"needs ([\d.]+) GiB per rank, more than 62.0 GiB", reasons["ddp"])
    assert needed is not None and float(needed[1]) > 62


def test_rejected_family_shows_relative_speed() -> None:
    search_problem = problem(LLAMA_8B, world=64, seq_len=8192, global_batch=256)
    outcome = search(search_problem)
    assert outcome.best is not None
    for family, reason in explain(search_problem).items():
        match = re.search(r"s per step, ([\d.]+)% (slower|faster)", reason)
        if match is None:
            continue
        fastest_s = min(c.step_s for c in outcome.fitting if c.family == family)
        ratio = fastest_s / outcome.best.step_s
        expected = ratio - 1 if match[2] == "slower" else 1 / ratio - 1
        assert float(match[1]) == pytest.approx(100 * expected, abs=0.051)
        assert match[2] == "slower" or "within the error" in reason or "must gain" in reason
    assert any("slower" in reason for reason in explain(search_problem).values())


def test_a_faster_layout_has_the_same_figure_and_reason_wherever_it_is_named() -> None:
    rng, named = random.Random(5), 0
    for _ in range(60):
        search_problem = random_problem(rng)
        outcome = search(search_problem)
        if outcome.best is None:
            continue
        why = " ".join(search_result.explain_chosen(outcome.best, outcome, "GPU", ""))
        for reason in dict(search_result.explain_rejected(search_problem, outcome)).values():
            layout, _, rest = reason.partition(":")
            match = re.search(rf"{re.escape(layout)} would be ([\d.]+)% faster", why)
            if match is not None:
                named += 1
                assert f"{match[1]}% faster" in rest and "within the error" not in rest and "must gain 5%" in rest
    assert named > 2


@pytest.mark.parametrize(
    ("changes", "family", "reason"),
    [
        ({"global_batch": 100}, "ddp", "train.global_batch = 100 does not divide over 16 ranks: 100 / 16 = 6.25"),
        ({"seq_len": 1001}, "context parallel", "cp 2 does not divide seq_len 1001"),
        ({"seq_len": 1001}, "tensor parallel", "tp 2 with sequence parallel does not divide seq_len 1001"),
        ({"gpus_per_node": 1}, "tensor parallel", "these nodes have 1 GPU"),
        ({"world": 8}, "hybrid-shard", "one node of 8 cannot replicate"),
        ({"world": 1024, "global_batch": 1024}, "fsdp", "1024 ranks would share parameters"),
    ],
)
def test_exclusion_reason(changes: dict[str, Any], family: str, reason: str) -> None:
    assert reason in explain(problem(LLAMA_8B, **changes))[family]


def test_user_exclusions_have_no_reason() -> None:
    assert explain(problem(LLAMA_8B, strategy="fsdp", tp=1, cp=1, pp=1)) == {}
    assert "pipeline" not in explain(problem(LLAMA_8B, tp=2, cp=1, pp=1))


@pytest.mark.parametrize(
    "search_problem",
    [
        problem(LLAMA_8B, "t4", world=4, gpus_per_node=4),
        problem(LLAMA_8B, "a100", world=4, gpus_per_node=4, seq_len=8192),
        problem(LLAMA_8B, "rtx-4090", world=6, gpus_per_node=6, global_batch=6),
        problem(LLAMA_8B, "l4", world=8, strategy="fsdp", tp=1, cp=1, pp=1),
    ],
    ids=["t4", "a100", "rtx-4090", "l4-fsdp"],
)
def test_suggested_gpu_count_is_minimal(search_problem: SearchProblem) -> None:
    match = re.search(r"(\d+) nodes? of (\d+) x \((\d+) GPUs\)", search_result.suggest_changes(search_problem, "x"))
    assert match is not None
    nodes, per_node, gpus = (int(n) for n in match.groups())
    assert nodes * per_node == gpus and per_node == search_problem.gpus_per_node

    def fits_on(world: int) -> bool:
        divisible_batch = -(-search_problem.global_batch // world) * world
        return (
            search(dataclasses.replace(search_problem, world_size=world, global_batch=divisible_batch)).best is not None
        )

    assert fits_on(gpus) and not fits_on(gpus - per_node)


def make_plan(job: dict[str, Any], train: dict[str, Any], parallel: dict[str, Any], seq_len: int = 2048) -> Plan:
    recipe = Recipe(
        model=LLAMA_8B,
        data=DataSpec(seq_len=seq_len),
        train=TrainSpec(**{"global_batch": 64, **train}),
        parallel=ParallelSpec(**parallel),
    )
    return plan(RunSpec(job=JobSpec(**job), recipe=recipe), ClusterProfile(), "cuda")


@pytest.mark.parametrize(
    ("request_", "change"),
    [
        (
            {"job": {"layout": "fsdp", "gpu_type": "h100"}, "train": {"micro_batch": 8}, "seq_len": 8192},
            {"train": {"micro_batch": 0}},
        ),
        (
            {
                "job": {"layout": "fsdp", "gpu_type": "h100"},
                "parallel": {"activation_checkpointing": "none"},
                "seq_len": 16_384,
            },
            {"parallel": {"activation_checkpointing": "full"}},
        ),
        ({"job": {"layout": "ddp"}}, {"job": {"layout": "auto"}}),
        ({"job": {"gpus": 4, "gpu_type": "t4"}}, {"parallel": {"offload": True}}),
        ({"train": {"global_batch": 8}, "seq_len": 262_144}, {"seq_len": 32_768}),
    ],
    ids=["micro-batch", "checkpointing", "layout", "offload", "sequence"],
)
def test_suggested_change_fits(request_: dict[str, Any], change: dict[str, Any]) -> None:
    before: dict[str, Any] = {"job": {}, "train": {}, "parallel": {}, **request_}
    before["job"] = {"nodes": 1, "gpus": 8, "gpu_type": "a100", **before["job"]}
    result = make_plan(**before)
    assert result.memory.fits is False and result.suggested_changes
    after: dict[str, Any] = {
        k: ({**v, **change.get(k, {})} if isinstance(v, dict) else change.get(k, v)) for k, v in before.items()
    }
    ((key, value),) = change.items()
    name, word = next(iter(value.items())) if isinstance(value, dict) else (key, value)
    assert (
        str(name).replace("_", "") in result.suggested_changes.replace("_", "")
        and str(word).lower() in result.suggested_changes
    )
    assert make_plan(**after).memory.fits is True


def test_combined_change_is_suggested() -> None:
    search_problem = problem(
        LLAMA_8B, "a100", world=8, activation_checkpointing="none", micro_batch=8, strategy="fsdp", tp=1, cp=1, pp=1
    )
    assert search(search_problem).best is None
    assert search_result.suggest_changes(search_problem, "a100").startswith(
        "use train.micro_batch = 0 and parallel.activation_checkpointing = 'full'"
    )
    constraints = dataclasses.replace(search_problem.constraints, micro_batch=0, activation_checkpointing="full")
    assert search(dataclasses.replace(search_problem, constraints=constraints)).best is not None


def test_indivisible_batch_warns() -> None:
    result = make_plan({"nodes": 1, "gpus": 6, "gpu_type": "h200"}, {}, {})
    assert result.layout.is_model_parallel
    assert any("64 / 6 = 10.6667" in note and "60 or 66" in note for note in result.warnings)
    even = make_plan({"nodes": 1, "gpus": 8, "gpu_type": "h200"}, {}, {})
    assert not even.layout.is_model_parallel and not any("global_batch" in note for note in even.warnings)


def test_reasons_show_time_shares_and_runners_up_differ() -> None:
    result = make_plan({"nodes": 8, "gpus": 8, "gpu_type": "h100"}, {}, {})
    (breakdown,) = [r for r in result.reasons if r.startswith("time of a step: ")]
    shares = [int(n) for n in re.findall(r"(\d+)%", breakdown)]
    assert shares == sorted(shares, reverse=True) and 90 <= sum(shares) <= 102
    names = [runner.layout for runner in result.runners_up]
    assert 1 <= len(names) == len(set(names)) <= 3
    seconds = [runner.step_s for runner in result.runners_up]
    assert seconds == sorted(seconds)
    assert msgspec.json.decode(msgspec.json.encode(result))["runners_up"][0]["layout"] == names[0]
