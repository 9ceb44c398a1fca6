"""Limits for slow GPUs and ranks, shared by the rules of a node (:mod:`.rules`) and the :mod:`.cross_node` rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from clustertrain.telemetry.alerts.gate import HEALTHY, AlertFinding, RuleResult
from clustertrain.telemetry.findings import WARNING

CONFIRM_S = 60.0
_MIN_STEP_SHARE = 0.02  # of a step; a smaller delay of the forward pass does not matter
_MIN_DELAY_S = 0.002  # per step; very short steps vary by this much


@dataclass(frozen=True)
class Suspect:
    """GPU, rank or node that may be slow."""

    label: str  # for messages
    node: str
    uuid: str | None
    rank: int | None


StragglerRule = Callable[[Suspect, float, float, float, float], RuleResult]


def evaluate_clock(suspect: Suspect, mhz: float, median: float, margin: float) -> RuleResult:
    """Return a finding if the clock in training is below the median by the share ``margin``."""
    limit = median * (1 - margin)
    if mhz > limit:
        return HEALTHY if mhz > median * (1 - margin / 2) else None
    text = f"{suspect.label} is slow: {mhz:.0f} MHz while training, the others run at {median:.0f} MHz"
    return _finding(
        "slow_gpu", suspect, text, f"heat or power may throttle it; {exclude_hint(suspect.node)}", mhz, limit
    )


def evaluate_forward(suspect: Suspect, seconds: float, median: float, step_s: float, margin: float) -> RuleResult:
    """Return a finding if the forward pass exceeds the median by the share ``margin`` and matters for the step."""
    limit, delay_s, min_delay_s = median * (1 + margin), seconds - median, max(_MIN_STEP_SHARE * step_s, _MIN_DELAY_S)
    if seconds < limit or delay_s < min_delay_s:
        return HEALTHY if seconds < median * (1 + margin / 2) or delay_s < min_delay_s / 2 else None
    text = (
        f"{suspect.label} is slow: {_format_seconds(seconds)} per step in the forward pass, the others take"
        f" {_format_seconds(median)}"
    )
    return _finding(
        "straggler", suspect, text, "all ranks wait for it; compare its GPU's clock and its node's load", seconds, limit
    )


def evaluate_data_wait(suspect: Suspect, seconds: float, median: float, step_s: float, margin: float) -> RuleResult:
    """Return a finding if the wait for data exceeds the median by the share ``margin`` of a step."""
    max_delay_s = max(margin * step_s, _MIN_DELAY_S)
    limit = median + max_delay_s
    if seconds < limit:
        return HEALTHY if seconds < median + max_delay_s / 2 else None
    text = f"{suspect.label} waits {_format_seconds(seconds)} per step for data, the others {_format_seconds(median)}"
    fix = "all ranks wait for it: use more data-loader workers, or check its node's disk and network"
    return _finding("straggler_data", suspect, text, fix, seconds, limit)


def exclude_hint(node: str) -> str:
    """Return a hint, for the end of a sentence, to continue without the node."""
    return f"`clustertrain requeue --exclude {node}` continues without this node"


def _finding(code: str, suspect: Suspect, text: str, fix: str, value: float, limit: float) -> AlertFinding:
    return AlertFinding(
        code=code,
        severity=WARNING,
        text=text,
        fix=fix,
        uuid=suspect.uuid,
        rank=suspect.rank,
        value=value,
        limit=limit,
        confirm_s=CONFIRM_S,
    )


def _format_seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
