"""The contract rows of `status` and `telemetry`."""

from __future__ import annotations

from clustertrain.report.status import contract_rows
from clustertrain.run.usage.budget import BudgetUsage
from clustertrain.run.usage.contract_status import ContractStatus, SliceStatus


def test_task_metric_slices_and_budget() -> None:
    contract = ContractStatus(
        task="tell cats from dogs",
        target="research",
        metric="validation_accuracy",
        higher_is_better=True,
        value=0.6,
        step=30,
        best=0.7,
        best_step=20,
        slices={
            "night": SliceStatus(value=0.5, best=0.75, regression=0.25),
            "day": SliceStatus(value=0.9, best=0.9, regression=0.0),
        },
        used=BudgetUsage(gpu_hours=4.0, wall_hours=1.0),
        remaining={"gpu_hours": 6.0},
    )
    assert contract_rows(contract) == [
        ("task", "tell cats from dogs, research"),
        ("metric", "validation_accuracy: best 0.7 at step 20, last 0.6 at step 30"),
        ("slices", "night 0.5, 0.25 worse than its best 0.75; day 0.9"),
        ("budget", "4 GPU-hours used, 6 left"),
    ]


def test_no_contract_and_no_evaluation_yet() -> None:
    assert contract_rows(None) == [] == contract_rows(ContractStatus(metric="loss"))
    assert contract_rows(ContractStatus(metric="validation_loss")) == [("metric", "validation_loss, not evaluated yet")]
