"""Slurm's words for "no": what it says when it has understood a request and will not do it.

From slurm_errno.c of 22.05 to 25.05, for requests to submit, requeue, update and cancel. All other words count as no
answer. A request is then repeated, which costs minutes at most; an outage taken for a refusal costs the run. The words
for an outage differ by version, command and moment: with slurmctld away, 22.05's scontrol says "Unexpected message
received", sbatch "Unable to contact slurm controller", both may say "Socket timed out", and a site's munge or DNS adds
its own.
"""

from __future__ import annotations

_REFUSALS = (
    # of anything
    "access/permission denied",
    "requested operation is presently disabled",
    "requested operation not supported",
    "operation not permitted on individual component",
    "invalid job id",
    "invalid user id",
    "invalid group id",
    # of a job that is not in a state for it
    "job is pending execution",
    "job is no longer pending execution",
    "already completing or completed",
    "job has already finished",
    "job is not running",
    "job is not pending nor running",
    "only batch jobs are accepted",
    "cannot modify scrontab jobs",
    # of a submission: who, where to, how much
    "invalid account",
    "invalid or unknown association",
    "invalid qos",
    "invalid wckey",
    "invalid partition",
    "no partition specified",
    "user's group not permitted",
    "multiple partition job request not supported",
    "system submissions disabled",
    "violates accounting/qos policy",
    "breached requested qos usage threshold",
    "requested time limit is invalid",
    "time limit specification required",
    "job size specification needs",
    "access denied to requested reservation",
    "requested reservation is invalid",
    "job dependency problem",
    "burst buffer permission denied",
    "burst buffer request invalid",
    "burst buffer resource limit exceeded",
    # of a submission: on what
    "node configuration is not available",
    "requested nodes not in this partition",
    "more processors requested than permitted",
    "requested more tasks than available",
    "node count specification invalid",
    "cpu count specification invalid",
    "task count specification invalid",
    "task distribution specification invalid",
    "memory required by task is not available",
    "memory specification can not be satisfied",
    "invalid feature",
    "invalid generic resource",
    "invalid gres",
    "requested gres option unsupported",
    "invalid license",
    "invalid node name",
    "invalid time",
    "invalid trackable resource",
    "invalid job array",
    "invalid --nice",
    "pathname of a file, directory or other parameter too long",
    "job script not specified",
    # of the command itself, before it asks
    "unrecognized option",
    "unable to open file",
    "sbatch --help",
)


def is_refusal(output: str) -> bool:
    """Whether a command of Slurm's that failed with these words reports a decision."""
    text = output.lower()
    return any(refusal in text for refusal in _REFUSALS)
