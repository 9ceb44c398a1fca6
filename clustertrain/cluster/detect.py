"""``cluster detect``: combine Slurm's configuration, this machine's GPUs and measured rates into a profile."""

from __future__ import annotations

import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from clustertrain import clock, settings
from clustertrain.cluster import bench, profile_file, slurm_site, slurm_site_profile
from clustertrain.cluster.bench import BenchResult, BenchTarget
from clustertrain.cluster.profile_file import MergeResult
from clustertrain.cluster.slurm_site import Site
from clustertrain.cluster.slurm_site_profile import DetectedProfile
from clustertrain.config import cluster, hardware
from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.parsing.documents import read_text
from clustertrain.errors import UsageError
from clustertrain.scheduler.slurm import SlurmBackend
from clustertrain.telemetry.readers.nvml import Device, Nvml, NvmlError


@dataclass(frozen=True)
class DetectRequest:
    """The options of ``cluster detect``."""

    name: str = ""
    partition: str = ""
    measure: bool | None = None
    """None: measure only inside an allocation."""
    local: bool = False
    """Ignore Slurm."""
    force: bool = False
    """Overwrite existing keys."""


@dataclass(frozen=True)
class DetectResult:
    """The merged profile, not written yet."""

    name: str
    path: Path
    detected: DetectedProfile
    bench_result: BenchResult
    merged: MergeResult
    profile: ClusterProfile
    """``merged.text``, parsed."""


def detect_cluster(
    request: DetectRequest, environ: Mapping[str, str], on_progress: Callable[[str], None]
) -> DetectResult:
    """Query Slurm, measure and merge; ``on_progress`` is called before each measurement.

    Raises:
        UsageError: an invalid profile name, or an unknown partition.
        ConfigError: the existing profile is invalid.
        CommandFailed: Slurm does not answer.
    """
    slurm = None if request.local else slurm_site.query_site()
    name = _choose_name(request, slurm, environ)
    path = cluster.list_profiles(environ).get(name)
    text = read_text(path) if path else None
    existing = profile_file.parse_profile(text, str(path)) if text is not None else ClusterProfile()
    detected = _detect_profile(request, slurm, existing, environ)
    bench_result = _measure(request, existing, detected, environ, on_progress)
    measured = (
        profile_file.carry_over_fabric_rate(existing.measured, bench_result.measured) if bench_result.measured else None
    )
    path = path or settings.profile_folders(environ)[-1] / f"{name}.toml"
    header = profile_file.format_header(detected.notes, clock.now())
    tables = {"measured": measured, "node": bench_result.node}
    merged = profile_file.merge(text, detected.keys, tables, header=header, force=request.force)
    return DetectResult(name, path, detected, bench_result, merged, profile_file.parse_profile(merged.text, str(path)))


def _choose_name(request: DetectRequest, slurm: Site | None, environ: Mapping[str, str]) -> str:
    slurm_name = slurm.cluster_name if slurm else ""
    name = request.name or cluster.default_profile_name(environ) or slurm_name or socket.gethostname().split(".")[0]
    return profile_file.check_name(name)


def _detect_profile(
    request: DetectRequest, slurm: Site | None, existing: ClusterProfile, environ: Mapping[str, str]
) -> DetectedProfile:
    if slurm is None:
        if request.partition:
            raise UsageError(f"--partition {request.partition}: Slurm is not used", fix="omit --partition")
        detected = _detect_local_machine()
        detected.notes.insert(0, "without Slurm: the profile describes this machine only")
        return detected
    if request.partition:
        return slurm_site_profile.detect_profile(slurm, request.partition, "--partition")
    if existing.partition:
        return slurm_site_profile.detect_profile(slurm, existing.partition, "the profile's")
    return slurm_site_profile.detect_profile(slurm, environ.get(settings.SLURM_JOB_PARTITION, ""), "this job's")


def _measure(
    request: DetectRequest,
    existing: ClusterProfile,
    detected: DetectedProfile,
    environ: Mapping[str, str],
    on_progress: Callable[[str], None],
) -> BenchResult:
    in_allocation = not request.local and settings.SLURM_JOB_ID in environ
    if request.measure is False or (request.measure is None and not in_allocation):
        return BenchResult()
    nodes = SlurmBackend().current_nodes(environ) if in_allocation else ()
    # Measure on the partition's device: CPU rates in the profile of a GPU partition would be wrong.
    device = (
        existing.device if existing.device != "auto" or "device" not in detected.keys else detected.keys["device"].value
    )
    return bench.measure(BenchTarget.from_profile(existing, sys.executable, nodes, device), on_progress)


def _detect_local_machine() -> DetectedProfile:
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
