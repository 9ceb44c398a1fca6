"""What Slurm knows of a job that somebody may have started without clustertrain."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from clustertrain import proc, reading
from clustertrain.errors import CommandFailed
from clustertrain.scheduler import slurm_parse
from clustertrain.scheduler.slurm import COMMAND_TIMEOUT_S, client_environ

# None of these holds text of the user, so none contains the separator.
_FIELDS = (
    "JobArrayID", "JobID", "State", "UserID", "UserName", "RestartCnt", "SubmitTime", "StartTime", "EndTime",
    "HetJobID", "NodeList", "Reason",
)  # fmt: skip
_UNKNOWN_JOB = "Invalid job id"
_GPUS = re.compile(r"gpu(?::[^:(,]+)?:(\d+)(?:\(|,|$)")


class NodeGroup(NamedTuple):
    """Nodes on which the job has the same."""

    nodes: tuple[str, ...]
    gpus: int
    """GPUs of the job on each node."""
    memory_mib: int | None
    """Memory of the job on each node; None if unknown."""


@dataclass(frozen=True)
class SlurmJob:
    """A job in Slurm's memory: pending, running, or ended a few minutes ago. Times are UTC epoch s."""

    job_id: str
    """An array task is ``ARRAY_TASK``, a component of a heterogeneous job ``JOB+OFFSET``."""
    number: str
    """The number that Slurm gives each task of an array too; ``SLURM_JOB_ID`` inside the job."""
    state: str
    reason: str
    uid: int
    user: str
    restart: int
    """Number of requeues before this start."""
    submit_time: float | None
    start_time: float | None
    end_time: float | None
    """When the time limit is reached, or when the job ended."""
    is_heterogeneous: bool
    nodes: tuple[str, ...]

    @property
    def is_pending(self) -> bool:
        return self.state in ("PENDING", "CONFIGURING", "SUSPENDED", "STOPPED")

    @property
    def is_running(self) -> bool:
        return self.state == slurm_parse.RUNNING


@dataclass(frozen=True)
class JobDetails:
    """The parts of a job that are not needed to decide whether it runs."""

    name: str = ""
    command: str = ""
    """The batch script, with its arguments; empty for a job without one."""
    work_dir: str = ""
    output: str = ""
    """Path of the batch script's output."""
    groups: tuple[NodeGroup, ...] = ()


def query_job(job_id: str) -> list[SlurmJob]:
    """Return the job, or all tasks of an array; empty if Slurm does not know it (any more).

    Raises:
        CommandFailed: Slurm does not answer.
    """
    result = _run(
        "squeue", "--noheader", "--array", "--states=all", f"--jobs={job_id}",
        "--Format=" + ",".join(f"{field}:|" for field in _FIELDS),
    )  # fmt: skip
    if result.returncode and _UNKNOWN_JOB in result.stderr:
        return []
    if result.returncode:
        raise CommandFailed(
            f"squeue failed: {slurm_parse.format_error(result.stderr)}", fix="see whether `squeue` answers"
        )
    return parse_jobs(result.stdout)


def parse_jobs(text: str) -> list[SlurmJob]:
    """Return the jobs in the output of squeue; lines of another form are skipped."""
    jobs = []
    for line in text.splitlines():
        values = [value.strip() for value in line.rstrip("|").split("|", len(_FIELDS) - 1)]
        if len(values) != len(_FIELDS):
            continue
        job_id, number, state, uid, user, restarts, submitted, start, end, het, nodes, reason = values
        if not reading.is_unsigned_int(number) or not reading.is_unsigned_int(uid):
            continue
        jobs.append(
            SlurmJob(
                job_id=job_id,
                number=number,
                state=slurm_parse.parse_state(state),
                reason=slurm_parse.parse_field(reason),
                uid=int(uid),
                user=user,
                restart=int(restarts) if reading.is_unsigned_int(restarts) else 0,
                submit_time=slurm_parse.parse_epoch(submitted),
                start_time=slurm_parse.parse_epoch(start),
                end_time=slurm_parse.parse_epoch(end),
                is_heterogeneous=slurm_parse.parse_field(het) not in ("", "0"),
                nodes=slurm_parse.expand_nodes(nodes),
            )
        )
    return jobs


def query_details(number: str) -> JobDetails:
    """Return the details of a job; the defaults if Slurm does not know it."""
    return parse_details(_run("scontrol", "show", "job", "--details", number).stdout)


def parse_details(text: str) -> JobDetails:
    """Return the details in the output of `scontrol show job --details`."""

    def find(pattern: str) -> str:
        match = re.search(rf"^ +{pattern}$", text, re.MULTILINE)
        return slurm_parse.parse_field(match[1]) if match else ""

    name = re.search(r"^JobId=.*? JobName=(.*)$", text, re.MULTILINE)
    return JobDetails(
        name=name[1] if name else "",
        command=find(r"Command=(.*)"),
        work_dir=find(r"WorkDir=(.*)"),
        output=find(r"StdOut=(.*)"),
        groups=_parse_groups(text),
    )


def has_managed_gpus(node: str) -> bool:
    """Return whether Slurm hands out the GPUs of a node. Otherwise a job that has the whole node may use all."""
    return bool(re.search(r"^ +Gres=.*\bgpu\b", _run("scontrol", "show", "node", node).stdout, re.MULTILINE))


def _parse_groups(text: str) -> tuple[NodeGroup, ...]:
    """Return the groups of nodes, which may have the same figures on several lines."""
    found: dict[tuple[int, int | None], list[str]] = {}
    pattern = re.compile(r"^ +Nodes=(\S+) CPU_IDs=\S* Mem=(\d*)\S* GRES=(\S*)$", re.MULTILINE)
    for nodes, memory, gres in pattern.findall(text):
        gpus = sum(int(count) for count in _GPUS.findall(gres))
        found.setdefault((gpus, int(memory or 0) or None), []).extend(slurm_parse.expand_nodes(nodes))
    return tuple(NodeGroup(tuple(nodes), gpus, memory) for (gpus, memory), nodes in found.items())


def _run(*argv: str) -> proc.CommandResult:
    return proc.run(argv, env=client_environ(os.environ), check=False, timeout_s=COMMAND_TIMEOUT_S)


def order_nodes(groups: Sequence[NodeGroup]) -> tuple[str, ...]:
    """Return all nodes of the groups by name."""
    return tuple(sorted(node for group in groups for node in group.nodes))
