"""Where and how to run: the request to ``submit`` after profile, recipe and command line are merged."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

import msgspec

from clustertrain.config.checks.ranges import check_positive
from clustertrain.config.checks.storage_paths import check_node_folder
from clustertrain.config.command_options import (
    check_pattern,
    normalize_stop_signal,
    parse_stop_signal,
    split_arguments,
)
from clustertrain.config.container import RuntimeName, parse_mount
from clustertrain.config.recipe import Recipe

BackendName = Literal["auto", "slurm", "local"]
LayoutName = Literal["auto", "ddp", "zero1", "fsdp", "fsdp-grad-op", "hybrid-shard"]
MAX_RANKS = 10**6
Device = Literal["auto", "cuda", "cpu"]
EnvironmentPlace = Literal["shared", "ship"]


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[job]`` table: nodes, layout, and options for Slurm. Options of the command line win."""

    name: str = ""
    """First part of the run id. Empty: the name of the recipe or script."""
    nodes: int = 1
    """Number of nodes."""
    gpus: int = 1
    """GPUs per node; ranks per node with ``device = "cpu"``."""
    layout: LayoutName = "auto"
    """Data-parallel layout of the ranks that tp, cp and pp leave. ``"auto"``: the fastest one predicted to fit,
    otherwise ddp or fsdp by the memory estimate."""
    tp: int = 0
    """Tensor-parallel degree: ranks that share each layer. 0: chosen with ``layout = "auto"`` if no degree is given,
    otherwise 1."""
    cp: int = 0
    """Context-parallel degree: ranks that share each sequence. 0: as for ``tp``."""
    pp: int = 0
    """Pipeline-parallel degree: ranks that each hold some of the layers. 0: as for ``tp``."""
    dp_replicate: int = 0
    """Number of replicas. 0: inferred from the other degrees."""
    dp_shard: int = 0
    """Ranks that share a replica. 0: inferred from the other degrees."""
    backend: BackendName = "auto"
    """Where to run. ``"auto"``: Slurm if it is installed, otherwise this machine unless the job needs a cluster."""
    python: str = ""
    """Interpreter of the ranks: a path or the name of a command. Empty: the profile's, otherwise the one that runs
    ``submit``, or ``python`` of your shell if only that has torch."""
    environment: EnvironmentPlace = "shared"
    """Where the ranks' Python runs from. ``"ship"``: its environment is packed once, and each node runs a copy on its
    local disk. ``"shared"``: from its own folder."""
    environment_dir: str = ""
    """Folder on the nodes' local disks for these copies, such as ``"/local/$USER"``. Empty: the profile's, otherwise
    ``$SLURM_TMPDIR``, ``$TMPDIR`` or ``/tmp``."""
    cluster: str = ""
    """Name of the cluster profile. Empty: ``$CLUSTERTRAIN_CLUSTER``, otherwise none."""
    device: Device = "auto"
    """Device to train on. ``"auto"``: the profile's, otherwise cuda on Slurm, with ``gpu_type`` or if this machine has
    an NVIDIA GPU, otherwise cpu."""
    gpu_type: str = ""
    """GPU type, as the site's gres names it. Empty: the profile's, otherwise any."""
    partition: str = ""
    """Partition. Passed to sbatch. Empty: the profile's, otherwise Slurm's default."""
    account: str = ""
    """Account. Passed to sbatch. Empty: the profile's, otherwise Slurm's default."""
    qos: str = ""
    """Quality of service. Passed to sbatch. Empty: the profile's, otherwise Slurm's default."""
    time: str = ""
    """Time limit in sbatch's format: minutes, H:M:S or D-H:M:S. Empty: the profile's, otherwise Slurm's default."""
    constraint: str = ""
    """Node features. Passed to sbatch. Empty: none."""
    exclude: str = ""
    """Nodes to exclude. Passed to sbatch. Empty: none."""
    nodelist: str = ""
    """Nodes to use. Passed to sbatch. Empty: any."""
    reservation: str = ""
    """Reservation. Passed to sbatch. Empty: none."""
    mem: str = ""
    """Host memory per node. Passed to sbatch. Empty: the profile's, otherwise Slurm's default."""
    cpus_per_gpu: int = 0
    """CPUs per GPU, or per rank on CPUs. 0: the profile's, otherwise Slurm's default (one per rank on CPUs)."""
    dependency: str = ""
    """Jobs to wait for. Passed to sbatch. Empty: none."""
    sbatch: dict[str, str] = {}
    """Further options for sbatch, passed as ``--KEY=VALUE``."""
    checkpoint_dir: str = ""
    """Folder for checkpoints, which are saved in ``<checkpoint_dir>/<run-id>``. Empty: the run folder."""
    max_requeues: int = 50
    """Most requeues of the run. 0: never requeue."""
    hooks: bool = True
    """Hook the frameworks that a command imports, to see its steps and to stop and resume it with its own
    checkpoints."""
    stop_signal: str = "TERM"
    """Signal that asks a command to stop: ``TERM``, ``USR1``, ``USR2``, ``INT`` or ``HUP``, with ``:all`` after it for
    all processes of a rank instead of its program alone. ``"none"``: the command reads the stop file."""
    resume_args: str = ""
    """Arguments that a command gets in addition from the second attempt on, split as in a shell. ``{checkpoint}``,
    ``{run_dir}`` and ``{attempt}`` are replaced. Left out while there is no checkpoint, if ``checkpoints`` names them
    or ``{checkpoint}`` is used."""
    checkpoints: str = ""
    """Pattern of the files or folders that a command saves as checkpoints, such as ``out/ckpt-*.pt``, from the folder
    of ``submit``. The latest complete one is ``CLUSTERTRAIN_CHECKPOINT``, and a newer one counts as progress.
    ``{run_dir}`` is replaced. Empty: those of the frameworks with hooks."""
    container: str = ""
    """Image in which the ranks run: a ``.sif`` or ``.sqsh`` file, an OCI bundle, a folder with a root filesystem, or
    ``docker://NAME``. Empty: the profile's, otherwise none."""
    container_runtime: RuntimeName = "auto"
    """Program that starts the containers. ``"auto"``: the profile's, otherwise the first one that is installed and
    takes the image."""
    container_mounts: tuple[str, ...] = ()
    """Host paths to mount into the containers, as ``SRC[:DST[:ro]]``, after those of the profile."""
    container_options: tuple[str, ...] = ()
    """Further options for the runtime, after those of the profile."""
    share: bool = False
    """Let the group read the run folder (mode 0750 instead of 0700)."""

    def __post_init__(self) -> None:
        check_positive("nodes", self.nodes)
        check_positive("gpus", self.gpus)
        if self.nodes * self.gpus > MAX_RANKS:
            raise ValueError(
                f"nodes = {self.nodes} x gpus = {self.gpus}: {self.nodes * self.gpus} ranks, at most {MAX_RANKS}; the "
                "largest clusters have some 200,000 GPUs, and gpus is per node"
            )
        for name in ("tp", "cp", "pp"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 0 (automatic) or more")
        if self.dp_replicate < 0 or self.dp_shard < 0:
            raise ValueError("dp_replicate and dp_shard must be 0 (inferred) or more")
        if self.environment_dir:
            check_node_folder("environment_dir", self.environment_dir)
        for mount in self.container_mounts:
            parse_mount(mount)
        if self.max_requeues < 0:
            raise ValueError(f"max_requeues = {self.max_requeues}: must be 0 or more")
        if self.cpus_per_gpu < 0:
            raise ValueError(f"cpus_per_gpu = {self.cpus_per_gpu}: must be 0 (the cluster's default) or more")
        parse_stop_signal(self.stop_signal)
        msgspec.structs.force_setattr(self, "stop_signal", normalize_stop_signal(self.stop_signal))
        split_arguments(self.resume_args)
        check_pattern(self.checkpoints)


class ScriptSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The user's own program: a script that may open a session, or any command."""

    path: str = ""
    """Script, relative to the code snapshot in ``code/``. Empty: the command uses no file of the snapshot."""
    args: tuple[str, ...] = ()
    """Arguments of the script."""
    cwd: str
    """Working directory in which ``submit`` was called."""
    command: tuple[str, ...] = ()
    """What each rank executes. Empty: the script, with the job's Python."""
    path_index: int | None = None
    """Which element of ``command`` stands for ``path``. None: ``path`` is a package, which the command imports."""
    local_rank_index: int | None = None
    """Which element of ``command`` is an option to which each rank's ``=LOCAL_RANK`` is added."""

    @property
    def is_package(self) -> bool:
        return bool(self.command and self.path) and self.path_index is None

    @property
    def name(self) -> str:
        """Name of the program in messages."""
        return PurePath(self.path or self.command[0]).name


class RunSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The frozen request of a run, as in ``spec.toml``."""

    version: int = 1
    """Version of the format."""
    job: JobSpec = JobSpec()
    """Merged job options."""
    recipe: Recipe = Recipe()
    """Merged recipe."""
    script: ScriptSpec | None = None
    """The user's script; None for the built-in trainer."""
    env: dict[str, str] = {}
    """Environment variables of the ranks."""
    secret_env: tuple[str, ...] = ()
    """Names of the ``--env`` variables. Before submission ``env`` holds their values; afterwards a file of the run that
    only its owner can read."""
    wrapped: bool = False
    """The run is a command inside the user's own batch script: ``clustertrain wrap``."""
    watched: bool = False
    """The run is a job that was started without clustertrain, and is only watched: ``clustertrain watch``."""
