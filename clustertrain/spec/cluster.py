"""Cluster profiles: what a site needs before and around a job (TOML)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from clustertrain import settings
from clustertrain.errors import ConfigError
from clustertrain.spec.job import Device
from clustertrain.spec.node import NodeFacts
from clustertrain.spec.ranges import positive
from clustertrain.spec.strict import build, nearest, read_toml


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
    gpus_flag: str = "gpus-per-node"  # or "gres": some sites refuse one of them
    cpus_per_gpu: int = 0
    fabric_interface: str = ""  # network interface of the training traffic, where it cannot be told
    env: dict[str, str] = {}
    sbatch: dict[str, str] = {}
    node: NodeFacts | None = None  # what its nodes are made of; all alike, as far as the settings of NCCL go

    def __post_init__(self) -> None:
        if self.grace_s is not None:
            positive("grace_s", self.grace_s)
        positive("signal_lead_s", self.signal_lead_s)
        if self.python and not self.python.startswith("/"):
            raise ValueError(f"python = {self.python!r}: must be an absolute path, the nodes may have another PATH")
        if self.gpus_flag not in ("gpus-per-node", "gres"):
            raise ValueError(f"gpus_flag = {self.gpus_flag!r}: must be 'gpus-per-node' or 'gres'")


def find(environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """All profiles by name."""
    found: dict[str, Path] = {}
    for folder in settings.profile_folders(environ):
        for path in sorted(folder.glob("*.toml")) if folder.is_dir() else []:
            found.setdefault(path.stem, path)
    return found


def load(name: str, environ: Mapping[str, str] = os.environ) -> ClusterProfile:
    """The profile ``name``; with an empty name ``$CLUSTERTRAIN_CLUSTER``, else the built-in defaults.

    Raises:
        ConfigError: no such profile (the known ones are named), or a bad one.
    """
    wanted = name or environ.get(settings.CLUSTER, "")
    if not wanted:
        return ClusterProfile()
    profiles = find(environ)
    if wanted not in profiles:
        known = nearest(wanted, list(profiles)) if profiles else "there is none yet"
        folder = settings.profile_folders(environ)[-1]
        raise ConfigError(f"cluster profile {wanted!r} not found: {known}", fix=f"write {folder / (wanted + '.toml')}")
    return build(read_toml(profiles[wanted]), ClusterProfile, str(profiles[wanted]))
