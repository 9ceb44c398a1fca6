"""Parsing of the output of squeue, sacct and scontrol. Pure functions."""

from __future__ import annotations

import re
from typing import NamedTuple

from clustertrain import reading
from clustertrain.scheduler.backend import COMPLETING, PENDING, RUNNING, JobStart, JobView

EMPTY_VALUES = frozenset({"", "N/A", "n/a", "None", "NONE", "(null)", "Unknown", "None assigned", "NOT_SET"})
SQUEUE_FIELDS = ("JobArrayID", "State", "RestartCnt", "StartTime", "EndTime", "PreemptTime", "NodeList", "Reason")
# A suffix and no size: neither padded nor cut at the default 20 characters (seen on 22.05).
SQUEUE_FORMAT = ",".join(f"{field}:|" for field in SQUEUE_FIELDS)
SACCT_FIELDS = ("JobID", "State", "Start", "End", "NodeList", "ExitCode", "Reason")


def parse_epoch(text: str) -> float | None:
    """Return a time that Slurm printed with SLURM_TIME_FORMAT=%s; None if there is none yet."""
    text = text.strip()
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) and float(text) > 0 else None


def parse_field(text: str) -> str:
    """Return a field; empty for the values that Slurm prints for "none"."""
    text = text.strip()
    return "" if text in EMPTY_VALUES else text


# Slurm prints a flag in place of the job's state. SIGNALING appears briefly when Slurm warns a job, just when it
# matters whether the job is RUNNING.
_FLAG_STATES = {
    "SIGNALING": RUNNING,
    "RESIZING": RUNNING,
    "STAGE_OUT": COMPLETING,
    "REQUEUE_HOLD": PENDING,
    "REQUEUE_FED": PENDING,
    "RESV_DEL_HOLD": PENDING,
    "SPECIAL_EXIT": PENDING,
}


def parse_state(text: str) -> str:
    """Return the state: CANCELLED for ``CANCELLED by 1000``, COMPLETED for ``COMPLETED+``, RUNNING while signaled."""
    printed = (text.split() or ["UNKNOWN"])[0].rstrip("+").upper()
    return _FLAG_STATES.get(printed, printed)


def format_error(output: str) -> str:
    """Return the error message of a Slurm command on one line, without its prefixes."""
    prefix = re.compile(r"^(sbatch|scontrol|scancel|squeue|sacct|slurm_\w+):?\s+(error|fatal):\s+")
    lines = [prefix.sub("", line.strip()) for line in output.splitlines()]
    return "; ".join(line for line in lines if line) or "it gave no reason"


def expand_nodes(text: str) -> tuple[str, ...]:
    """Return the names in a Slurm node list, in order: ``gpu[01-03,7]-a,b`` is gpu01-a gpu02-a gpu03-a gpu7-a b.

    Raises:
        ValueError: the brackets do not match, or a range is invalid.
    """
    if text.strip() in EMPTY_VALUES:
        return ()
    return tuple(name for group in _split_groups(text.strip()) for name in _expand_group(group))


def _split_groups(text: str) -> list[str]:
    """Split a node list at the commas outside brackets."""
    groups, depth, start = [], 0, 0
    for position, c in enumerate(text):
        depth += (c == "[") - (c == "]")
        if depth not in (0, 1):
            raise ValueError(f"not a node list: {text!r}")
        if c == "," and depth == 0:
            groups.append(text[start:position])
            start = position + 1
    if depth:
        raise ValueError(f"not a node list: {text!r}")
    return [g for g in (*groups, text[start:]) if g]


def _expand_group(group: str) -> list[str]:
    head, bracket, rest = group.partition("[")
    if not bracket:
        return [group]
    inner, _, tail = rest.partition("]")
    tails = _expand_group(tail)
    return [
        f"{head}{number}{suffix}"
        for number_range in inner.split(",")
        for number in _expand_range(number_range)
        for suffix in tails
    ]


def _expand_range(number_range: str) -> list[str]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", number_range)
    if match is None:
        raise ValueError(f"not a range of node numbers: {number_range!r}")
    low, high = match[1], match[2] or match[1]
    return [f"{n:0{len(low)}d}" for n in range(int(low), int(high) + 1)]


