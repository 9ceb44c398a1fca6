"""Detect profile values on this machine alone, without Slurm."""

from __future__ import annotations

from collections import Counter

from clustertrain.cluster.slurm_site_profile import DetectedProfile
from clustertrain.config import hardware
from clustertrain.telemetry.readers.nvml import Device, Nvml, NvmlError


def detect_local_machine() -> DetectedProfile:
    """Detect the GPUs that the NVIDIA driver reports."""
    detected = DetectedProfile()
    try:
        gpus = _list_gpus()
    except NvmlError as e:
        detected.add("device", "cpu", "NVML reports no GPU")
        detected.notes.append(f"no NVIDIA GPU on this machine: {e.reason}")
        return detected
    names = Counter(gpu.name or "" for gpu in gpus)
    if not names:
        detected.add("device", "cpu", "NVML reports no GPU")
        return detected
    name = max(names, key=lambda n: names[n])
    detected.add("device", "cuda", "NVML")
    detected.add("gpus_per_node", names[name], f"NVML reports {names[name]} x {name or 'a GPU without a name'}")
    if len(names) > 1:
        detected.notes.append(f"GPUs of several types: {', '.join(f'{n} x {name}' for name, n in names.items())}")
    known_gpu = hardware.find_gpu_type(name)
    if known_gpu is None:
        detected.notes.append(f"GPU {name!r} is not in the GPU catalog, so the plan does not know its memory")
    else:
        detected.add("gpu_type", known_gpu.name, f"NVML name: {name}")
    return detected


def _list_gpus() -> list[Device]:
    nvml = Nvml()
    nvml.open()
    try:
        return [device for device in nvml.devices() if device.parent is None and device.reason is None]
    finally:
        nvml.close()
