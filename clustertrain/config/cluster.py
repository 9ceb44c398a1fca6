"""Cluster profiles: what a site needs before and around a job (TOML)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from clustertrain import settings
from clustertrain.config import hardware
from clustertrain.config.checks.ranges import check_positive
from clustertrain.config.hardware import GpuType
from clustertrain.config.job import Device
from clustertrain.config.node_facts import NodeFacts
from clustertrain.config.parsing.documents import build, did_you_mean, load_toml
from clustertrain.errors import ConfigError


class MeasuredRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The table ``[measured]``: rates that ``cluster detect`` saw in an allocation; None where it saw none.

    Bus bandwidth is that of nccl-tests (doc/PERFORMANCE.md): of an all-reduce of S bytes over n ranks in t seconds
    S / t * 2 (n - 1) / n, here in GB/s = 1e9 bytes/s. It is what the slowest rank's links carry, whatever n.
    """

    gemm_tflops: float | None = None  # one device, the median of a few large matrix products
    gemm_dtype: Literal["", "bf16", "fp16", "fp32"] = ""  # what they were multiplied in
    node_bus_gb_s: float | None = None  # all-reduce over all devices of one node
    fabric_bus_gb_s: float | None = None  # across nodes, each device with its peers of the same local rank, all at once
    device: str = ""  # the driver's name of the GPU, or "cpu"
    ranks: int = 0  # of one node
    nodes: int = 0  # that took part
    torch: str = ""
    measured_at: float = 0.0  # UTC epoch seconds

    def __post_init__(self) -> None:
        for name in ("gemm_tflops", "node_bus_gb_s", "fabric_bus_gb_s"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))


class ClusterProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``$XDG_CONFIG_HOME/clustertrain/clusters/NAME.toml``. Options of the command line win over it."""

    setup: tuple[str, ...] = ()  # shell lines run in job.sh before anything else: module load, conda activate
    python: str = ""  # absolute interpreter on the compute nodes; default: the one that runs submit
    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    mem: str = ""
    grace_s: float | None = None  # what preemption leaves between the warning and the kill; None: not known
    signal_lead_s: int = 120  # first `--signal` before the time limit
    device: Device = "auto"
    gpu_type: str = ""
    gpus_per_node: int = 0  # that a node has; 0: not known
    gpus_flag: str = "gpus-per-node"  # or "gres": some sites refuse one of them
    cpus_per_gpu: int = 0
    fabric: str = ""  # what joins the nodes, as "8 x ndr" or "efa-p5" (config/hardware.py); "": as the GPU type comes
    fabric_interface: str = ""  # network interface of the training traffic, where it cannot be told
    env: dict[str, str] = {}
    sbatch: dict[str, str] = {}
    measured: MeasuredRates | None = None
    # Measured over predicted step time of a run of yours, as ``status`` shows it: scales every prediction.
    calibration: float = 1.0
    gpu: GpuType | None = None  # a type that the catalogue lacks; its name is what --gpu-type says
    node: NodeFacts | None = None  # what its nodes are made of; all alike, as far as the settings of NCCL go

    def __post_init__(self) -> None:
        if self.grace_s is not None:
            check_positive("grace_s", self.grace_s)
        check_positive("signal_lead_s", self.signal_lead_s)
        check_positive("calibration", self.calibration)
        if self.gpu is not None:
            for name in ("memory_gib", "tflops", "memory_gb_s", "fabric_gb_s", "power"):
                check_positive(f"gpu.{name}", getattr(self.gpu, name))
        if self.fabric:
            hardware.parse_node_gb_s(self.fabric)
        if self.gpus_per_node < 0:
            raise ValueError(f"gpus_per_node = {self.gpus_per_node}: must be 0 (not known) or more")
        if self.python and not self.python.startswith("/"):
            raise ValueError(f"python = {self.python!r}: must be an absolute path, the nodes may have another PATH")
        if self.gpus_flag not in ("gpus-per-node", "gres"):
            raise ValueError(f"gpus_flag = {self.gpus_flag!r}: must be 'gpus-per-node' or 'gres'")


def list_profiles(environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """All profiles by name."""
    profiles: dict[str, Path] = {}
    for folder in settings.profile_folders(environ):
        for path in sorted(folder.glob("*.toml")) if folder.is_dir() else []:
            profiles.setdefault(path.stem, path)
    return profiles


def default_profile_name(environ: Mapping[str, str] = os.environ) -> str:
    """The profile that is used where none is named; empty where there is no such choice."""
    return environ.get(settings.CLUSTER, "")


def load_profile(name: str, environ: Mapping[str, str] = os.environ) -> ClusterProfile:
    """The profile ``name``; with an empty name ``$CLUSTERTRAIN_CLUSTER``, else the built-in defaults.

    Raises:
        ConfigError: no such profile (the known ones are named), or a bad one.
    """
    profile_name = name or default_profile_name(environ)
    if not profile_name:
        return ClusterProfile()
    profiles = list_profiles(environ)
    if profile_name not in profiles:
        suggestion = did_you_mean(profile_name, list(profiles)) if profiles else "there is none yet"
        folder = settings.profile_folders(environ)[-1]
        raise ConfigError(
            f"cluster profile {profile_name!r} not found: {suggestion}",
            fix=f"write {folder / (profile_name + '.toml')}",
        )
    return build(load_toml(profiles[profile_name]), ClusterProfile, str(profiles[profile_name]))
