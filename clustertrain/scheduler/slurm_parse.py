"""What squeue and sacct print -> JobView and JobStart. Pure functions."""

from __future__ import annotations

import re

from clustertrain import reading
from clustertrain.scheduler.backend import COMPLETING, PENDING, RUNNING, JobStart, JobView

NOTHING = frozenset({"", "N/A", "n/a", "None", "NONE", "(null)", "Unknown", "None assigned", "NOT_SET"})
SQUEUE_FIELDS = ("JobArrayID", "State", "RestartCnt", "StartTime", "EndTime", "PreemptTime", "NodeList", "Reason")
# A suffix and no size: neither padded nor cut at the default 20 characters (seen on 22.05).
SQUEUE_FORMAT = ",".join(f"{field}:|" for field in SQUEUE_FIELDS)
SACCT_FIELDS = ("JobID", "State", "Start", "End", "NodeList", "ExitCode", "Reason")


def epoch(text: str) -> float | None:
    """A time as Slurm prints it under SLURM_TIME_FORMAT=%s; None where there is none yet."""
    text = text.strip()
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) and float(text) > 0 else None


def word(text: str) -> str:
    """A field, empty where Slurm prints one of its words for nothing."""
    text = text.strip()
    return "" if text in NOTHING else text


# A flag is printed in place of the state that it goes with. SIGNALING stands there for a moment whenever Slurm warns a
# job, which is when the question whether it is RUNNING matters most.
_OF_FLAG = {
    "SIGNALING": RUNNING,
    "RESIZING": RUNNING,
    "STAGE_OUT": COMPLETING,
    "REQUEUE_HOLD": PENDING,
    "REQUEUE_FED": PENDING,
    "RESV_DEL_HOLD": PENDING,
    "SPECIAL_EXIT": PENDING,
}


def state(text: str) -> str:
    """``CANCELLED by 1000`` -> ``CANCELLED``, ``COMPLETED+`` -> ``COMPLETED``, ``SIGNALING`` -> ``RUNNING``."""
    printed = (text.split() or ["UNKNOWN"])[0].rstrip("+").upper()
    return _OF_FLAG.get(printed, printed)


def plain(said: str) -> str:
    """What a Slurm command complained, without its prefixes, on one line."""
    prefix = re.compile(r"^(sbatch|scontrol|scancel|squeue|sacct|slurm_\w+):?\s+(error|fatal):\s+")
    lines = [prefix.sub("", line.strip()) for line in said.splitlines()]
    return "; ".join(line for line in lines if line) or "it gave no reason"


def expand_nodes(text: str) -> tuple[str, ...]:
    """A Slurm node list as names, in its order: ``gpu[01-03,7]-a,b`` -> gpu01-a gpu02-a gpu03-a gpu7-a b.

    Raises:
        ValueError: the brackets do not match, or a range is not one.
    """
    if text.strip() in NOTHING:
        return ()
    return tuple(name for group in _split(text.strip()) for name in _expand(group))


def _split(text: str) -> list[str]:
    """At the commas outside brackets."""
    groups, depth, start = [], 0, 0
    for at, c in enumerate(text):
        depth += (c == "[") - (c == "]")
        if depth not in (0, 1):
            raise ValueError(f"not a node list: {text!r}")
        if c == "," and depth == 0:
            groups.append(text[start:at])
            start = at + 1
    if depth:
        raise ValueError(f"not a node list: {text!r}")
    return [g for g in (*groups, text[start:]) if g]


def _expand(group: str) -> list[str]:
    head, bracket, rest = group.partition("[")
    if not bracket:
        return [group]
    inner, _, tail = rest.partition("]")
    tails = _expand(tail)
    return [f"{head}{number}{after}" for part in inner.split(",") for number in _range(part) for after in tails]


def _range(part: str) -> list[str]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    if found is None:
        raise ValueError(f"not a range of node numbers: {part!r}")
    low, high = found[1], found[2] or found[1]
    return [f"{n:0{len(low)}d}" for n in range(int(low), int(high) + 1)]


def read_sacct(text: str, job_id: str) -> list[JobStart]:
    """All starts of ``job_id`` from ``sacct -D -X -P -n -o`` :data:`SACCT_FIELDS`, oldest first."""
    starts = []
    for line in text.splitlines():
        fields = line.split("|", len(SACCT_FIELDS) - 1)
        if len(fields) != len(SACCT_FIELDS) or fields[0].strip() != job_id:
            continue
        _, said, start, end, nodes, ending, reason = fields
        code, _, signal = ending.partition(":")
        starts.append(
            JobStart(
                job_id=job_id,
                state=state(said),
                start=epoch(start),
                end=epoch(end),
                nodes=expand_nodes(nodes),
                exit_code=int(code) if reading.is_count(code) else None,
                signal=int(signal) if reading.is_count(signal) and int(signal) else None,
                reason=word(reason),
            )
        )
    # A start that is still to come (PENDING) has no time and is the newest.
    return sorted(starts, key=lambda s: (s.start is None, s.start or 0.0))


def read_squeue(text: str) -> dict[str, JobView]:
    """Jobs by id from ``squeue --noheader -O`` :data:`SQUEUE_FORMAT`; lines of other shape are skipped."""
    views = {}
    for line in text.splitlines():
        fields = line.rstrip("|").split("|", len(SQUEUE_FIELDS) - 1)
        if len(fields) != len(SQUEUE_FIELDS):
            continue
        job_id, said, restarts, start, end, preempt, nodes, reason = (f.strip() for f in fields)
        views[job_id] = JobView(
            job_id=job_id,
            state=state(said),
            reason=word(reason),
            restarts=int(restarts) if reading.is_count(restarts) else 0,
            start_time=epoch(start),
            end_time=epoch(end),
            preempt_time=epoch(preempt),
            nodes=expand_nodes(nodes),
        )
    return views


SHORT_GRACE_S = 30


def preemption_advice(text: str, partition: str) -> list[str]:
    """Notes on `scontrol --oneliner show partition`, for the named partition or, without a name, the default one."""
    for line in text.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        named = fields.get("PartitionName", "")
        if named != partition if partition else fields.get("Default") != "YES":
            continue
        modes = fields.get("PreemptMode", "OFF").split(",")
        if modes == ["OFF"]:
            return []
        notes = []
        if "CANCEL" in modes:
            notes.append(
                f"partition {named}: preempted jobs are cancelled, not requeued by Slurm; the run requeues itself only "
                "within the grace time"
            )
        return notes + _grace_advice(named, fields.get("GraceTime", ""))
    return []


def _grace_advice(partition: str, grace: str) -> list[str]:
    if not reading.is_count(grace) or int(grace) >= SHORT_GRACE_S:
        return []
    if int(grace) == 0:
        return [
            f"partition {partition} gives a preempted job no grace time: what was done since the last checkpoint is "
            "then lost, so choose checkpoint.every with care"
        ]
    return [f"partition {partition} gives a preempted job {grace} s: two steps, a save and the exit must fit into it"]
