"""The machine of a check: versions, GPUs, clocks and limits. As a program, it prints what torch says, as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from benchmarks import measure
from clustertrain import proc
from clustertrain.errors import CommandFailed
from clustertrain.telemetry.readers.allocation import find_allocation
from clustertrain.telemetry.readers.nvml import Device, Nvml, NvmlError

TORCH_TIMEOUT_S = 120.0
# NVML's functions for one number or text per GPU, with their arguments; for power in mW, clocks in MHz.
_CLOCK_SM, _CLOCK_MEM = 1, 2
_GPU_FACTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "vbios": ("nvmlDeviceGetVbiosVersion", ()),
    "power_limit_mw": ("nvmlDeviceGetEnforcedPowerLimit", ()),
    "default_power_limit_mw": ("nvmlDeviceGetPowerManagementDefaultLimit", ()),
    "sm_clock_mhz": ("nvmlDeviceGetClockInfo", (_CLOCK_SM,)),
    "max_sm_clock_mhz": ("nvmlDeviceGetMaxClockInfo", (_CLOCK_SM,)),
    "max_memory_clock_mhz": ("nvmlDeviceGetMaxClockInfo", (_CLOCK_MEM,)),
    "persistence_mode": ("nvmlDeviceGetPersistenceMode", ()),
    "pcie_generation": ("nvmlDeviceGetCurrPcieLinkGeneration", ()),
    "pcie_width": ("nvmlDeviceGetCurrPcieLinkWidth", ()),
}


def read_gpus() -> tuple[str | None, list[dict[str, Any]]]:
    """Return the driver's version, and the GPUs and MIG slices of this job; outside a job, all that NVML lists.

    Raises:
        NvmlError: there is no driver, or NVML does not start.
    """
    nvml = Nvml()
    driver = nvml.open()
    try:
        return driver, [
            _describe_device(nvml, device) for device in find_allocation(os.environ, nvml.devices()).devices
        ]
    finally:
        nvml.close()


def _describe_device(nvml: Nvml, device: Device) -> dict[str, Any]:
    memory = device.memory_total_bytes
    return {
        "uuid": device.uuid,
        "name": device.name,
        "memory_gib": None if memory is None else round(memory / 2**30, 2),
        "mig_slice_of": device.parent,
        "unreadable": device.reason,
        **({} if device.reason or device.parent else _read_facts(nvml, device.uuid)),
    }


def _read_facts(nvml: Nvml, uuid: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name, (function, args) in _GPU_FACTS.items():
        try:
            facts[name] = nvml.call(function, nvml.handles[uuid], *args)
        except NvmlError as e:
            facts[name] = e.name
    return facts


def read_torch() -> dict[str, Any]:
    """Return what torch says of itself and its GPUs, from another process: a context would take memory of the GPU."""
    argv = [sys.executable, "-m", "benchmarks.gpu_check.machine"]
    try:
        done = proc.run(argv, timeout_s=TORCH_TIMEOUT_S, cwd=measure.ROOT)
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (CommandFailed, ValueError, IndexError) as e:
        return {"cuda_available": False, "unavailable": f"torch does not start: {e.args[0]}"[-2000:]}
    return facts


def describe() -> dict[str, Any]:
    """Return the host's part of the description: processor, memory, commit, versions."""
    context = measure.context(("clustertrain", "torch", "nvidia-ml-py"))
    argv = ["git", "-C", str(measure.ROOT), "status", "--porcelain"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    context["uncommitted_files"] = len(done.stdout.splitlines()) if done.returncode == 0 else None
    return context


def save_packages(path: Path) -> None:
    """Write the version of each installed package, a line each."""
    installed = {f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions()}
    path.write_text("\n".join(sorted(installed, key=str.lower)) + "\n")


def save_nvidia_smi(path: Path) -> None:
    """Write what ``nvidia-smi -q`` prints to ``path``, or why it does not."""
    if shutil.which("nvidia-smi") is None:
        path.write_text("nvidia-smi is not installed\n")
        return
    try:
        path.write_text(proc.run(["nvidia-smi", "-q"], timeout_s=15).stdout)
    except CommandFailed as e:
        path.write_text(f"{e.args[0]}\n")


def _torch_facts() -> dict[str, Any]:
    import torch

    with warnings.catch_warnings(record=True) as caught:  # torch warns if the driver is too old for it
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    reason = "torch sees no GPU" if torch.version.cuda else "this torch was built without CUDA"
    facts: dict[str, Any] = {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cuda_available": available,
        "unavailable": "" if available else "; ".join([reason, *(str(w.message) for w in caught)]),
    }
    if available:
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["gpus"] = [_describe_gpu(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    return facts


def _describe_gpu(properties: Any) -> dict[str, Any]:
    return {
        "name": properties.name,
        "uuid": str(properties.uuid),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 2),
        "multiprocessors": properties.multi_processor_count,
    }


if __name__ == "__main__":
    print(json.dumps(_torch_facts()))
