"""Low utilization and why, by the evidence that there is; and the same causes where they cost much all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from clustertrain.run import endings
from clustertrain.telemetry import causes as known
from clustertrain.telemetry.insights import context as facts
from clustertrain.telemetry.insights.context import CRITICAL, INFO, WARNING, Job, counted, of_gpu, where
from clustertrain.telemetry.report_schema import GpuSummary, Note

VERY_LOW, LOW, HIGH = 0.15, known.LOW, 0.8  # mean utilization
# Shares from which a cause explains a low utilization, and from which it is told in any case.
DATA, MUCH_DATA = known.DATA, 0.2  # of a step
CHECKPOINTS, MANY_CHECKPOINTS = 0.05, 0.1  # of the allocated time
EVALUATION, MUCH_EVALUATION = 0.1, 0.3
STARTUP, MUCH_STARTUP = 0.25, 0.4

_LEAST_WAIT_S = 0.002  # of a step: a toy's batch takes as long to be handed over
_NEAR_IDLE_POWER = 0.3  # of the board's limit; an idle H100 or A100 draws a tenth to a sixth of it
_WAITING_POWER = 0.45  # kernels that spin in a collective
_HUNG_ACTIVITY, _WAITING_ACTIVITY = 0.05, 0.3  # of the multiprocessors
_HUNG_SAMPLES = 300  # before that many, a compilation or the loading of a model may look so
_MOST = 0.9  # of the GPUs that tell


@dataclass(frozen=True)
class Cause:
    """``text`` is the evidence. ``alone``: worth a note even where the utilization is not low; ``mild``: where the job
    is too short for another verdict."""

    code: str
    text: str
    fix: str
    alone: bool = False
    mild: bool = False


def low_and_why(job: Job) -> Iterable[Note]:
    """The first cause that has evidence explains a low utilization; the other ones are told where they cost much."""
    yield from _hung(job)
    causes = [cause for find in _CAUSES if (cause := find(job)) is not None]
    low = [g for g in job.working if facts.utilization(g) is not None and _overall(g) < LOW]
    if low:
        yield from _low(job, low, causes[0] if causes else _unknown(job))
    else:
        yield from _waits_in_kernels(job)
    for cause in causes[1:] if low else causes:
        if cause.alone:
            yield Note(severity=INFO if cause.mild else WARNING, code=cause.code, text=_sentence(cause), fix=cause.fix)


def _overall(gpu: GpuSummary) -> float:
    use = facts.busy(gpu)
    return use.mean if use is not None else 0.0


def _sentence(cause: Cause) -> str:
    return cause.text[0].upper() + cause.text[1:]


def _low(job: Job, low: list[GpuSummary], cause: Cause) -> list[Note]:
    """One note for the job where it is most GPUs' state, else one for each."""
    if len(low) > 1 and 2 * len(low) >= len(job.working):
        mean = sum(_overall(g) for g in low) / len(low)
        early = all(g.samples < facts.SETTLED_SAMPLES for g in low)
        so_far = " so far" if early else ""
        who = "the GPUs were" if len(low) == len(job.summary.gpus) else f"{counted(len(low), 'GPU')} were"
        text = f"{who} busy {mean:.0%} of the time{so_far}: {cause.text}"
        return [Note(severity=_severity(mean, cause, early), code=cause.code, text=text, fix=cause.fix)]
    return [_low_one(gpu, cause) for gpu in low]


def _low_one(gpu: GpuSummary, cause: Cause) -> Note:
    early = gpu.samples < facts.SETTLED_SAMPLES
    so_far = f" over the first {gpu.samples} samples" if early else ""
    text = f"{where(gpu)} was busy {_overall(gpu):.0%} of the time{so_far}: {cause.text}"
    return of_gpu(gpu, _severity(_overall(gpu), cause, early), cause.code, text, cause.fix)


def _severity(mean: float, cause: Cause, early: bool) -> str:
    return INFO if cause.mild or early else CRITICAL if mean < VERY_LOW else WARNING


def _unknown(job: Job) -> Cause:
    text = "nothing that was recorded says why"
    told = []
    if _data_share(job) is not None:
        told.append("data")
    if job.summary.goodput is not None:
        told += ["checkpoints", "evaluation", "start-up"]
    if told:
        text = f"not for {known.listed(told, 'or')}, so the kernels may be too small, or Python too slow for them"
    return Cause("low_utilization", text, known.LARGER_KERNELS)


