"""What the watching command asks of each node: the argument of ``python -m clustertrain watch-node``."""

from __future__ import annotations

import msgspec

BEAT_S = 5.0  # between two bytes of the lease
LEASE_S = 30.0  # without a byte, after which a node leaves


class NodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the watching command asks of each node."""

    run: str
    attempt: int
    job_id: str
    number: str
    """``SLURM_JOB_ID`` of the job's processes."""
    comparing_node: str | None = None
    """The node that compares all nodes; None if there is only one."""
    interval_s: float = 3.0
    has_gpus: bool = True
    """Slurm has given the job GPUs of this node, or does not manage them."""
    memory_mib: int | None = None
    """Memory of the job on this node."""
