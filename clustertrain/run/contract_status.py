"""The contract of a run as its record has it, and how the run stands to it."""

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
from clustertrain.run import budget, event_types, events, json_files
from clustertrain.run.attempts import Attempt
from clustertrain.run.budget import BudgetUsage
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec

_RESTART_EVENTS = {"restored": "step", "rolled_back": "to_step"}  # events, and the step from which the run goes on


class SliceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Of the newest evaluation. ``regression``: by how much it is worse than the best so far, 0 where it is not."""

    value: float | None
    best: float | None
    regression: float | None


class ContractStatus(msgspec.Struct, frozen=True, kw_only=True):
    """``value`` is of the newest evaluation, ``step`` where it was made, None before there is one. ``left``: by limit
    that the contract sets; of a limit that is reached 0."""

    task: str = ""
    target: str = ""
    metric: str = ""
    higher_is_better: bool = False
    value: float | None = None
    step: int | None = None
    best: float | None = None
    best_step: int | None = None
    slices: dict[str, SliceStatus] = {}
    used: BudgetUsage | None = None
    left: dict[str, float] = {}
    when_spent: str = "stop"
    resume: str = "elastic"


def build_record(recipe: Recipe) -> dict[str, Any]:
    """What record.json keeps of it."""
    contract: dict[str, Any] = msgspec.to_builtins(recipe.contract)
    return {**contract, "metric": recipe.deciding_metric, "higher_is_better": recipe.higher_is_better}


def load_contract_status(run: RunDir, history: Sequence[Attempt], now: float | None) -> ContractStatus | None:
    """``now`` (UTC epoch s) where the last attempt is running. None of a run whose record has no contract."""
    record = json_files.poll_document(run.record).get("contract")
    if not isinstance(record, dict):
        return None
    contract = _load_limits(run, record)
    if contract is None:
        return None
    evaluation = _find_newest_evaluation(run)
    usage = budget.compute_usage(run, history, now, contract.gpu_hour_cost) if contract.has_budget else None
    higher_is_better = bool(evaluation.get("higher_is_better", record.get("higher_is_better")))
    return ContractStatus(
        task=contract.task,
        target=contract.target,
        metric=str(evaluation.get("metric", contract.metric)),
        higher_is_better=higher_is_better,
        value=evaluation.get("value"),
        step=evaluation.get("step"),
        best=evaluation.get("best"),
        best_step=evaluation.get("best_step"),
        slices={
            name: _build_slice_status(values, higher_is_better)
            for name, values in (evaluation.get("slices") or {}).items()
        },
        used=usage,
        left=budget.remaining(contract, usage) if usage is not None else {},
        when_spent=contract.when_spent,
        resume=contract.resume,
    )


def _load_limits(run: RunDir, record: dict[str, Any]) -> ContractSpec | None:
    """The owner may have raised them in spec.toml since. None where they cannot be read."""
    with contextlib.suppress(ConfigError, PermissionDenied):
        return msgspec.structs.replace(load_spec(run).recipe.contract, metric=str(record.get("metric", "")))
    fields = {f: record[f] for f in ContractSpec.__struct_fields__ if f in record}
    try:
        return schema.convert(fields, ContractSpec)
    except msgspec.ValidationError:  # of another version
        return None


def _find_newest_evaluation(run: RunDir) -> dict[str, Any]:
    """The newest evaluation of a step that counts: the run has not begun again before it since."""
    resume_step = math.inf
    for attempt in reversed(run.attempts()):
        log = events.for_attempt(attempt)
        for event in reversed(log):
            if event["event"] == "judged" and event.get("step", 0) <= resume_step:
                return event
            key = _RESTART_EVENTS.get(event["event"])
            if key in event:
                resume_step = min(resume_step, event[key])
        # One that found no checkpoint has restored nothing. Not above: a step's evaluation is told before the step.
        resume_step = min(
            [resume_step, *(e.step - 1 for e in events.select(log, event_types.FirstStep) if e.step is not None)]
        )
    return {}


def _build_slice_status(values: dict[str, float], higher_is_better: bool) -> SliceStatus:
    value, best = values.get("value"), values.get("best")
    if value is None or best is None:
        return SliceStatus(value=value, best=best, regression=None)
    return SliceStatus(value=value, best=best, regression=max(0.0, best - value if higher_is_better else value - best))
