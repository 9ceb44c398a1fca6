"""Peak GPU memory of a run from the totals of its nodes, so that ``status`` reads no samples and imports no numpy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from clustertrain import reading, schema
from clustertrain.run.run_dir import AttemptDir

_GIB = 1 << 30
_MOST_BYTES = 256 * reading.MIB  # unpacked


class _PeakTotals(msgspec.Struct):
    """Required fields of :class:`clustertrain.telemetry.store.totals.SegmentTotals`."""

    columns: list[str]
    high: list[float | None]


def read_peak_memory_gib(attempts: Sequence[AttemptDir]) -> float | None:
    """Return the peak memory use of any GPU in the newest attempt with totals, which are at most a minute old.

    The value, measured by NVML, includes the reserve of torch's allocator, the CUDA context, NCCL's buffers and other
    users of the GPU.
    """
    for attempt in reversed(attempts):
        files = sorted(attempt.telemetry.glob("*/*/totals.json.gz"))
        used = [u for path in files for u in _read_used_bytes(path)]
        if used:
            return max(used) / _GIB
    return None


def _read_used_bytes(path: Path) -> list[float]:
    try:
        sums = schema.decode(reading.decompress(reading.read_bytes(path), _MOST_BYTES), _PeakTotals)
    except (OSError, ValueError):  # being written, damaged, or another user's
        return []
    pairs = zip(sums.columns, sums.high, strict=False)
    return [v for c, v in pairs if v is not None and c.startswith("gpu") and c.endswith(".memory_used_bytes")]
