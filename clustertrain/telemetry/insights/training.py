"""What the job's time and energy went into."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from clustertrain.telemetry.insights import context as facts
from clustertrain.telemetry.insights.context import INFO, WARNING, Job, counted
from clustertrain.telemetry.report_schema import Note

LOST = 0.1  # of the allocated time
WASTED, MUCH_WASTED = 0.1, 0.5  # of the GPU-hours
_SMALL = 1.0  # GPU-hours, below which nobody minds
POWER_LIMITED = 0.5  # of the training
_KWH = 3.6e6

# For people: the causes of summary.Waste.
CAUSES = {
    "idle_gpus": "idle GPUs",
    "startup": "start-up",
    "restore": "restore",
    "repeated": "repeated steps",
    "checkpoint_stall": "checkpoint stalls",
    "evaluation": "evaluation",
    "shutdown": "shutdown",
    "lost": "steps that were lost",
}


def _lost_work(job: Job) -> Iterable[Note]:
    share = job.share("repeated_s", "lost_s")
    if share is not None and share >= LOST and not job.short:
        text = f"{share:.0%} of the job's time went into steps that were lost and done again"
        fix = 'checkpoint more often, or with checkpoint.every = "auto", which knows how often attempts end'
        yield Note(severity=WARNING, code="work_lost", text=text, fix=fix)


def _waste(job: Job) -> Iterable[Note]:
    """Idle GPUs are named elsewhere, so what they waste makes nothing worse here."""
    waste = job.summary.waste
    if waste is None or not waste.gpu_hours or waste.wasted_gpu_hours < WASTED * waste.gpu_hours:
        return
    share = waste.wasted_gpu_hours / waste.gpu_hours
    rest = share - waste.by_cause.get("idle_gpus", 0.0) / waste.gpu_hours
    causes = sorted(waste.by_cause.items(), key=lambda item: -item[1])
    by = ", ".join(f"{CAUSES.get(name, name.replace('_', ' '))} {hours:.2f}" for name, hours in causes if hours > 0)
    text = f"{waste.wasted_gpu_hours:,.2f} of {waste.gpu_hours:,.2f} GPU-hours ({share:.0%}) trained nothing"
    severe = rest >= MUCH_WASTED and waste.gpu_hours >= _SMALL and not job.short
    yield Note(severity=WARNING if severe else INFO, code="gpu_hours_wasted", text=f"{text}: {by}" if by else text)


def _energy(job: Job) -> Iterable[Note]:
    known = [g.energy_j for g in job.summary.gpus if g.energy_j is not None]
    if not known or not (total := sum(known)):
        return
    amount = f"{total / _KWH:,.2f} kWh" if total >= _KWH else f"{total / 3600:,.1f} Wh"
    number = len({g.uuid if g.index is not None else facts.key(g) for g in job.summary.gpus})
    some = f" ({len(known):,} of {counted(number, 'GPU')} told)" if len(known) < number else ""
    training = job.summary.training
    each = f", {training.joules_per_token:.3g} J a token" if training and training.joules_per_token is not None else ""
    yield Note(severity=INFO, code="energy", text=f"the GPUs drew {amount}{some}{each}")


def _power_limited(job: Job) -> Iterable[Note]:
    shares = [s for g in job.working if (s := facts.throttled(g, "power")) is not None]
    limited = [s for s in shares if s >= POWER_LIMITED]
    if limited and 2 * len(limited) >= len(shares):
        on = f"{len(limited):,} of {counted(len(shares), 'GPU')}" if len(limited) < len(shares) else "the GPUs"
        text = f"the power limit held down the clock of {on} for {sum(limited) / len(limited):.0%} of the training"
        yield Note(severity=INFO, code="power_limited", text=f"{text}, which is usual at full load")


RULES: tuple[Callable[[Job], Iterable[Note]], ...] = (_lost_work, _waste, _energy, _power_limited)
