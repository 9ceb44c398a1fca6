"""Every environment name that clustertrain reads or sets, once each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from clustertrain.errors import ConfigError

MOST_BYTES = 255  # NAME_MAX of Linux

# Set by the user.
HOME = "CLUSTERTRAIN_HOME"
CLUSTER = "CLUSTERTRAIN_CLUSTER"
CLUSTER_PATH = "CLUSTERTRAIN_CLUSTER_PATH"  # more folders with profiles, separated by ':'

# Set by tests of the checkpoints, see checkpoint/core/fault_points.py.
FAULT_AT = "CLUSTERTRAIN_FAULT_AT"

# Set by the secrets of a run: the webhook of its recipe.
WEBHOOK = "CLUSTERTRAIN_WEBHOOK"

# Set by job.sh, batch and the agent for the processes below them.
RUN_DIR = "CLUSTERTRAIN_RUN_DIR"
ATTEMPT = "CLUSTERTRAIN_ATTEMPT"
NONCE = "CLUSTERTRAIN_NONCE"
NODE = "CLUSTERTRAIN_NODE"
NODE_RANK = "CLUSTERTRAIN_NODE_RANK"
NODE_LIST = "CLUSTERTRAIN_NODE_LIST"  # names, separated by ','
RANK_DIR = "CLUSTERTRAIN_RANK_DIR"
DEVICE = "CLUSTERTRAIN_DEVICE"
LOCAL_JOB = "CLUSTERTRAIN_LOCAL_JOB"  # the local backend's job folder
RANK_CPUS = "CLUSTERTRAIN_RANK_CPUS"  # `0,1;2,3`: the processors of each local rank, where they are bound
LAUNCHER_PID = "CLUSTERTRAIN_LAUNCHER_PID"  # of torchrun, the parent of each rank
INTERNAL = frozenset(
    {
        RUN_DIR,
        ATTEMPT,
        NONCE,
        NODE,
        NODE_RANK,
        NODE_LIST,
        RANK_DIR,
        DEVICE,
        LOCAL_JOB,
        RANK_CPUS,
        LAUNCHER_PID,
        WEBHOOK,
    }
)

# Of others.
XDG_DATA_HOME = "XDG_DATA_HOME"
XDG_CONFIG_HOME = "XDG_CONFIG_HOME"
SLURM_JOB_ID = "SLURM_JOB_ID"
SLURM_RESTART_COUNT = "SLURM_RESTART_COUNT"
SLURM_JOB_PARTITION = "SLURM_JOB_PARTITION"
SLURM_NODEID = "SLURM_NODEID"
SLURMD_NODENAME = "SLURMD_NODENAME"
SLURM_ARRAY_JOB_ID = "SLURM_ARRAY_JOB_ID"
SLURM_ARRAY_TASK_ID = "SLURM_ARRAY_TASK_ID"
SLURM_STEP_GPUS = "SLURM_STEP_GPUS"
SLURM_JOB_GPUS = "SLURM_JOB_GPUS"
SLURM_GPUS_ON_NODE = "SLURM_GPUS_ON_NODE"
SLURM_CPUS_ON_NODE = "SLURM_CPUS_ON_NODE"
SLURM_MEM_PER_NODE = "SLURM_MEM_PER_NODE"  # MiB, as the next two; 0: all of the node
SLURM_MEM_PER_CPU = "SLURM_MEM_PER_CPU"
SLURM_MEM_PER_GPU = "SLURM_MEM_PER_GPU"
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
USER_HOME = "HOME"
LIBRARY_PATH = "LD_LIBRARY_PATH"
NCCL_CONF_FILE = "NCCL_CONF_FILE"
# The user binds threads to processors.
THREAD_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")

_SUBMIT_ONLY_PREFIXES = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_")
# A user's defaults for sbatch that say on whose account and where. The others stay behind: sbatch prefers them to the
# lines of job.sh, so SBATCH_TIMELIMIT, SBATCH_SIGNAL or SBATCH_NO_REQUEUE would undo what the run relies on.
_SBATCH_DEFAULTS = frozenset({"SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION"})
# What torchrun sets for its ranks.
_TORCHRUN_PREFIX = "TORCHELASTIC_"
_TORCHRUN = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}
    | {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"}
)
# What points a client at its cluster, as opposed to what describes an allocation.
_KEEP = frozenset({"SLURM_CONF", "SLURM_TIME_FORMAT"})


def user_path(text: str, what: str) -> Path:
    """``text`` with the home folder in place of ``~`` or ``~NAME``.

    Raises:
        ConfigError: there is no such folder, or it can be no path; names ``what``.
    """
    longest = max((len(os.fsencode(part)) for part in text.split("/")), default=0)
    if longest > MOST_BYTES:
        raise ConfigError(
            f"{what} = {text[:80]!r}…: a name of {longest} bytes, and filesystems take at most {MOST_BYTES}",
            fix="shorten the name",
        )
    try:
        return Path(text).expanduser()
    except RuntimeError as e:
        who = text.partition("/")[0]
        raise ConfigError(
            f"{what} = {text!r}: {who} has no home folder on this machine", fix="write the whole path, from / on"
        ) from e


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder that holds all runs: ``$CLUSTERTRAIN_HOME``, else ``$XDG_DATA_HOME/clustertrain``."""
    explicit = environ.get(HOME)
    if explicit:
        return user_path(explicit, HOME).absolute()
    data = environ.get(XDG_DATA_HOME) or "~/.local/share"
    return user_path(data, XDG_DATA_HOME).absolute() / "clustertrain"


def profile_folders(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Where cluster profiles are looked for, first match wins."""
    more = [user_path(p, CLUSTER_PATH) for p in environ.get(CLUSTER_PATH, "").split(":") if p]
    config = user_path(environ.get(XDG_CONFIG_HOME) or "~/.config", XDG_CONFIG_HOME)
    return [*more, config / "clustertrain" / "clusters"]


def without_allocation(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without the variables of an enclosing Slurm allocation, run of ours, or rank.

    sbatch reads SBATCH_* and some SLURM_* as options: submitting from inside a job would otherwise inherit its memory,
    its node count and its task layout. Outside of one, a few SBATCH_* are the user's own defaults and stay.
    From inside a rank, its node and its number would become those of every agent of the new job.
    """
    keep = _KEEP if SLURM_JOB_ID in environ else _KEEP | _SBATCH_DEFAULTS
    prefixes, names = (*_SUBMIT_ONLY_PREFIXES, _TORCHRUN_PREFIX), INTERNAL | _TORCHRUN
    return {k: v for k, v in environ.items() if k in keep or not (k.startswith(prefixes) or k in names)}
