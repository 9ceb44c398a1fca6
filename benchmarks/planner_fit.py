"""``python -m benchmarks.planner_fit``: fit the time model's constants on the fitting half of the table and print them.

A person copies them, rounded, into ``plan/cost/compute.py``, ``plan/cost/collectives.py`` and
``plan/cost/frameworks.py``. The fit is a coordinate search in shrinking steps from the current values. Every constant
is a factor with a meaning, and the penalty keeps a constant at its value if no row depends on it.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from unittest import mock

from benchmarks import planner
from clustertrain.plan.cost import collectives, compute
from clustertrain.plan.table import predict
from clustertrain.plan.table.rows import TableRow

FIRST_STEP, LAST_STEP, PENALTY = 0.25, 0.015, 0.001
FULL_ERROR = 0.6  # larger errors count less, so that one odd row does not move a constant
SHARED = ("wave", "depth", "unaligned", "scores", "cast", "backward_host")
NETWORK = ("LINK_EFFICIENCY", "FABRIC_EFFICIENCY", "LAUNCH_S", "HOP_S")
FRAMEWORK = ("traffic", "flash", "host_s")
LIMITS: Mapping[str, tuple[float, float]] = {
    "LINK_EFFICIENCY": (0.5, 0.95), "FABRIC_EFFICIENCY": (0.4, 0.9), "backward_host": (0.8, 2.5), "flash": (0.25, 1.0),
    "unaligned": (1.0, 2.0), "depth": (16.0, 400.0), "sustained": (0.5, 1.0), "low_bits": (0.5, 1.1),
    "traffic": (0.3, 4.0), "tp_exposed": (0.2, 1.0),
}  # fmt: skip
Constants = dict[str, float]


@dataclass(frozen=True)
class Measured:
    """A row with its measured throughput per GPU and its weight in the fit."""

    row: TableRow
    tokens_per_s: float
    weight: float


def load_rows() -> list[Measured]:
    """Load the timed rows of both tables' fitting half.

    A source weighs as much as the square root of its number of rows.
    """
    cases = [*planner.load_cases(), *planner.load_cases(planner.FURTHER_TABLE)]
    timed = [c for c in cases if c.half == planner.FITTING and (c.ratio(c.predicted) or 0) > 0]
    counts = Counter(case.source for case in timed)
    return [
        Measured(
            predict.complete_row(case.row),
            (case.predicted.tokens_per_s_per_gpu or 0.0) / (case.ratio(case.predicted) or 1.0),
            counts[case.source] ** -0.5,
        )
        for case in timed
    ]


def current_constants(measured: list[Measured]) -> Constants:
    """Return the constants in use, of the frameworks in ``measured``."""
    fitted = compute.FITTED_CONSTANTS
    constants = {f"sustained.{n}": value for n, value in enumerate(fitted.sustained)}
    constants |= {f"low_bits.{n}": value for n, value in enumerate(fitted.low_bits)}
    constants |= {name: getattr(fitted, name) for name in SHARED}
    constants |= {name: getattr(collectives, name) for name in NETWORK}
    for framework in {m.row.framework.name: m.row.framework for m in measured if not m.row.compiled}.values():
        values = {name: getattr(framework, name) for name in FRAMEWORK}
        constants |= {f"{name}.{framework.name}": value for name, value in values.items() if value}
        if framework.tp_hidden:
            constants[f"tp_exposed.{framework.name}"] = 1 - framework.tp_hidden
    return constants


def loss(measured: list[Measured], constants: Constants, before: Constants) -> float:
    """Return the weighted mean error, plus the penalty for moving constants away from ``before``."""
    shared = replace(
        compute.FITTED_CONSTANTS,
        sustained=tuple(constants[f"sustained.{n}"] for n in range(3)),
        low_bits=tuple(constants[f"low_bits.{n}"] for n in range(3)),
        **{name: constants[name] for name in SHARED},
    )
    total = weights = 0.0
    with mock.patch.multiple(collectives, **{name: constants[name] for name in NETWORK}):
        for one in measured:
            row = _with(one.row, constants)
            error = abs(math.log(predict.tokens_per_s(row, predict.estimate_row_step(row, shared)) / one.tokens_per_s))
            total += one.weight * min(error, FULL_ERROR + 0.1 * error)
            weights += one.weight
    moved = sum(math.log(value / before[name]) ** 2 for name, value in constants.items())
    return total / weights + PENALTY * moved


def _with(row: TableRow, constants: Constants) -> TableRow:
    framework, factor = row.framework, 0.5 if row.compiled else 1.0
    changes = {
        name: constants[f"{name}.{framework.name}"] * (factor if name != "flash" else 1.0)
        for name in FRAMEWORK
        if f"{name}.{framework.name}" in constants
    }
    if f"tp_exposed.{framework.name}" in constants:
        changes["tp_hidden"] = 1 - constants[f"tp_exposed.{framework.name}"]
    return replace(row, framework=replace(framework, **changes))


def fit() -> Constants:
    """Return the fitted constants."""
    measured = load_rows()
    before = current_constants(measured)
    best, constants, step = loss(measured, before, before), dict(before), FIRST_STEP
    while step > LAST_STEP:
        better = False
        for name, value in list(constants.items()):
            for factor in (1 + step, 1 / (1 + step)):
                candidate = {**constants, name: _clamp(name, value * factor)}
                candidate_loss = loss(measured, candidate, before)
                if candidate_loss < best - 1e-5:
                    best, constants, better = candidate_loss, candidate, True
                    break
        print(f"step {step:.3f}: {best:.4f}", file=sys.stderr, flush=True)
        step /= 1 if better else 2
    return constants


def _clamp(name: str, value: float) -> float:
    low, high = LIMITS.get(name.split(".", maxsplit=1)[0], (0.0, math.inf))
    return min(max(value, low), high)


if __name__ == "__main__":
    for name, value in fit().items():
        print(f"{name:32} {value:.4g}")
