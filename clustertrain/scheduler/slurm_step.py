"""The place of a process in the user's own job step, read from the variables that Slurm sets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from clustertrain import proc, reading, settings
from clustertrain.errors import UsageError
from clustertrain.scheduler import slurm_parse
from clustertrain.scheduler.slurm import SlurmBackend

# Numbers of the batch script's step and of the shell of `salloc` (slurm.h).
_SHELL_STEPS = frozenset({"4294967291", "4294967290"})
_NO_GPU = frozenset({"", "-1", "NoDevFiles", "none", "void"})
# Options of the job and of srun that bind GPUs to tasks; srun 22.05 passes its own ones on in the last of these only.
_GPU_BINDING = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK")
_STEP_BINDING = "SLURMD_TRES_BIND"


@dataclass(frozen=True)
class StepTask:
    """A task of a job step."""

    job_id: str
    cluster: str
    """Name of the Slurm cluster; empty if unknown."""
    restart: int
    """Requeues of the job before this start."""
    step: str
    """Name of the step that is unique within this start of the job."""
    nodes: tuple[str, ...]
    """Nodes of the step, in the order of their node ranks."""
    node_rank: int
    local_rank: int
    """Number of the task on its node."""
    tasks_per_node: int
    num_gpus: int | None
    """GPUs that the task sees; None if Slurm names none."""

    @property
    def node(self) -> str:
        return self.nodes[self.node_rank]

    @property
    def is_first(self) -> bool:
        """Whether this is the task that decides about the run."""
        return self.node_rank == self.local_rank == 0


def is_printing_task(environ: Mapping[str, str]) -> bool:
    """Return whether this task prints what all tasks of the step would print."""
    return environ.get(settings.SLURM_PROCID, "0") == "0"


def is_in_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun has started this process. Only such a process gets Slurm's warnings."""
    return environ.get("SLURM_STEP_ID", "") not in {"", *_SHELL_STEPS}


def start_step(environ: Mapping[str, str], argv: Sequence[str]) -> NoReturn:
    """Replace this process, which srun has not started, by srun with the command ``argv``.

    Raises:
        UsageError: it is not in a job, or the job has several nodes.
        CommandFailed: srun is missing.
    """
    _check_job(environ)
    nodes = slurm_parse.expand_nodes(environ.get("SLURM_JOB_NODELIST", ""))
    if len(nodes) > 1:
        raise UsageError(
            f"the job has {len(nodes)} nodes, and this is a process of its batch script, on one of them",
            fix="put srun before it: srun --ntasks-per-node=1 clustertrain wrap -- COMMAND",
        )
    # As in job.sh: one task with all cores and GPUs of the job.
    options = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0", "--export=ALL"]
    env = {name: value for name, value in environ.items() if name not in _GPU_BINDING}
    proc.become(["srun", *options, "--cpu-bind=none", *argv], env)


def _check_job(environ: Mapping[str, str]) -> str:
    """Return the id of the job that this process is in."""
    job_id = SlurmBackend().current_job_id(environ)
    if job_id is None:
        raise UsageError(
            "not inside a Slurm job",
            fix="submit the program: clustertrain submit -- COMMAND, or put it behind srun in a batch script: "
            "srun clustertrain wrap -- COMMAND",
        )
    if settings.RUN_DIR in environ:
        raise UsageError(
            "inside a run of clustertrain, which has started the ranks", fix="name the program without clustertrain"
        )
    if environ.get("SLURM_HET_SIZE", "1") not in ("", "1"):
        raise UsageError(
            "the job has several components (a heterogeneous job)",
            fix="use a job of one component, or clustertrain submit -- COMMAND",
        )
    return job_id


def read_step_task(environ: Mapping[str, str]) -> StepTask:
    """Return the place of this process, which srun has started.

    Raises:
        UsageError: it is not in a job, or its step has a layout in which the first task of a node cannot start all
            ranks of the node.
    """
    job_id = _check_job(environ)
    nodes = slurm_parse.expand_nodes(environ.get("SLURM_STEP_NODELIST", ""))
    names = (settings.SLURM_PROCID, settings.SLURM_NODEID, settings.SLURM_LOCALID)
    rank, node_rank, local_rank = (_read_number(environ, name) for name in names)
    if node_rank >= len(nodes) or (rank == 0) != (node_rank == local_rank == 0):
        raise UsageError("the first task is not on the first node of the step", fix="remove srun's --distribution")
    task = StepTask(
        job_id=job_id,
        cluster=environ.get("SLURM_CLUSTER_NAME", ""),
        restart=_read_number(environ, settings.SLURM_RESTART_COUNT),
        step=f"{environ.get('SLURM_STEP_ID')}-{environ.get('SLURM_STEP_LAUNCHER_PORT')}",
        nodes=nodes,
        node_rank=node_rank,
        local_rank=local_rank,
        tasks_per_node=_read_tasks_per_node(environ),
        num_gpus=_count_gpus(environ),
    )
    _check_binding(task, environ)
    return task


def _read_number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name) or "0"
    if not reading.is_unsigned_int(value):
        raise UsageError(f"{name} = {value!r}: not a number", fix="start it with srun")
    return int(value)


def _read_tasks_per_node(environ: Mapping[str, str]) -> int:
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or "1"
    match = re.fullmatch(r"(\d+)(?:\(x\d+\))?", text)
    if match is None:
        raise UsageError(
            f"the nodes have different numbers of tasks ({text})",
            fix="give each node the same: srun --ntasks-per-node=N clustertrain wrap -- COMMAND",
        )
    return int(match[1])


def _count_gpus(environ: Mapping[str, str]) -> int | None:
    visible = environ.get(settings.CUDA_VISIBLE_DEVICES)
    if visible is not None:
        return sum(token.strip() not in _NO_GPU for token in visible.split(","))
    on_node = environ.get(settings.SLURM_GPUS_ON_NODE, "")
    return int(on_node) if reading.is_unsigned_int(on_node) else None


def _check_binding(task: StepTask, environ: Mapping[str, str]) -> None:
    """Refuse GPUs that are bound to single tasks: the first task of a node starts the ranks of all."""
    if task.tasks_per_node == 1:
        return
    bound = [name for name in (*_GPU_BINDING, _STEP_BINDING) if _binds_gpus(name, environ.get(name, ""))]
    on_node = environ.get(settings.SLURM_GPUS_ON_NODE, "")
    sees_part = task.num_gpus is not None and reading.is_unsigned_int(on_node) and task.num_gpus < int(on_node)
    if not bound and not (sees_part and task.num_gpus != 0):
        return
    cause = f"{bound[0]}={environ[bound[0]]}" if bound else f"a task sees {task.num_gpus} of {on_node} GPUs of its node"
    raise UsageError(
        f"GPUs are bound to single tasks ({cause}), and the first task of a node starts all ranks of the node",
        fix="use --gpus-per-node in place of --gpus-per-task, --gpu-bind and the like, or "
        "srun --ntasks-per-node=1 --gpus-per-task=N clustertrain wrap -- COMMAND",
    )


def _binds_gpus(name: str, value: str) -> bool:
    if name in ("SLURM_TRES_PER_TASK", _STEP_BINDING) and "gpu" not in value:
        return False
    return bool(value) and not value.endswith("none")
