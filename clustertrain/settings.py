"""The environment variables that clustertrain reads or sets."""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping
from pathlib import Path

from clustertrain.errors import ConfigError

MAX_NAME_BYTES = 255  # NAME_MAX of Linux

# Set by the user.
HOME = "CLUSTERTRAIN_HOME"
CLUSTER = "CLUSTERTRAIN_CLUSTER"
CLUSTER_PATH = "CLUSTERTRAIN_CLUSTER_PATH"  # more folders with profiles, separated by ':'

# Set by tests of checkpoints: see checkpoint/core/fault_points.py.
FAULT_AT = "CLUSTERTRAIN_FAULT_AT"

# Set by the run's secrets.sh: the webhook of its recipe.
WEBHOOK = "CLUSTERTRAIN_WEBHOOK"

# Set by job.sh, the batch process and the agents for their child processes.
RUN_DIR = "CLUSTERTRAIN_RUN_DIR"
ATTEMPT = "CLUSTERTRAIN_ATTEMPT"
NONCE = "CLUSTERTRAIN_NONCE"
NODE = "CLUSTERTRAIN_NODE"
NODE_RANK = "CLUSTERTRAIN_NODE_RANK"
NODE_LIST = "CLUSTERTRAIN_NODE_LIST"  # names, separated by ','
RANK_DIR = "CLUSTERTRAIN_RANK_DIR"
DEVICE = "CLUSTERTRAIN_DEVICE"
LOCAL_JOB = "CLUSTERTRAIN_LOCAL_JOB"  # the local backend's job folder
RANK_CPUS = "CLUSTERTRAIN_RANK_CPUS"  # CPUs of each local rank, such as `0,1;2,3`, if ranks are bound to CPUs
CHECKPOINT = "CLUSTERTRAIN_CHECKPOINT"  # newest whole checkpoint of a command
STOP_SIGNAL = "CLUSTERTRAIN_STOP_SIGNAL"  # that asks a command to stop: TERM, USR1, …, none
ADDED_ARGS = "CLUSTERTRAIN_ADDED_ARGS"  # JSON: arguments of a command that the user did not type
ENVIRONMENT_COPIES = "CLUSTERTRAIN_ENVIRONMENT_FOLDERS"  # JSON: folders of a shipped environment, the original last
GRACE = "CLUSTERTRAIN_GRACE_S"  # from the warning of a preemption to the kill, for a command
LAUNCHER_PID = "CLUSTERTRAIN_LAUNCHER_PID"  # pid of torchrun, the parent of each rank
WRAP_PID = "CLUSTERTRAIN_WRAP_PID"  # pid of `clustertrain wrap`, with which its agent ends
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
        CHECKPOINT,
        STOP_SIGNAL,
        GRACE,
        LAUNCHER_PID,
        WRAP_PID,
        WEBHOOK,
    }
)

# Set by the system, Slurm and other programs.
XDG_DATA_HOME = "XDG_DATA_HOME"
XDG_CONFIG_HOME = "XDG_CONFIG_HOME"
XDG_CACHE_HOME = "XDG_CACHE_HOME"
SLURM_JOB_ID = "SLURM_JOB_ID"
SLURM_RESTART_COUNT = "SLURM_RESTART_COUNT"
SLURM_JOB_PARTITION = "SLURM_JOB_PARTITION"
SLURM_NODEID = "SLURM_NODEID"
SLURM_PROCID = "SLURM_PROCID"
SLURM_LOCALID = "SLURM_LOCALID"
SLURM_STEP_NUM_TASKS = "SLURM_STEP_NUM_TASKS"
SLURMD_NODENAME = "SLURMD_NODENAME"
SLURM_ARRAY_JOB_ID = "SLURM_ARRAY_JOB_ID"
SLURM_ARRAY_TASK_ID = "SLURM_ARRAY_TASK_ID"
SLURM_STEP_GPUS = "SLURM_STEP_GPUS"
SLURM_JOB_GPUS = "SLURM_JOB_GPUS"
SLURM_GPUS_ON_NODE = "SLURM_GPUS_ON_NODE"
SLURM_CPUS_ON_NODE = "SLURM_CPUS_ON_NODE"
SLURM_MEM_PER_NODE = "SLURM_MEM_PER_NODE"  # MiB, as the next two; 0: all memory of the node
SLURM_MEM_PER_CPU = "SLURM_MEM_PER_CPU"
SLURM_MEM_PER_GPU = "SLURM_MEM_PER_GPU"
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
USER_HOME = "HOME"
LIBRARY_PATH = "LD_LIBRARY_PATH"
SLURM_TMPDIR = "SLURM_TMPDIR"  # of many sites: a folder on the node's disk for this job
TMPDIR = "TMPDIR"
# May name the folder of a Python environment: lists of folders, separated by ':', and single folders.
ENVIRONMENT_LISTS = ("PATH", "PYTHONPATH", LIBRARY_PATH)
ENVIRONMENT_FOLDERS = ("VIRTUAL_ENV", "CONDA_PREFIX")
NCCL_CONF_FILE = "NCCL_CONF_FILE"
# If one of these is set, the user binds threads to CPUs.
THREAD_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")

