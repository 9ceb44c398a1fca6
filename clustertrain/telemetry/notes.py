"""The rules that turn figures into advice. Each stands alone: a figure that is missing silences its own rule only."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from clustertrain.run import events
from clustertrain.telemetry.summary import GpuSummary, HostSummary, Note, Summary

CRITICAL, WARNING, INFO = "critical", "warning", "info"
_ORDER = {CRITICAL: 0, WARNING: 1, INFO: 2}

VERY_LOW, LOW = 0.15, 0.5  # mean utilization
SETTLED_SAMPLES = 60  # before that many, a low mean may be nothing but the start
NEARLY_FULL = 0.95  # of a GPU's memory
ENOUGH_COVERAGE = 0.9


def of(summary: Summary, log: Iterable[events.Event]) -> list[Note]:
    """All notes, the most severe first."""
    log = list(log)
    found = [note for gpu in summary.gpus for rule in _GPU_RULES if (note := rule(gpu)) is not None]
    found += [note for host in summary.hosts for rule in _HOST_RULES if (note := rule(host)) is not None]
    found += _lost(summary, log)
    found += [_failed(e) for e in events.named(log, "telemetry_failed")]
    found += _missing_fields(summary)
    if not summary.hosts:
        found.append(Note(severity=INFO, code="no_telemetry", text="nothing has been recorded yet"))
    return sorted(found, key=lambda n: (_ORDER[n.severity], n.code))


def where(gpu: GpuSummary) -> str:
    return f"GPU {gpu.uuid if gpu.index is None else gpu.index} of {gpu.node}"


def _rank(gpu: GpuSummary) -> int | None:
    return gpu.ranks[0] if len(gpu.ranks) == 1 else None


def _of_gpu(gpu: GpuSummary, severity: str, code: str, text: str, fix: str) -> Note:
    return Note(severity=severity, code=code, text=text, fix=fix, node=gpu.node, uuid=gpu.uuid, rank=_rank(gpu))


def _unused(gpu: GpuSummary) -> Note | None:
    if gpu.utilization is None or gpu.utilization.max > 0:
        return None
    rank = _rank(gpu)
    see = "" if rank is None else f", or see in `clustertrain logs --rank {rank}` why its rank does nothing"
    fix = f"ask for fewer GPUs{see}"
    return _of_gpu(gpu, CRITICAL, "gpu_unused", f"{where(gpu)} was not used: its utilization stayed at 0", fix)


def _low_utilization(gpu: GpuSummary) -> Note | None:
    use = gpu.utilization
    if use is None or use.max == 0 or use.mean >= LOW:
        return None
    severity = CRITICAL if use.mean < VERY_LOW else WARNING
    so_far = ""
    if gpu.samples < SETTLED_SAMPLES:
        severity, so_far = INFO, f" over the first {gpu.samples} samples"
    text = f"{where(gpu)} was busy {use.mean:.0%} of the time{so_far}"
    return _of_gpu(gpu, severity, "low_utilization", text, "a larger micro batch, more data-loader workers, fewer GPUs")


def _nearly_full(gpu: GpuSummary) -> Note | None:
    used, total = gpu.memory_used_gib, gpu.memory_total_gib
    if used is None or not total or used.max < NEARLY_FULL * total:
        return None
    text = f"the memory of {where(gpu)} was nearly full: {used.max:.1f} of {total:.1f} GiB"
    fix = "a smaller micro batch, activation checkpointing, or more sharding, before a longer batch runs out"
    return _of_gpu(gpu, WARNING, "memory_nearly_full", text, fix)


def _not_listed(gpu: GpuSummary) -> Note | None:
    reason = gpu.nulls.get("utilization", "")
    if not reason.startswith("NOT_FOUND"):
        return None
    text = f"{where(gpu)} is allocated, but NVML does not show it ({reason})"
    return _of_gpu(gpu, CRITICAL, "gpu_missing", text, f"requeue with --exclude {gpu.node} and tell the administrators")


def _no_nvml(host: HostSummary) -> Note | None:
    if host.nvml is None:
        return None
    fix = (
        "where the node has GPUs, check that nvidia-smi works in the job; a container needs --nv, or the NVIDIA "
        "runtime with the capability 'utility'"
    )
    text = f"{host.node} has no GPU figures: {host.nvml}"
    return Note(severity=WARNING, code="no_nvml", text=text, fix=fix, node=host.node)


def _low_coverage(host: HostSummary) -> Note | None:
    if host.samples >= ENOUGH_COVERAGE * host.expected:
        return None
    if not host.samples:
        text = f"{host.node} recorded nothing, though its agent ran"
        return Note(severity=WARNING, code="no_telemetry", text=text, fix=_SEE_LOG, node=host.node)
    share = host.samples / host.expected
    text = f"{host.node} recorded {share:.0%} of its samples ({host.samples} of {host.expected})"
    return Note(severity=WARNING, code="low_coverage", text=text, fix=_SEE_LOG, node=host.node)


_SEE_LOG = "the figures stand for what was recorded; the agent's log and events say what held the sampler up"
_GPU_RULES: tuple[Callable[[GpuSummary], Note | None], ...] = (_unused, _low_utilization, _nearly_full, _not_listed)
_HOST_RULES: tuple[Callable[[HostSummary], Note | None], ...] = (_no_nvml, _low_coverage)


def _lost(summary: Summary, log: list[events.Event]) -> list[Note]:
    """From the samples' reasons and from the events: either may be all that a dying node left behind."""
    told = {str(e.get("uuid")): e for e in events.named(log, "gpu_lost")}
    back = {str(e.get("uuid")): e for e in events.named(log, "gpu_back")}
    found = []
    for gpu in summary.gpus:
        event = told.get(gpu.uuid)
        reasons = [r for r in gpu.nulls.values() if r.startswith(("GPU_IS_LOST", "RESET_REQUIRED"))]
        if event is not None and not str(event.get("reason", "")).startswith("NOT_FOUND"):
            reasons.insert(0, str(event.get("reason")))
        if not reasons:
            continue
        returned = event is not None and gpu.uuid in back and float(back[gpu.uuid]["t"]) > float(event["t"])
        text = f"{where(gpu)} was lost{' for a while' if returned else ''} ({reasons[0]})"
        fix = f"requeue with --exclude {gpu.node} and tell the administrators"
        found.append(_of_gpu(gpu, CRITICAL, "gpu_lost", text, fix))
    return found


def _failed(event: events.Event) -> Note:
    text = f"the sampler on {event.get('host')} reported: {event.get('reason')}"
    return Note(severity=WARNING, code="telemetry_failed", text=text, fix=_SEE_LOG)


def _missing_fields(summary: Summary) -> list[Note]:
    """One note for a field that is missing for the same reason on many GPUs."""
    groups: dict[tuple[str, str], list[GpuSummary]] = {}
    for gpu in summary.gpus:
        for name, reason in gpu.nulls.items():
            if reason.startswith(("NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND", "IMPLAUSIBLE")):
                groups.setdefault((name, reason.partition(" (")[0]), []).append(gpu)
    found = []
    for (name, reason), gpus in groups.items():
        on = where(gpus[0]) if len(gpus) == 1 else f"{len(gpus)} GPUs"
        note = Note(severity=INFO, code="field_missing", text=f"{name} is missing on {on} ({reason})")
        if len(gpus) == 1:
            note = msgspec.structs.replace(note, node=gpus[0].node, uuid=gpus[0].uuid, rank=_rank(gpus[0]))
        found.append(note)
    return found
