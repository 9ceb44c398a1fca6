"""Insights on low utilization and its causes, and on the same causes if they are costly at high utilization."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from clustertrain.run import endings
from clustertrain.telemetry import findings
from clustertrain.telemetry.findings import CRITICAL, INFO, WARNING
from clustertrain.telemetry.insights.context import (
    SETTLED_SAMPLES,
    JobContext,
    gpu_insight,
    gpu_key,
    gpu_label,
    mean_known,
    pluralize,
    train_phase,
    train_utilization,
    utilization_stats,
)
from clustertrain.telemetry.insights.gpus import explain_outliers
from clustertrain.telemetry.report_schema import GpuSummary, Insight

VERY_LOW_UTILIZATION, LOW_UTILIZATION, HIGH_UTILIZATION = 0.15, findings.LOW_UTILIZATION, 0.8  # mean utilization
# Shares from which a cause explains low utilization, and from which it is reported in any case.
DATA_SHARE, HIGH_DATA_SHARE = findings.HIGH_DATA_WAIT, 0.2  # of a step
CHECKPOINT_SHARE, HIGH_CHECKPOINT_SHARE = 0.05, 0.1  # of the allocated time
EVALUATION_SHARE, HIGH_EVALUATION_SHARE = 0.1, 0.3
STARTUP_SHARE, HIGH_STARTUP_SHARE = 0.25, 0.4

_MIN_WAIT_S = 0.002  # per step: handing over even a tiny batch takes this long
_NEAR_IDLE_POWER = 0.3  # of the board's limit; an idle H100 or A100 draws a tenth to a sixth of it
_WAITING_POWER = 0.45  # kernels that spin in a collective
_HUNG_ACTIVITY, _WAITING_ACTIVITY = 0.05, 0.3  # of the multiprocessors
_HUNG_SAMPLES = 300  # before, compiling or loading a model may look like a hang
_GPU_QUORUM = 0.9  # of the measured GPUs


@dataclass(frozen=True)
class Cause:
    """Cause of low utilization."""

    code: str
    text: str  # the evidence
    fix: str
    standalone: bool = False  # worth an insight even if utilization is not low
    is_minor: bool = False  # the job is too short for a stronger verdict


def low_utilization(job: JobContext) -> Iterable[Insight]:
    """Explain low utilization by the first cause with evidence, and report other causes that are costly."""
    yield from _hung(job)
    likely_causes = [cause for rule in _CAUSE_RULES if (cause := rule(job)) is not None]
    low_gpus = [
        g for g in job.working_gpus if train_utilization(g) is not None and _mean_utilization(g) < LOW_UTILIZATION
    ]
    if not _is_most(low_gpus, job):  # a GPU that throttles needs no second explanation
        explained = explain_outliers(job)
        low_gpus = [g for g in low_gpus if gpu_key(g) not in explained]
    if low_gpus:
        yield from _low_utilization_insights(job, low_gpus, likely_causes[0] if likely_causes else _unknown_cause(job))
    else:
        yield from _busy_but_underused(job)
    for cause in likely_causes[1:] if low_gpus else likely_causes:
        if cause.standalone:
            yield Insight(
                severity=INFO if cause.is_minor else WARNING, code=cause.code, text=_capitalize(cause), fix=cause.fix
            )


def _is_most(gpus: Sequence[GpuSummary], job: JobContext) -> bool:
    return len(gpus) > 1 and 2 * len(gpus) >= len(job.working_gpus)


def _mean_utilization(gpu: GpuSummary) -> float:
    stats = utilization_stats(gpu)
    return stats.mean if stats is not None else 0.0


def _capitalize(cause: Cause) -> str:
    return cause.text[0].upper() + cause.text[1:]


def _low_utilization_insights(job: JobContext, low_gpus: list[GpuSummary], cause: Cause) -> list[Insight]:
    """Return one insight for the job if most GPUs are affected, else one for each GPU."""
    if _is_most(low_gpus, job):
        mean = sum(_mean_utilization(g) for g in low_gpus) / len(low_gpus)
        is_early = all(g.samples < SETTLED_SAMPLES for g in low_gpus)
        so_far = " so far" if is_early else ""
        subject = (
            "the GPUs were" if len(low_gpus) == len(job.summary.gpus) else f"{pluralize(len(low_gpus), 'GPU')} were"
        )
        text = f"{subject} busy {mean:.0%} of the time{so_far}: {cause.text}"
        return [Insight(severity=_severity(mean, cause, is_early), code=cause.code, text=text, fix=cause.fix)]
    return [_gpu_low_utilization(gpu, cause) for gpu in low_gpus]


def _gpu_low_utilization(gpu: GpuSummary, cause: Cause) -> Insight:
    is_early = gpu.samples < SETTLED_SAMPLES
    so_far = f" over the first {gpu.samples} samples" if is_early else ""
    text = f"{gpu_label(gpu)} was busy {_mean_utilization(gpu):.0%} of the time{so_far}: {cause.text}"
    return gpu_insight(gpu, _severity(_mean_utilization(gpu), cause, is_early), cause.code, text, cause.fix)


def _severity(mean: float, cause: Cause, is_early: bool) -> str:
    return INFO if cause.is_minor or is_early else CRITICAL if mean < VERY_LOW_UTILIZATION else WARNING


def _unknown_cause(job: JobContext) -> Cause:
    ruled_out = []
    if _data_wait_share(job) is not None:
        ruled_out.append("data")
    if job.summary.goodput is not None and job.summary.goodput.ratio is not None:
        ruled_out += ["checkpoints", "evaluation", "start-up"]
    return Cause("low_utilization", *findings.unknown_cause(ruled_out))


def _data_wait_share(job: JobContext) -> float | None:
    """Return the share of a step spent waiting for data: of rank 0, or the mean of all ranks if larger."""
    training = job.summary.training
    reported = training.data_wait_share if training is not None else None
    mean_wait_s = mean_known(r.data_wait_s for r in job.summary.ranks)
    shares = [reported, mean_wait_s / job.step_s if mean_wait_s is not None and job.step_s else None]
    return max((s for s in shares if s is not None), default=None)


def _data_cause(job: JobContext) -> Cause | None:
    share = _data_wait_share(job)
    if share is None or share < DATA_SHARE or (job.step_s is not None and share * job.step_s < _MIN_WAIT_S):
        return None
    busy_cores = ""
    if (cores := _cpu_utilization(job)) is not None and cores >= findings.HIGH_CPU_UTILIZATION:
        busy_cores = f"{cores:.0%} of the allocated cores busy"
    text, fix = findings.waiting_for_data(share, busy_cores)
    return Cause("waiting_on_data", text, fix, standalone=share >= HIGH_DATA_SHARE)


def _cpu_utilization(job: JobContext) -> float | None:
    return mean_known(
        h.processes.cpu_cores.mean / h.cpu_allocated
        for h in job.summary.hosts
        if h.cpu_allocated and h.processes is not None and h.processes.cpu_cores is not None
    )


def _evaluation_cause(job: JobContext) -> Cause | None:
    share = job.share("evaluation_s")
    if share is None or share < EVALUATION_SHARE:
        return None
    text = f"evaluation took {share:.0%} of the job's time"
    fix = "evaluate less often, on fewer samples, or in a separate job from the checkpoints"
    return Cause("evaluation_often", text, fix, standalone=share >= HIGH_EVALUATION_SHARE, is_minor=job.is_short)


def _checkpoint_cause(job: JobContext) -> Cause | None:
    share = job.share("checkpoint_stall_s")
    if share is None or share < CHECKPOINT_SHARE:
        return None
    num_checkpoints = sum(1 for a in job.summary.attempts for m in a.events if m.kind == "checkpoint")
    text = (
        f"training was stalled for {share:.0%} of the job's"
        f" time{f' over {num_checkpoints:,} checkpoints' if num_checkpoints else ''}"
    )
    fix = 'set checkpoint.every = "auto", which balances cost and lost work, or checkpoint.async_save = true'
    return Cause("checkpoint_often", text, fix, standalone=share >= HIGH_CHECKPOINT_SHARE, is_minor=job.is_short)


def _startup_cause(job: JobContext) -> Cause | None:
    share = job.share("startup_s", "restore_s")
    if share is None:
        shares = [sum(g.phases[p].share for p in ("startup", "restore") if p in g.phases) for g in job.working_gpus]
        share = mean_known(shares) if any(g.phases for g in job.working_gpus) else None
    if share is None or share < STARTUP_SHARE:
        return None
    num_attempts = len(job.summary.attempts)
    several = f" of {num_attempts} attempts" if num_attempts > 1 else ""
    text = f"start-up and restore{several} took {share:.0%} of the job's time"
    if job.is_short:
        text += ", which was short"
    fix = "judge by a longer job; cache compiled and downloaded files; use a longer --time for fewer attempts"
    return Cause("startup_dominated", text, fix, standalone=share >= HIGH_STARTUP_SHARE, is_minor=job.is_short)


def _communication_cause(job: JobContext) -> Cause | None:
    """Blame communication if links are busy while utilization is low."""
    if len(job.working_gpus) < 2:
        return None
    busy_links = _busy_links(job)
    return Cause("communication_bound", *findings.waiting_for_communication(busy_links)) if busy_links else None


def _busy_links(job: JobContext) -> str:
    """Return a phrase for the busy links."""
    gpus_per_node: dict[str, int] = {}
    for gpu in job.working_gpus:
        gpus_per_node[gpu.node] = gpus_per_node.get(gpu.node, 0) + 1
    infiniband = mean_known(
        h.infiniband_bytes_per_s.mean / gpus_per_node[h.node]
        for h in job.summary.hosts
        if h.infiniband_bytes_per_s is not None and h.node in gpus_per_node
    )
    nvlink = mean_known(g.nvlink_bytes_per_s.mean for g in job.working_gpus if g.nvlink_bytes_per_s)
    pcie = mean_known(g.pcie_bytes_per_s.mean for g in job.working_gpus if g.pcie_bytes_per_s)
    return findings.format_busy_links(nvlink, pcie, infiniband)


_CAUSE_RULES: tuple[Callable[[JobContext], Cause | None], ...] = (
    _data_cause,
    _evaluation_cause,
    _checkpoint_cause,
    _startup_cause,
    _communication_cause,
)


def _power_share(gpu: GpuSummary) -> float | None:
    """Return the mean power in training as a share of the board's limit."""
    phase = train_phase(gpu)
    power = phase.power_w if phase is not None else None
    if power is None and gpu.power_w is not None:
        power = gpu.power_w.mean
    return power / gpu.power_limit_w if power is not None and gpu.power_limit_w else None


