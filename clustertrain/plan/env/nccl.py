"""Environment of the ranks: each setting with its value and the reason. Only what there is evidence for, and never a
name that the user has set, nor one that means the same.

Left alone on purpose; docs/explanation/nccl.md says more:

- TORCH_NCCL_ASYNC_ERROR_HANDLING: 3 by default, tears the process down on an error, which is what the agent waits for;
  the header of ProcessGroupNCCL asks not to set it. TORCH_NCCL_BLOCKING_WAIT would undo it.
- TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, NCCL_IB_TIMEOUT, NCCL_IB_RETRY_CNT: nothing that a node shows argues for others.
- NCCL_ALGO, NCCL_PROTO, NCCL_NVLS_ENABLE, NCCL_MNNVL_ENABLE: NCCL works out from the topology which algorithm is best
  for each size, and finds NVLink SHARP and NVLink between nodes by itself; aws-ofi-nccl's tuner refuses to load beside
  a pinned one (aws-ofi-nccl issue 982).
- FI_PROVIDER, FI_EFA_USE_DEVICE_RDMA, FI_EFA_FORK_SAFE, RDMAV_FORK_SAFE, NCCL_PROTO=simple: were for aws-ofi-nccl up to
  1.6; its doc/efa-env-var.md calls them not needed now, and RDMAV_FORK_SAFE harmful.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from clustertrain.config.node_facts import NodeFacts
from clustertrain.plan.env import interfaces

# Names by which the user has decided the same thing: a former name of it, or a choice that ours would contradict.
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
    value: str
    reason: str


def communication_env(
    device: str, fabric_interface: str, user_env: Collection[str], node: NodeFacts | None = None
) -> dict[str, EnvSetting]:
    """Settings of NCCL, gloo and torch's process groups.

    Args:
        fabric_interface: as the cluster profile names it; empty where it does not.
        node: what the nodes are made of, where that is known and there are several of them.
    """
    settings: dict[str, EnvSetting] = {}
    if device == "cuda":
        settings["TORCH_FR_BUFFER_SIZE"] = EnvSetting(
            "2000",
            "keeps the last 2000 collectives of each rank, so that a hang can be explained; torch's default, pinned",
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
    """What only the node itself can tell, when the job has started on it.

    Args:
        user: names that the environment has already, the plan's among them.
        towards: the interface that leads to the other nodes.
        dumps: where the Flight Recorder writes; torch appends the rank.
    """
    settings: dict[str, EnvSetting] = {}
    if device == "cuda":
        settings["TORCH_FR_DUMP_TEMP_FILE"] = EnvSetting(
            dump_prefix,
            "the record of the last collectives lies with the logs of the attempt, and not in a cache of the home",
        )
    if several_nodes:
        settings.update(_network_env(device, facts, route_interface))
        index = interfaces.select_gid_index(facts)
        # Not from a profile: one GID table is no evidence for the next node's.
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
            # "=": without it the name is a prefix, and eth1 means eth10 too.
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
    """Settings of the allocator and of the thread pools. ``cpus_per_gpu`` is 0 where it was not asked for."""
    settings: dict[str, EnvSetting] = {}
    if device == "cuda":
        settings["PYTORCH_ALLOC_CONF"] = EnvSetting(
            "expandable_segments:True", "less fragmentation: 58.8 of 80 GB ran out of memory without (Megatron-Bridge)"
        )
    if cpus_per_gpu:
        settings["OMP_NUM_THREADS"] = EnvSetting(str(cpus_per_gpu), "one thread for each core that a rank was given")
    elif ranks_per_node > 1:
        settings["OMP_NUM_THREADS"] = EnvSetting(
            "1", "several ranks share a node and cpus_per_gpu is not set; torchrun would choose 1 too, with a warning"
        )
    return _drop_overridden(settings, user_env)
