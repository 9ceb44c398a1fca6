"""Insights on GPU health as reported by the driver: lost GPUs, XIDs, memory errors, links."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable

from clustertrain.run import events
from clustertrain.telemetry import xids
from clustertrain.telemetry.findings import CRITICAL, INFO, WARNING
from clustertrain.telemetry.insights.context import (
    JobContext,
    gpu_insight,
    gpu_key,
    gpu_label,
    pluralize,
)
from clustertrain.telemetry.report_schema import GpuSummary, Insight

_NOTIFY = "notify the administrators"
MIN_CORRECTED_ERRORS = 1000  # memory errors; correcting a few is normal for ECC
MIN_REPLAYS_PER_HOUR = 60  # of PCIe packets; also the minimum for shorter runs
MIN_LINK_ERRORS_PER_HOUR = 100  # replays and CRC errors of NVLink; also the minimum for shorter runs


def _missing_gpus(job: JobContext) -> Iterable[Insight]:
    for gpu in job.summary.gpus:
        reason = gpu.missing.get("utilization", "")
        if reason.startswith("NOT_FOUND"):
            text = f"{gpu_label(gpu)} is allocated, but not visible in NVML ({reason})"
            yield gpu_insight(gpu, CRITICAL, "gpu_missing", text, f"{job.exclude_hint(gpu.node)}; {_NOTIFY}")


def _lost_gpus(job: JobContext) -> Iterable[Insight]:
    lost_at = {str(e.get("uuid")): float(e["t"]) for e in events.filter_by_name(job.log, "gpu_lost")}
    returned_at = {str(e.get("uuid")): float(e["t"]) for e in events.filter_by_name(job.log, "gpu_back")}
    for gpu in job.summary.gpus:
        if gpu_key(gpu) in job.lost_gpus:
            returned = gpu.uuid in lost_at and returned_at.get(gpu.uuid, 0.0) > lost_at[gpu.uuid]
            text = f"{gpu_label(gpu)} was lost{' for a while' if returned else ''} ({job.lost_gpus[gpu_key(gpu)]})"
            yield gpu_insight(gpu, CRITICAL, "gpu_lost", text, f"{job.exclude_hint(gpu.node)}; {_NOTIFY}")


def _xids(job: JobContext) -> Iterable[Insight]:
    """Return one insight for each XID and GPU, except those covered by another insight of the GPU."""
    for gpu in job.summary.gpus:
        counts: collections.Counter[int] = collections.Counter()
        for x in gpu.errors.xids:
            counts[x.xid] += x.count
        for xid, count in counts.items():
            if _is_covered(job, gpu, xid):
                continue
            severity, text = xids.lookup_xid(xid).severity, f"{gpu_label(gpu)} {xids.format_report(xid, count)}"
            yield gpu_insight(gpu, severity, "xid", text, xids.format_fix(xid, gpu.node))


_OFF_THE_BUS, _UNCORRECTED, _REMAPPED = {79}, {48, 95, 140}, {63, 64}


def _is_covered(job: JobContext, gpu: GpuSummary, xid: int) -> bool:
    e = gpu.errors
    remapped = e.remap_failed or e.remap_pending or e.remapped_rows
    return bool(
        (xid in _OFF_THE_BUS and gpu_key(gpu) in job.lost_gpus)
        or (xid in _UNCORRECTED and e.ecc_uncorrected)
        or (xid in _REMAPPED and remapped)
    )


def _ecc(job: JobContext) -> Iterable[Insight]:
    for gpu in job.summary.gpus:
        errors = gpu.errors
        if errors.ecc_uncorrected:
            number = pluralize(errors.ecc_uncorrected, "memory error")
            text = f"{gpu_label(gpu)} had {number} that ECC could not correct: its results may be wrong"
            fix = f"go back to an earlier checkpoint; {job.exclude_hint(gpu.node)}; {_NOTIFY}"
            yield gpu_insight(gpu, CRITICAL, "ecc_uncorrected", text, fix)
        elif (errors.ecc_corrected or 0) >= MIN_CORRECTED_ERRORS:
            text = f"ECC corrected {errors.ecc_corrected:,} memory errors of {gpu_label(gpu)}; none did harm"
            yield gpu_insight(gpu, INFO, "ecc_corrected", text, f"{_NOTIFY}: the memory may be failing")


def _row_remaps(job: JobContext) -> Iterable[Insight]:
    for gpu in job.summary.gpus:
        errors = gpu.errors
        if errors.remap_failed:
            text = f"{gpu_label(gpu)} could not replace a memory row: the board must be replaced"
            yield gpu_insight(gpu, CRITICAL, "row_remap_failed", text, f"{job.exclude_hint(gpu.node)}; {_NOTIFY}")
        elif errors.remap_pending:
            text = f"{gpu_label(gpu)} has a memory row to replace, which needs a reset of the GPU"
            yield gpu_insight(gpu, WARNING, "row_remap_pending", text, f"{_NOTIFY}: drain the node, reset the GPU")
        elif errors.remapped_rows:
            text = f"{gpu_label(gpu)} replaced {pluralize(errors.remapped_rows, 'memory row')} during the run"
            yield gpu_insight(gpu, INFO, "rows_remapped", text, None)


def _nvlink(job: JobContext) -> Iterable[Insight]:
    max_links = max((g.nvlinks_active_max or 0 for g in job.summary.gpus), default=0)
    for gpu in job.summary.gpus:
        min_active, max_active = gpu.nvlinks_active_min, gpu.nvlinks_active_max
        if min_active is None or max_active is None:
            continue
        if min_active < max_active:
            text = f"{max_active - min_active} of {max_active} NVLinks of {gpu_label(gpu)} went down during the run"
            yield gpu_insight(gpu, WARNING, "nvlink_down", text, f"{job.exclude_hint(gpu.node)}; {_NOTIFY}")
        elif max_active < max_links and _peers_have_links(job, gpu, max_links):
            text = f"{gpu_label(gpu)} has {max_active} NVLinks up, the others of its model have {max_links}"
            yield gpu_insight(gpu, WARNING, "nvlink_down", text, f"{job.exclude_hint(gpu.node)}; {_NOTIFY}")
    for gpu in job.summary.gpus:
        if _exceeds_hourly(job, gpu.errors.nvlink_errors, MIN_LINK_ERRORS_PER_HOUR):
            text = f"NVLink of {gpu_label(gpu)} had {gpu.errors.nvlink_errors:,} errors, each with a retransmission"
            yield gpu_insight(gpu, WARNING, "nvlink_errors", text, f"{_NOTIFY}; {job.exclude_hint(gpu.node)}")


def _peers_have_links(job: JobContext, gpu: GpuSummary, num_links: int) -> bool:
    """Return whether most GPUs of the same model have all links; some models may be bridged in pairs."""
    peer_links = [g.nvlinks_active_max for g in job.summary.gpus if g is not gpu and g.name == gpu.name]
    return len(peer_links) > 1 and sum(n == num_links for n in peer_links) >= 0.9 * len(peer_links)


def _pcie(job: JobContext) -> Iterable[Insight]:
    for gpu in job.summary.gpus:
        if _exceeds_hourly(job, gpu.errors.pcie_replays, MIN_REPLAYS_PER_HOUR):
            text = f"PCIe of {gpu_label(gpu)} resent {gpu.errors.pcie_replays:,} packets: the slot may be faulty"
            yield gpu_insight(gpu, WARNING, "pcie_replays", text, f"{_NOTIFY}; {job.exclude_hint(gpu.node)}")


def _exceeds_hourly(job: JobContext, errors: int | None, per_hour: int) -> bool:
    hours = max(1.0, (job.allocated_s or 0.0) / 3600)
    return errors is not None and errors >= per_hour * hours


RULES: tuple[Callable[[JobContext], Iterable[Insight]], ...] = (
    _missing_gpus,
    _lost_gpus,
    _xids,
    _ecc,
    _row_remaps,
    _nvlink,
    _pcie,
)
