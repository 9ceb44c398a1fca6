"""Where and how to run: what ``submit`` was asked, after profile, recipe and command line are merged."""

from __future__ import annotations

from typing import Literal

import msgspec

from clustertrain.config.checks.ranges import check_positive
from clustertrain.config.recipe import Recipe

BackendName = Literal["auto", "slurm", "local"]
LayoutName = Literal["auto", "ddp", "zero1", "fsdp", "fsdp-grad-op", "hybrid-shard"]
MAX_RANKS = 10**6
Device = Literal["auto", "cuda", "cpu"]


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[job]`` table. ``gpus`` counts devices a node; on device ``cpu`` it is the number of ranks a node."""

    name: str = ""
    nodes: int = 1
    gpus: int = 1
    layout: LayoutName = "auto"  # what the data-parallel ranks share: those that tp, cp and pp leave of nodes x gpus
    tp: int = 0  # ranks that share each layer; 0: chosen with layout "auto" where no degree is given, else 1
    cp: int = 0  # ranks that share each sequence
    pp: int = 0  # ranks that each have some of the layers
    dp_replicate: int = 0  # replicas; 0: from the other degrees
    dp_shard: int = 0  # ranks that share a replica; 0: from the other degrees
    backend: BackendName = "auto"
    cluster: str = ""
    device: Device = "auto"
    gpu_type: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""  # as sbatch takes it: minutes, H:M:S, D-H:M:S
    constraint: str = ""
    exclude: str = ""
    nodelist: str = ""
    reservation: str = ""
    mem: str = ""
    cpus_per_gpu: int = 0
    dependency: str = ""
    sbatch: dict[str, str] = {}  # anything else, passed through as --KEY=VALUE
    checkpoint_dir: str = ""
    max_requeues: int = 50
    share: bool = False

    def __post_init__(self) -> None:
        check_positive("nodes", self.nodes)
        check_positive("gpus", self.gpus)
        if self.nodes * self.gpus > MAX_RANKS:
            raise ValueError(
                f"nodes = {self.nodes} x gpus = {self.gpus}: {self.nodes * self.gpus} ranks, at most {MAX_RANKS}; the "
                "largest clusters have some 200,000 GPUs, and gpus counts those of one node"
            )
        for name in ("tp", "cp", "pp"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 0 (chosen) or more")
        if self.dp_replicate < 0 or self.dp_shard < 0:
            raise ValueError("dp_replicate and dp_shard must be 0 (derived) or more")
        if self.max_requeues < 0:
            raise ValueError(f"max_requeues = {self.max_requeues}: must be 0 or more")
        if self.cpus_per_gpu < 0:
            raise ValueError(f"cpus_per_gpu = {self.cpus_per_gpu}: must be 0 (the cluster's default) or more")


class ScriptSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A script of the user's. ``path`` is relative to the snapshot in ``code/``; ``cwd`` is where submit was called."""

    path: str
    args: tuple[str, ...] = ()
    cwd: str


class RunSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The frozen request in ``spec.toml``. ``secret_env`` names the variables of --env: before submission their values
    stand in ``env``, afterwards in a file of the run that only its owner may read."""

    version: int = 1
    job: JobSpec = JobSpec()
    recipe: Recipe = Recipe()
    script: ScriptSpec | None = None
    env: dict[str, str] = {}
    secret_env: tuple[str, ...] = ()
