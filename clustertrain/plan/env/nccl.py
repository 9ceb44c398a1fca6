"""Environment of the ranks: settings with values and reasons.

Only settings backed by evidence are made, and none that the user set under this or an equivalent name.

Left unset on purpose (details: docs/explanation/nccl.md):

- TORCH_NCCL_ASYNC_ERROR_HANDLING: the default 3 ends the process on an error, which the agent expects; the header of
  ProcessGroupNCCL asks not to set it. TORCH_NCCL_BLOCKING_WAIT would undo it.
- TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, NCCL_IB_TIMEOUT, NCCL_IB_RETRY_CNT: no facts of a node suggest other values.
- NCCL_ALGO, NCCL_PROTO, NCCL_NVLS_ENABLE, NCCL_MNNVL_ENABLE: NCCL derives the best algorithm for each size from
  the topology and detects NVLink SHARP and NVLink between nodes; aws-ofi-nccl's tuner refuses to load if an algorithm
  is pinned (aws-ofi-nccl issue 982).
- FI_PROVIDER, FI_EFA_USE_DEVICE_RDMA, FI_EFA_FORK_SAFE, RDMAV_FORK_SAFE, NCCL_PROTO=simple: for aws-ofi-nccl up to 1.6;
  its doc/efa-env-var.md now calls them unnecessary, and RDMAV_FORK_SAFE harmful.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from clustertrain.config.node_facts import NodeFacts
from clustertrain.plan.env import interfaces

# Names that decide the same: a former name, or a choice that our setting would contradict.
_OVERRIDDEN_BY = {
    "TORCH_FR_BUFFER_SIZE": ("TORCH_NCCL_TRACE_BUFFER_SIZE",),
    "TORCH_FR_DUMP_TEMP_FILE": ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",),
    "PYTORCH_ALLOC_CONF": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    "NCCL_SOCKET_IFNAME": ("NCCL_SOCKET_FAMILY", "NCCL_COMM_ID"),
    "NCCL_IB_HCA": ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN"),
    "NCCL_IB_GID_INDEX": ("NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_ADDR_FAMILY",
                          "NCCL_IB_ADDR_RANGE", "NCCL_IB_ROCE_VERSION_NUM"),
}  # fmt: skip


class EnvSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Value of an environment variable and the reason for it."""

    value: str
    """Value of the variable."""
    reason: str
    """Why it has this value."""


def communication_env(
    device: str, fabric_interface: str, user_env: Collection[str], node: NodeFacts | None = None
) -> dict[str, EnvSetting]:
    """Return the settings of NCCL, gloo and torch's process groups.

    Args:
        fabric_interface: interface that the cluster profile names, or empty.
        user_env: names that the user has set.
        node: hardware of the nodes, if known and if there are several nodes.
    """
    settings: dict[str, EnvSetting] = {}
    if device == "cuda":
        settings["TORCH_FR_BUFFER_SIZE"] = EnvSetting(
            "2000",
            "keeps the last 2000 collectives of each rank, to explain a hang; torch's default, pinned",
        )
        settings["TORCH_NCCL_DUMP_ON_TIMEOUT"] = EnvSetting("1", "writes that record when a collective times out")
    if node is not None:
        settings.update(_network_env(device, node, ""))
    if fabric_interface:
        reason = f"the cluster profile names {fabric_interface} for training traffic"
        settings["GLOO_SOCKET_IFNAME"] = EnvSetting(fabric_interface, reason)
        if device == "cuda":
            settings["NCCL_SOCKET_IFNAME"] = EnvSetting(fabric_interface, reason)
    return _drop_overridden(settings, user_env, node)


def node_env(
    device: str,
    facts: NodeFacts,
    user_env: Collection[str],
    *,
    route_interface: str = "",
    several_nodes: bool,
    dump_prefix: str,
) -> dict[str, EnvSetting]:
    """Return the settings that only the node itself can determine, after the job has started on it.

    Args:
        user_env: names that are already in the environment, including the plan's.
        route_interface: interface that the kernel routes to the other nodes.
        dump_prefix: path prefix of the Flight Recorder's dumps; torch appends the rank.
    """
    settings: dict[str, EnvSetting] = {}
    if device == "cuda":
        settings["TORCH_FR_DUMP_TEMP_FILE"] = EnvSetting(
            dump_prefix,
            "writes the record of the last collectives to the logs of the attempt, not to a cache in the home folder",
        )
    if several_nodes:
        settings.update(_network_env(device, facts, route_interface))
        index = interfaces.select_gid_index(facts)
        # Not from a profile: GID tables differ from node to node.
        if device == "cuda" and index is not None:
            settings["NCCL_IB_GID_INDEX"] = EnvSetting(*index)
    return _drop_overridden(settings, user_env, facts)


def _network_env(device: str, facts: NodeFacts, route_interface: str) -> dict[str, EnvSetting]:
    settings: dict[str, EnvSetting] = {}
    interface = interfaces.select_interface(facts, route_interface)
    if interface is not None:
        settings["GLOO_SOCKET_IFNAME"] = EnvSetting(*interface)
    if device == "cuda":
        if interface is not None:
            # Without "=" the name is a prefix: eth1 would also match eth10.
            settings["NCCL_SOCKET_IFNAME"] = EnvSetting(f"={interface.value}", interface.reason)
        ports = interfaces.select_hcas(facts)
        if ports is not None:
            settings["NCCL_IB_HCA"] = EnvSetting(*ports)
    return settings


def _drop_overridden(
    settings: dict[str, EnvSetting], user_env: Collection[str], node: NodeFacts | None = None
) -> dict[str, EnvSetting]:
    user_names = {*user_env, *(node.nccl_conf if node is not None else ())}
    return {name: s for name, s in settings.items() if not user_names & {name, *_OVERRIDDEN_BY.get(name, ())}}


def process_env(
    device: str, cpus_per_gpu: int, ranks_per_node: int, user_env: Collection[str]
) -> dict[str, EnvSetting]:
    """Return the settings of the allocator and the thread pools. ``cpus_per_gpu`` is 0 if not requested."""
    settings: dict[str, EnvSetting] = {}
    if device == "cuda":
        settings["PYTORCH_ALLOC_CONF"] = EnvSetting(
            "expandable_segments:True",
            "less fragmentation: without it, a job ran out of memory at 58.8 of 80 GB (Megatron-Bridge)",
        )
    if cpus_per_gpu:
        settings["OMP_NUM_THREADS"] = EnvSetting(str(cpus_per_gpu), "one thread per core of the rank")
    elif ranks_per_node > 1:
        settings["OMP_NUM_THREADS"] = EnvSetting(
            "1", "several ranks share a node and cpus_per_gpu is unset; torchrun would also choose 1, with a warning"
        )
    return _drop_overridden(settings, user_env)