def parse_sacct(text: str, job_id: str) -> list[JobStart]:
    """Return all starts of ``job_id`` from ``sacct -D -X -P -n -o`` :data:`SACCT_FIELDS`, oldest first."""
    starts = []
    for line in text.splitlines():
        fields = line.split("|", len(SACCT_FIELDS) - 1)
        if len(fields) != len(SACCT_FIELDS) or fields[0].strip() != job_id:
            continue
        _, state_text, start, end, nodes, exit_status, reason = fields
        code, _, signal = exit_status.partition(":")
        starts.append(
            JobStart(
                job_id=job_id,
                state=parse_state(state_text),
                start=parse_epoch(start),
                end=parse_epoch(end),
                nodes=expand_nodes(nodes),
                exit_code=int(code) if reading.is_unsigned_int(code) else None,
                signal=int(signal) if reading.is_unsigned_int(signal) and int(signal) else None,
                reason=parse_field(reason),
            )
        )
    # A pending start has no time and is the newest.
    return sorted(starts, key=lambda s: (s.start is None, s.start or 0.0))


def parse_squeue(text: str) -> dict[str, JobView]:
    """Return jobs by id from ``squeue --noheader -O`` :data:`SQUEUE_FORMAT`; other lines are skipped."""
    views = {}
    for line in text.splitlines():
        fields = line.rstrip("|").split("|", len(SQUEUE_FIELDS) - 1)
        if len(fields) != len(SQUEUE_FIELDS):
            continue
        job_id, state_text, restarts, start, end, preempt, nodes, reason = (f.strip() for f in fields)
        views[job_id] = JobView(
            job_id=job_id,
            state=parse_state(state_text),
            reason=parse_field(reason),
            restarts=int(restarts) if reading.is_unsigned_int(restarts) else 0,
            start_time=parse_epoch(start),
            end_time=parse_epoch(end),
            preempt_time=parse_epoch(preempt),
            nodes=expand_nodes(nodes),
        )
    return views


SHORT_GRACE_S = 30


def preemption_advice(text: str, partition: str) -> list[str]:
    """Return notes on ``partition`` (empty: the default one) from `scontrol --oneliner show partition`."""
    for line in text.splitlines():
        fields = dict(pair.split("=", 1) for pair in line.split() if "=" in pair)
        name = fields.get("PartitionName", "")
        if name != partition if partition else fields.get("Default") != "YES":
            continue
        modes = fields.get("PreemptMode", "OFF").split(",")
        if modes == ["OFF"]:
            return []
        notes = []
        if "CANCEL" in modes:
            notes.append(
                f"partition {name}: Slurm cancels preempted jobs and does not requeue them; the run requeues itself "
                "only within the grace time"
            )
        return notes + _grace_advice(name, fields.get("GraceTime", ""))
    return []


def _grace_advice(partition: str, grace: str) -> list[str]:
    if not reading.is_unsigned_int(grace) or int(grace) >= SHORT_GRACE_S:
        return []
    if int(grace) == 0:
        return [
            f"partition {partition} gives a preempted job no grace time: all steps since the last checkpoint are "
            "lost, so choose checkpoint.every with care"
        ]
    return [f"partition {partition} gives a preempted job {grace} s: two steps, a save and the exit must fit into it"]


class JobFacts(NamedTuple):
    """What Slurm knows of the user's own job."""

    has_script: bool = True
    """False for the jobs of `salloc` and `srun`."""
    may_requeue: bool = True
    time_limit: str = ""
    """As sbatch takes it; empty if unlimited."""
    output: str = ""
    """Path of the batch script's output."""


def parse_job_facts(text: str) -> JobFacts:
    """Return the facts in the output of `scontrol show job`."""

    def find(pattern: str) -> str:
        # Other users' text is on lines of its own, or after the first word of a line.
        match = re.search(rf"^ +{pattern}$", text, re.MULTILINE)
        return match[1] if match else ""

    return JobFacts(
        has_script=find(r"Requeue=.* BatchFlag=(\d).*") != "0",
        may_requeue=find(r"Requeue=(\d).*") != "0",
        time_limit=find(r"RunTime=\S+ TimeLimit=((?:\d+-)?\d+:\d+:\d+) .*"),
        output=find(r"StdOut=(.*)"),
    )
