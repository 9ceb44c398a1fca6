"""An alert, and the gate that keeps a flapping figure from filling a chat: each is raised once and cleared once, and of
one rule there are at most so many an hour."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

import msgspec

CRITICAL, WARNING = "critical", "warning"
RAISED, CLEARED = "raised", "cleared"

CLEAR_S = 60.0  # so long must all be well before an alert is cleared
REST_S = 600.0  # after that it is not raised again for so long
HOUR_S = 3600.0
MOST_AN_HOUR = 10  # of one rule on one node


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


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule says while it holds; the fields as in :class:`Alert`. ``hold_s``: for how long it must have held
    before it is told. ``moment``: it happened, and is never over: an XID, say."""

    code: str
    severity: str
    text: str
    fix: str | None = None
    uuid: str | None = None
    rank: int | None = None
    value: float | None = None
    limit: float | None = None
    hold_s: float = 0.0
    moment: bool = False


# A rule's word: it holds; all is well; or neither (no figure, or between the two limits), which changes nothing.
Verdict = Finding | bool | None
WELL = False


@dataclass(slots=True)
class _Subject:
    raised: Alert | None = None
    since: float = 0.0
    holds_since: float | None = None
    well_since: float | None = None
    rests_until: float = float("-inf")
    counted: bool = False


class Gate:
    """Turns verdicts into alerts. ``mono`` is monotonic s, and may stand still or jump."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._subjects: dict[Hashable, _Subject] = {}
        self._told: dict[str, deque[float]] = {}
        self._held: dict[str, int] = {}

    def judge(self, key: Hashable, verdict: Verdict, t: float, mono: float) -> Alert | None:
        """``key`` names the rule and what it is about (a GPU, a rank)."""
        if verdict is None:
            return None
        subject = self._subjects.get(key)
        if isinstance(verdict, Finding):
            if subject is None:
                subject = self._subjects[key] = _Subject()
            return (
                self._happened(subject, verdict, t, mono) if verdict.moment else self._holds(subject, verdict, t, mono)
            )
        return None if subject is None else self._well(subject, t, mono)

    def _happened(self, subject: _Subject, finding: Finding, t: float, mono: float) -> Alert | None:
        subject.counted = False  # each one counts
        alert = self._holds(subject, finding, t, mono)
        if alert is not None:
            subject.raised, subject.rests_until = None, mono + REST_S
        return alert

    def _holds(self, subject: _Subject, finding: Finding, t: float, mono: float) -> Alert | None:
        subject.well_since = None
        if subject.raised is not None:
            return None
        if subject.holds_since is None:
            subject.holds_since = mono
        if mono - subject.holds_since < finding.hold_s:
            return None
        told = self._told.setdefault(finding.code, deque())
        while told and mono - told[0] >= HOUR_S:
            told.popleft()
        if mono < subject.rests_until or len(told) >= MOST_AN_HOUR:
            if not subject.counted:
                subject.counted = True
                self._held[finding.code] = self._held.get(finding.code, 0) + 1
            return None
        told.append(mono)
        if subject.counted:  # it is told after all
            subject.counted = False
            self._held[finding.code] = max(0, self._held.get(finding.code, 0) - 1)
        subject.raised, subject.since = self._alert(finding, t), mono
        return subject.raised

    def _alert(self, f: Finding, t: float) -> Alert:
        return Alert(
            t=t,
            code=f.code,
            severity=f.severity,
            text=f.text,
            fix=f.fix,
            node=self._node,
            uuid=f.uuid,
            rank=f.rank,
            value=None if f.value is None else round(f.value, 4),
            limit=None if f.limit is None else round(f.limit, 4),
            held_back=self._held.pop(f.code, 0),
        )

    def _well(self, subject: _Subject, t: float, mono: float) -> Alert | None:
        subject.holds_since, subject.counted = None, False
        if subject.raised is None:
            return None
        if subject.well_since is None:
            subject.well_since = mono
        if mono - subject.well_since < CLEAR_S:
            return None
        lasted = max(0.0, subject.well_since - subject.since)
        alert = msgspec.structs.replace(
            subject.raised, t=t, state=CLEARED, lasted_s=round(lasted, 1), held_back=0, value=None
        )
        subject.raised, subject.well_since, subject.rests_until = None, None, mono + REST_S
        return alert
