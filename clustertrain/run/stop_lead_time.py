"""How long before the end of the allocation the ranks must be told to stop."""

from __future__ import annotations

from clustertrain.run import events, json_files, metrics_file
from clustertrain.run.run_dir import RunDir

DEFAULT_LEAD_S = 120.0
NEWEST_ROWS = 8  # rows of an attempt, or more, that tell how long its steps take
EXIT_S = 15.0  # for the ranks to leave, the agents to write their results and the batch host to decide


def load_planned_lead_s(run: RunDir) -> float:
    """What the plan took from the cluster profile, and job.sh asks Slurm for with `--signal`."""
    lead = json_files.load_document(run.plan).value.get("signal_lead_s")
    return float(lead) if lead and json_files.is_number(lead) else DEFAULT_LEAD_S


def compute_lead_s(run: RunDir, allocation_s: float | None) -> float:
    """Seconds: two steps, a save and the exit, each with a factor of safety, from what earlier attempts measured; at
    the first start what the plan took from the cluster profile. Never more than half of ``allocation_s``, or an
    allocation would be over before its first step."""
    lead = _measure_lead_s(run) or load_planned_lead_s(run)
    return lead if allocation_s is None else min(lead, allocation_s / 2)


def _measure_lead_s(run: RunDir) -> float | None:
    attempts = run.attempts()
    saves = [
        float(e["save_s"])
        for a in attempts
        for e in events.filter_by_name(events.for_attempt(a), "checkpoint")
        if "save_s" in e
    ]
    newest = [
        r
        for a in attempts
        for r in metrics_file.read_last(run.metrics_files(a.n)[-1], min_rows=NEWEST_ROWS)[1:]
        if "step_s" in r
    ]
    # Without an attempt's first rows: they include warming up and compiling.
    steps = [float(r["step_s"]) for r in newest]
    if not saves or not steps:
        return None
    return 3 * max(steps) + 3 * max(saves) + EXIT_S
