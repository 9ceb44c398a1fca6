"""Slurm's error messages for requests that it understood and refused.

From slurm_errno.c of 22.05 to 25.05, for requests to submit, requeue, update and cancel. Any other message counts as no
answer. The request is then repeated, which costs minutes at most; an outage mistaken for a refusal would end the run.
The messages of an outage vary with version and command: without slurmctld, scontrol 22.05 prints "Unexpected message
received", sbatch "Unable to contact slurm controller", both may print "Socket timed out", and a site's munge or DNS
adds others.
"""

from __future__ import annotations

_REFUSALS = (
    # of any request
    "access/permission denied",
    "requested operation is presently disabled",
    "requested operation not supported",
    "operation not permitted on individual component",
    "invalid job id",
    "invalid user id",
    "invalid group id",
    # of a job in the wrong state
    "job is pending execution",
    "job is no longer pending execution",
    "already completing or completed",
    "job has already finished",
    "job is not running",
    "job is not pending nor running",
    "only batch jobs are accepted",
    "cannot modify scrontab jobs",
    # of a submission: account, partition, limits
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
    # of a submission: resources
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
    # of the command itself, before it sends the request
    "unrecognized option",
    "unable to open file",
    "sbatch --help",
)


def is_refusal(output: str) -> bool:
    """Return whether the output of a failed Slurm command is a refusal."""
    text = output.lower()
    return any(refusal in text for refusal in _REFUSALS)