def _mean_sm_activity(gpu: GpuSummary) -> float | None:
    phase = train_phase(gpu)
    if phase is not None and phase.sm_activity is not None:
        return phase.sm_activity
    return gpu.sm_activity.mean if gpu.sm_activity is not None and gpu.utilization is not None else None


def _is_underused(gpu: GpuSummary, max_activity: float, max_power_share: float) -> bool | None:
    """Return whether a busy GPU does little work, as a kernel that only waits counts as busy; None if unknown."""
    sm_activity, power_share = _mean_sm_activity(gpu), _power_share(gpu)
    if sm_activity is not None:
        return sm_activity < max_activity
    return None if power_share is None else power_share < max_power_share


def _busy_but_underused(job: JobContext) -> Iterable[Insight]:
    """Report GPUs that are busy according to the driver while their multiprocessors are not."""
    training = job.summary.training
    measured = [
        (g, underused)
        for g in job.working_gpus
        if (train_utilization(g) or 0.0) >= HIGH_UTILIZATION
        and (underused := _is_underused(g, _WAITING_ACTIVITY, _WAITING_POWER)) is not None
    ]
    if (
        training is None
        or not training.steps
        or not measured
        or sum(little for _, little in measured) < _GPU_QUORUM * len(measured)
    ):
        return
    gpus = [g for g, _ in measured]
    evidence = _format_evidence(gpus)
    if len(job.summary.gpus) - len(job.idle_gpus) == 1:  # no other GPU to wait for
        text = f"{gpu_label(gpus[0])} is busy, but does little: {evidence}: its kernels are small"
        yield gpu_insight(
            gpus[0], WARNING, "small_kernels", text, "use a larger micro batch, compile = true, or a MIG slice"
        )
        return
    busy_links = _busy_links(job)
    links = f", with {busy_links}" if busy_links else ""
    coverage = f" ({len(gpus):,} of {len(job.summary.gpus):,} measured)" if len(gpus) < len(job.summary.gpus) else ""
    text = (
        f"the GPUs are busy, but do little{coverage}: {evidence}{links}: they wait for each other, or for small kernels"
    )
    yield Insight(severity=WARNING, code="communication_bound", text=text, fix=findings.FIX_NETWORK)


