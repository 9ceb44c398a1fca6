"""Cluster profiles (TOML): a site's defaults for jobs, and the hardware of its nodes."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from clustertrain import settings
from clustertrain.config import hardware
from clustertrain.config.checks.ranges import check_positive
from clustertrain.config.checks.storage_paths import check_node_folder
from clustertrain.config.container import RuntimeName, is_registry_image, parse_mount
from clustertrain.config.hardware import GpuType
from clustertrain.config.job import Device, EnvironmentPlace
from clustertrain.config.node_facts import NodeFacts
from clustertrain.config.parsing.documents import build, did_you_mean, parse_toml, read_text
from clustertrain.errors import ConfigError


class MeasuredRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[measured]`` table: rates that ``cluster detect`` measured in an allocation; unset where it measured none.

    Bus bandwidth is defined as in nccl-tests (doc/PERFORMANCE.md): for an all-reduce of S bytes over n ranks in t
    seconds it is S / t * 2 (n - 1) / n, here in GB/s = 1e9 bytes/s. For any n it is the rate of the slowest rank's
    links.
    """

    gemm_tflops: float | None = None
    """TFLOP/s of dense matrix products on one device: the median of a few large ones. Unset: not measured."""
    gemm_dtype: Literal["", "bf16", "fp16", "fp32"] = ""
    """Data type of these products. Empty: not measured."""
    node_bus_gb_s: float | None = None
    """Bus bandwidth in GB/s of an all-reduce over all devices of one node. Unset: not measured."""
    fabric_bus_gb_s: float | None = None
    """Bus bandwidth in GB/s across nodes: each device with its peers of the same local rank, all groups at once, the
    slowest group. Unset: not measured."""
    device: str = ""
    """The driver's name of the GPU, or ``"cpu"``."""
    ranks: int = 0
    """Ranks per node in the measurement."""
    nodes: int = 0
    """Nodes in the measurement."""
    torch: str = ""
    """Version of torch."""
    measured_at: float = 0.0
    """Time of the measurement in seconds since the epoch, UTC."""

    def __post_init__(self) -> None:
        for name in ("gemm_tflops", "node_bus_gb_s", "fabric_bus_gb_s"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))


class ClusterProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A cluster profile, ``$XDG_CONFIG_HOME/clustertrain/clusters/NAME.toml``. Command-line options and recipes win."""

    setup: tuple[str, ...] = ()
    """Shell lines that the job script runs first, for example ``module load`` or ``conda activate``."""
    python: str = ""
    """Absolute path of the ranks' interpreter on the compute nodes. Empty: see ``job.python``."""
    environment: EnvironmentPlace = "shared"
    """Default of ``job.environment``: ``"ship"`` where imports from the shared filesystem are slow."""
    environment_dir: str = ""
    """Folder on the nodes' local disks for shipped environments. Empty: see ``job.environment_dir``."""
    partition: str = ""
    """Default partition. Empty: Slurm's."""
    account: str = ""
    """Default account. Empty: Slurm's."""
    qos: str = ""
    """Default quality of service. Empty: Slurm's."""
    time: str = ""
    """Default time limit in sbatch's format. Empty: Slurm's."""
    mem: str = ""
    """Default host memory per node. Empty: Slurm's."""
    grace_s: float | None = None
    """Seconds between the warning of a preemption and the kill. Unset: unknown."""
    signal_lead_s: int = 120
    """Seconds before the time limit at which Slurm sends the first warning (``--signal``)."""
    device: Device = "auto"
    """Default device."""
    gpu_type: str = ""
    """Default GPU type, as the site's gres names it. Empty: any."""
    gpus_per_node: int = 0
    """GPUs of a node. 0: unknown."""
    gpus_flag: str = "gpus-per-node"
    """sbatch option that requests GPUs: ``"gpus-per-node"`` or ``"gres"``. Some sites refuse one of them."""
    cpus_per_gpu: int = 0
    """CPUs per GPU. 0: the site's default."""
    fabric: str = ""
    """Network between nodes, for example ``"8 x ndr"`` or ``"efa-p5"`` (names: hardware.md). Empty: the ports in
    ``[node]``, otherwise the usual network of the GPU type."""
    fabric_interface: str = ""
    """Network interface for training traffic, where it cannot be detected. Empty: detected."""
    env: dict[str, str] = {}
    """Environment variables of the ranks. A recipe's ``[env]`` wins."""
    sbatch: dict[str, str] = {}
    """Further options for sbatch, passed as ``--KEY=VALUE``."""
    container: str = ""
    """Default image in which the ranks run, see ``job.container``. Empty: none."""
    container_runtime: RuntimeName = "auto"
    """Program that starts the containers. ``"auto"``: the first one that is installed and takes the image."""
    container_mounts: tuple[str, ...] = ()
    """Files and folders of the nodes that all containers see, as ``SRC[:DST[:ro]]`` with absolute paths."""
    container_options: tuple[str, ...] = ()
    """Further options for the runtime, such as ``"--device=/dev/fuse"`` for podman."""
    measured: MeasuredRates | None = None
    """Measured rates, written by ``cluster detect --measure``. Unset: not measured."""
    calibration: float = 1.0
    """Ratio of measured to predicted step time of one of your runs, as ``status`` shows it. Scales every prediction."""
    gpu: GpuType | None = None
    """GPU type missing from the catalog; ``--gpu-type`` selects it by its name. Unset: none."""
    node: NodeFacts | None = None
    """Hardware of the nodes, written by ``cluster detect``. NCCL settings assume that all nodes are
    alike. Unset: unknown."""

    def __post_init__(self) -> None:
        if self.grace_s is not None:
            check_positive("grace_s", self.grace_s)
        check_positive("signal_lead_s", self.signal_lead_s)
        check_positive("calibration", self.calibration)
        if self.gpu is not None:
            for name in ("memory_gib", "tflops", "memory_gb_s", "fabric_gb_s", "power_limit_factor"):
                check_positive(f"gpu.{name}", getattr(self.gpu, name))
        if self.environment_dir:
            check_node_folder("environment_dir", self.environment_dir)
        if self.fabric:
            hardware.parse_node_gb_s(self.fabric)
        if self.gpus_per_node < 0:
            raise ValueError(f"gpus_per_node = {self.gpus_per_node}: must be 0 (unknown) or more")
        if self.python and not self.python.startswith("/"):
            raise ValueError(
                f"python = {self.python!r}: must be an absolute path, because PATH may differ on the nodes"
            )
        if self.container and not (is_registry_image(self.container) or self.container.startswith(("/", "~"))):
            raise ValueError(f"container = {self.container!r}: must be an absolute path or docker://NAME")
        for mount in self.container_mounts:
            if not parse_mount(mount).source.startswith(("/", "~")):
                raise ValueError(f"container_mounts: {mount!r} must begin with an absolute path")
        if self.gpus_flag not in ("gpus-per-node", "gres"):
            raise ValueError(f"gpus_flag = {self.gpus_flag!r}: must be 'gpus-per-node' or 'gres'")


def list_profiles(environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """Return the paths of all profiles by name."""
    profiles: dict[str, Path] = {}
    for folder in settings.profile_folders(environ):
        for path in sorted(folder.glob("*.toml")) if folder.is_dir() else []:
            profiles.setdefault(path.stem, path)
    return profiles


def default_profile_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of the default profile: ``$CLUSTERTRAIN_CLUSTER``, or an empty string."""
    return environ.get(settings.CLUSTER, "")


def load_profile(name: str, environ: Mapping[str, str] = os.environ) -> ClusterProfile:
    """Load the profile ``name``; for an empty name ``$CLUSTERTRAIN_CLUSTER``'s, otherwise the built-in defaults.

    Raises:
        ConfigError: the profile is unknown (the message lists the known ones) or invalid.
    """
    profile_name = name or default_profile_name(environ)
    if not profile_name:
        return ClusterProfile()
    profiles = list_profiles(environ)
    if profile_name not in profiles:
        suggestion = did_you_mean(profile_name, list(profiles)) if profiles else "there are no profiles"
        folder = settings.profile_folders(environ)[-1]
        raise ConfigError(
            f"cluster profile {profile_name!r} not found: {suggestion}",
            fix=f"`clustertrain init profile` or `clustertrain cluster detect` writes a profile to {folder}",
        )
    path = profiles[profile_name]
    return _parse_profile(read_text(path), str(path))


@functools.lru_cache(maxsize=8)  # the submission of a command asks for it four times
def _parse_profile(text: str, source: str) -> ClusterProfile:
    return build(parse_toml(text, source), ClusterProfile, source)
