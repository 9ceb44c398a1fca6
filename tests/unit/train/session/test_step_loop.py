"""The step loop on one process: stop, rollback and evaluation at the same step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import clustertrain as ct
from clustertrain import fsio, settings
from clustertrain.checkpoint.load import rollback
from clustertrain.config.job import JobSpec, RunSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.plan.layout import Layout
from clustertrain.run import attempts, metrics
from clustertrain.run.run_dir import RunDir
from clustertrain.submit.transaction import format_spec
from clustertrain.train.core import result
from clustertrain.train.core.time_left import DeadlineTracker
from clustertrain.train.evaluation.best_metric import EarlyStopping
from clustertrain.train.evaluation.schedule import EvaluationSchedule
from clustertrain.train.session.budget import BudgetTracker

BATCH, TOTAL = 4, 8
BAD = (4 * BATCH,)  # position of the first sample of step 5


class Points:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([math.sin(i), math.cos(i)]), torch.tensor([float(i % 3)])


def nan_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target) * math.nan


@dataclass
class Attempt:
    """One attempt of a run: the actions of its script, and its records."""

    run: RunDir
    n: int = 1
    every: int | None = 2  # steps between checkpoints
    bad: Sequence[int] = ()  # positions of global batches whose loss is NaN
    stop_in: int = 0  # step, counted from 1, in which a stop is requested
    stop_in_evaluation: int = 0  # step whose evaluation requests a stop
    values: Sequence[float] = ()  # results of the evaluations, in order
    patience: int = 0
    scheduler_outside: bool = False  # a learning-rate scheduler that is not in the state
    evaluated: list[int] = field(default_factory=list)
    trained_steps: list[int] = field(default_factory=list)
    weights: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def rank_dir(self) -> Path:
        return self.run.path / f"rank-{self.n}"

    def train(self) -> None:
        with contextlib.suppress(SystemExit), ct.session() as session:
            model = session.parallelize(nn.Linear(2, 1))
            state = {"model": model, "optimizer": session.optimizer(torch.optim.SGD, lr=0.1)}
            data = state["data"] = session.loader(Points(), global_batch=BATCH)
            if self.scheduler_outside:
                torch.optim.lr_scheduler.ConstantLR(state["optimizer"])
            remaining = list(self.values)

            def measure() -> dict[str, float]:
                self.evaluated.append(session.step)
                if session.step == self.stop_in_evaluation:
                    (self.rank_dir / "stop").touch()
                return {} if session.poll() else {"validation_loss": remaining.pop(0)}

            early_stopping = EarlyStopping(patience=self.patience)
            evaluations = (
                EvaluationSchedule(measure, every=2, early_stopping=early_stopping)
                if remaining or self.stop_in_evaluation
                else None
            )
            for step in session.steps(TOTAL, state, self.every, 10, evaluations):
                first_position = data.next_position(data.position) - BATCH
                session.train_step(next(data), nan_loss if first_position in self.bad else F.mse_loss)
                self.trained_steps.append(step + 1)
                if step + 1 == self.stop_in:
                    (self.rank_dir / "stop").touch()
                self.weights = torch.cat([p.detach().flatten() for p in model.parameters()])

    @property
    def result(self) -> dict[str, Any]:
        record: dict[str, Any] = fsio.read_json(self.rank_dir / "rank-0.json")
        return record

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in fsio.read_jsonl(self.run.attempt(self.n).events_path("rank-0")) if e["event"] == name]


Begin = Callable[..., Attempt]


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Return a function that runs an attempt to its end."""
    threads, generator = torch.get_num_threads(), torch.get_rng_state()

    def begin(run: RunDir, n: int = 1, **options: Any) -> Attempt:
        started = Attempt(run, n, **options)
        started.rank_dir.mkdir()
        run.attempt(n).path.mkdir()
        monkeypatch.setenv(settings.RUN_DIR, str(run.path))
        monkeypatch.setenv(settings.ATTEMPT, str(n))
        monkeypatch.setenv(settings.RANK_DIR, str(started.rank_dir))
        monkeypatch.setenv(settings.DEVICE, "cpu")
        result.current.cache_clear()
        started.train()
        return started

    yield begin
    result.current.cache_clear()
    torch.set_num_threads(threads)
    torch.set_rng_state(generator)


def make_run(folder: Path, **stability: Any) -> RunDir:
    run = RunDir(folder)
    (run.path / "attempts").mkdir(parents=True)
    tables = {
        "checkpoint": {"async_save": False},
        "stability": {"max_skipped": 1, "on_divergence": "roll-back", **stability},
    }
    recipe = build(tables, Recipe, "test")
    run.spec.write_text(format_spec(RunSpec(job=JobSpec(name="points", backend="local"), recipe=recipe)))
    fsio.write_json(run.plan, {"layout": msgspec.to_builtins(Layout())})
    return run


