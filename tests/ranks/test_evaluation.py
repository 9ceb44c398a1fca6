"""Evaluation gives the same result under every layout as on one process, and does not change training."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from clustertrain import fsio
from clustertrain.config.parsing.documents import load_toml
from clustertrain.plan.layout import Layout
from clustertrain.run import metrics
from clustertrain.run.run_dir import RunDir
from tests.ranks.rank_pool import SEQ_LEN, Ranks, digest, make_run, one_thread, write_plan

pytestmark = pytest.mark.ranks

SAMPLES = 13  # prime
STEPS = 4


class ValidationData:
    """Validation data with two slices that are spread unevenly over the micro-batches."""

    slice_names = ("day", "night")

    samples = SAMPLES

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(0, 256, (SEQ_LEN + 1,), generator=torch.Generator().manual_seed(i))
        torch.rand(1)  # as a dataset that uses the global random generator of its rank
        return tokens[:-1], tokens[1:]

    def slice_of(self, i: int) -> int:
        return int(i % 3 == 0)


def use_validation_data(samples: int = SAMPLES) -> None:
    """Setup: give the trainer :class:`ValidationData` with ``samples`` samples."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from clustertrain.train import trainer

    ValidationData.samples = samples
    task = trainer.build_task

    def with_validation(recipe: Any, **kw: Any) -> Any:
        return dataclasses.replace(task(recipe, **kw), validation=ValidationData())

    trainer.build_task = with_validation


def make_evaluation_run(folder: Path, layout: Layout, tables: dict[str, Any] | None = None, **kw: Any) -> RunDir:
    kw = {"steps": STEPS, "every": 100, "micro_batch": 2, **kw}  # in a pipeline the samples make two such chunks
    run = make_run(folder, layout, layout.world_size, **kw)
    spec = load_toml(run.spec)
    for name, table in (tables or {}).items():
        spec["recipe"].setdefault(name, {}).update(table)
    run.spec.write_text(tomli_w.dumps(spec))
    return run


def evaluations(run: RunDir) -> dict[int, dict[str, float]]:
    return {
        r["step"]: {k: v for k, v in r.items() if k.startswith("validation_")}
        for r in metrics.load_rows(run)
        if "validation_loss" in r
    }


EVALUATE = {
    "data": {"validation": 0.1},
    "evaluation": {"every": 2, "metrics": ["accuracy", "top5", "perplexity", "bits_per_token"]},
}


SAVED = 5  # predictions, of samples that several ranks have


def train(folder: Path, layout: Layout, samples: int = SAMPLES, **kw: Any) -> dict[int, dict[str, float]]:
    saved = 0 if layout.cp > 1 else SAVED
    tables = {**EVALUATE, "evaluation": {**EVALUATE["evaluation"], "save_predictions": saved}}
    run = make_evaluation_run(folder, layout, tables, **kw)
    Ranks(run, layout.world_size, setup=use_validation_data, args=(samples,)).expect(0)
    if saved:
        rows = [row for path in run.predictions.glob(f"step-{STEPS:08d}/*.jsonl") for row in fsio.read_jsonl(path)]
        targets = {row["sample"]: row["target"] for row in rows}
        expected = range(min(SAVED, samples))
        assert len(rows) == len(expected) and targets == {i: ValidationData()[i][1].tolist() for i in expected}
        assert all(len(row["prediction"]) == SEQ_LEN for row in rows)
    return evaluations(run)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, float]]:
    return train(tmp_path_factory.mktemp("single") / "run", Layout())


