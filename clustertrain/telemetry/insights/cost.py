"""Insights on the use of the job's time and energy."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from clustertrain.telemetry import findings
from clustertrain.telemetry.findings import INFO, WARNING
from clustertrain.telemetry.insights.context import JobContext, gpu_key, pluralize, throttled_share
from clustertrain.telemetry.report_schema import Insight

LOST_SHARE = 0.1  # of the allocated time
WASTED_SHARE, HIGH_WASTED_SHARE = 0.1, 0.5  # of the GPU-hours
_MIN_GPU_HOURS = 1.0  # less waste is not worth a warning
POWER_LIMITED_SHARE = 0.5  # of the training time
_JOULES_PER_KWH = 3.6e6

# Display names of the causes in report_schema.Waste.
WASTE_LABELS = {
    "idle_gpus": "idle GPUs",
    "startup": "start-up",
    "restore": "restore",
    "repeated": "repeated steps",
    "checkpoint_stall": "checkpoint stalls",
    "evaluation": "evaluation",
    "shutdown": "shutdown",
    "lost": "lost steps",
}


def _lost_work(job: JobContext) -> Iterable[Insight]:
    share = job.share("repeated_s", "lost_s")
    if share is not None and share >= LOST_SHARE and not job.is_short:
        text = f"{share:.0%} of the job's time went into steps that were lost and repeated"
        fix = 'checkpoint more often, or set checkpoint.every = "auto", which adapts to how often attempts end'
        yield Insight(severity=WARNING, code="work_lost", text=text, fix=fix)


def _waste(job: JobContext) -> Iterable[Insight]:
    """Report wasted GPU-hours; idle GPUs do not raise the severity because other insights report them."""
    waste = job.summary.waste
    if waste is None or not waste.gpu_hours or waste.wasted_gpu_hours < WASTED_SHARE * waste.gpu_hours:
        return
    share = waste.wasted_gpu_hours / waste.gpu_hours
    non_idle_share = share - waste.by_cause.get("idle_gpus", 0.0) / waste.gpu_hours
    causes = sorted(waste.by_cause.items(), key=lambda item: -item[1])
    by_cause = ", ".join(
        f"{WASTE_LABELS.get(name, name.replace('_', ' '))} {hours:.2f}" for name, hours in causes if hours > 0
    )
    text = f"{waste.wasted_gpu_hours:,.2f} of {waste.gpu_hours:,.2f} GPU-hours ({share:.0%}) trained nothing"
    is_severe = non_idle_share >= HIGH_WASTED_SHARE and waste.gpu_hours >= _MIN_GPU_HOURS and not job.is_short
    yield Insight(
        severity=WARNING if is_severe else INFO,
        code="gpu_hours_wasted",
        text=f"{text}: {by_cause}" if by_cause else text,
    )


def _energy(job: JobContext) -> Iterable[Insight]:
    energies_j = [g.energy_j for g in job.summary.gpus if g.energy_j is not None]
    if not energies_j or not (total_j := sum(energies_j)):
        return
    amount = f"{total_j / _JOULES_PER_KWH:,.2f} kWh" if total_j >= _JOULES_PER_KWH else f"{total_j / 3600:,.1f} Wh"
    num_gpus = len({g.uuid if g.index is not None else gpu_key(g) for g in job.summary.gpus})
    coverage = f" ({len(energies_j):,} of {pluralize(num_gpus, 'GPU')} measured)" if len(energies_j) < num_gpus else ""
    joules = training.joules_per_token if (training := job.summary.training) else None
    per_token = "" if joules is None else f", {findings.format_joules(joules)} per token"
    yield Insight(severity=INFO, code="energy", text=f"the GPUs used {amount}{coverage}{per_token}")


def _power_limited(job: JobContext) -> Iterable[Insight]:
    shares = [s for g in job.working_gpus if (s := throttled_share(g, "power")) is not None]
    limited = [s for s in shares if s >= POWER_LIMITED_SHARE]
    if limited and 2 * len(limited) >= len(shares):
        gpus_text = f"{len(limited):,} of {pluralize(len(shares), 'GPU')}" if len(limited) < len(shares) else "the GPUs"
        text = f"the power limit lowered the clock of {gpus_text} for {sum(limited) / len(limited):.0%} of the training"
        yield Insight(severity=INFO, code="power_limited", text=f"{text}, which is normal at full load")


RULES: tuple[Callable[[JobContext], Iterable[Insight]], ...] = (_lost_work, _waste, _energy, _power_limited)
