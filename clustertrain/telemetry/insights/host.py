"""The hosts: memory and cores beside what the job was given, and clocks that were set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from clustertrain.telemetry.insights.context import INFO, WARNING, Job, counted
from clustertrain.telemetry.report_schema import HostSummary, Note

LITTLE = 0.5  # of what was allocated
NEARLY_FULL = 0.95
HEADROOM = 1.2  # over the peak, in what is suggested
_WHOLE_NODE = 0.95  # of the node: then nobody else could use what is left over
_CLOCK_STEP_S = 1.0


def _little_memory(job: Job) -> Iterable[Note]:
    told = [
        (h.processes.rss_gib.max, h.memory_allocated_gib)
        for h in job.summary.hosts
        if h.processes is not None and h.memory_allocated_gib and not _whole(h.memory_allocated_gib, h.memory_total_gib)
    ]
    if not told or not _settled(job) or any(used >= LITTLE * given for used, given in told):
        return
    used, given = max(told)
    text = f"the job used {used:.1f} of the {given:.1f} GiB of memory that it had on a node ({used / given:.0%})"
    fix = f"--mem={max(1, math.ceil(used * HEADROOM))}G is the peak and a fifth more"
    yield Note(severity=INFO, code="host_memory_over_requested", text=text, fix=fix)


def _whole(given: float, there: float | None) -> bool:
    return there is not None and given >= _WHOLE_NODE * there


def _settled(job: Job) -> bool:
    """Long enough to know the peak."""
    return job.began and not job.short


def _little_cpu(job: Job) -> Iterable[Note]:
    told = [
        (h.processes.cpu_cores.p95, h.cpu_allocated, h)
        for h in job.summary.hosts
        if h.cpu_allocated and h.processes is not None and h.processes.cpu_cores is not None
        if not _whole(h.cpu_allocated, h.cpu_count)
    ]
    if not told or not _settled(job) or any(used >= LITTLE * given for used, given, _ in told):
        return
    used, given, host = max(told, key=lambda found: found[:2])
    gpus = sum(1 for g in job.summary.gpus if g.node == host.node)
    each = max(1, math.ceil(used * HEADROOM / max(gpus, 1)))
    if gpus and each * gpus >= given:
        return
    text = f"the job used {used:.1f} of the {given} cores that it had on a node ({used / given:.0%})"
    fix = f"--cpus-per-gpu={each} is that and a fifth more" if gpus else f"{each} cores are that and a fifth more"
    yield Note(severity=INFO, code="cores_over_requested", text=text, fix=fix)


def _memory_nearly_full(job: Job) -> Iterable[Note]:
    """Of the allocation where it is known, since the kernel kills at that; else of the node."""
    for h in job.summary.hosts:
        if h.processes is not None and h.memory_allocated_gib:
            used, given, whose = h.processes.rss_gib.max, h.memory_allocated_gib, "the job had"
        elif h.memory_used_gib is not None and h.memory_total_gib:
            used, given, whose = h.memory_used_gib.max, h.memory_total_gib, "there are"
        else:
            continue
        if used >= NEARLY_FULL * given:
            text = f"the memory of {h.node} was nearly full: {used:.1f} of the {given:.1f} GiB that {whose}"
            fix = "more with --mem, fewer data-loader workers (shared pages count once a process here)"
            yield Note(severity=WARNING, code="host_memory_nearly_full", text=text, fix=fix, node=h.node)


def _clock_steps(job: Job) -> Iterable[Note]:
    for h in job.summary.hosts:
        steps = [s for s in h.clock_steps_s if abs(s) >= _CLOCK_STEP_S]
        if steps:
            most = max(steps, key=abs)
            how = f"{abs(most):,.1f} s {'forward' if most > 0 else 'back'}"
            times = f"{counted(len(steps), 'time')}, by up to " if len(steps) > 1 else ""
            text = f"the clock of {h.node} was set {times}{how}; its samples stand by the monotonic clock"
            fix = "ask the administrators whether the node keeps time (chronyc tracking)"
            yield Note(severity=INFO, code="clock_stepped", text=text, fix=fix, node=h.node)


def _agents(job: Job) -> Iterable[Note]:
    for h in job.summary.hosts:
        if h.agents_max > 1:
            text = f"{h.agents_max} agents recorded {h.node} at the same time; the longer recording is counted"
            fix = "start one agent a node: in a job script of one's own, srun with --ntasks-per-node=1"
            yield Note(severity=WARNING, code="two_agents", text=text, fix=fix, node=h.node)


def _no_nvml(job: Job) -> Iterable[Note]:
    """Nodes with the same reason together: a cluster without GPUs has it on all of them."""
    seen = {g.node for g in job.summary.gpus if g.samples}
    by_reason: dict[str, list[HostSummary]] = {}
    for h in job.summary.hosts:
        if h.nvml is not None and h.node not in seen:
            by_reason.setdefault(h.nvml, []).append(h)
        elif h.nvml is not None:
            text = f"{h.node} had no GPU figures for {h.nvml_missing_s:,.0f} s: {h.nvml}"
            fix = "the GPUs' figures are of the other time; what they drew and did in this one is not known"
            yield Note(severity=WARNING, code="no_nvml", text=text, fix=fix, node=h.node)
    fix = (
        "where the node has GPUs, check that nvidia-smi works in the job; a container needs --nv, or the NVIDIA "
        "runtime with the capability 'utility'"
    )
    for reason, hosts in by_reason.items():
        one = hosts[0].node if len(hosts) == 1 else None
        who = f"{one} has" if one else f"{len(hosts):,} nodes have"
        text = f"{who} no GPU figures: {reason}"
        on_cpu = job.summary.device == "cpu"
        severity = INFO if on_cpu else WARNING
        yield Note(severity=severity, code="no_nvml", text=text, fix=None if on_cpu else fix, node=one)


RULES: tuple[Callable[[Job], Iterable[Note]], ...] = (
    _no_nvml,
    _memory_nearly_full,
    _little_memory,
    _little_cpu,
    _clock_steps,
    _agents,
)