LAYOUTS = [
    Layout(strategy="ddp", dp_replicate=3),
    Layout(strategy="zero1", dp_replicate=2),
    Layout(strategy="fsdp", dp_shard=2),
    Layout(strategy="hybrid-shard", dp_replicate=2, dp_shard=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(cp=2),
    Layout(pp=2, schedule="gpipe"),
    Layout(pp=2, schedule="1f1b", strategy="fsdp", dp_shard=2),
    Layout(pp=2, schedule="interleaved", virtual_stages=2),
    Layout(pp=2, schedule="zero-bubble", virtual_stages=2),
    Layout(pp=2, schedule="zbv", virtual_stages=2, tp=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
def test_layout_evaluates_like_one_process(
    tmp_path: Path, expected: dict[int, dict[str, float]], layout: Layout
) -> None:
    result = train(tmp_path / "run", layout)
    assert result.keys() == expected.keys() == {2, 4}
    for step, values in expected.items():
        assert result[step].keys() == values.keys()
        for name, value in values.items():
            assert result[step][name] == pytest.approx(value, rel=2e-5), (step, name)


def test_evaluation_does_not_change_training(tmp_path: Path) -> None:
    layout = Layout(strategy="fsdp", dp_shard=4)
    options = {"model": {"dropout": 0.1}, "global_batch": 16}
    folder_without, folder_with = (tmp_path / name for name in ("without", "with"))
    plain = make_evaluation_run(folder_without, layout, {**EVALUATE, "evaluation": {"every": 1000}}, **options)
    Ranks(plain, 4, setup=use_validation_data).expect(0)
    assert set(evaluations(plain)) == {4}  # only at the end
    evaluated = make_evaluation_run(folder_with, layout, {**EVALUATE, "evaluation": {"every": 1}}, **options)
    ranks = Ranks(evaluated, 4, setup=use_validation_data).expect(0)
    assert set(evaluations(evaluated)) == {1, 2, 3, 4}
    assert ranks.losses() == losses_of(plain)
    assert digest(evaluated, STEPS) == digest(plain, STEPS)


def test_fewer_samples_than_ranks(tmp_path: Path) -> None:
    result = train(tmp_path / "few", Layout(strategy="fsdp", dp_shard=4), samples=2)
    single = train(tmp_path / "single", Layout(), samples=2)
    assert result[2] == pytest.approx(single[2], rel=2e-5)
    assert result[4] == pytest.approx(single[4], rel=2e-5)


@pytest.mark.parametrize("group", [4, 0])
def test_contrastive_groups_are_independent_of_layout(tmp_path: Path, group: int) -> None:
    tables = {
        "data": {"validation": 0.1}, "model": {"kind": "two-tower"}, "objective": {"group": group},
    }  # fmt: skip
    result = []
    for layout in (Layout(), Layout(strategy="ddp", dp_replicate=2)):
        run = make_evaluation_run(tmp_path / layout.describe(), layout, tables, global_batch=8, micro_batch=4, steps=2)
        Ranks(run, layout.world_size, setup=use_validation_pairs).expect(0)
        result.append(evaluations(run)[2])
    assert result[0].keys() == {"validation_loss", "validation_recall_at_1"}
    assert result[1] == pytest.approx(result[0], rel=2e-5)


def use_validation_pairs() -> None:
    """Setup: give the trainer thirteen validation pairs, one more than whole groups of four."""
    use_validation_data()

    def pair(self: ValidationData, i: int) -> Any:
        tokens = torch.randint(0, 256, (2, SEQ_LEN), generator=torch.Generator().manual_seed(i))
        return (tokens[0], tokens[1]), i

    ValidationData.__getitem__ = pair  # type: ignore[assignment,method-assign]
    ValidationData.slice_names = ()  # type: ignore[assignment]


def record_dtypes() -> None:
    """Setup: record the dtypes that linear layers return in training and in evaluation."""
    use_validation_data()
    original = torch.nn.Linear.forward

    def forward(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        result = original(self, x)
        with Path(os.environ["CLUSTERTRAIN_RANK_DIR"], "training" if self.training else "evaluation").open("a") as file:
            file.write(f"{result.dtype}\n")
        return result

    torch.nn.Linear.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "layout", [Layout(strategy="fsdp", dp_shard=2), Layout(tp=2)], ids=lambda layout: layout.describe()
)
def test_evaluation_uses_the_precision_of_training(
    tmp_path: Path, expected: dict[int, dict[str, float]], layout: Layout
) -> None:
    """Compare the dtypes of layer outputs: the loss of so small a model hardly depends on the precision."""
    run = make_evaluation_run(tmp_path / "run", layout, EVALUATE, precision="bf16")
    ranks = Ranks(run, layout.world_size, setup=record_dtypes)
    ranks.expect(0)
    result = evaluations(run)
    for step, values in expected.items():
        assert result[step]["validation_loss"] == pytest.approx(values["validation_loss"], rel=2e-2)
    types = {mode: set((ranks.rank_dir / mode).read_text().split()) for mode in ("training", "evaluation")}
    assert types["evaluation"] == types["training"] == {"torch.bfloat16"}


def losses_of(run: RunDir) -> dict[int, tuple[float, float]]:
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in fsio.read_jsonl(run.metrics_path(1))}


def stop_inside(step: int, sample: int) -> None:
    """Setup: request a stop at sample ``sample`` of the evaluation of ``step``."""
    use_validation_data()
    original = ValidationData.__getitem__
    from clustertrain.train.session.session import Session

    evaluate = Session.evaluate
    steps: list[int] = []

    def record_step(self: Session, *args: Any, **kw: Any) -> dict[str, float]:
        steps.append(self.step)
        return evaluate(self, *args, **kw)

    def stop_at_sample(self: ValidationData, i: int) -> Any:
        if steps and steps[-1] == step and i >= sample:
            Path(os.environ["CLUSTERTRAIN_RANK_DIR"], "stop").touch()
        return original(self, i)

    Session.evaluate, ValidationData.__getitem__ = record_step, stop_at_sample  # type: ignore[method-assign]


@pytest.mark.parametrize("step", [2, STEPS])
def test_interrupted_evaluation_is_repeated_with_its_step(
    tmp_path: Path, expected: dict[int, dict[str, float]], step: int
) -> None:
    layout = Layout(strategy="ddp", dp_replicate=2)
    run = make_evaluation_run(tmp_path / "run", layout, EVALUATE)
    first = Ranks(run, 2, setup=stop_inside, args=(step, 4)).expect(0)
    assert [r["ending"] for r in first.results()] == ["stopped", "stopped"]
    assert [r["step"] for r in first.results()] == [step, step]
    assert step not in evaluations(run)
    second = Ranks(run, 2, attempt=2, setup=use_validation_data).expect(0)
    assert [r["ending"] for r in second.results()] == ["completed", "completed"]
    result = evaluations(run)
    assert result.keys() == {2, 4}
    assert result[step]["validation_loss"] == pytest.approx(expected[step]["validation_loss"], rel=2e-5)
    rows = metrics.load_rows(run)
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert all("loss" in r and "lr" in r for r in rows)
    assert second.events("evaluated")[-1]["best_step"] is not None


SCRIPT = Path(__file__).with_name("evaluation_script.py")


def run_script(folder: Path, layout: Layout, *args: str) -> tuple[RunDir, list[dict[str, float]]]:
    """Run the script and return the run and each rank's result of the last evaluation."""
    run = make_run(folder, layout, layout.world_size, micro_batch=4, script=(SCRIPT, args))
    return run, _last_results(Ranks(run, layout.world_size, setup=one_thread).expect(0))


def _last_results(ranks: Ranks) -> list[dict[str, float]]:
    return [json.loads(p.read_text()) for p in sorted(ranks.rank_dir.glob("evaluation-*.json"))]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(strategy="ddp", dp_replicate=2),
        Layout(pp=2, schedule="zero-bubble", virtual_stages=2, strategy="fsdp", dp_shard=2),
        Layout(strategy="fsdp-grad-op", dp_shard=2, reshard_after_forward=False),
        Layout(pp=2, schedule="zbv", virtual_stages=2),
    ],
    ids=lambda layout: layout.describe(),
)
def test_batch_norm_script_evaluates_like_its_checkpoint(tmp_path: Path, layout: Layout) -> None:
    plain, at_end = run_script(tmp_path / "plain", layout)
    evaluated, results = run_script(tmp_path / "evaluated", layout, "each-step")
    assert losses_of(evaluated) == losses_of(plain)
    assert digest(evaluated) == digest(plain)
    assert len(at_end) == layout.world_size and at_end[0].keys() == {"validation_loss", "validation_accuracy"}
    assert all(result == at_end[0] for result in (*at_end, *results))
    write_plan(evaluated, Layout(), 1, micro_batch=4)
    (single,) = _last_results(Ranks(evaluated, 1, attempt=2, setup=one_thread).expect(0))
    assert single == pytest.approx(at_end[0], rel=1e-6)
