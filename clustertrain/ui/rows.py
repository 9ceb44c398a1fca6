"""One run as a row of the table."""

from __future__ import annotations

import urllib.parse

import msgspec

from clustertrain.printable import printable
from clustertrain.report.progress import Progress
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.run_status import RunStatus, Unreadable


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """What takes long to compute: from the telemetry of the whole run."""

    utilization: float | None = None
    """Mean of all GPUs."""
    spark: list[float | None] = []
    """Mean utilization of all GPUs in equal steps over the run; None: not recorded."""
    critical: int = 0
    """Number of insights of each severity."""
    warning: int = 0
    info: int = 0
    idle_gpu_hours: float = 0.0
    """GPU-hours of GPUs that were never used."""
    error: str | None = None
    """Why it cannot be computed."""


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times are UTC epoch s; durations end in ``_s``. None: unknown."""

    run: str
    url: str
    name: str | None = None
    state: str | None = None
    """One of :data:`clustertrain.run.state.DESCRIPTIONS`."""
    step: int | None = None
    total_steps: int | None = None
    eta_s: float | None = None
    step_s: float | None = None
    since_step_s: float | None = None
    loss: float | None = None
    goodput: float | None = None
    """Productive time over all time."""
    nodes: int | None = None
    gpus_per_node: int | None = None
    submitted: float | None = None
    attempts: int = 0
    job_id: str | None = None
    reason: str | None = None
    """Why the run waits, or why it ended without being completed."""
    command: str | None = None
    """The command that continues the run, if it needs its owner."""
    error: str | None = None
    """Why the run cannot be read."""
    details: Details | None = None


def run_url(run_id: str) -> str:
    return f"/runs/{urllib.parse.quote(run_id, safe='', errors='surrogateescape')}"


def make_row(run: RunDir, status: RunStatus | Unreadable, progress: Progress, details: Details | None = None) -> RunRow:
    """Return the row of a run. Control characters in its texts become visible, as in the terminal."""
    if isinstance(status, Unreadable):
        return RunRow(run=printable(run.id), url=run_url(run.id), error=printable(status.error))
    is_pending = status.view is not None and status.view.state == "PENDING"
    waits_for = status.view.reason if status.view is not None and is_pending else ""
    reason = status.end_reason or waits_for
    return RunRow(
        run=printable(run.id),
        url=run_url(run.id),
        name=printable(status.name),
        state=status.shown_state,
        step=status.step,
        total_steps=status.total_steps,
        eta_s=progress.eta_s,
        step_s=progress.step_s,
        # In units of 5 s: a run that reports no step must not change its row each second.
        since_step_s=None if progress.since_step_s is None else progress.since_step_s // 5 * 5,
        loss=progress.loss,
        goodput=status.goodput.ratio,
        nodes=progress.nodes,
        gpus_per_node=progress.gpus_per_node,
        submitted=progress.submitted,
        attempts=len(status.history),
        job_id=status.job_id,
        reason=printable(reason) or None,
        command=status.continue_command,
        details=details,
    )
