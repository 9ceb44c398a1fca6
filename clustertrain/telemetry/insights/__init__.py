"""The rules that turn figures into advice. Each stands alone: a figure that is missing silences its own rule only."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from clustertrain.run import events
from clustertrain.telemetry.insights import errors, gpus, host, memory, recording, training, utilization
from clustertrain.telemetry.insights.context import CRITICAL, INFO, WARNING, Job
from clustertrain.telemetry.report_schema import Note, Summary

_ORDER = {CRITICAL: 0, WARNING: 1, INFO: 2}
_RULES: tuple[Callable[[Job], Iterable[Note]], ...] = (
    *errors.RULES,
    gpus.one_cause_each,
    utilization.low_and_why,
    *memory.RULES,
    *training.RULES,
    *host.RULES,
    *recording.RULES,
)


def of(summary: Summary, log: Iterable[events.Event]) -> list[Note]:
    """All notes, the most severe first; those of one kind by node and rank."""
    job = Job(summary, log)
    found = [note for rule in _RULES for note in rule(job)]
    return sorted(found, key=lambda n: (_ORDER[n.severity], n.code, n.node or "", -1 if n.rank is None else n.rank))
