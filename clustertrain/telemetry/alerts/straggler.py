"""When a GPU or a rank is slower than the others: the same limits on a node (:mod:`.alerts`) and between nodes
(:mod:`.across`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from clustertrain.telemetry.alerts.gate import WARNING, WELL, Finding, Verdict

CONFIRM_S = 60.0
_MATTERS = 0.02  # of a step: a forward pass that is slower by less costs nobody anything
_LEAST_S = 0.002  # of a step, too: the steps of a toy differ by as much for nothing


@dataclass(frozen=True)
class Who:
    """``where`` in words."""

    where: str
    node: str
    uuid: str | None
    rank: int | None


OfRank = Callable[[Who, float, float, float, float], Verdict]


def of_clock(who: Who, mhz: float, usual: float, share: float) -> Verdict:
    """Whether a clock while training is below the others' by ``share``."""
    limit = usual * (1 - share)
    if mhz > limit:
        return WELL if mhz > usual * (1 - share / 2) else None
    text = f"{who.where} is slow: {mhz:.0f} MHz while training, the others run at {usual:.0f} MHz"
    return _finding("slow_gpu", who, text, f"heat or power may hold it down; {leave_out(who.node)}", mhz, limit)


def of_forward(who: Who, seconds: float, usual: float, step_s: float, share: float) -> Verdict:
    """Whether a rank's forward pass takes longer than the others' by ``share``, and enough of a step to matter."""
    limit, more, least = usual * (1 + share), seconds - usual, max(_MATTERS * step_s, _LEAST_S)
    if seconds < limit or more < least:
        return WELL if seconds < usual * (1 + share / 2) or more < least / 2 else None
    text = f"{who.where} is slow: {_time(seconds)} a step in the forward pass, the others take {_time(usual)}"
    return _finding(
        "straggler", who, text, "all ranks wait for it; compare its GPU's clock and its node's load", seconds, limit
    )


def of_data_wait(who: Who, seconds: float, usual: float, step_s: float, share: float) -> Verdict:
    """Whether a rank waits for its data longer than the others by ``share`` of a step."""
    more = max(share * step_s, _LEAST_S)
    limit = usual + more
    if seconds < limit:
        return WELL if seconds < usual + more / 2 else None
    text = f"{who.where} waits {_time(seconds)} a step for its data, the others {_time(usual)}"
    fix = "all ranks wait for it: more data-loader workers, or see what its node's disk or network does"
    return _finding("straggler_data", who, text, fix, seconds, limit)


def leave_out(node: str) -> str:
    """The end of a sentence."""
    return f"`clustertrain requeue --exclude {node}` goes on without this node"


def _finding(code: str, who: Who, text: str, fix: str, value: float, limit: float) -> Finding:
    return Finding(
        code=code,
        severity=WARNING,
        text=text,
        fix=fix,
        uuid=who.uuid,
        rank=who.rank,
        value=value,
        limit=limit,
        hold_s=CONFIRM_S,
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
