"""The document of ``status``. It is apart from those of other commands because it imports the planner."""

from __future__ import annotations

from clustertrain import clock
from clustertrain.report.documents.runs import RunEntry, collect_fields
from clustertrain.report.plan_vs_measured import PlanAccuracy, compare_run
from clustertrain.report.progress import load_progress
from clustertrain.scheduler.run_status import RunStatus


class RunStatusDocument(RunEntry, frozen=True, kw_only=True):
    """The status of one run."""

    prediction: PlanAccuracy
    """What the plan predicted, beside what was measured."""


def build_status(status: RunStatus) -> RunStatusDocument:
    """Return the document of ``status --json``."""
    fields = collect_fields(status, load_progress(status, clock.now()))
    return RunStatusDocument(**fields, prediction=compare_run(status.run))
