"""``python -m benchmarks.planner_fit``: set the time model's constants on the half of the table that does not judge.

Prints them; a person puts them, rounded, into ``plan/cost/compute.py``, ``plan/cost/collectives.py`` and
``plan/cost/frameworks.py``.
Coordinate by coordinate, in steps that shrink, from the values that stand there: every constant is a factor with a
meaning, and the penalty keeps those that the rows say nothing of where they were.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from unittest import mock

from benchmarks import planner
from clustertrain.plan.cost import collectives, compute
from clustertrain.plan.table import predict
from clustertrain.plan.table.rows import TableRow

FIRST_STEP, LAST_STEP, STAY = 0.25, 0.015, 0.001
CAPPED = 0.6  # an error counts in full up to here: one odd row must not pull a constant
SHARED = ("wave", "depth", "unaligned", "scores", "cast", "backward_host")
NETWORK = ("LINK_EFFICIENCY", "FABRIC_EFFICIENCY", "LAUNCH_S", "HOP_S")
OF_STACK = ("traffic", "flash", "host_s")
LIMITS: Mapping[str, tuple[float, float]] = {
    "LINK_EFFICIENCY": (0.5, 0.95), "FABRIC_EFFICIENCY": (0.4, 0.9), "backward_host": (0.8, 2.5), "flash": (0.25, 1.0),
    "unaligned": (1.0, 2.0), "depth": (16.0, 400.0), "sustained": (0.5, 1.0), "low_bits": (0.5, 1.1),
    "traffic": (0.3, 4.0), "tp_exposed": (0.2, 1.0),
}  # fmt: skip
Constants = dict[str, float]


@dataclass(frozen=True)
class Measured:
    row: TableRow
    tokens_per_s: float
    weight: float


def rows() -> list[Measured]:
    """The timed rows of the setting half, each source with the square root of its number of rows."""
    timed = [c for c in planner.cases() if c.half == planner.SETTING and (c.ratio(c.found) or 0) > 0]
    often: dict[str, int] = {}
    for case in timed:
        often[case.source] = often.get(case.source, 0) + 1
    return [
        Measured(
            predict.complete_row(case.row),
            (case.found.tokens_per_s_per_gpu or 0.0) / (case.ratio(case.found) or 1.0),
            often[case.source] ** -0.5,
        )
        for case in timed
    ]


def standing(measured: list[Measured]) -> Constants:
    at = compute.FITTED_CONSTANTS
    found = {f"sustained.{n}": value for n, value in enumerate(at.sustained)}
    found |= {f"low_bits.{n}": value for n, value in enumerate(at.low_bits)}
    found |= {name: getattr(at, name) for name in SHARED} | {name: getattr(collectives, name) for name in NETWORK}
    for stack in {m.row.framework.name: m.row.framework for m in measured if not m.row.compiled}.values():
        found |= {f"{name}.{stack.name}": getattr(stack, name) for name in OF_STACK if getattr(stack, name)}
        if stack.tp_hidden:
            found[f"tp_exposed.{stack.name}"] = 1 - stack.tp_hidden
    return found


def loss(measured: list[Measured], constants: Constants, before: Constants) -> float:
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
            total += one.weight * min(error, CAPPED + 0.1 * error)
            weights += one.weight
    moved = sum(math.log(value / before[name]) ** 2 for name, value in constants.items())
    return total / weights + STAY * moved


def _with(row: TableRow, constants: Constants) -> TableRow:
    stack, half = row.framework, 0.5 if row.compiled else 1.0
    changes = {
        name: constants[f"{name}.{stack.name}"] * (half if name != "flash" else 1.0)
        for name in OF_STACK
        if f"{name}.{stack.name}" in constants
    }
    if f"tp_exposed.{stack.name}" in constants:
        changes["tp_hidden"] = 1 - constants[f"tp_exposed.{stack.name}"]
    return replace(row, framework=replace(stack, **changes))


def fit() -> Constants:
    measured = rows()
    before = standing(measured)
    best, constants, step = loss(measured, before, before), dict(before), FIRST_STEP
    while step > LAST_STEP:
        better = False
        for name, value in list(constants.items()):
            for factor in (1 + step, 1 / (1 + step)):
                tried = {**constants, name: _limited(name, value * factor)}
                found = loss(measured, tried, before)
                if found < best - 1e-5:
                    best, constants, better = found, tried, True
                    break
        print(f"step {step:.3f}: {best:.4f}", file=sys.stderr, flush=True)
        step /= 1 if better else 2
    return constants


def _limited(name: str, value: float) -> float:
    low, high = LIMITS.get(name.split(".", maxsplit=1)[0], (0.0, math.inf))
    return min(max(value, low), high)


if __name__ == "__main__":
    for name, value in fit().items():
        print(f"{name:32} {value:.4g}")
