"""The plan's description of the training: one line per part of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import JobSpec, RunSpec, ScriptSpec
from clustertrain.config.model import ModelSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.plan.planner import plan

USER_MODEL = {"entry": "mine:Net"}
HELD_OUT = {"validation": 0.1}


def describe(script: str = "", **tables: Any) -> dict[str, str]:
    tables = {"train": {"steps": 200}, **tables}
    script_spec = ScriptSpec(path=script, cwd="/") if script else None
    return plan(RunSpec(recipe=build(tables, Recipe, "recipe"), script=script_spec), ClusterProfile(), "cpu").training


def test_json_has_all_descriptions() -> None:
    result = plan(RunSpec(), ClusterProfile(), "cpu")
    decoded = msgspec.json.decode(msgspec.json.encode(result))["training"]
    assert list(decoded) == ["model", "objective", "optimizer", "schedule", "clipping", "evaluation"]
    assert decoded == result.training


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, "cosine over 200 steps: up to 0.001 in 4 steps, then down to 0.0001"),
        ({"kind": "linear", "floor": 0.0}, "linear over 200 steps: up to 0.001 in 4 steps, then down to 0"),
        ({"kind": "constant", "warmup_steps": 0}, "constant over 200 steps: 0.001 from the first step"),
        ({"kind": "wsd"}, "wsd over 200 steps: up to 0.001 in 4 steps, constant, and down to 0.0001 in the last 40"),
        (
            {"kind": "step", "milestones": [50, 100]},
            "step over 200 steps: up to 0.001 in 4 steps, times 0.1 after 50 and 100, 1e-05 at the end",
        ),
        (
            {"kind": "one-cycle"},
            "one-cycle over 200 steps: from 4e-05 up to 0.001 at 60, down to 4e-09; momentum from 0.95 down to 0.85, "
            "and back",
        ),
        (
            {"kind": "one-cycle", "cycle_momentum": False},
            "one-cycle over 200 steps: from 4e-05 up to 0.001 at 60, down to 4e-09",
        ),
        (
            {"kind": "plateau", "patience": 1},
            "plateau over 200 steps: up to 0.001 in 4 steps, times 0.5 after more than 1 evaluation without a better "
            "validation_loss, not below 0.0001",
        ),
    ],
)
def test_schedule_description(schedule: dict[str, Any], expected: str) -> None:
    assert describe(schedule=schedule, optim={"lr": 1e-3}, data=HELD_OUT)["schedule"] == expected


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({}, "cross-entropy"),
        (
            {"objective": {"label_smoothing": 0.1, "ignore_index": -1}},
            "cross-entropy, label smoothing 0.1, targets of -1 are ignored",
        ),
        (
            {"model": {"kind": "two-tower"}, "objective": {"group": 8}},
            "nt-xent, each sample against the others of its group of 8",
        ),
        ({"model": USER_MODEL}, "the model's loss if it computes one, otherwise cross-entropy"),
        ({"model": USER_MODEL, "objective": {"kind": "huber", "delta": 2.0}}, "huber, linear from 2 on"),
        (
            {"model": USER_MODEL, "objective": {"kind": "nt-xent", "group": 4}},
            "nt-xent at temperature 0.1, each sample against the others of its group of 4",
        ),
        ({"model": USER_MODEL, "objective": {"kind": "mse"}}, "mse"),
    ],
)
def test_objective_description(tables: dict[str, Any], expected: str) -> None:
    assert describe(**tables)["objective"] == expected


def test_model_description() -> None:
    assert describe(model={"kind": "convnet"})["model"].startswith("convnet, ")
    assert describe(model={"preset": "tiny"})["model"] == f"decoder, {ModelSpec().parameters():,} parameters"
    assert describe(model=USER_MODEL)["model"] == "built by mine:Net"


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        ({}, "global gradient norm at most 1"),
        ({"clip_norm": 0.0}, "none"),
        ({"clip": "value", "clip_value": 0.5}, "each element of the gradient between -0.5 and 0.5"),
        (
            {"clip": "adaptive"},
            "global gradient norm at most the 0.95 quantile of recent norms, initially 1",
        ),
    ],
)
def test_clipping_description(optim: dict[str, Any], expected: str) -> None:
    assert describe(optim=optim)["clipping"] == expected


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({}, "none, because data.validation is not set; loss decides, lower is better"),
        (
            {"data": HELD_OUT, "evaluation": {"samples": 64, "patience": 3}},
            "every 20 steps and at the end, on 10% of the data, held out (at most 64 samples): loss, accuracy, "
            "perplexity, bits_per_token; validation_loss decides, lower is better; the run ends after 3 evaluations "
            "without a better one",
        ),
        (
            {
                "model": {"kind": "convnet"},
                "data": {"validation_path": "other.npz"},
                "evaluation": {"every": 200},
                "contract": {"metric": "validation_accuracy", "slices": ["a", "b"]},
            },
            "at the end, on other.npz: loss, accuracy; validation_accuracy decides, higher is better; slices a, b are "
            "reported",
        ),
        (
            {"model": USER_MODEL, "data": HELD_OUT},
            "every 20 steps and at the end, on 10% of the data, held out: loss; validation_loss decides, lower is "
            "better",
        ),
    ],
)
def test_evaluation_description(tables: dict[str, Any], expected: str) -> None:
    assert describe(**tables)["evaluation"] == expected


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"model": USER_MODEL}, "adamw: betas 0.9 and 0.95; weight decay 0.1"),
        ({"model": {"kind": "convnet"}}, "adamw: betas 0.9 and 0.999; weight decay 0.1"),
        (
            {"model": USER_MODEL, "optim": {"name": "sgd", "nesterov": True, "freeze": ["a"]}},
            "sgd: momentum 0.9, nesterov; weight decay 0.1 except for norms, biases and embeddings; frozen: a",
        ),
        ({"optim": {"name": "adafactor"}}, "adafactor; "),
        ({"optim": {"name": "muon"}}, "muon: momentum 0.95, betas 0.9 and 0.95; "),
    ],
)
def test_optimizer_description_with_unknown_state(tables: dict[str, Any], expected: str) -> None:
    assert describe(**tables)["optimizer"].startswith(expected)


def test_packing_description() -> None:
    packed = describe(data={"kind": "tokens", "path": "/shards", "pack": True, "seq_len": 512})
    assert "samples of 512 tokens" in packed["data"] and "clustertrain diagnose data" in packed["data"]
    assert "data" not in describe()


def test_script_description() -> None:
    (line,) = describe(script="/home/me/train.py").values()
    assert line.startswith("train.py defines model, data, batch, objective, optimizer, schedule")


def test_command_description() -> None:
    def describe_command(*command: str, **job: Any) -> dict[str, str]:
        spec = RunSpec(job=JobSpec(**job), script=ScriptSpec(command=command, cwd="/"))
        return plan(spec, ClusterProfile(), "cpu").training

    assert describe_command("python", "train.py") == {"command": "one rank runs python train.py"}
    long = describe_command("python", "-c", "a\n" * 100, gpus=2)["command"]
    assert long.startswith("each of 2 ranks runs python -c 'a a ") and long.endswith(" …")
    assert len(long) < 125 and "\n" not in long
    job = {"stop_signal": "USR1:all", "resume_args": "--from {checkpoint}", "checkpoints": "out/*.pt"}
    container = {"container": "/image.sif", "container_runtime": "apptainer", "container_mounts": ("/a:/b:ro", "/c:/c")}
    assert describe_command("./run.sh", **job, **container) == {
        "command": "one rank runs ./run.sh",
        "stop signal": "USR1, to every process of a rank",
        "resume arguments": "--from {checkpoint}",
        "checkpoints": "out/*.pt",
        "container": "/image.sif with apptainer; mounts /a:/b:ro, /c:/c",
    }
