"""How full the GPUs of a run are, from the ends of its files: ``status`` must stay cheap after weeks of samples."""

from __future__ import annotations

from collections.abc import Sequence

from clustertrain.run.folder import AttemptDir
from clustertrain.telemetry import store

_GIB = 1 << 30


def memory_used_gib(attempts: Sequence[AttemptDir]) -> float | None:
    """What NVML saw in use on the fullest GPU at the newest samples, in the newest attempt that has any.

    That is the most there was: torch's allocator keeps what it has taken from the device. It counts what the allocator
    keeps in reserve, the CUDA context, NCCL's buffers, and whoever else uses the GPU.
    """
    for attempt in reversed(attempts):
        nodes = sorted(attempt.telemetry.iterdir()) if attempt.telemetry.is_dir() else []
        used = [u for node in nodes for u in _used_bytes(store.newest(node))]
        if used:
            return max(used) / _GIB
    return None


def _used_bytes(records: Sequence[store.Header | store.Sample]) -> list[float]:
    found: list[float] = []
    at: int | None = None
    for record in records:
        if isinstance(record, store.Header):
            fields = record.gpu_fields
            at = fields.index("memory_used_bytes") if "memory_used_bytes" in fields else None
        elif at is not None:
            found += [used for gpu in record.g if gpu is not None and (used := gpu[at]) is not None]
    return found