def _data_share(job: Job) -> float | None:
    """Of a step: as rank 0 tells it, or on the mean of the ranks if that is more."""
    training = job.summary.training
    told = training.data_wait_share if training is not None else None
    waits = facts.mean(r.data_wait_s for r in job.summary.ranks)
    shares = [told, waits / job.step_s if waits is not None and job.step_s else None]
    return max((s for s in shares if s is not None), default=None)


def _data(job: Job) -> Cause | None:
    share = _data_share(job)
    if share is None or share < DATA or (job.step_s is not None and share * job.step_s < _LEAST_WAIT_S):
        return None
    text = f"training waits for its data for {share:.0%} of a step"
    fix = known.FASTER_DATA
    if (cores := _cores_busy(job)) is not None and cores >= known.CORES_BUSY:
        text += f", with {cores:.0%} of the allocated cores busy"
        fix = f"{known.MORE_CORES}; else {fix}"
    return Cause("waiting_on_data", text, fix, alone=share >= MUCH_DATA)


def _cores_busy(job: Job) -> float | None:
    return facts.mean(
        h.processes.cpu_cores.mean / h.cpu_allocated
        for h in job.summary.hosts
        if h.cpu_allocated and h.processes is not None and h.processes.cpu_cores is not None
    )


def _evaluation(job: Job) -> Cause | None:
    share = job.share("evaluation_s")
    if share is None or share < EVALUATION:
        return None
    text = f"evaluation took {share:.0%} of the job's time"
    fix = "evaluate less often, or on fewer samples, or in a job of its own from the checkpoints"
    return Cause("evaluation_often", text, fix, alone=share >= MUCH_EVALUATION, mild=job.short)


def _checkpoints(job: Job) -> Cause | None:
    share = job.share("checkpoint_stall_s")
    if share is None or share < CHECKPOINTS:
        return None
    number = sum(1 for a in job.summary.attempts for m in a.events if m.kind == "checkpoint")
    text = f"training stood still for {share:.0%} of the job's time{f' over {number:,} checkpoints' if number else ''}"
    fix = 'checkpoint.every = "auto" weighs the cost against what a failure loses; checkpoint.background = true'
    return Cause("checkpoint_often", text, fix, alone=share >= MANY_CHECKPOINTS, mild=job.short)


def _startup(job: Job) -> Cause | None:
    share = job.share("startup_s", "restore_s")
    if share is None:
        shares = [sum(g.phases[p].share for p in ("startup", "restore") if p in g.phases) for g in job.working]
        share = facts.mean(shares) if any(g.phases for g in job.working) else None
    if share is None or share < STARTUP:
        return None
    starts = len(job.summary.attempts)
    several = f" of {starts} attempts" if starts > 1 else ""
    text = f"start-up and restore{several} took {share:.0%} of the job's time"
    if job.short:
        text += ", which was short"
    fix = "judge it by a longer job; cache what is compiled and downloaded; a longer --time makes fewer attempts"
    return Cause("startup_dominated", text, fix, alone=share >= MUCH_STARTUP, mild=job.short)


def _communication(job: Job) -> Cause | None:
    """Utilization low with busy links: the GPU waits for what they carry."""
    if len(job.working) < 2:
        return None
    busy = _traffic(job)
    if not busy:
        return None
    text = f"waiting on communication, with {known.listed(busy, 'and')} a GPU"
    return Cause("communication_bound", text, known.LESS_TRAFFIC)


def _traffic(job: Job) -> list[str]:
    """The links that are busy, in words."""
    of_node: dict[str, int] = {}
    for gpu in job.working:
        of_node[gpu.node] = of_node.get(gpu.node, 0) + 1
    infiniband = facts.mean(
        h.infiniband_bytes_per_s.mean / of_node[h.node]
        for h in job.summary.hosts
        if h.infiniband_bytes_per_s is not None and h.node in of_node
    )
    nvlink = facts.mean(g.nvlink_bytes_per_s.mean for g in job.working if g.nvlink_bytes_per_s)
    pcie = facts.mean(g.pcie_bytes_per_s.mean for g in job.working if g.pcie_bytes_per_s)
    return known.links(
        [("NVLink", nvlink, known.NVLINK), ("PCIe", pcie, known.PCIE), ("InfiniBand", infiniband, known.INFINIBAND)]
    )


