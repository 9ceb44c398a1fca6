"""Interface, ports and GID index for eight kinds of node, and for faulty nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from clustertrain.config.node_facts import EfaDevice, Gpu, Hca, Interface, NodeFacts
from clustertrain.plan.env import interfaces, nccl
from clustertrain.sysinfo.node import read_node
from tests.fixtures.nodes.expand import expand, facts_of

H100_PORTS = "=" + ",".join(f"mlx5_{n}:1" for n in (0, 3, 4, 5, 6, 9, 10, 11))
# interface, NCCL_IB_HCA, NCCL_IB_GID_INDEX
EXPECTED: dict[str, tuple[str, str | None, str | None]] = {
    "cpu-only": ("ens2f0.40", None, None),
    "dgx-a100": ("ibp12s0", "=" + ",".join(f"mlx5_{n}:1" for n in (0, 1, 2, 3, 6, 7, 8, 9)), None),
    "dgx-h100": ("bond0", H100_PORTS, None),
    "gb200": ("bond0", "=mlx5_0:1,mlx5_1:1,mlx5_4:1,mlx5_5:1", None),
    "hgx-h200-roce": ("ens3f0np0", "=" + ",".join(f"mlx5_{n}:1" for n in range(8)), "3"),
    "p4d": ("ens32", None, None),
    "p5": ("enp71s0", None, None),
    "pcie-a100": ("ens5f0np0", None, "3"),
}


def node_settings(
    facts: NodeFacts, user: tuple[str, ...] = (), route: str = "", device: str = "cuda"
) -> dict[str, str]:
    settings = nccl.node_env(device, facts, user, route_interface=route, several_nodes=True, dump_prefix="/logs/rank-")
    assert all(s.reason for s in settings.values())
    return {name: s.value for name, s in settings.items() if name != "TORCH_FR_DUMP_TEMP_FILE"}


@pytest.mark.parametrize("kind", EXPECTED)
def test_settings_per_node_kind(kind: str) -> None:
    interface, ports, gid = EXPECTED[kind]
    expected = {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "NCCL_IB_HCA": ports,
        "NCCL_IB_GID_INDEX": gid,
    }
    facts = facts_of(kind)
    assert node_settings(facts) == {name: value for name, value in expected.items() if value is not None}
    assert node_settings(facts, device="cpu") == {"GLOO_SOCKET_IFNAME": interface}
    assert interfaces.find_network_problems(facts) == []


@pytest.mark.parametrize("kind", EXPECTED)
def test_no_retired_settings(kind: str) -> None:
    facts = facts_of(kind)
    names = {*node_settings(facts), *nccl.communication_env("cuda", "", (), facts), *nccl.process_env("cuda", 8, 8, ())}
    assert not {n for n in names if n.startswith(("FI_", "RDMAV_", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS"))}
    assert not names & {
        "NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "TORCH_NCCL_TRACE_BUFFER_SIZE", "PYTORCH_CUDA_ALLOC_CONF",
    }  # fmt: skip


@pytest.mark.parametrize("kind", EXPECTED)
def test_route_interface_is_kept_unless_management(kind: str) -> None:
    facts = facts_of(kind)
    management = {"dgx-a100": "enp226s0", "dgx-h100": "eno3", "gb200": "enP5p9s0", "hgx-h200-roce": "eno1"}
    slow = management.get(kind, "eno1")
    assert node_settings(facts, route=slow)["GLOO_SOCKET_IFNAME"] == EXPECTED[kind][0]
    assert node_settings(facts, route="docker0")["GLOO_SOCKET_IFNAME"] == EXPECTED[kind][0]
    assert node_settings(facts, route="lo")["GLOO_SOCKET_IFNAME"] == EXPECTED[kind][0]
    if kind == "dgx-a100":
        assert node_settings(facts, route="enp97s0f0")["GLOO_SOCKET_IFNAME"] == "enp97s0f0"


def test_reason_lists_excluded_interfaces() -> None:
    facts = facts_of("pcie-a100")
    interface = interfaces.select_interface(facts)
    assert interface is not None
    for phrase in ("eno1 (1 Gbit/s, management)", "ens5f1np1 (down)", "virbr0 (virtual)"):
        assert phrase in interface.reason
    ports = interfaces.select_hcas(facts_of("gb200"))
    assert ports is not None and "4 x InfiniBand at 400 Gbit/s" in ports.reason
    assert "mlx5_2:1 (Ethernet, 200 Gbit/s)" in ports.reason and "mlx5_3:1 (down)" in ports.reason


def replace_device(facts: NodeFacts, part: str, name: str, **changes: Any) -> NodeFacts:
    changed = tuple(msgspec.structs.replace(x, **changes) if x.name == name else x for x in getattr(facts, part))
    return msgspec.structs.replace(facts, **{part: changed})


def test_only_fast_port_down() -> None:
    facts = facts_of("pcie-a100")
    facts = replace_device(
        replace_device(facts, "interfaces", "ens5f0np0", state="down"), "hcas", "mlx5_0", state="down"
    )
    assert node_settings(facts) == {"GLOO_SOCKET_IFNAME": "eno1", "NCCL_SOCKET_IFNAME": "=eno1"}
    assert interfaces.find_network_problems(facts) == ["no RDMA port is active (mlx5_0:1, mlx5_1:1): NCCL uses TCP"]


def test_interface_without_address_is_not_chosen() -> None:
    facts = replace_device(facts_of("pcie-a100"), "interfaces", "ens5f0np0", addresses=())
    assert node_settings(facts, route="ens5f0np0")["GLOO_SOCKET_IFNAME"] == "eno1"


def test_nothing_is_chosen_without_any_address(tmp_path: Path) -> None:
    node = expand("pcie-a100", tmp_path)
    facts = read_node(node.root, type(node.ip)(), node.gpus, {})
    assert "GLOO_SOCKET_IFNAME" not in node_settings(facts, route="eno1")


@pytest.mark.parametrize(
    ("user", "removed"),
    [
        ("NCCL_IB_HCA", {"NCCL_IB_HCA", "NCCL_IB_GID_INDEX"}),
        ("NCCL_IB_DISABLE", {"NCCL_IB_HCA", "NCCL_IB_GID_INDEX"}),
        ("NCCL_IB_ADDR_RANGE", {"NCCL_IB_GID_INDEX"}),
        ("NCCL_SOCKET_IFNAME", {"NCCL_SOCKET_IFNAME"}),
        ("NCCL_SOCKET_FAMILY", {"NCCL_SOCKET_IFNAME"}),
        ("GLOO_SOCKET_IFNAME", {"GLOO_SOCKET_IFNAME"}),
        ("NCCL_DEBUG", set()),
    ],
)
def test_user_settings_win(user: str, removed: set[str]) -> None:
    facts = facts_of("hgx-h200-roce")
    assert node_settings(facts).keys() - node_settings(facts, (user,)).keys() == removed
    # The same if NCCL's configuration files set it, which the environment would override.
    assert (
        node_settings(facts).keys() - node_settings(msgspec.structs.replace(facts, nccl_conf=(user,))).keys() == removed
    )


def test_differing_gid_tables_are_left_to_nccl() -> None:
    facts = replace_device(facts_of("hgx-h200-roce"), "hcas", "mlx5_5", roce_v2_ipv4_gid_index=5)
    assert "NCCL_IB_GID_INDEX" not in node_settings(facts)
    (note,) = interfaces.find_network_problems(facts)
    assert "mlx5_0:1 3" in note and "mlx5_5:1 5" in note
    none = replace_device(facts_of("hgx-h200-roce"), "hcas", "mlx5_5", roce_v2_ipv4_gid_index=None)
    assert (
        "NCCL_IB_GID_INDEX" not in node_settings(none) and "mlx5_5:1 none" in interfaces.find_network_problems(none)[0]
    )


def test_fast_storage_port_does_not_outweigh_compute_fabric() -> None:
    compute = tuple(Hca(name=f"mlx5_{i}", state="active", link_layer="InfiniBand", rate_gbit=200) for i in range(4))
    storage = Hca(name="mlx5_4", state="active", link_layer="InfiniBand", rate_gbit=400)
    assert interfaces.find_training_ports(NodeFacts(hcas=(*compute, storage))) == compute


def test_rails_carry_sockets_only_as_last_resort() -> None:
    rails = tuple(
        Interface(name=f"rail{i}", state="up", addresses=(f"10.{i}.0.1/31",), speed_gbit=400) for i in range(2)
    )
    ports = tuple(
        Hca(name=f"mlx5_{i}", state="active", link_layer="Ethernet", rate_gbit=400, netdev=f"rail{i}") for i in range(2)
    )
    board = Interface(name="eno1", state="up", addresses=("10.9.0.1/24",), speed_gbit=1)
    chosen = interfaces.select_interface(NodeFacts(interfaces=(board, *rails), hcas=ports))
    assert chosen is not None and chosen.value == "rail0"
    front = msgspec.structs.replace(board, speed_gbit=10)
    chosen = interfaces.select_interface(NodeFacts(interfaces=(front, *rails), hcas=ports))
    assert chosen is not None and chosen.value == "eno1"


def test_routed_network_beats_point_to_point_link() -> None:
    link = Interface(name="p2p", state="up", addresses=("10.0.0.1/31",), speed_gbit=200)
    lan = Interface(name="lan", state="up", addresses=("10.1.0.1/16",), speed_gbit=100)
    chosen = interfaces.select_interface(NodeFacts(interfaces=(link, lan)))
    assert chosen is not None and chosen.value == "lan"


def test_network_problems() -> None:
    efa = tuple(EfaDevice(name=f"efa_{i}", state="active") for i in range(4))
    gpu = Gpu(index=3, nvlinks_active=16, nvlinks_total=18)
    bare = Gpu(index=4, nvlinks_active=0, nvlinks_total=12)  # a PCIe card without bridges is no problem
    missing, links = interfaces.find_network_problems(NodeFacts(efa=efa, gpus=(gpu, bare)))
    assert "4 EFA devices" in missing and "aws-ofi-nccl" in missing
    assert links == "GPU 3: 16 of 18 NVLinks are up"


def test_plan_uses_profile_except_gid_index() -> None:
    facts = facts_of("hgx-h200-roce")
    planned = nccl.communication_env("cuda", "", (), facts)
    assert planned["NCCL_SOCKET_IFNAME"].value == "=ens3f0np0" and "NCCL_IB_HCA" in planned
    assert "NCCL_IB_GID_INDEX" not in planned
    assert nccl.communication_env("cuda", "ib0", (), facts)["NCCL_SOCKET_IFNAME"].value == "ib0"  # set explicitly
