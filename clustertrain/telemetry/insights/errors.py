"""What the driver reports of a GPU's health: lost, XIDs, memory errors, links."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable

from clustertrain.run import events
from clustertrain.telemetry import xids
from clustertrain.telemetry.insights.context import CRITICAL, INFO, WARNING, Job, counted, key, of_gpu, where
from clustertrain.telemetry.report_schema import GpuSummary, Note

_TELL = "tell the administrators"
MANY_CORRECTED = 1000  # memory errors: the ECC is there to correct some
MANY_REPLAYS = 60  # of PCIe packets, an hour; and at least so many
MANY_LINK_ERRORS = 100  # replays and CRC errors of NVLink, an hour; and at least so many


def _not_listed(job: Job) -> Iterable[Note]:
    for gpu in job.summary.gpus:
        reason = gpu.nulls.get("utilization", "")
        if reason.startswith("NOT_FOUND"):
            text = f"{where(gpu)} is allocated, but NVML does not show it ({reason})"
            yield of_gpu(gpu, CRITICAL, "gpu_missing", text, f"{job.without(gpu.node)}; {_TELL}")


def _lost(job: Job) -> Iterable[Note]:
    gone = {str(e.get("uuid")): float(e["t"]) for e in events.named(job.log, "gpu_lost")}
    back = {str(e.get("uuid")): float(e["t"]) for e in events.named(job.log, "gpu_back")}
    for gpu in job.summary.gpus:
        if key(gpu) in job.lost:
            returned = gpu.uuid in gone and back.get(gpu.uuid, 0.0) > gone[gpu.uuid]
            text = f"{where(gpu)} was lost{' for a while' if returned else ''} ({job.lost[key(gpu)]})"
            yield of_gpu(gpu, CRITICAL, "gpu_lost", text, f"{job.without(gpu.node)}; {_TELL}")


def _xids(job: Job) -> Iterable[Note]:
    """One note for each number on each GPU, but for those that another note of the GPU says already."""
    for gpu in job.summary.gpus:
        counts: collections.Counter[int] = collections.Counter()
        for x in gpu.errors.xids:
            counts[x.xid] += x.count
        for xid, times in counts.items():
            if _said(job, gpu, xid):
                continue
            known = xids.of(xid)
            often = f" {times:,} times" if times > 1 else ""
            text = f"{where(gpu)} reported XID {xid}{often}: {known.name}, {known.meaning}"
            yield of_gpu(gpu, known.severity, "xid", text, xids.advice(xid, gpu.node))


_OFF_THE_BUS, _UNCORRECTED, _REMAPPED = {79}, {48, 95, 140}, {63, 64}


def _said(job: Job, gpu: GpuSummary, xid: int) -> bool:
    e = gpu.errors
    remapped = e.remap_failed or e.remap_pending or e.remapped_rows
    return bool(
        (xid in _OFF_THE_BUS and key(gpu) in job.lost)
        or (xid in _UNCORRECTED and e.ecc_uncorrected)
        or (xid in _REMAPPED and remapped)
    )


def _ecc(job: Job) -> Iterable[Note]:
    for gpu in job.summary.gpus:
        errors = gpu.errors
        if errors.ecc_uncorrected:
            number = counted(errors.ecc_uncorrected, "memory error")
            text = f"{where(gpu)} had {number} that ECC could not correct: what it computed then is not to be trusted"
            fix = f"go back to a checkpoint from before; {job.without(gpu.node)}; {_TELL}"
            yield of_gpu(gpu, CRITICAL, "ecc_uncorrected", text, fix)
        elif (errors.ecc_corrected or 0) >= MANY_CORRECTED:
            text = f"ECC corrected {errors.ecc_corrected:,} memory errors of {where(gpu)}; none did harm"
            yield of_gpu(gpu, INFO, "ecc_corrected", text, f"{_TELL}, as so many may be a beginning")


def _remapped(job: Job) -> Iterable[Note]:
    for gpu in job.summary.gpus:
        errors = gpu.errors
        if errors.remap_failed:
            text = f"{where(gpu)} could not replace a memory row: the board is to be exchanged"
            yield of_gpu(gpu, CRITICAL, "row_remap_failed", text, f"{job.without(gpu.node)}; {_TELL}")
        elif errors.remap_pending:
            text = f"{where(gpu)} has a memory row to replace, which takes a reset of the GPU"
            yield of_gpu(gpu, WARNING, "row_remap_pending", text, f"{_TELL}: drain the node, reset the GPU")
        elif errors.remapped_rows:
            text = f"{where(gpu)} replaced {counted(errors.remapped_rows, 'memory row')} during the run"
            yield of_gpu(gpu, INFO, "rows_remapped", text, None)


def _nvlink(job: Job) -> Iterable[Note]:
    most = max((g.nvlinks_active_max or 0 for g in job.summary.gpus), default=0)
    for gpu in job.summary.gpus:
        low, high = gpu.nvlinks_active_min, gpu.nvlinks_active_max
        if low is None or high is None:
            continue
        if low < high:
            text = f"{high - low} of {high} NVLinks of {where(gpu)} went down during the run"
            yield of_gpu(gpu, WARNING, "nvlink_down", text, f"{job.without(gpu.node)}; {_TELL}")
        elif high < most and _all_else_have(job, gpu, most):
            text = f"{where(gpu)} has {high} NVLinks up, the others of its kind {most}"
            yield of_gpu(gpu, WARNING, "nvlink_down", text, f"{job.without(gpu.node)}; {_TELL}")
    for gpu in job.summary.gpus:
        if _many(job, gpu.errors.nvlink_errors, MANY_LINK_ERRORS):
            text = f"NVLink of {where(gpu)} had {gpu.errors.nvlink_errors:,} errors, each of them sent again"
            yield of_gpu(gpu, WARNING, "nvlink_errors", text, f"{_TELL}; {job.without(gpu.node)}")


def _all_else_have(job: Job, gpu: GpuSummary, links: int) -> bool:
    """By NVML's name for the kind: parts of one may be bridged in pairs, so most must have them all."""
    others = [g.nvlinks_active_max for g in job.summary.gpus if g is not gpu and g.name == gpu.name]
    return len(others) > 1 and sum(n == links for n in others) >= 0.9 * len(others)


def _pcie(job: Job) -> Iterable[Note]:
    for gpu in job.summary.gpus:
        if _many(job, gpu.errors.pcie_replays, MANY_REPLAYS):
            text = f"PCIe of {where(gpu)} sent {gpu.errors.pcie_replays:,} packets again: the slot is not sound"
            yield of_gpu(gpu, WARNING, "pcie_replays", text, f"{_TELL}; {job.without(gpu.node)}")


def _many(job: Job, errors: int | None, an_hour: int) -> bool:
    hours = max(1.0, (job.allocated_s or 0.0) / 3600)
    return errors is not None and errors >= an_hour * hours


RULES: tuple[Callable[[Job], Iterable[Note]], ...] = (_not_listed, _lost, _xids, _ecc, _remapped, _nvlink, _pcie)
