"""Settings that differ between runs, and the telemetry of two runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from clustertrain import fsio
from clustertrain.report.runs import compare
from clustertrain.report.runs.settings import load_settings
from clustertrain.run.run_dir import RunDir
from tests.unit.telemetry.runs import busy, gpu, new_attempt, new_run, record

SPEC = """
version = 1
[job]
nodes = 2
gpus = 4
mem = "{mem}"
[recipe.optim]
lr = {lr}
[recipe.telemetry]
interval_s = {interval}
[env]
SECRET_{name} = "{name}"
"""
LAYOUT = {"strategy": "fsdp", "dp_shard": 8}


def make_run(home: Path, name: str, lr: float, mem: str, micro_batch: int, interval: float = 1.0) -> RunDir:
    run = new_run(home, name)
    run.spec.write_text(SPEC.format(lr=lr, mem=mem, interval=interval, name=name.partition("-")[0].upper()))
    plan = {"nodes": 2, "precision": "bf16", "layout": LAYOUT, "batch": {"micro_batch": micro_batch}, "reasons": [name]}
    fsio.write_json(run.plan, plan)
    return run


def test_differing_settings_are_listed_without_secrets(tmp_path: Path) -> None:
    a = make_run(tmp_path, "one-aaaaaa", 3e-4, "100G", 4, interval=1.0)
    b = make_run(tmp_path, "two-bbbbbb", 1e-4, "100G", 8, interval=5.0)
    for run in (a, b):
        record(new_attempt(run), [(gpu(i), busy()) for i in range(2)])
    comparison = compare.compare_runs([a, b])
    assert [(s.key, *s.values) for s in comparison.settings] == [
        ("batch.micro_batch", 4, 8),
        ("recipe.optim.lr", 3e-4, 1e-4),
        ("env", ["SECRET_ONE"], ["SECRET_TWO"]),
    ]
    assert load_settings(a)["layout"] == "fsdp"
    assert '"ONE"' not in json.dumps(msgspec.to_builtins(comparison)), "a variable's value may be a secret"


def test_differing_packages_of_the_ranks_are_listed(tmp_path: Path) -> None:
    a, b = (make_run(tmp_path, name, 3e-4, "", 4) for name in ("one-aaaaaa", "two-bbbbbb"))
    packages = {"torch": "2.13.0", "numpy": "2.0"}
    new_attempt(a).rank_python.write_text(json.dumps({"python": "3.11.7", "packages": packages}))
    assert not [s.key for s in compare.compare_runs([a, b]).settings if s.key.startswith("python")]
    new_attempt(b).rank_python.write_text(json.dumps({"python": "3.11.7", "packages": {**packages, "torch": "2.12"}}))
    (torch_row,) = [s for s in compare.compare_runs([a, b]).settings if s.key.startswith("python")]
    assert (torch_row.key, torch_row.values) == ("python.packages.torch", ["2.13.0", "2.12"])


@pytest.mark.parametrize(
    ("spec", "included", "excluded"),
    [
        (
            '[script]\npath = "train.py"\nargs = ["--lr", "1"]\ncwd = "/"\n',
            {"script.args", "recipe.train.seed", "recipe.checkpoint.keep"},
            {"recipe.optim.lr", "recipe.optim.name", "recipe.model.dim", "recipe.train.steps", "recipe.data.seq_len"},
        ),
        (
            '[recipe.model]\nentry = "mine:Net"\nargs = { dim = 3 }\n',
            {"recipe.model.entry", "recipe.model.args.dim", "recipe.optim.lr"},
            {"recipe.model.dim", "recipe.model.layers", "recipe.model.convnet.width"},
        ),
    ],
    ids=["script", "model entry"],
)
def test_only_effective_settings_are_compared(
    spec: str, included: set[str], excluded: set[str], tmp_path: Path
) -> None:
    run = make_run(tmp_path, "one-aaaaaa", 3e-4, "", 4)
    with run.spec.open("a") as file:
        file.write(spec)
    keys = load_settings(run).keys()
    assert included <= keys and not excluded & keys


def test_unreadable_plan_is_reported(tmp_path: Path) -> None:
    a, b = (make_run(tmp_path, name, 3e-4, "", 4) for name in ("one-aaaaaa", "two-bbbbbb"))
    b.plan.write_text("no plan")
    comparison = compare.compare_runs([a, b])
    assert comparison.settings == []
    assert any(note.startswith("the settings of two-bbbbbb cannot be read") for note in comparison.notes)


def test_telemetry_of_exactly_two_runs_is_compared(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, name, 3e-4, "", 4) for name in ("one-aaaaaa", "two-bbbbbb", "new-cccccc")]
    for run, utilization in zip(runs[:2], (0.8, 0.4), strict=True):
        record(new_attempt(run), [(gpu(i), busy(utilization)) for i in range(2)])
    telemetry = compare.compare_runs(runs[:2]).telemetry
    assert telemetry is not None
    assert telemetry.figures["utilization"].ratio == pytest.approx(0.5)
    assert compare.compare_runs(runs).telemetry is None, "only two runs are compared side by side"


def test_runs_without_telemetry_have_no_comparison(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, name, 3e-4, "", 4) for name in ("one-aaaaaa", "two-bbbbbb")]
    assert compare.compare_runs(runs).telemetry is None
