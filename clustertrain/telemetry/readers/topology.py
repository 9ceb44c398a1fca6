"""Topology of the job's GPUs on this node: PCI, NVLink, NVSwitch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import msgspec

from clustertrain.config.node_facts import Gpu
from clustertrain.telemetry.readers import allocation
from clustertrain.telemetry.readers.nvml import Device, Nvml, NvmlError


def read_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the allocated GPUs in the order of the local ranks; outside a job, all GPUs.

    A MIG slice has the PCI address and the links of its GPU.

    Raises:
        NvmlError: there is no driver, or NVML does not start.
    """
    nvml = Nvml()
    nvml.open()
    try:
        devices = nvml.devices()
        boards = {d.uuid: d for d in devices}
        allocated = allocation.find_allocation(environ, devices).devices
        return tuple(_read_gpu(nvml, i, d, boards.get(d.parent or d.uuid)) for i, d in enumerate(allocated))
    finally:
        nvml.close()


def _read_gpu(nvml: Nvml, position: int, device: Device, board: Device | None) -> Gpu:
    gpu = Gpu(index=position if device.index is None else device.index, name=device.name or "")
    if board is None or not nvml.has_handle(board.uuid):
        return gpu
    # Separate blocks: one missing fact must not hide the others.
    with contextlib.suppress(NvmlError):
        gpu = msgspec.structs.replace(gpu, pci_address=nvml.pci_address(board.uuid))
    with contextlib.suppress(NvmlError):
        links = nvml.nvlinks(board.uuid)
        gpu = msgspec.structs.replace(
            gpu, nvlinks_active=links.active, nvlinks_total=links.total, nvswitch=links.nvswitch
        )
    with contextlib.suppress(NvmlError):
        gpu = msgspec.structs.replace(gpu, nvlink_domain=nvml.nvlink_domain(board.uuid))
    return gpu
