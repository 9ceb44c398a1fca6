"""The lead time: how long before the end of the allocation the ranks must be asked to stop."""

from __future__ import annotations

from clustertrain.run import event_types, events, json_files, metrics_file
from clustertrain.run.run_dir import RunDir

DEFAULT_LEAD_S = 120.0
NEWEST_ROWS = 8  # minimum number of rows per attempt from which the step time is measured
EXIT_S = 15.0  # for the ranks to exit, the agents to write their results and the batch process to decide


def load_planned_lead_s(run: RunDir) -> float:
    """Return the lead time (s) in the plan. It comes from the cluster profile, and job.sh passes it to `--signal`."""
    lead = json_files.load_document(run.plan).value.get("signal_lead_s")
    return float(lead) if lead and json_files.is_number(lead) else DEFAULT_LEAD_S


def compute_lead_s(run: RunDir, allocation_s: float | None) -> float:
    """Return the lead time (s): three of the slowest steps and saves of earlier attempts, and 15 s.

    At the first start it is the lead time of the plan. It is at most half of ``allocation_s``; otherwise a short
    allocation could end before its first step.
    """
    lead = _measure_lead_s(run) or load_planned_lead_s(run)
    return lead if allocation_s is None else min(lead, allocation_s / 2)


def _measure_lead_s(run: RunDir) -> float | None:
    attempts = run.attempts()
    saves = [
        e.save_s
        for a in attempts
        for e in events.select(events.for_attempt(a), event_types.Checkpoint)
        if e.save_s is not None
    ]
    newest = [
        r
        for a in attempts
        for r in metrics_file.read_last(run.metrics_files(a.n)[-1], min_rows=NEWEST_ROWS)[1:]
        if "step_s" in r
    ]
    # Without the first rows of an attempt, which include warm-up and compilation.
    steps = [float(r["step_s"]) for r in newest]
    if not saves or not steps:
        return None
    return 3 * max(steps) + 3 * max(saves) + EXIT_S