@pytest.mark.long
def test_stop_at_rollback_step_saves_and_restores_nothing(tmp_path: Path, attempt: Begin) -> None:
    uninterrupted = attempt(make_run(tmp_path / "whole", roll_back_margin=1), bad=BAD)
    run = make_run(tmp_path / "run", roll_back_margin=1)
    first = attempt(run, bad=BAD, stop_in=5)
    assert (first.result["ending"], first.result["step"], first.result["committed_step"]) == ("stopped", 5, 2)
    assert [e["save"] for e in first.events("stop_agreed")] == [False]
    assert [(e["step"], e["to_step"]) for e in first.events("rolled_back")] == [(5, 2)]
    # Step 4 is within the margin: its checkpoint still exists but is invalid.
    assert run.committed_steps() == [2] and (run.checkpoints / "step-00000004" / "COMMITTED").exists()
    second = attempt(run, 2, bad=BAD)
    assert [e["step"] for e in second.events("restored")] == [2] and not second.events("rolled_back")
    assert second.trained_steps == [3, 4, 5, 6, 7, 8] and torch.equal(second.weights, uninterrupted.weights)
    assert [(a.committed_step, a.roll_backs) for a in attempts.load_attempts(run)] == [(2, 1), (8, 0)]


@pytest.mark.long
def test_next_attempt_rolls_back_if_stop_had_no_time(
    tmp_path: Path, attempt: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted = attempt(make_run(tmp_path / "whole"), bad=BAD)
    run = make_run(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(DeadlineTracker, "is_too_late_to_save", lambda self, agreement, saves: True)
        first = attempt(run, bad=BAD, stop_in=5)
    assert first.result["ending"] == "stopped" and not first.events("rolled_back")
    assert not rollback.read_records(run.checkpoints)
    second = attempt(run, 2, bad=BAD)
    assert second.trained_steps == [5, 5, 6, 7, 8] and torch.equal(second.weights, uninterrupted.weights)


def test_exhausted_rollbacks_at_stop_are_not_requeued(tmp_path: Path, attempt: Begin) -> None:
    with pytest.raises(Exception, match="max_roll_backs = 0"):
        attempt(make_run(tmp_path / "run", max_roll_backs=0), bad=BAD, stop_in=5)


def test_spent_budget_at_rollback_step(tmp_path: Path, attempt: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[int] = []
    monkeypatch.setattr(BudgetTracker, "should_stop", lambda self: checks.append(1) or len(checks) > 5)
    monkeypatch.setattr(BudgetTracker, "spent_reason", lambda self: "the budget is spent")
    run = make_run(tmp_path / "run")
    finished = attempt(run, bad=BAD)
    result_fields = {key: finished.result[key] for key in ("ending", "step", "budget_spent", "reason")}
    assert result_fields == {"ending": "stopped", "step": 5, "budget_spent": True, "reason": "the budget is spent"}
    assert run.committed_steps() == [2, 4] and len(rollback.read_records(run.checkpoints)) == 1


def test_rollback_cancels_early_stop_at_same_step(tmp_path: Path, attempt: Begin) -> None:
    bad = (5 * BATCH,)
    finished = attempt(make_run(tmp_path / "run"), bad=bad, values=(1.0, 0.5, 9.0, 0.4, 0.3), patience=1)
    assert finished.evaluated == [2, 4, 6, 6, 8] and finished.trained_steps == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    assert (finished.result["ending"], finished.result["reason"]) == ("completed", None)
    assert not finished.events("early_stop")


def test_missed_evaluation_is_run_after_rollback(tmp_path: Path, attempt: Begin) -> None:
    run = make_run(tmp_path / "run", grad_norm_max=1e-9)
    first = attempt(run, every=None, values=(1.0,), stop_in_evaluation=4)
    assert first.evaluated == [2, 4] and first.result["committed_step"] == 4
    assert metrics.is_cut_short(metrics.load_rows(run)[-1])
    # Not an improvement, so no checkpoint records it.
    second = attempt(run, 2, every=None, values=(2.0, 2.0, 3.0), patience=2, bad=BAD)
    assert second.trained_steps == [5, 5, 6] and second.evaluated == [4, 4, 6]
    assert second.result["reason"].startswith("early stop: validation_loss has not improved for 2 evaluations")
    rows = metrics.load_rows(run)
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6] and not any(map(metrics.is_cut_short, rows))
    assert {r["step"]: r["validation_loss"] for r in rows if "validation_loss" in r} == {2: 1.0, 4: 2.0, 6: 3.0}
    assert rows[3]["loss"] == first_loss(run, 4)
    # The first attempt has already warned about step 4.
    warnings = [(e["code"], e["step"]) for e in second.events("training_warning")]
    assert [step for code, step in warnings if code == "grad_norm_high"] == [5]


def test_scheduler_that_is_not_saved_is_reported(
    tmp_path: Path, attempt: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    started = attempt(make_run(tmp_path / "train-warn"), scheduler_outside=True)
    (warning,) = [e for e in started.events("training_warning") if e["code"] == "scheduler_not_saved"]
    assert "begins again" in warning["text"] and warning["text"] in caplog.text


def first_loss(run: RunDir, step: int) -> float:
    (value,) = [r["loss"] for r in fsio.read_jsonl(run.metrics_path(1)) if r["step"] == step]
    return float(value)
