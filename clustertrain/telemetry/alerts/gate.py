"""An alert, and the gate that keeps a flapping figure from filling a chat: each is raised once and cleared once, and of
one rule there are at most so many an hour."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

import msgspec

CRITICAL, WARNING = "critical", "warning"
RAISED, CLEARED = "raised", "cleared"

CLEAR_AFTER_S = 60.0  # so long must all be well before an alert is cleared
COOLDOWN_S = 600.0  # after that it is not raised again for so long
HOUR_S = 3600.0
MAX_PER_HOUR = 10  # of one rule on one node


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """``t`` UTC epoch s. ``code`` is the rule's, as in the notes of the report. ``value`` is what was measured and
    ``limit`` what it was held against, in the unit that the text names. ``lasted_s``: of a cleared one. ``held_back``:
    how many of this rule were not told since the last one that was."""

    t: float
    code: str
    severity: str
    text: str
    node: str
    state: str = RAISED
    fix: str | None = None
    uuid: str | None = None
    rank: int | None = None
    value: float | None = None
    limit: float | None = None
    lasted_s: float | None = None
    held_back: int = 0


class AlertFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule says while it holds; the fields as in :class:`Alert`. ``confirm_s``: for how long it must have held
    before it is told. ``one_shot``: it happened, and is never over: an XID, say."""

    code: str
    severity: str
    text: str
    fix: str | None = None
    uuid: str | None = None
    rank: int | None = None
    value: float | None = None
    limit: float | None = None
    confirm_s: float = 0.0
    one_shot: bool = False


# A rule's word: it holds; all is well; or neither (no figure, or between the two limits), which changes nothing.
RuleResult = AlertFinding | bool | None
HEALTHY = False


@dataclass(slots=True)
class _AlertState:
    active: Alert | None = None
    raised_at: float = 0.0
    failing_since: float | None = None
    healthy_since: float | None = None
    cooldown_until: float = float("-inf")
    is_suppressed: bool = False


class AlertGate:
    """Turns verdicts into alerts. ``mono`` is monotonic s, and may stand still or jump."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._states: dict[Hashable, _AlertState] = {}
        self._sent_times: dict[str, deque[float]] = {}
        self._suppressed_counts: dict[str, int] = {}

    def update(self, key: Hashable, result: RuleResult, t: float, mono: float) -> Alert | None:
        """``key`` names the rule and what it is about (a GPU, a rank)."""
        if result is None:
            return None
        state = self._states.get(key)
        if isinstance(result, AlertFinding):
            if state is None:
                state = self._states[key] = _AlertState()
            return (
                self._raise_one_shot(state, result, t, mono)
                if result.one_shot
                else self._raise_if_confirmed(state, result, t, mono)
            )
        return None if state is None else self._clear_if_healthy(state, t, mono)

    def _raise_one_shot(self, state: _AlertState, finding: AlertFinding, t: float, mono: float) -> Alert | None:
        state.is_suppressed = False  # each one counts
        alert = self._raise_if_confirmed(state, finding, t, mono)
        if alert is not None:
            state.active, state.cooldown_until = None, mono + COOLDOWN_S
        return alert

    def _raise_if_confirmed(self, state: _AlertState, finding: AlertFinding, t: float, mono: float) -> Alert | None:
        state.healthy_since = None
        if state.active is not None:
            return None
        if state.failing_since is None:
            state.failing_since = mono
        if mono - state.failing_since < finding.confirm_s:
            return None
        sent_times = self._sent_times.setdefault(finding.code, deque())
        while sent_times and mono - sent_times[0] >= HOUR_S:
            sent_times.popleft()
        if mono < state.cooldown_until or len(sent_times) >= MAX_PER_HOUR:
            if not state.is_suppressed:
                state.is_suppressed = True
                self._suppressed_counts[finding.code] = self._suppressed_counts.get(finding.code, 0) + 1
            return None
        sent_times.append(mono)
        if state.is_suppressed:  # it is told after all
            state.is_suppressed = False
            self._suppressed_counts[finding.code] = max(0, self._suppressed_counts.get(finding.code, 0) - 1)
        state.active, state.raised_at = self._build_alert(finding, t), mono
        return state.active

    def _build_alert(self, finding: AlertFinding, t: float) -> Alert:
        return Alert(
            t=t,
            code=finding.code,
            severity=finding.severity,
            text=finding.text,
            fix=finding.fix,
            node=self._node,
            uuid=finding.uuid,
            rank=finding.rank,
            value=None if finding.value is None else round(finding.value, 4),
            limit=None if finding.limit is None else round(finding.limit, 4),
            held_back=self._suppressed_counts.pop(finding.code, 0),
        )

    def _clear_if_healthy(self, state: _AlertState, t: float, mono: float) -> Alert | None:
        state.failing_since, state.is_suppressed = None, False
        if state.active is None:
            return None
        if state.healthy_since is None:
            state.healthy_since = mono
        if mono - state.healthy_since < CLEAR_AFTER_S:
            return None
        duration_s = max(0.0, state.healthy_since - state.raised_at)
        alert = msgspec.structs.replace(
            state.active, t=t, state=CLEARED, lasted_s=round(duration_s, 1), held_back=0, value=None
        )
        state.active, state.healthy_since, state.cooldown_until = None, None, mono + COOLDOWN_S
        return alert
