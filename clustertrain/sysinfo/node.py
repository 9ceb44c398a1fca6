"""Read the hardware of a node from kernel files and ``ip``.

Nothing raises: unreadable parts stay empty, with a note in ``read_errors``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from clustertrain import proc, settings
from clustertrain.config.node_facts import Cpus, Gpu, NodeFacts, NumaNode, parse_cpu_list
from clustertrain.errors import CommandFailed
from clustertrain.sysinfo import network, rdma
from clustertrain.sysinfo.network import IpOutput
from clustertrain.sysinfo.sysfs import Sysfs

IP_TIMEOUT_S = 10.0
# Locations used by the EFA installer, AWS images and distributions; folders of LD_LIBRARY_PATH are searched first.
_LIBFABRIC = ("opt/amazon/efa/lib*/libfabric.so*", "usr/lib*/libfabric.so*", "usr/lib/*/libfabric.so*")
_AWS_OFI_NCCL = ("opt/amazon/ofi-nccl/lib*/libnccl-net*.so", "opt/amazon/ofi-nccl/lib*/*/libnccl-net*.so",
                 "opt/aws-ofi-nccl/lib*/libnccl-net*.so")  # fmt: skip
_CPU, _NODE, _PCI = "/sys/devices/system/cpu", "/sys/devices/system/node", "/sys/bus/pci/devices"


def read_node(
    root: Path = Path("/"),
    ip: IpOutput | None = None,
    gpus: tuple[Gpu, ...] = (),
    environ: Mapping[str, str] = os.environ,
) -> NodeFacts:
    """Return the facts of the node whose files are under ``root``.

    Args:
        root: the root of the node's file system.
        ip: the output of ``ip``; None runs it.
        gpus: the GPUs from NVML in the order of the local ranks; their NUMA nodes are added.
        environ: the environment, for library paths and NCCL's configuration file.
    """
    tree = Sysfs(root)
    if ip is None:
        ip = _run_ip(tree)
    hcas, efa = rdma.read_devices(tree)
    rates = {h.netdev: h.rate_gbit for h in hcas if h.netdev and h.rate_gbit is not None}
    return NodeFacts(
        interfaces=network.read_interfaces(tree, ip, rates),
        hcas=hcas,
        efa=efa,
        gpus=tuple(_with_numa_node(tree, gpu) for gpu in gpus),
        cpus=_read_cpus(tree),
        libfabric=_find_library(tree, _LIBFABRIC, "libfabric.so*", environ),
        aws_ofi_nccl=_find_library(tree, _AWS_OFI_NCCL, "libnccl-net*.so", environ),
        nccl_conf=_read_nccl_conf(tree, environ),
        read_errors=tuple(tree.read_errors),
    )


def _run_ip(tree: Sysfs) -> IpOutput:
    try:
        return IpOutput(*(proc.run(["ip", "-j", obj], timeout_s=IP_TIMEOUT_S).stdout for obj in ("address", "route")))
    except (CommandFailed, OSError) as e:
        tree.read_errors.append(f"no addresses of network interfaces: {e.args[0]}")
        return IpOutput()


def _with_numa_node(tree: Sysfs, gpu: Gpu) -> Gpu:
    return msgspec.structs.replace(gpu, numa_node=tree.read_number(f"{_PCI}/{gpu.pci_address}/numa_node"))


def _read_cpus(tree: Sysfs) -> Cpus:
    online = tree.read_text(f"{_CPU}/online")
    try:
        numbers = parse_cpu_list(online)
    except ValueError:
        tree.note_unparsable(f"{_CPU}/online", online, "a list of CPUs")
        numbers = set()
    core_ids = {
        (
            tree.read_number(f"{_CPU}/cpu{n}/topology/physical_package_id"),
            tree.read_number(f"{_CPU}/cpu{n}/topology/core_id"),
        )
        for n in numbers
    }
    valid_ids = {p for p in core_ids if None not in p}
    return Cpus(
        sockets=len({package for package, _ in valid_ids}) or None,
        cores=len(valid_ids) or None,
        threads=len(numbers) or None,
        numa_nodes=tuple(_read_numa_nodes(tree)),
    )


def _read_numa_nodes(tree: Sysfs) -> list[NumaNode]:
    nodes = []
    for name in tree.list_names(_NODE):
        cpus = tree.read_text(f"{_NODE}/{name}/cpulist") if name.removeprefix("node").isdigit() else ""
        try:
            if parse_cpu_list(cpus):
                nodes.append(NumaNode(index=int(name.removeprefix("node")), cpus=cpus))
        except ValueError:
            tree.note_unparsable(f"{_NODE}/{name}/cpulist", cpus, "a list of CPUs")
    return nodes


def _find_library(tree: Sysfs, patterns: tuple[str, ...], name: str, environ: Mapping[str, str]) -> str:
    folders = [f for f in environ.get(settings.LIBRARY_PATH, "").split(":") if f.startswith("/")]
    for pattern in (*(f"{folder.strip('/')}/{name}" for folder in folders), *patterns):
        try:
            matches = sorted(tree.root.glob(pattern))
        except (OSError, ValueError):  # ValueError: a folder name that is not a valid pattern
            continue
        if matches:
            return "/" + str(matches[0].relative_to(tree.root))
    return ""


def _read_nccl_conf(tree: Sysfs, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables set in NCCL's files: one of the user's, and /etc/nccl.conf (src/misc/param.cc)."""
    user_file = environ.get(settings.NCCL_CONF_FILE) or f"{environ.get(settings.USER_HOME, '')}/.nccl.conf"
    lines = [line for path in (user_file, "/etc/nccl.conf") for line in tree.read_text(path).splitlines()]
    names = [line.partition("=")[0].strip() for line in lines if "=" in line and not line.startswith("#")]
    return tuple(dict.fromkeys(names))
