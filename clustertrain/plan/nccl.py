"""Environment of the ranks: each setting with its value and the reason. Only what there is evidence for, and never a
name that the user has set.

Left at torch's own value on purpose: TORCH_NCCL_ASYNC_ERROR_HANDLING (3 by default, tears the process down on an error,
which is what the agent waits for; the header of ProcessGroupNCCL asks not to set it).
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: str
    reason: str


def communication(device: str, fabric_interface: str, user: Collection[str]) -> dict[str, Setting]:
    """Settings of NCCL, gloo and torch's process groups. ``fabric_interface`` is empty where it cannot be told."""
    found: dict[str, Setting] = {}
    if device == "cuda":
        found["TORCH_FR_BUFFER_SIZE"] = Setting(
            "2000",
            "keeps the last 2000 collectives of each rank, so that a hang can be explained; torch's default, pinned",
        )
        found["TORCH_NCCL_DUMP_ON_TIMEOUT"] = Setting("1", "writes that record when a collective times out")
    if fabric_interface:
        why = f"the cluster profile names {fabric_interface} for training traffic"
        found["GLOO_SOCKET_IFNAME"] = Setting(fabric_interface, why)
        if device == "cuda":
            found["NCCL_SOCKET_IFNAME"] = Setting(fabric_interface, why)
    return {name: setting for name, setting in found.items() if name not in user}


def process(device: str, cpus_per_gpu: int, ranks_per_node: int, user: Collection[str]) -> dict[str, Setting]:
    """Settings of the allocator and of the thread pools. ``cpus_per_gpu`` is 0 where it was not asked for."""
    found: dict[str, Setting] = {}
    if device == "cuda":
        found["PYTORCH_ALLOC_CONF"] = Setting(
            "expandable_segments:True", "less fragmentation: 58.8 of 80 GB ran out of memory without (Megatron-Bridge)"
        )
    if cpus_per_gpu:
        found["OMP_NUM_THREADS"] = Setting(str(cpus_per_gpu), "one thread for each core that a rank was given")
    elif ranks_per_node > 1:
        found["OMP_NUM_THREADS"] = Setting(
            "1", "several ranks share a node and cpus_per_gpu is not set; torchrun would choose 1 too, with a warning"
        )
    return {name: setting for name, setting in found.items() if name not in user and not _old_name_set(name, user)}


def _old_name_set(name: str, user: Collection[str]) -> bool:
    return name == "PYTORCH_ALLOC_CONF" and "PYTORCH_CUDA_ALLOC_CONF" in user
