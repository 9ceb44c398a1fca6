"""What this node is made of. Reads files and asks ``ip``; no part of it raises: what cannot be read stays empty, with
a note in ``unread``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from clustertrain import proc, settings
from clustertrain.config.node_facts import Cpus, Gpu, NodeFacts, NumaNode, cpu_numbers
from clustertrain.errors import CommandFailed
from clustertrain.sysinfo import network, rdma
from clustertrain.sysinfo.network import IpOutput
from clustertrain.sysinfo.sysfs import Sysfs

IP_TIMEOUT_S = 10.0
# Where the EFA installer, AWS's images and distributions put them; a folder of LD_LIBRARY_PATH comes before.
_LIBFABRIC = ("opt/amazon/efa/lib*/libfabric.so*", "usr/lib*/libfabric.so*", "usr/lib/*/libfabric.so*")
_AWS_OFI_NCCL = ("opt/amazon/ofi-nccl/lib*/libnccl-net*.so", "opt/amazon/ofi-nccl/lib*/*/libnccl-net*.so",
                 "opt/aws-ofi-nccl/lib*/libnccl-net*.so")  # fmt: skip
_CPU, _NODE, _PCI = "/sys/devices/system/cpu", "/sys/devices/system/node", "/sys/bus/pci/devices"


def read(
    root: Path = Path("/"),
    ip: IpOutput | None = None,
    gpus: tuple[Gpu, ...] = (),
    environ: Mapping[str, str] = os.environ,
) -> NodeFacts:
    """The facts of the node whose files lie under ``root``.

    Args:
        ip: what ``ip`` printed; None asks it now.
        gpus: from NVML, in the order of the local ranks; their NUMA node is added here.
    """
    tree = Sysfs(root)
    if ip is None:
        ip = _ask_ip(tree)
    hcas, efa = rdma.devices(tree)
    rates = {h.netdev: h.rate_gbit for h in hcas if h.netdev and h.rate_gbit is not None}
    return NodeFacts(
        interfaces=network.interfaces(tree, ip, rates),
        hcas=hcas,
        efa=efa,
        gpus=tuple(_near(tree, gpu) for gpu in gpus),
        cpus=_cpus(tree),
        libfabric=_library(tree, _LIBFABRIC, "libfabric.so*", environ),
        aws_ofi_nccl=_library(tree, _AWS_OFI_NCCL, "libnccl-net*.so", environ),
        nccl_conf=_nccl_conf(tree, environ),
        unread=tuple(tree.unread),
    )


def _ask_ip(tree: Sysfs) -> IpOutput:
    try:
        return IpOutput(*(proc.run(["ip", "-j", what], timeout_s=IP_TIMEOUT_S).stdout for what in ("address", "route")))
    except (CommandFailed, OSError) as e:
        tree.unread.append(f"no addresses of network interfaces: {e.args[0]}")
        return IpOutput()


def _near(tree: Sysfs, gpu: Gpu) -> Gpu:
    return msgspec.structs.replace(gpu, numa_node=tree.number(f"{_PCI}/{gpu.pci_address}/numa_node"))


def _cpus(tree: Sysfs) -> Cpus:
    online = tree.text(f"{_CPU}/online")
    try:
        numbers = cpu_numbers(online)
    except ValueError:
        tree.garbage(f"{_CPU}/online", online, "a list of processors")
        numbers = set()
    places = {
        (tree.number(f"{_CPU}/cpu{n}/topology/physical_package_id"), tree.number(f"{_CPU}/cpu{n}/topology/core_id"))
        for n in numbers
    }
    told = {p for p in places if None not in p}
    return Cpus(
        sockets=len({package for package, _ in told}) or None,
        cores=len(told) or None,
        threads=len(numbers) or None,
        numa_nodes=tuple(_numa_nodes(tree)),
    )


def _numa_nodes(tree: Sysfs) -> list[NumaNode]:
    found = []
    for name in tree.names(_NODE):
        cpus = tree.text(f"{_NODE}/{name}/cpulist") if name.removeprefix("node").isdigit() else ""
        try:
            if cpu_numbers(cpus):
                found.append(NumaNode(index=int(name.removeprefix("node")), cpus=cpus))
        except ValueError:
            tree.garbage(f"{_NODE}/{name}/cpulist", cpus, "a list of processors")
    return found


def _library(tree: Sysfs, places: tuple[str, ...], name: str, environ: Mapping[str, str]) -> str:
    folders = [f for f in environ.get(settings.LIBRARY_PATH, "").split(":") if f.startswith("/")]
    for pattern in (*(f"{folder.strip('/')}/{name}" for folder in folders), *places):
        try:
            found = sorted(tree.root.glob(pattern))
        except (OSError, ValueError):  # ValueError: a folder whose name is no pattern
            continue
        if found:
            return "/" + str(found[0].relative_to(tree.root))
    return ""


def _nccl_conf(tree: Sysfs, environ: Mapping[str, str]) -> tuple[str, ...]:
    """NCCL reads one file of the user's and /etc/nccl.conf (src/misc/param.cc)."""
    own = environ.get(settings.NCCL_CONF_FILE) or f"{environ.get(settings.USER_HOME, '')}/.nccl.conf"
    lines = [line for path in (own, "/etc/nccl.conf") for line in tree.text(path).splitlines()]
    names = [line.partition("=")[0].strip() for line in lines if "=" in line and not line.startswith("#")]
    return tuple(dict.fromkeys(names))
