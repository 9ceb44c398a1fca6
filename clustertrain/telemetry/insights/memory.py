"""Memory of the GPUs: nearly full, or far more than is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from clustertrain.run import endings
from clustertrain.telemetry.insights import context as facts
from clustertrain.telemetry.insights.context import INFO, WARNING, Job, counted, of_gpu, where
from clustertrain.telemetry.report_schema import GpuSummary, Note

NEARLY_FULL = 0.95  # of a GPU's memory
LITTLE = 0.3


def _used(gpu: GpuSummary) -> float | None:
    """The most that was used, as a share."""
    used, total = gpu.memory_used_gib, gpu.memory_total_gib
    return None if used is None or not total else used.max / total


def _nearly_full(job: Job) -> Iterable[Note]:
    fix = "a smaller micro batch, activation checkpointing, or more sharding, before a longer batch runs out"
    for gpu in job.summary.gpus:
        if (share := _used(gpu)) is not None and share >= NEARLY_FULL and gpu.memory_used_gib is not None:
            of = f"{gpu.memory_used_gib.max:.1f} of {gpu.memory_total_gib:.1f} GiB"
            text = f"the memory of {where(gpu)} was nearly full: {of}"
            yield of_gpu(gpu, WARNING, "memory_nearly_full", text, fix)


def _ran_out(job: Job) -> Iterable[Note]:
    ended = [a.n for a in job.summary.attempts if a.ending == endings.OUT_OF_MEMORY]
    if ended:
        which = f"attempt{'s' * (len(ended) > 1)} {', '.join(map(str, ended))}"
        fix = (
            "of a GPU: a smaller micro batch, activation checkpointing, more sharding; of the host: more with --mem, "
            f"fewer data-loader workers; `clustertrain logs {job.summary.run}` says which"
        )
        yield Note(severity=WARNING, code="out_of_memory", text=f"{which} ran out of memory", fix=fix)


def _over_requested(job: Job) -> Iterable[Note]:
    """Of all GPUs that work; one that needs little beside others that do not is an imbalance of the model."""
    told = [(share, g) for g in job.working if (share := _used(g)) is not None]
    if not told or not job.began or len(told) < len(job.working):
        return
    if any(share >= LITTLE or g.samples < facts.SETTLED_SAMPLES for share, g in told):
        return
    share, fullest = max(told, key=lambda found: found[0])
    if fullest.memory_used_gib is None:
        return
    slice_gib = fullest.memory_used_gib.max * 1.2
    alone = f", or a MIG slice of {slice_gib:.0f} GiB where the site has them" if len(told) == 1 else ", or fewer GPUs"
    text = (
        f"little of the GPUs' memory was used: {fullest.memory_used_gib.max:.1f} of {fullest.memory_total_gib:.1f} GiB "
        f"({share:.0%}) on the fullest of {counted(len(told), 'GPU')}"
    )
    yield Note(severity=INFO, code="memory_over_requested", text=text, fix=f"a larger micro batch{alone}")


RULES: tuple[Callable[[Job], Iterable[Note]], ...] = (_nearly_full, _ran_out, _over_requested)
