"""The contract in a run's record, and the run's progress against it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from clustertrain import schema
from clustertrain.config.contract import ContractSpec
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError, PermissionDenied
from clustertrain.run import event_types, events, json_files
from clustertrain.run.attempts import Attempt
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.run.usage import budget
from clustertrain.run.usage.budget import BudgetUsage


class SliceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One slice of the validation data in the newest evaluation."""

    value: float | None
    """The deciding metric on this slice in the newest evaluation; null if it has none."""
    best: float | None
    """Its best value so far; null if it has none."""
    regression: float | None
    """How much worse ``value`` is than ``best``; 0 if it is not worse; null if one of them is."""


class ContractStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The contract, the newest evaluation and the budget used."""

    task: str = ""
    """Description of the task; empty if the recipe has none."""
    target: str = ""
    """Intended use of the result: `research`, `production`, `fine-tune` or `benchmark`; empty if the recipe has
    none."""
    metric: str = ""
    """Name of the metric that decides which checkpoint is best."""
    higher_is_better: bool = False
    """A higher value of the metric is better."""
    value: float | None = None
    """The deciding metric in the newest evaluation; null before the first evaluation."""
    step: int | None = None
    """Step of the newest evaluation; null before it."""
    best: float | None = None
    """Best value of the metric so far; null before the first evaluation."""
    best_step: int | None = None
    """Step of the best value; null before the first evaluation."""
    slices: dict[str, SliceStatus] = {}
    """Slices of the validation data on which a regression is unacceptable, by name."""
    used: BudgetUsage | None = None
    """The budget used so far; null if the contract sets no limit."""
    remaining: dict[str, float] = {}
    """What is left of each limit that the contract sets, in the unit of the key: `gpu_hours`, `wall_hours`, `cost`."""
    on_budget_spent: str = "stop"
    """What happens when the budget is spent: `stop` or `warn`."""
    resume: str = "elastic"
    """Condition for a resume: `elastic` (layout and ranks may change) or `exact` (nothing may change)."""


def build_record(recipe: Recipe) -> dict[str, Any]:
    """Return the contract as record.json stores it."""
    contract: dict[str, Any] = msgspec.to_builtins(recipe.contract)
    return {**contract, "metric": recipe.deciding_metric, "higher_is_better": recipe.higher_is_better}


def load_contract_status(run: RunDir, history: Sequence[Attempt], now: float | None) -> ContractStatus | None:
    """Return the status; None if the run's record has no contract.

    ``now`` (UTC epoch s) is given while the last attempt runs.
    """
    record = json_files.poll_document(run.record).get("contract")
    if not isinstance(record, dict):
        return None
    contract = _load_limits(run, record)
    if contract is None:
        return None
    evaluation = _find_newest_evaluation(run)
    usage = budget.compute_usage(run, history, now, contract.gpu_hour_cost) if contract.has_budget else None
    higher_is_better = evaluation.higher_is_better
    if higher_is_better is None:
        higher_is_better = bool(record.get("higher_is_better"))
    return ContractStatus(
        task=contract.task,
        target=contract.target,
        metric=contract.metric if evaluation.metric is None else evaluation.metric,
        higher_is_better=higher_is_better,
        value=evaluation.value,
        step=evaluation.step,
        best=evaluation.best,
        best_step=evaluation.best_step,
        slices={
            name: _build_slice_status(values, higher_is_better) for name, values in (evaluation.slices or {}).items()
        },
        used=usage,
        remaining=budget.remaining(contract, usage) if usage is not None else {},
        on_budget_spent=contract.on_budget_spent,
        resume=contract.resume,
    )


def _load_limits(run: RunDir, record: dict[str, Any]) -> ContractSpec | None:
    """Return the limits, which the owner may have raised in spec.toml; None if they cannot be read."""
    with contextlib.suppress(ConfigError, PermissionDenied):
        return msgspec.structs.replace(load_spec(run).recipe.contract, metric=str(record.get("metric", "")))
    fields = {f: record[f] for f in ContractSpec.__struct_fields__ if f in record}
    try:
        return schema.convert(fields, ContractSpec)
    except msgspec.ValidationError:  # another version wrote it
        return None


def _find_newest_evaluation(run: RunDir) -> event_types.Evaluated:
    """Return the newest evaluation of a step that counts: the run has not restarted from an earlier step since.

    Its fields are None if there is none.
    """
    resume_step = math.inf
    for attempt in reversed(run.attempts()):
        log = [events.to_struct(e) for e in events.for_attempt(attempt)]
        for event in reversed(log):
            match event:
                case event_types.Evaluated() if (event.step or 0) <= resume_step:
                    return event
                case event_types.Restored(step=int(restart_step)) | event_types.RolledBack(to_step=int(restart_step)):
                    resume_step = min(resume_step, restart_step)
        # An attempt without a checkpoint restored nothing. After the loop: an evaluation is logged before its step.
        first_steps = (e.step for e in log if isinstance(e, event_types.FirstStep))
        resume_step = min([resume_step, *(step - 1 for step in first_steps if step is not None)])
    return event_types.Evaluated(t=0.0)


def _build_slice_status(values: dict[str, float | None], higher_is_better: bool) -> SliceStatus:
    value, best = values.get("value"), values.get("best")
    if value is None or best is None:
        return SliceStatus(value=value, best=best, regression=None)
    return SliceStatus(value=value, best=best, regression=max(0.0, best - value if higher_is_better else value - best))
