"""Names of the checks, and the finding that each check returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from clustertrain.config.parsing.documents import did_you_mean
from clustertrain.errors import UsageError

Verdict = Literal["pass", "warn", "fail", "skipped"]
_BY_SEVERITY: tuple[Verdict, ...] = ("skipped", "pass", "warn", "fail")
ALL = "all"
# The checks run in this order.
CHECKS: Mapping[str, str] = {
    "init-loss": "Compare the loss before any training with its expected value.",
    "pretrained": "Check that a pretrained model's first loss is far below that of random weights.",
    "adapter": "Check that new adapters leave the base model's outputs unchanged.",
    "overfit": "Check that the model can memorize eight samples.",
    "lr-range": "Find the learning rate at which the loss starts to rise, and compare optim.lr with it.",
    "gradients": "Compare gradients with central differences in float64.",
    "layers": "Show gradient norms per layer, dead units and activations.",
    "data": "Check samples, labels, duplicates, NaN and Inf.",
    "modes": "Check train and eval mode, accumulating gradients, frozen and unused parameters.",
    "resume": "Save, kill and restore, then compare the next steps bit by bit.",
    "speed": "Measure where a step's time goes and how fast data is read.",
}


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """One curve."""

    x_name: str
    y_name: str
    x: list[float]
    y: list[float]
    log_x: bool = False
    marks: dict[str, float] = {}
    """Labeled positions on the x axis."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    check: str
    verdict: Verdict
    text: str
    """The reason for the verdict, in one sentence."""
    fix: str = ""
    evidence: dict[str, Any] = {}
    """Every measured number, with the unit in its key."""
    rows: list[tuple[str, str]] = []
    """The main numbers as text, for the terminal."""
    plot: Plot | None = None


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the most severe verdict; pass for an empty sequence."""
    return max(verdicts, key=_BY_SEVERITY.index, default="pass")


def overall_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict of a diagnosis; skipped checks are ignored unless all were skipped."""
    all_verdicts = list(verdicts)
    return worst_verdict(v for v in all_verdicts if v != "skipped") if set(all_verdicts) != {"skipped"} else "skipped"


def select_checks(name: str) -> list[str]:
    """Return the checks selected by ``name``, which is a check or "all".

    Raises:
        UsageError: ``name`` is not a check.
    """
    if name == ALL:
        return list(CHECKS)
    if name not in CHECKS:
        raise UsageError(f"no such check: {name!r}", fix=did_you_mean(name, [*CHECKS, ALL]))
    return [name]
