"""Keys of the contract with real ranks: early stop, best checkpoint, budget, exact resume."""

from __future__ import annotations

import dataclasses
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from clustertrain import fsio
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.offline import inspect
from clustertrain.config.parsing.documents import load_toml
from clustertrain.plan.layout import Layout
from clustertrain.run import attempts, metrics
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.run.usage import contract_status
from tests.ranks.rank_pool import SEQ_LEN, Ranks, make_run, write_plan

pytestmark = pytest.mark.ranks

PAIR = Layout(strategy="ddp", dp_replicate=2)


class ConsecutiveTokens:
    """Dataset of four samples of consecutive token numbers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.arange(i, i + SEQ_LEN + 1)
        return tokens[:-1], tokens[1:]


def fix_losses(*values: float) -> None:
    """Setup: make the evaluation after step n return the n-th of ``values`` as validation loss."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from clustertrain.train import trainer
    from clustertrain.train.session.session import Session, get_runtime

    task, evaluate = trainer.build_task, Session.evaluate

    def with_validation(recipe: Any, **kw: Any) -> Any:
        return dataclasses.replace(task(recipe, **kw), validation=ConsecutiveTokens())

    def fixed_loss(self: Session, *args: Any, **kw: Any) -> dict[str, float]:
        result = evaluate(self, *args, **kw)
        get_runtime(self).state.eval_results = {**result, "validation_loss": values[self.step - 1]}
        return dict(get_runtime(self).state.eval_results)

    trainer.build_task, Session.evaluate = with_validation, fixed_loss  # type: ignore[method-assign]


def make_run_with(folder: Path, layout: Layout = PAIR, *, steps: int = 8, every: int = 100, **tables: Any) -> RunDir:
    run = make_run(folder, layout, layout.world_size, steps=steps, every=every, keep=1)
    spec = load_toml(run.spec)
    for name, table in tables.items():
        spec["recipe"].setdefault(name, {}).update(table)
    run.spec.write_text(tomli_w.dumps(spec))
    fsio.write_json(run.record, {"git": None, "contract": contract_status.build_record(load_spec(run).recipe)})
    return run


EVALUATE_EACH_STEP = {"data": {"validation": 0.1}, "evaluation": {"every": 1}}
LOSSES = (5.0, 3.0, 4.0, 4.5, 4.6, 4.7, 4.8, 4.9)


def kept_checkpoints(run: RunDir) -> dict[int, float | None]:
    """Return the metric value of each checkpoint by its step."""
    result = {}
    for folder in index.list_checkpoint_folders(run.checkpoints):
        metric = index.read_manifest(folder).metric
        result[index.parse_step(folder) or 0] = metric.value if metric is not None else None
    return result


def test_run_without_improvement_stops_and_keeps_best_checkpoint(tmp_path: Path) -> None:
    run = make_run_with(
        tmp_path / "run", **{**EVALUATE_EACH_STEP, "evaluation": {"every": 1, "patience": 3, "warn_when_rising": 2}}
    )
    ranks = Ranks(run, 2, setup=fix_losses, args=LOSSES).expect(0)
    reason = "early stop: validation_loss has not improved for 3 evaluations"
    for result in ranks.results():
        assert (result["ending"], result["step"], result["committed_step"]) == ("completed", 5, 5)
        assert result["reason"].startswith(reason)
    assert kept_checkpoints(run) == {2: 3.0, 5: 4.6}
    assert inspect.find_best(run.checkpoints).name == "step-00000002"
    assert [r["best"] for r in inspect.list_checkpoints(run.checkpoints)] == [True, False]
    (warning,) = ranks.events("training_warning")
    assert (warning["code"], warning["step"], warning["value"]) == ("validation_rising", 4, 2)
    status = contract_status.load_contract_status(run, attempts.load_attempts(run), None)
    assert status is not None and (status.best, status.best_step, status.value, status.step) == (3.0, 2, 4.6, 5)
    assert [r["validation_loss"] for r in metrics.load_rows(run)] == list(LOSSES[:5])


def stop_at_5(*values: float) -> None:
    """Setup: fix the losses of the evaluations, and request a stop in the sixth step."""
    fix_losses(*values)
    from tests.ranks.rank_pool import touch_stop_at

    touch_stop_at(5)


