"""Attempts, phases and events of a run on one timeline, from its events alone."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from clustertrain.errors import ClusterTrainError
from clustertrain.report.html import charts
from clustertrain.report.html.text import clean
from clustertrain.run import attempts, events
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.telemetry import timeline_events
from clustertrain.telemetry.report_schema import AttemptSummary, Summary, TimeWindow
from clustertrain.ui.stamps import Stamp, event_files, take_stamp


class TimelineFeed:
    """The events of one run. An attempt is read again only if its files have changed. Safe in threads."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._attempts: dict[int, tuple[Stamp, AttemptSummary]] = {}
        self._problems: dict[int, str] = {}
        self.version = 0

    def refresh(self) -> bool:
        """Read the attempts whose files have changed; return whether there was one."""
        with self._lock:
            version = self.version
            for attempt in self._run.attempts():
                stamp = take_stamp(event_files(attempt))
                if stamp != self._attempts.get(attempt.n, ((), None))[0]:
                    self._attempts[attempt.n] = stamp, self._load(attempt)
                    self.version += 1
            return self.version != version

    def _load(self, attempt: AttemptDir) -> AttemptSummary:
        """Return the attempt, without what cannot be read."""
        self._problems.pop(attempt.n, None)
        try:
            stored = attempts.load_attempt(self._run, attempt)
            return _summarize(stored, timeline_events.timeline_from_events(events.for_attempt(attempt)))
        except (ClusterTrainError, OSError, ValueError) as e:
            self._problems[attempt.n] = f"attempt {attempt.n} is not shown: {e}"
            return AttemptSummary(attempt.n, None, TimeWindow(None, None), [])

    def document(self, now: float, *, is_final: bool) -> dict[str, Any]:
        """Return attempts, phases, lanes and marks as templates/parts/timeline.js takes them.

        An attempt that has not ended has null as its end; its phases last until ``now`` (UTC epoch s).

        Args:
            is_final: the run has ended, so that its last attempt has too, even if it left no record.
        """
        self.refresh()
        with self._lock:
            found = [summary for _, (_, summary) in sorted(self._attempts.items())]
            problems = list(self._problems.values())
        open_attempts = _end_abandoned(found, is_final=is_final)
        marks, marks_note = charts.lane_events(_without_samples(self._run, open_attempts))
        known_until = [
            a if a.end is not None else msgspec.structs.replace(a, end=max(now, a.start or now)) for a in open_attempts
        ]
        phases, phases_note = charts.phase_spans(_without_samples(self._run, known_until))
        document = {
            "attempts": [
                {"n": a.n, "start": a.start, "end": a.end, "ending": a.ending, "nodes": a.nodes, "job_id": a.job_id}
                for a in open_attempts
            ],
            "phases": phases,
            "lanes": charts.used_lanes(marks),
            "marks": charts.events_to_json(marks),
            "notes": [note for note in (marks_note, phases_note) if note],
            "problems": problems,
        }
        return clean(document)


def _summarize(stored: attempts.Attempt, marks: list[timeline_events.TimelineEvent]) -> AttemptSummary:
    window = TimeWindow(marks[0].t if marks else None, max((m.end or m.t for m in marks), default=None))
    nodes = list(stored.nodes)
    return AttemptSummary(
        stored.n, stored.job_id or None, window, nodes, stored.start, stored.end, stored.ending, marks
    )


def _end_abandoned(found: Sequence[AttemptSummary], *, is_final: bool) -> list[AttemptSummary]:
    """Return the attempts; one that was killed without a record ended by its last event, or by the next start."""
    result = []
    for attempt, following in itertools.zip_longest(found, found[1:]):
        end = attempt.end
        if end is None and (is_final or following is not None):
            next_start = following.start if following is not None else None
            end = attempt.window.end if attempt.window.end is not None else next_start
        result.append(msgspec.structs.replace(attempt, end=end))
    return result


def _without_samples(run: RunDir, found: list[AttemptSummary]) -> Summary:
    return Summary(
        run=run.id, job_id=None, window=TimeWindow(None, None), coverage=None, attempts=found, gpus=[], hosts=[],
        insights=[],
    )  # fmt: skip
