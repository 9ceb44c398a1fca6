"""What a plan says of the layouts that it did not take, and of what would make it fit: with numbers, and true."""

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
from clustertrain.plan.search.layouts import FAMILIES, SearchProblem, search
from tests.unit.plan.problems import LLAMA_8B, problem

pytestmark = pytest.mark.long


def said(of: SearchProblem) -> dict[str, str]:
    return dict(search_result.explain_rejected(of, search(of)))


def anything(rng: random.Random) -> SearchProblem:
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
        any_problem = anything(rng)
        found = search(any_problem)
        words = dict(search_result.explain_rejected(any_problem, found))
        taken = {found.best.family} if found.best else set()
        for kind in set(FAMILIES) - taken:
            if (kind == "single") == (any_problem.world_size == 1):
                assert re.search(r"\d", words[kind]), (kind, any_problem)
        assert not taken & set(words)


def test_rejected_family_exceeds_memory() -> None:
    of = problem(LLAMA_8B, world=8, limit_gib=62.0)
    words = said(of)
    found = re.search(r"needs ([\d.]+) GiB per rank, more than 62.0 GiB", words["ddp"])
    assert found is not None and float(found[1]) > 62


def test_rejected_family_shows_relative_speed() -> None:
    of = problem(LLAMA_8B, world=64, seq_len=8192, global_batch=256)
    found = search(of)
    assert found.best is not None
    for kind, words in said(of).items():
        more = re.search(r"s per step, ([\d.]+)% (slower|faster)", words)
        if more is None:
            continue
        least = min(c.step_s for c in found.fitting if c.family == kind)
        percent = float(more[1]) * (1 if more[2] == "slower" else -1)
        assert percent == pytest.approx(100 * (least / found.best.step_s - 1), abs=0.051)
        assert more[2] == "slower" or "within the error" in words
    assert any("slower" in words for words in said(of).values())


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"global_batch": 100}, "ddp", "train.global_batch = 100 does not divide over 16 ranks: 100 / 16 = 6.25"),
        ({"seq_len": 1001}, "context parallel", "cp 2 does not divide seq_len 1001"),
        ({"seq_len": 1001}, "tensor parallel", "tp 2 with sequence parallel does not divide seq_len 1001"),
        ({"gpus_per_node": 1}, "tensor parallel", "these nodes have 1 GPU"),
        ({"world": 8}, "hybrid-shard", "one node of 8 cannot replicate"),
        ({"world": 1024, "global_batch": 1024}, "fsdp", "1024 ranks would share parameters"),
    ],
)
def test_exclusion_reason(changes: dict[str, Any], kind: str, words: str) -> None:
    assert words in said(problem(LLAMA_8B, **changes))[kind]


def test_user_exclusions_have_no_reason() -> None:
    assert said(problem(LLAMA_8B, strategy="fsdp", tp=1, cp=1, pp=1)) == {}
    assert "pipeline" not in said(problem(LLAMA_8B, tp=2, cp=1, pp=1))


@pytest.mark.parametrize(
    "of",
    [
        problem(LLAMA_8B, "t4", world=4, gpus_per_node=4),
        problem(LLAMA_8B, "a100", world=4, gpus_per_node=4, seq_len=8192),
        problem(LLAMA_8B, "rtx-4090", world=6, gpus_per_node=6, global_batch=6),
        problem(LLAMA_8B, "l4", world=8, strategy="fsdp", tp=1, cp=1, pp=1),
    ],
    ids=["t4", "a100", "rtx-4090", "l4-fsdp"],
)
def test_suggested_gpu_count_is_minimal(of: SearchProblem) -> None:
    named = re.search(r"(\d+) nodes? of (\d+) x \((\d+) GPUs\)", search_result.suggest_changes(of, "x"))
    assert named is not None
    nodes, per_node, gpus = (int(n) for n in named.groups())
    assert nodes * per_node == gpus and per_node == of.gpus_per_node

    def fits_on(world: int) -> bool:
        whole = -(-of.global_batch // world) * world
        return search(dataclasses.replace(of, world_size=world, global_batch=whole)).best is not None

    assert fits_on(gpus) and not fits_on(gpus - per_node)


def planned(job: dict[str, Any], train: dict[str, Any], parallel: dict[str, Any], seq_len: int = 2048) -> Plan:
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
        ({"train": {"global_batch": 8}, "seq_len": 131_072}, {"seq_len": 32_768}),
    ],
    ids=["micro-batch", "checkpointing", "layout", "offload", "sequence"],
)
def test_suggested_change_fits(request_: dict[str, Any], change: dict[str, Any]) -> None:
    before: dict[str, Any] = {"job": {}, "train": {}, "parallel": {}, **request_}
    before["job"] = {"nodes": 1, "gpus": 8, "gpu_type": "a100", **before["job"]}
    made = planned(**before)
    assert made.memory.fits is False and made.suggested_changes
    after: dict[str, Any] = {
        k: ({**v, **change.get(k, {})} if isinstance(v, dict) else change.get(k, v)) for k, v in before.items()
    }
    ((key, value),) = change.items()
    name, word = next(iter(value.items())) if isinstance(value, dict) else (key, value)
    assert (
        str(name).replace("_", "") in made.suggested_changes.replace("_", "")
        and str(word).lower() in made.suggested_changes
    )
    assert planned(**after).memory.fits is True


def test_combined_change_is_suggested() -> None:
    of = problem(
        LLAMA_8B, "a100", world=8, activation_checkpointing="none", micro_batch=8, strategy="fsdp", tp=1, cp=1, pp=1
    )
    assert search(of).best is None
    assert search_result.suggest_changes(of, "a100").startswith(
        "use train.micro_batch = 0 and parallel.activation_checkpointing = 'full'"
    )
    wanted = dataclasses.replace(of.constraints, micro_batch=0, activation_checkpointing="full")
    assert search(dataclasses.replace(of, constraints=wanted)).best is not None


def test_indivisible_batch_warns() -> None:
    made = planned({"nodes": 1, "gpus": 6, "gpu_type": "h200"}, {}, {})
    assert made.layout.is_model_parallel
    assert any("64 / 6 = 10.6667" in note and "60 or 66" in note for note in made.warnings)
    even = planned({"nodes": 1, "gpus": 8, "gpu_type": "h200"}, {}, {})
    assert not even.layout.is_model_parallel and not any("global_batch" in note for note in even.warnings)


def test_reasons_show_time_shares_and_runners_up_differ() -> None:
    made = planned({"nodes": 8, "gpus": 8, "gpu_type": "h100"}, {}, {})
    (where,) = [r for r in made.reasons if r.startswith("time of a step: ")]
    shares = [int(n) for n in re.findall(r"(\d+)%", where)]
    assert shares == sorted(shares, reverse=True) and 90 <= sum(shares) <= 102
    names = [runner.layout for runner in made.runners_up]
    assert 1 <= len(names) == len(set(names)) <= 3
    seconds = [runner.step_s for runner in made.runners_up]
    assert seconds == sorted(seconds)
    assert msgspec.json.decode(msgspec.json.encode(made))["runners_up"][0]["layout"] == names[0]