def test_best_checkpoint_is_known_after_resume(tmp_path: Path) -> None:
    plateau = {"kind": "plateau", "patience": 1, "factor": 0.5, "warmup_steps": 0}
    run = make_run_with(tmp_path / "run", schedule=plateau, **EVALUATE_EACH_STEP)
    stopped = Ranks(run, 2, setup=stop_at_5, args=LOSSES).expect(0)
    assert stopped.results()[0]["ending"] == "stopped"
    Ranks(run, 2, attempt=2, setup=fix_losses, args=LOSSES).expect(0)
    assert kept_checkpoints(run) == {2: 3.0, 8: 4.9}
    status = contract_status.load_contract_status(run, attempts.load_attempts(run), None)
    assert status is not None and (status.best, status.best_step, status.step) == (3.0, 2, 8)
    peak = load_spec(run).recipe.optim.lr
    rates = [r["lr"] / peak for r in metrics.load_rows(run)]
    assert rates == pytest.approx([1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25])  # halved after two bad evaluations


def spent_after(checks: int) -> None:
    """Setup: report zero usage for the first ``checks`` checks of the budget."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from clustertrain.run.usage.budget import BudgetUsage
    from clustertrain.train.session.budget import BudgetTracker

    current_usage, checks_done = BudgetTracker.current_usage, []

    def usage_after_checks(self: BudgetTracker) -> BudgetUsage:
        checks_done.append(1)
        return current_usage(self) if len(checks_done) > checks else BudgetUsage()

    BudgetTracker.current_usage = usage_after_checks  # type: ignore[method-assign]


def test_spent_budget_ends_run_with_checkpoint(tmp_path: Path) -> None:
    run = make_run_with(tmp_path / "run", contract={"gpu_hours": 1e-9})
    ranks = Ranks(run, 2, setup=spent_after, args=(3,)).expect(0)
    for result in ranks.results():
        assert (result["ending"], result["budget_spent"]) == ("stopped", True)
        assert result["committed_step"] == result["step"] == 4
    assert "of gpu_hours = 1e-09" in ranks.results()[0]["reason"]
    assert list(kept_checkpoints(run)) == [ranks.results()[0]["step"]]


def test_spent_budget_can_only_warn(tmp_path: Path) -> None:
    run = make_run_with(tmp_path / "run", contract={"gpu_hours": 1e-9, "on_budget_spent": "warn"})
    ranks = Ranks(run, 2, setup=fix_losses, args=LOSSES).expect(0)
    assert ranks.results()[0]["ending"] == "completed"
    (warning,) = [e for e in ranks.events("training_warning") if e["code"] == "budget_spent"]
    assert "the budget is spent" in warning["text"]


@pytest.mark.parametrize("resume", ["exact", "elastic"])
def test_exact_resume_refuses_another_layout(tmp_path: Path, resume: str) -> None:
    run = make_run_with(tmp_path / "run", steps=20, contract={"resume": resume})
    Ranks(run, 2, setup=stop_in, args=(5,)).expect(0)
    resumed = Ranks(run, 2, attempt=2, setup=stop_in, args=(6,)).expect(0)
    assert resumed.events("restored")[0]["step"] == 7  # requested in step 5; all ranks leave two steps later
    before = list(kept_checkpoints(run))
    if resume == "exact":
        for result in Ranks(run, 2, attempt=3, setup=another_python, args=(1,)).expect(78).results():
            assert " then, 3.0.0 now (node b; rank 1)" in result["error"]["message"]
    write_plan(run, Layout(strategy="fsdp", dp_shard=2), 2)
    other = Ranks(run, 2, attempt=4)
    difference = "layout ddp then, fsdp now (strategy ddp -> fsdp, dp_replicate 2 -> 1, dp_shard 1 -> 2)"
    if resume == "elastic":
        assert other.expect(0).results()[0]["ending"] == "completed"
        assert difference in other.logs()
        return
    assert other.wait() == [78, 78]
    message = other.results()[0]["error"]["message"]
    assert "contract.resume = 'exact'" in message and difference in message
    assert list(kept_checkpoints(run)) == before


def another_python(rank: int) -> None:
    """Setup: give ``rank`` another Python version and node than the others."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if int(os.environ["RANK"]) == rank:
        os.environ["CLUSTERTRAIN_NODE"] = "b"
        platform.python_version = lambda: "3.0.0"


def stop_in(step: int) -> None:
    """Setup: use one thread, and request a stop after ``step`` steps."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from tests.ranks.rank_pool import touch_stop_at

    touch_stop_at(step)


def test_unknown_metric_is_reported_at_first_evaluation(tmp_path: Path) -> None:
    run = make_run_with(tmp_path / "run", **EVALUATE_EACH_STEP, contract={"metric": "validation_accuracy/night"})
    ranks = Ranks(run, 2, setup=fix_losses, args=LOSSES)
    assert ranks.wait() == [78, 78]
    message = ranks.results()[0]["error"]["message"]
    assert "contract.metric = 'validation_accuracy/night' is not produced by the evaluation" in message
    assert "available: validation_loss, validation_accuracy" in message
