"""Alerts, and a gate against flapping: each alert is raised once and cleared once, with an hourly limit per rule."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

import msgspec

RAISED, CLEARED = "raised", "cleared"

CLEAR_AFTER_S = 60.0  # healthy time before an alert clears
COOLDOWN_S = 600.0  # time after which a cleared alert may be raised again
HOUR_S = 3600.0
MAX_PER_HOUR = 10  # per rule and node


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """A raised or cleared alert."""

    t: float  # UTC epoch s
    code: str  # of the rule, as in the insights of the report
    severity: str
    text: str
    node: str
    state: str = RAISED
    fix: str | None = None
    uuid: str | None = None
    rank: int | None = None
    value: float | None = None  # measured, in the unit of the text
    limit: float | None = None  # for ``value``
    lasted_s: float | None = None  # duration of a cleared alert
    suppressed: int = 0  # alerts of this rule suppressed since the last one sent


class AlertFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a rule whose condition holds; fields as in :class:`Alert`."""

    code: str
    severity: str
    text: str
    fix: str | None = None
    uuid: str | None = None
    rank: int | None = None
    value: float | None = None
    limit: float | None = None
    confirm_s: float = 0.0
    """Seconds for which the condition must hold before the alert is raised."""
    one_shot: bool = False
    """An incident that is never cleared, such as an XID."""


# A finding (the condition holds), HEALTHY, or None (no data, or between the two limits), which changes nothing.
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
    """Turns rule results into alerts. ``mono`` is monotonic s and may stand still or jump."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._states: dict[Hashable, _AlertState] = {}
        self._sent_times: dict[str, deque[float]] = {}
        self._suppressed_counts: dict[str, int] = {}

    def update(self, key: Hashable, result: RuleResult, t: float, mono: float) -> Alert | None:
        """Return the alert to send for a rule's result, if any; ``key`` identifies the rule and its GPU or rank."""
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
        state.is_suppressed = False  # each incident counts
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
        if state.is_suppressed:  # it is sent after all
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
            suppressed=self._suppressed_counts.pop(finding.code, 0),
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
            state.active, t=t, state=CLEARED, lasted_s=round(duration_s, 1), suppressed=0, value=None
        )
        state.active, state.healthy_since, state.cooldown_until = None, None, mono + COOLDOWN_S
        return alert