_ALLOCATION_PREFIXES = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_")
# The user's defaults for sbatch that are passed on. sbatch prefers these variables to the directives in job.sh, so
# SBATCH_TIMELIMIT, SBATCH_SIGNAL or SBATCH_NO_REQUEUE would override settings that the run relies on.
_SBATCH_DEFAULTS = frozenset({"SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION"})
# Set by torchrun for its ranks.
_TORCHRUN_PREFIX = "TORCHELASTIC_"
_TORCHRUN_NAMES = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}
    | {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"}
)
# Kept although they have a prefix of an allocation: they configure Slurm's commands.
_KEEP = frozenset({"SLURM_CONF", "SLURM_TIME_FORMAT"})


def expand_user_path(text: str, key: str) -> Path:
    """Return the path ``text`` with ``~`` or ``~NAME`` replaced by the home folder.

    Raises:
        ConfigError: the user has no home folder, or a name in the path is too long; the message names ``key``.
    """
    longest_bytes = max((len(os.fsencode(component)) for component in text.split("/")), default=0)
    if longest_bytes > MAX_NAME_BYTES:
        raise ConfigError(
            f"{key} = {text[:80]!r}…: contains a name of {longest_bytes} bytes; file systems allow {MAX_NAME_BYTES}",
            fix="shorten the name",
        )
    try:
        return Path(text).expanduser()
    except RuntimeError as e:
        user = text.partition("/")[0]
        raise ConfigError(
            f"{key} = {text!r}: {user} has no home folder on this machine", fix="write an absolute path"
        ) from e


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder with all runs: ``$CLUSTERTRAIN_HOME``, otherwise ``$XDG_DATA_HOME/clustertrain``."""
    explicit = environ.get(HOME)
    if explicit:
        return expand_user_path(explicit, HOME).absolute()
    data = environ.get(XDG_DATA_HOME) or "~/.local/share"
    return expand_user_path(data, XDG_DATA_HOME).absolute() / "clustertrain"


def user_name() -> str:
    """Return the name of the user; the uid if it has none, as in many containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for what can be computed again; it may be missing."""
    cache = environ.get(XDG_CACHE_HOME) or "~/.cache"
    return expand_user_path(cache, XDG_CACHE_HOME).absolute() / "clustertrain"


def profile_folders(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the folders that are searched for cluster profiles; the first match wins."""
    extra = [expand_user_path(p, CLUSTER_PATH) for p in environ.get(CLUSTER_PATH, "").split(":") if p]
    config = expand_user_path(environ.get(XDG_CONFIG_HOME) or "~/.config", XDG_CONFIG_HOME)
    return [*extra, config / "clustertrain" / "clusters"]


def strip_allocation_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the variables of an enclosing Slurm allocation, clustertrain run or rank.

    sbatch reads SBATCH_* and some SLURM_* as options: a submission from inside a job would inherit the job's memory,
    node count and task layout. Outside a job, a few SBATCH_* are the user's defaults and are kept. With a rank's
    variables, every agent of the new job would use that rank's node and number.
    """
    keep = _KEEP if SLURM_JOB_ID in environ else _KEEP | _SBATCH_DEFAULTS
    prefixes, names = (*_ALLOCATION_PREFIXES, _TORCHRUN_PREFIX), INTERNAL | _TORCHRUN_NAMES
    return {k: v for k, v in environ.items() if k in keep or not (k.startswith(prefixes) or k in names)}
