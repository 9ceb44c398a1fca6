"""The checks by name, and what one of them finds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from clustertrain.config.parsing.documents import did_you_mean
from clustertrain.errors import UsageError

Verdict = Literal["pass", "warn", "fail", "skipped"]
_BY_SEVERITY: tuple[Verdict, ...] = ("skipped", "pass", "warn", "fail")
ALL = "all"
# In this order they run.
CHECKS: Mapping[str, str] = {
    "init-loss": "The loss before any training against its expected value.",
    "overfit": "Whether eight samples can be learned by heart.",
    "lr-range": "From which learning rate on the loss rises, and where optim.lr lies to it.",
    "gradients": "Gradients against central differences in float64.",
    "layers": "Gradient norms layer by layer, dead units, activations.",
    "data": "Samples, labels, duplicates, values that are not finite.",
    "modes": "Train and eval mode, gradients that add up, frozen and unused parameters.",
    "resume": "Save, kill, restore: the next steps bit by bit.",
    "speed": "Where a step's time goes, and how fast data is read.",
}


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """One curve. ``marks`` are places on the x axis by what they are called."""

    x_name: str
    y_name: str
    x: list[float]
    y: list[float]
    log_x: bool = False
    marks: dict[str, float] = {}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """``evidence`` holds the numbers, with units in their names; ``rows`` are some of them in words, for people."""

    check: str
    verdict: Verdict
    text: str
    fix: str = ""
    evidence: dict[str, Any] = {}
    rows: list[tuple[str, str]] = []
    plot: Plot | None = None


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Of nothing: pass."""
    return max(verdicts, key=_BY_SEVERITY.index, default="pass")


def overall_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Of a whole diagnosis; what was skipped says nothing, unless all was."""
    all_verdicts = list(verdicts)
    return worst_verdict(v for v in all_verdicts if v != "skipped") if set(all_verdicts) != {"skipped"} else "skipped"


def select_checks(name: str) -> list[str]:
    """The checks that ``name`` stands for.

    Raises:
        UsageError: there is no such check.
    """
    if name == ALL:
        return list(CHECKS)
    if name not in CHECKS:
        raise UsageError(f"no check {name!r}", fix=did_you_mean(name, [*CHECKS, ALL]))
    return [name]
