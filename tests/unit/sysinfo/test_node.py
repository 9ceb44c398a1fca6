"""Facts of eight kinds of nodes, and of nodes with damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain.config.node_facts import NodeFacts
from clustertrain.sysinfo.network import IpOutput
from clustertrain.sysinfo.node import read_node
from tests.fixtures.nodes.expand import KINDS, Tree, expand, facts_of

# hcas, efa, GPUs; sockets, cores, threads; NUMA nodes with CPUs; NUMA nodes of the GPUs
COUNTS = {
    "cpu-only": (0, 0, 0, 2, 32, 32, [0, 1], []),
    "dgx-a100": (12, 0, 8, 2, 128, 256, list(range(8)), [3, 3, 1, 1, 7, 7, 5, 5]),
    "dgx-h100": (12, 0, 8, 2, 112, 224, [0, 1], [0, 0, 0, 0, 1, 1, 1, 1]),
    "gb200": (8, 0, 4, 2, 144, 144, [0, 1], [0, 0, 1, 1]),
    "hgx-h200-roce": (9, 0, 8, 2, 96, 192, [0, 1], [0, 0, 0, 0, 1, 1, 1, 1]),
    "p4d": (0, 4, 8, 2, 48, 96, [0, 1], [0, 0, 0, 0, 1, 1, 1, 1]),
    "p5": (0, 32, 8, 2, 96, 192, [0, 1], [0, 0, 0, 0, 1, 1, 1, 1]),
    "pcie-a100": (2, 0, 2, 2, 64, 64, [0, 1], [0, 1]),
}


def test_counts_cover_all_kinds() -> None:
    assert set(KINDS) == set(COUNTS)


@pytest.mark.parametrize("kind", COUNTS)
def test_each_kind_is_read_completely(kind: str) -> None:
    facts = facts_of(kind)
    numa = [n.index for n in facts.cpus.numa_nodes]
    cpus = facts.cpus
    counts = (len(facts.hcas), len(facts.efa), len(facts.gpus), cpus.sockets, cpus.cores, cpus.threads)
    assert (*counts, numa, [g.numa_node for g in facts.gpus]) == COUNTS[kind]
    assert facts.read_errors == ()


def test_kinds_and_states_of_interfaces() -> None:
    interfaces = {i.name: i for i in facts_of("dgx-h100").interfaces}
    assert {n: i.kind for n, i in interfaces.items() if i.kind != "ethernet" and not n.startswith("ibp")} == {
        "bond0": "bond", "docker0": "virtual", "enx72d1a0e1f2c3": "usb", "lo": "loopback",
    }  # fmt: skip
    assert interfaces["ibp24s0"].kind == "infiniband" and interfaces["ibp24s0"].addresses == ()
    assert interfaces["ens1f1np1"].state == "down" and interfaces["lo"].state == "up"
    assert interfaces["enp41s0f0np0"].master == "bond0"
    bond = interfaces["bond0"]
    assert (bond.addresses, bond.speed_gbit, bond.default_route) == (("10.150.0.21/21",), 400, True)


def test_rdma_rate_is_the_speed_of_its_interface() -> None:
    interfaces = {i.name: i for i in facts_of("dgx-a100").interfaces}
    assert interfaces["ibp12s0"].speed_gbit == 200  # IPoIB of older kernels reports none
    assert {i.name: i.speed_gbit for i in facts_of("pcie-a100").interfaces}["ens5f1np1"] == 40


def test_link_local_addresses_are_ignored() -> None:
    interfaces = {i.name: i for i in facts_of("cpu-only").interfaces}
    assert interfaces["ens2f0"].addresses == () and interfaces["ens2f0.40"].kind == "vlan"


def test_bridge_over_a_physical_port_is_not_virtual(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.net("eno1", {"pci": "0000:02:00.0", "master": "br0"})
    tree.net("br0", {"ports": "eno1"})
    tree.net("virbr0", {"ports": "vnet0"})
    tree.net("vnet0", {})
    assert {i.name: i.kind for i in read_node(tmp_path, IpOutput()).interfaces} == {
        "br0": "bridge", "eno1": "ethernet", "virbr0": "virtual", "vnet0": "virtual",
    }  # fmt: skip


def test_ports_of_rdma_devices() -> None:
    first, *_, last = facts_of("hgx-h200-roce").hcas
    assert (first.name, first.state, first.link_layer, first.rate_gbit) == ("mlx5_0", "active", "Ethernet", 400)
    assert (first.netdev, first.numa_node, first.roce_v2_ipv4_gid_index) == ("rail0", 0, 3)
    assert (last.name, last.rate_gbit, last.pci_address) == ("mlx5_8", 200, "0000:2a:00.0")
    assert facts_of("dgx-h100").hcas[0].roce_v2_ipv4_gid_index is None  # InfiniBand has none


def test_two_routable_gids_are_ambiguous(tmp_path: Path) -> None:
    Tree(tmp_path).rdma(
        "mlx5_0",
        {
            "pci": "0000:18:00.0",
            "layer": "Ethernet",
            "rate": "400 Gb/sec (4X NDR)",
            "gids": "3/v2/10.0.0.1,5/v2/10.1.0.1",
        },
        "mlx5_core",
    )
    assert read_node(tmp_path, IpOutput()).hcas[0].roce_v2_ipv4_gid_index is None


def test_libraries_are_found_in_known_folders_and_library_path(tmp_path: Path) -> None:
    expand("p5", tmp_path)
    facts = read_node(tmp_path, IpOutput(), environ={})
    assert facts.libfabric == "/opt/amazon/efa/lib/libfabric.so.1"
    assert facts.aws_ofi_nccl == "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net-ofi.so"
    user_folder = tmp_path / "home/me/lib"
    user_folder.mkdir(parents=True)
    (user_folder / "libnccl-net.so").touch()
    assert read_node(tmp_path, IpOutput(), environ={"LD_LIBRARY_PATH": ":/home/me/lib"}).aws_ofi_nccl == (
        "/home/me/lib/libnccl-net.so"
    )


def test_variables_in_nccl_conf_files(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.write("/etc/nccl.conf", "# by the site\nNCCL_IB_HCA=mlx5_0\nNCCL_DEBUG=WARN\nno setting")
    tree.write("/home/me/.nccl.conf", "NCCL_SOCKET_IFNAME==ib0")
    tree.write("/home/me/other.conf", "NCCL_ALGO=Ring")
    assert read_node(tmp_path, IpOutput(), environ={"HOME": "/home/me"}).nccl_conf == (
        "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG",
    )  # fmt: skip
    environ_with_file = {"HOME": "/home/me", "NCCL_CONF_FILE": "/home/me/other.conf"}
    assert read_node(tmp_path, IpOutput(), environ=environ_with_file).nccl_conf == (
        "NCCL_ALGO",
        "NCCL_IB_HCA",
        "NCCL_DEBUG",
    )


def test_unparsable_files_are_noted(tmp_path: Path) -> None:
    node = expand("dgx-h100", tmp_path)
    tree = Tree(tmp_path)
    tree.write("/sys/class/infiniband/mlx5_0/ports/1/rate", "fast\x00")
    tree.write("/sys/class/infiniband/mlx5_3/ports/1/state", "?")
    tree.write("/sys/class/net/bond0/speed", "99999999999999999999999")
    tree.write("/sys/devices/system/node/node1/cpulist", "56-x")
    tree.write("/sys/devices/system/cpu/online", "all of them")
    (tmp_path / "sys/class/net/eno3/operstate").write_bytes(b"\xff\xfe")
    facts = read_node(tmp_path, IpOutput('{"not": "a list"}', "[1,"), node.gpus, {})
    assert facts.hcas[0].rate_gbit is None and facts.hcas[0].state == "active"
    assert facts.hcas[3].state == "unknown" and facts.hcas[4].rate_gbit == 400
    assert [n.index for n in facts.cpus.numa_nodes] == [0] and facts.cpus.cores is None
    assert {i.state for i in facts.interfaces if i.name == "eno3"} == {"down"}
    for part in ("mlx5_0/ports/1/rate", "bond0/speed", "node1/cpulist", "cpu/online", "ip -j address", "ip -j route"):
        assert any(part in note for note in facts.read_errors), (part, facts.read_errors)


def test_unreadable_sysfs_leaves_only_notes(tmp_path: Path) -> None:
    for folder in ("sys/class/net", "sys/class/infiniband", "sys/devices/system/node"):
        (tmp_path / folder).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / folder).symlink_to(tmp_path / folder)  # a link to itself: ELOOP, for root too
    facts = read_node(tmp_path, IpOutput(), environ={})
    assert (facts.interfaces, facts.hcas, facts.cpus.numa_nodes) == ((), (), ())
    assert len(facts.read_errors) == 3 and all("symbolic links" in note for note in facts.read_errors)


def test_empty_root_has_no_facts(tmp_path: Path) -> None:
    assert read_node(tmp_path, IpOutput(), environ={}) == NodeFacts()


def test_missing_ip_command_only_loses_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expand("pcie-a100", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    facts = read_node(tmp_path, environ={})
    assert {i.name: i.speed_gbit for i in facts.interfaces}["ens5f0np0"] == 100
    assert [note for note in facts.read_errors if "ip: command not found" in note] == list(facts.read_errors)


def test_this_machine_is_read() -> None:
    """Read the files of this machine and run its ``ip``, if installed."""
    facts = read_node()
    assert "lo" in {i.name for i in facts.interfaces}
    assert facts.cpus.threads and not any("is not a" in note for note in facts.read_errors)