_CAUSES: tuple[Callable[[Job], Cause | None], ...] = (_data, _evaluation, _checkpoints, _startup, _communication)


def _power_share(gpu: GpuSummary) -> float | None:
    """Of the board's limit, while training."""
    phase = facts.training(gpu)
    power = phase.power_w if phase is not None else None
    if power is None and gpu.power_w is not None:
        power = gpu.power_w.mean
    return power / gpu.power_limit_w if power is not None and gpu.power_limit_w else None


def _sm_activity(gpu: GpuSummary) -> float | None:
    phase = facts.training(gpu)
    if phase is not None and phase.sm_activity is not None:
        return phase.sm_activity
    return gpu.sm_activity.mean if gpu.sm_activity is not None and gpu.utilization is not None else None


def _does_little(gpu: GpuSummary, activity: float, power: float) -> bool | None:
    """Although it is busy by its utilization, which a kernel that only waits raises as well. None: nothing tells."""
    active, drawn = _sm_activity(gpu), _power_share(gpu)
    if active is not None:
        return active < activity
    return None if drawn is None else drawn < power


def _waits_in_kernels(job: Job) -> Iterable[Note]:
    """Busy by the driver's word, on all GPUs, while their multiprocessors are not."""
    training = job.summary.training
    told = [
        (g, little)
        for g in job.working
        if (facts.utilization(g) or 0.0) >= HIGH
        and (little := _does_little(g, _WAITING_ACTIVITY, _WAITING_POWER)) is not None
    ]
    if training is None or not training.steps or not told or sum(little for _, little in told) < _MOST * len(told):
        return
    gpus = [g for g, _ in told]
    evidence = _evidence(gpus)
    if len(job.summary.gpus) - len(job.idle) == 1:  # nobody to wait for
        text = f"{where(gpus[0])} is busy, but does little: {evidence}: its kernels are small"
        yield of_gpu(gpus[0], WARNING, "small_kernels", text, "a larger micro batch, compile = true, or a MIG slice")
        return
    busy = _traffic(job)
    links = f", with {known.listed(busy, 'and')} a GPU" if busy else ""
    some = f" ({len(gpus):,} of {len(job.summary.gpus):,} told)" if len(gpus) < len(job.summary.gpus) else ""
    text = f"the GPUs are busy, but do little{some}: {evidence}{links}: they wait for each other, or for small kernels"
    yield Note(severity=WARNING, code="communication_bound", text=text, fix=known.LESS_TRAFFIC)


def _evidence(gpus: list[GpuSummary]) -> str:
    use, active = facts.mean(map(facts.utilization, gpus)), facts.mean(map(_sm_activity, gpus))
    tensor = facts.mean(g.tensor_activity.mean for g in gpus if g.tensor_activity is not None)
    power = facts.mean(map(_power_share, gpus))
    words = [f"utilization {use:.0%}"] if use is not None else []
    words += [f"{active:.0%} of the multiprocessors active"] if active is not None else []
    words += [f"tensor cores active {tensor:.0%}"] if tensor is not None else []
    words += [f"power at {power:.0%} of the limit"] if power is not None else []
    return ", ".join(words)


def _hung(job: Job) -> Iterable[Note]:
    fix = (
        f"see where each rank stands in `clustertrain logs {job.summary.run}` and in torch's flight records beside "
        "the logs; most often one rank has left a collective that the others wait in"
    )
    ended = [a.n for a in job.summary.attempts if a.ending == endings.HANG]
    training = job.summary.training
    stuck = []
    if training is not None and not training.steps:
        stuck = [
            g
            for g in job.working
            if g.samples >= _HUNG_SAMPLES
            and (facts.utilization(g) or 0.0) >= HIGH
            and _does_little(g, _HUNG_ACTIVITY, _NEAR_IDLE_POWER)
        ]
    if stuck:
        who = where(stuck[0]) if len(stuck) == 1 else counted(len(stuck), "GPU")
        text = f"{who} hung: no step was done, and {_evidence(stuck)}"
        if len(stuck) == 1:
            yield of_gpu(stuck[0], CRITICAL, "hung", text, fix)
        else:
            yield Note(severity=CRITICAL, code="hung", text=text, fix=fix)
    elif ended:
        which = f"attempt{'s' * (len(ended) > 1)} {', '.join(map(str, ended))}"
        yield Note(severity=CRITICAL, code="hung", text=f"{which} ended because no step was done any more", fix=fix)
