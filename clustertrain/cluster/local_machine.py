"""What a profile can say of this machine alone, where there is no Slurm to ask."""

from __future__ import annotations

from collections import Counter

from clustertrain.cluster.slurm_site_profile import Findings
from clustertrain.config import hardware
from clustertrain.telemetry.readers.nvml import Device, Nvml, NvmlError


def of_machine() -> Findings:
    """GPUs as the driver shows them."""
    found = Findings()
    try:
        gpus = _gpus()
    except NvmlError as e:
        found.add("device", "cpu", "NVML shows no GPU")
        found.notes.append(f"no NVIDIA GPU here: {e.reason}")
        return found
    names = Counter(gpu.name or "" for gpu in gpus)
    if not names:
        found.add("device", "cpu", "NVML shows no GPU")
        return found
    name = max(names, key=lambda n: names[n])
    found.add("device", "cuda", "NVML")
    found.add("gpus_per_node", names[name], f"NVML shows {names[name]} x {name or 'a GPU without a name'}")
    if len(names) > 1:
        found.notes.append(f"GPUs of several types: {', '.join(f'{n} x {name}' for name, n in names.items())}")
    known = hardware.find(name)
    if known is None:
        found.notes.append(f"GPU {name!r} is not in the catalogue: the plan does not know its memory")
    else:
        found.add("gpu_type", known.name, f"NVML calls it {name}")
    return found


def _gpus() -> list[Device]:
    nvml = Nvml()
    nvml.open()
    try:
        return [device for device in nvml.devices() if device.parent is None and device.reason is None]
    finally:
        nvml.close()
