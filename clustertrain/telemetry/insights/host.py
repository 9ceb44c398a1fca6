"""Insights on hosts: memory and cores compared with the allocation, clock steps, and missing NVML."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from clustertrain.telemetry.findings import INFO, WARNING
from clustertrain.telemetry.insights.context import JobContext, pluralize
from clustertrain.telemetry.report_schema import HostSummary, Insight

LOW_USAGE_SHARE = 0.5  # of the allocation
NEARLY_FULL_SHARE = 0.95
HEADROOM = 1.2  # suggested allocation relative to the peak
_WHOLE_NODE_SHARE = 0.95  # of the node; other jobs could not use the rest
_MIN_CLOCK_STEP_S = 1.0


def _memory_over_requested(job: JobContext) -> Iterable[Insight]:
    usage = [
        (h.processes.rss_gib.max, h.memory_allocated_gib)
        for h in job.summary.hosts
        if h.processes is not None
        and h.memory_allocated_gib
        and not _is_whole_node(h.memory_allocated_gib, h.memory_total_gib)
    ]
    if not usage or not _is_peak_known(job) or any(used >= LOW_USAGE_SHARE * allocated for used, allocated in usage):
        return
    used, allocated = max(usage)
    text = f"the job used {used:.1f} of {allocated:.1f} GiB of memory allocated on a node ({used / allocated:.0%})"
    fix = f"use --mem={max(1, math.ceil(used * HEADROOM))}G, the peak plus 20 %"
    yield Insight(severity=INFO, code="host_memory_over_requested", text=text, fix=fix)


def _is_whole_node(allocated: float, total: float | None) -> bool:
    return total is not None and allocated >= _WHOLE_NODE_SHARE * total


def _is_peak_known(job: JobContext) -> bool:
    """Return whether the job ran long enough to know its peak usage."""
    return job.training_began and not job.is_short


def _cores_over_requested(job: JobContext) -> Iterable[Insight]:
    usage = [
        (h.processes.cpu_cores.p95, h.cpu_allocated, h)
        for h in job.summary.hosts
        if h.cpu_allocated and h.processes is not None and h.processes.cpu_cores is not None
        if not _is_whole_node(h.cpu_allocated, h.cpu_count)
    ]
    if not usage or not _is_peak_known(job) or any(used >= LOW_USAGE_SHARE * allocated for used, allocated, _ in usage):
        return
    used, allocated, host = max(usage, key=lambda entry: entry[:2])
    gpus = sum(1 for g in job.summary.gpus if g.node == host.node)
    cores_per_gpu = max(1, math.ceil(used * HEADROOM / max(gpus, 1)))
    if gpus and cores_per_gpu * gpus >= allocated:
        return
    text = f"the job used {used:.1f} of {allocated} cores allocated on a node ({used / allocated:.0%})"
    fix = (
        f"use --cpus-per-gpu={cores_per_gpu}, the usage plus 20 %"
        if gpus
        else f"use {cores_per_gpu} cores, the usage plus 20 %"
    )
    yield Insight(severity=INFO, code="cores_over_requested", text=text, fix=fix)


def _memory_nearly_full(job: JobContext) -> Iterable[Insight]:
    """Compare with the allocation, at which the kernel kills processes, or with the node if it is unknown."""
    for h in job.summary.hosts:
        if h.processes is not None and h.memory_allocated_gib:
            used, limit, limit_text = h.processes.rss_gib.max, h.memory_allocated_gib, "allocated"
        elif h.memory_used_gib is not None and h.memory_total_gib:
            used, limit, limit_text = h.memory_used_gib.max, h.memory_total_gib, "installed"
        else:
            continue
        if used >= NEARLY_FULL_SHARE * limit:
            text = f"the memory of {h.node} was nearly full: {used:.1f} of {limit:.1f} GiB {limit_text}"
            fix = "request more with --mem, or use fewer data-loader workers (shared pages count once per process here)"
            yield Insight(severity=WARNING, code="host_memory_nearly_full", text=text, fix=fix, node=h.node)


def _clock_steps(job: JobContext) -> Iterable[Insight]:
    for h in job.summary.hosts:
        steps = [s for s in h.clock_steps_s if abs(s) >= _MIN_CLOCK_STEP_S]
        if steps:
            largest_step = max(steps, key=abs)
            step_text = f"{abs(largest_step):,.1f} s {'forward' if largest_step > 0 else 'back'}"
            count_text = f"{pluralize(len(steps), 'time')}, by up to " if len(steps) > 1 else ""
            text = f"the clock of {h.node} was set {count_text}{step_text}; samples use the monotonic clock"
            fix = "ask the administrators whether the node keeps time (chronyc tracking)"
            yield Insight(severity=INFO, code="clock_stepped", text=text, fix=fix, node=h.node)


def _duplicate_agents(job: JobContext) -> Iterable[Insight]:
    for h in job.summary.hosts:
        if h.samplers_max > 1:
            text = f"{h.samplers_max} agents recorded {h.node} at the same time; only the longest recording counts"
            fix = "start one agent per node: in a custom job script, use srun with --ntasks-per-node=1"
            yield Insight(severity=WARNING, code="two_agents", text=text, fix=fix, node=h.node)


def _no_nvml(job: JobContext) -> Iterable[Insight]:
    """Report nodes without NVML, grouped by reason: on a cluster without GPUs all nodes have the same."""
    nodes_with_gpus = {g.node for g in job.summary.gpus if g.samples}
    by_reason: dict[str, list[HostSummary]] = {}
    for h in job.summary.hosts:
        if h.nvml_error is not None and h.node not in nodes_with_gpus:
            by_reason.setdefault(h.nvml_error, []).append(h)
        elif h.nvml_error is not None:
            text = f"{h.node} had no GPU samples for {h.nvml_missing_s:,.0f} s: {h.nvml_error}"
            fix = "note that GPU metrics cover only the other time"
            yield Insight(severity=WARNING, code="no_nvml", text=text, fix=fix, node=h.node)
    fix = (
        "if the node has GPUs, check that nvidia-smi works in the job; a container needs --nv, or the NVIDIA "
        "runtime with the capability 'utility'"
    )
    for reason, hosts in by_reason.items():
        only_node = hosts[0].node if len(hosts) == 1 else None
        subject = f"{only_node} has" if only_node else f"{len(hosts):,} nodes have"
        text = f"{subject} no GPU samples: {reason}"
        on_cpu = job.summary.device == "cpu"
        severity = INFO if on_cpu else WARNING
        yield Insight(severity=severity, code="no_nvml", text=text, fix=None if on_cpu else fix, node=only_node)


RULES: tuple[Callable[[JobContext], Iterable[Insight]], ...] = (
    _no_nvml,
    _memory_nearly_full,
    _memory_over_requested,
    _cores_over_requested,
    _clock_steps,
    _duplicate_agents,
)