def _format_evidence(gpus: list[GpuSummary]) -> str:
    utilization, sm_activity = (
        mean_known(map(train_utilization, gpus)),
        mean_known(map(_mean_sm_activity, gpus)),
    )
    tensor_activity = mean_known(g.tensor_activity.mean for g in gpus if g.tensor_activity is not None)
    power_share = mean_known(map(_power_share, gpus))
    parts = [f"utilization {utilization:.0%}"] if utilization is not None else []
    parts += [f"{sm_activity:.0%} of the multiprocessors active"] if sm_activity is not None else []
    parts += [f"tensor cores active {tensor_activity:.0%}"] if tensor_activity is not None else []
    parts += [f"power at {power_share:.0%} of the limit"] if power_share is not None else []
    return ", ".join(parts)


def _hung(job: JobContext) -> Iterable[Insight]:
    fix = (
        f"see where each rank is in `clustertrain logs {job.summary.run}` and in torch's flight records next to "
        "the logs; usually one rank has left a collective in which the others wait"
    )
    hung_attempts = [a.n for a in job.summary.attempts if a.ending == endings.HANG]
    training = job.summary.training
    stuck = []
    if training is not None and not training.steps:
        stuck = [
            g
            for g in job.working_gpus
            if g.samples >= _HUNG_SAMPLES
            and (train_utilization(g) or 0.0) >= HIGH_UTILIZATION
            and _is_underused(g, _HUNG_ACTIVITY, _NEAR_IDLE_POWER)
        ]
    if stuck:
        subject = gpu_label(stuck[0]) if len(stuck) == 1 else pluralize(len(stuck), "GPU")
        text = f"{subject} hung: no step was done, and {_format_evidence(stuck)}"
        if len(stuck) == 1:
            yield gpu_insight(stuck[0], CRITICAL, "hung", text, fix)
        else:
            yield Insight(severity=CRITICAL, code="hung", text=text, fix=fix)
    elif hung_attempts:
        attempts_text = f"attempt{'s' * (len(hung_attempts) > 1)} {', '.join(map(str, hung_attempts))}"
        yield Insight(severity=CRITICAL, code="hung", text=f"{attempts_text} ended because steps stopped", fix=fix)
