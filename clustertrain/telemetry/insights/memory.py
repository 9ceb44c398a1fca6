"""Insights on GPU memory: nearly full, or far more than needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from clustertrain.run import endings
from clustertrain.telemetry.findings import FIX_GPU_MEMORY, INFO, WARNING
from clustertrain.telemetry.insights.context import (
    SETTLED_SAMPLES,
    JobContext,
    gpu_insight,
    gpu_label,
    pluralize,
)
from clustertrain.telemetry.report_schema import GpuSummary, Insight

NEARLY_FULL_SHARE = 0.95  # of a GPU's memory
LOW_USAGE_SHARE = 0.3


def _peak_share(gpu: GpuSummary) -> float | None:
    """Return the peak memory use as a share of the total."""
    used, total = gpu.memory_used_gib, gpu.memory_total_gib
    return None if used is None or not total else used.max / total


def _nearly_full(job: JobContext) -> Iterable[Insight]:
    for gpu in job.summary.gpus:
        if (share := _peak_share(gpu)) is not None and share >= NEARLY_FULL_SHARE and gpu.memory_used_gib is not None:
            usage = f"{gpu.memory_used_gib.max:.1f} of {gpu.memory_total_gib:.1f} GiB"
            text = f"the memory of {gpu_label(gpu)} was nearly full: {usage}"
            yield gpu_insight(gpu, WARNING, "memory_nearly_full", text, FIX_GPU_MEMORY)


def _out_of_memory(job: JobContext) -> Iterable[Insight]:
    oom_attempts = [a.n for a in job.summary.attempts if a.ending == endings.OUT_OF_MEMORY]
    if oom_attempts:
        attempts_text = f"attempt{'s' * (len(oom_attempts) > 1)} {', '.join(map(str, oom_attempts))}"
        fix = (
            "on a GPU, use a smaller micro batch, activation checkpointing or more sharding; on the host, more --mem "
            f"or fewer data-loader workers; check `clustertrain logs {job.summary.run}` for which"
        )
        yield Insight(severity=WARNING, code="out_of_memory", text=f"{attempts_text} ran out of memory", fix=fix)


def _over_requested(job: JobContext) -> Iterable[Insight]:
    """Report low memory use of all working GPUs; a single one with low use is an imbalance of the model."""
    shares = [(share, g) for g in job.working_gpus if (share := _peak_share(g)) is not None]
    if not shares or not job.training_began or len(shares) < len(job.working_gpus):
        return
    if any(share >= LOW_USAGE_SHARE or g.samples < SETTLED_SAMPLES for share, g in shares):
        return
    share, fullest = max(shares, key=lambda entry: entry[0])
    if fullest.memory_used_gib is None:
        return
    slice_gib = fullest.memory_used_gib.max * 1.2
    alternative = (
        f", or a MIG slice of {slice_gib:.0f} GiB if the site has them" if len(shares) == 1 else ", or fewer GPUs"
    )
    text = (
        f"little of the GPUs' memory was used: {fullest.memory_used_gib.max:.1f} of {fullest.memory_total_gib:.1f} GiB "
        f"({share:.0%}) on the fullest of {pluralize(len(shares), 'GPU')}"
    )
    yield Insight(severity=INFO, code="memory_over_requested", text=text, fix=f"use a larger micro batch{alternative}")


RULES: tuple[Callable[[JobContext], Iterable[Insight]], ...] = (_nearly_full, _out_of_memory, _over_requested)
