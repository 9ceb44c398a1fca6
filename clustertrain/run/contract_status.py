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
from clustertrain.errors import ConfigError, NotReadable
from clustertrain.run import budget, events, json_files
from clustertrain.run.attempts import Attempt
from clustertrain.run.budget import Used
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec

_BEGINS = {"restored": "step", "rolled_back": "to_step"}  # events, and the step from which the run goes on


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """Of the newest evaluation. ``regression``: by how much it is worse than the best so far, 0 where it is not."""

    value: float | None
    best: float | None
    regression: float | None


class Standing(msgspec.Struct, frozen=True, kw_only=True):
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
    slices: dict[str, Slice] = {}
    used: Used | None = None
    left: dict[str, float] = {}
    when_spent: str = "stop"
    resume: str = "elastic"


def recorded(recipe: Recipe) -> dict[str, Any]:
    """What record.json keeps of it."""
    asked: dict[str, Any] = msgspec.to_builtins(recipe.contract)
    return {**asked, "metric": recipe.deciding_metric, "higher_is_better": recipe.higher_is_better}


def standing(run: RunDir, history: Sequence[Attempt], now: float | None) -> Standing | None:
    """``now`` (UTC epoch s) where the last attempt is running. None of a run whose record has no contract."""
    record = json_files.peek(run.record).get("contract")
    if not isinstance(record, dict):
        return None
    contract = _limits(run, record)
    if contract is None:
        return None
    told = _last_judged(run)
    used = budget.used(run, history, now, contract.gpu_hour_cost) if contract.has_budget else None
    higher = bool(told.get("higher_is_better", record.get("higher_is_better")))
    return Standing(
        task=contract.task,
        target=contract.target,
        metric=str(told.get("metric", contract.metric)),
        higher_is_better=higher,
        value=told.get("value"),
        step=told.get("step"),
        best=told.get("best"),
        best_step=told.get("best_step"),
        slices={name: _slice(values, higher) for name, values in (told.get("slices") or {}).items()},
        used=used,
        left=budget.left(contract, used) if used is not None else {},
        when_spent=contract.when_spent,
        resume=contract.resume,
    )


def _limits(run: RunDir, record: dict[str, Any]) -> ContractSpec | None:
    """The owner may have raised them in spec.toml since. None where they cannot be read."""
    with contextlib.suppress(ConfigError, NotReadable):
        return msgspec.structs.replace(load_spec(run).recipe.contract, metric=str(record.get("metric", "")))
    known = {f: record[f] for f in ContractSpec.__struct_fields__ if f in record}
    try:
        return schema.convert(known, ContractSpec)
    except msgspec.ValidationError:  # of another version
        return None


def _last_judged(run: RunDir) -> dict[str, Any]:
    """The newest evaluation of a step that counts: the run has not begun again before it since."""
    begun = math.inf
    for attempt in reversed(run.attempts()):
        told = events.of_attempt(attempt)
        for event in reversed(told):
            if event["event"] == "judged" and event.get("step", 0) <= begun:
                return event
            key = _BEGINS.get(event["event"])
            if key in event:
                begun = min(begun, event[key])
        # One that found no checkpoint has restored nothing. Not above: a step's evaluation is told before the step.
        begun = min([begun, *(e["step"] - 1 for e in events.named(told, "first_step") if "step" in e)])
    return {}


def _slice(values: dict[str, float], higher_is_better: bool) -> Slice:
    value, best = values.get("value"), values.get("best")
    if value is None or best is None:
        return Slice(value=value, best=best, regression=None)
    return Slice(value=value, best=best, regression=max(0.0, best - value if higher_is_better else value - best))
