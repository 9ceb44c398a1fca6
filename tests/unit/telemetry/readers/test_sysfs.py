"""Counters of a node from fake /sys trees."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from clustertrain.telemetry.readers import sysfs


def tree(root: Path, files: Mapping[str, object]) -> Path:
    for name, value in files.items():
        path = root / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return root


def sums(kind: sysfs.DeviceClass, root: Path) -> tuple[float, float]:
    return sysfs.DeviceCounters(kind, root).read()


def interface(name: str, received: int, sent: int, **extra: object) -> dict[str, object]:
    """Return the files of an interface; a keyword ``a__b`` is the file ``a/b``."""
    base = {"statistics/rx_bytes": received, "statistics/tx_bytes": sent}
    return {f"class/net/{name}/{file.replace('__', '/')}": value for file, value in {**base, **extra}.items()}


PORT = {"device__vendor": "0x15b3"}


def test_stacked_interfaces_count_once(tmp_path: Path) -> None:
    """There are a bond of two ports with a VLAN, a bridge with a container's interface, and the loopback."""
    tree(
        tmp_path,
        {
            **interface("lo", 7, 7),
            **interface("eth0", 100, 10, **PORT, master__ifindex=9),
            **interface("eth1", 200, 20, **PORT, master__ifindex=9),
            **interface("bond0", 300, 30, lower_eth0="", bonding__mode="802.3ad"),
            **interface("bond0.7", 300, 30, lower_bond0=""),
            **interface("br0", 50, 5, bridge__root_id="x"),
            **interface("veth1", 50, 5, master__ifindex=4),
            **interface("docker0", 1, 1, bridge__root_id="x"),
        },
    )
    assert sums(sysfs.NETWORK, tmp_path) == (300, 30)


def test_virtual_function_below_interface(tmp_path: Path) -> None:
    files = {**interface("eth0", 100, 10, **PORT), **interface("enP1", 90, 9, **PORT, master__device__vendor="x")}
    assert sums(sysfs.NETWORK, tree(tmp_path, files)) == (100, 10)


def test_virtual_function_representor(tmp_path: Path) -> None:
    uplink = interface("p0", 100, 10, **PORT, phys_port_name="p0")
    virtual = interface("pf0vf1", 40, 4, **PORT, phys_port_name="pf0vf1")
    assert sums(sysfs.NETWORK, tree(tmp_path, {**uplink, **virtual})) == (100, 10)


def test_virtual_interface_in_container(tmp_path: Path) -> None:
    files = {**interface("lo", 7, 7), **interface("eth0", 100, 10), **interface("vlan5", 100, 10, lower_eth0="")}
    assert sums(sysfs.NETWORK, tree(tmp_path, files)) == (100, 10)


def test_only_loopback(tmp_path: Path) -> None:
    with pytest.raises(sysfs.NotAvailable, match="loopback"):
        sums(sysfs.NETWORK, tree(tmp_path, interface("lo", 7, 7)))


def rdma(device: str, port: int, received: object, sent: object, folder: str = "counters") -> dict[str, object]:
    names = {"counters": ("port_rcv_data", "port_xmit_data"), "hw_counters": ("rx_bytes", "tx_bytes")}
    rx, tx = names.get(folder, ("port_rcv_data_64", "port_xmit_data_64"))
    port_folder = f"class/infiniband/{device}/ports/{port}"
    return {
        f"{port_folder}/{folder}/{rx}": received,
        f"{port_folder}/{folder}/{tx}": sent,
        f"{port_folder}/state": "4: ACTIVE",
    }


def test_infiniband_counts_4_byte_words(tmp_path: Path) -> None:
    tree(tmp_path, {**rdma("mlx5_0", 1, 1000, 10), **rdma("mlx5_1", 1, 2**40, 5), **rdma("mlx5_1", 2, 0, 0)})
    assert sums(sysfs.INFINIBAND, tmp_path) == (4 * (1000 + 2**40), 60)


def test_extended_counters_of_old_hardware(tmp_path: Path) -> None:
    tree(tmp_path, {**rdma("mlx4_0", 1, 2**32 - 1, 17), **rdma("mlx4_0", 1, 2**33, 17, "counters_ext")})
    assert sums(sysfs.INFINIBAND, tmp_path) == (4 * 2**33, 68)


def test_saturated_counter_is_unusable(tmp_path: Path) -> None:
    with pytest.raises(sysfs.NotAvailable, match="64-bit"):
        sums(sysfs.INFINIBAND, tree(tmp_path, rdma("mthca0", 1, 2**32 - 1, 17)))
    tree(tmp_path, rdma("mlx5_0", 1, 10, 20))
    assert sums(sysfs.INFINIBAND, tmp_path) == (40, 80)


def test_efa_counts_bytes(tmp_path: Path) -> None:
    none = rdma("none", 1, "N/A (no PMA)", "N/A (no PMA)")
    tree(tmp_path, {**rdma("rdmap0s6", 1, 1000, 500, "hw_counters"), **none})
    assert sums(sysfs.INFINIBAND, tmp_path) == (1000, 500)


def disk(name: str, read: int, written: int, **extra: object) -> dict[str, object]:
    stat = f"5 0 {read} 1 7 0 {written} 2 0 3 4"
    return {f"block/{name}/{file.replace('__', '/')}": value for file, value in {"stat": stat, **extra}.items()}


def test_only_whole_disks_count(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            **disk("nvme0n1", 8, 2, device__model="x", nvme0n1p1__stat="5 0 8 1 7 0 2 2 0 3 4"),
            **disk("sda", 4, 1, device__model="y"),
            **disk("nvme0c0n1", 8, 2, device__model="x", hidden=1),
            **disk("dm-0", 8, 2, slaves__nvme0n1__x=""),
            **disk("md0", 4, 1),
            **disk("loop0", 99, 0),
            **disk("zram0", 99, 9),
        },
    )
    assert sums(sysfs.DISKS, tmp_path) == (512 * 12, 512 * 3)


def test_node_without_disks(tmp_path: Path) -> None:
    with pytest.raises(sysfs.NotAvailable, match="no local disk"):
        sums(sysfs.DISKS, tree(tmp_path, disk("loop0", 1, 1)))


def test_disks_are_rescanned(tmp_path: Path) -> None:
    now = 0.0
    counters = sysfs.DeviceCounters(sysfs.DISKS, tree(tmp_path, disk("sda", 8, 2, device__model="x")), lambda: now)
    assert counters.read() == (512 * 8, 512 * 2)
    tree(tmp_path, {**disk("sda", 9, 2, device__model="x"), **disk("sdb", 100, 0, device__model="y")})
    now = 50.0
    assert counters.read() == (512 * 9, 512 * 2)
    now = 60.0
    assert counters.read() == (512 * 109, 512 * 2)
    shutil.rmtree(tmp_path / "sys/block/sda")
    now = 61.0
    assert counters.read() == (512 * 100, 0)
