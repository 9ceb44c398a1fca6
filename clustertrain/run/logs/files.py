"""Which log files a run has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from clustertrain.run import attempts
from clustertrain.run.run_dir import AttemptDir, RunDir

_RANK_LOG = re.compile(r"rank-(\d{1,9})\.log")


@dataclass(frozen=True)
class LogSelection:
    """Which logs to read: ``rank``'s, unless one of ``job``, ``node`` and ``all_ranks`` is set."""

    rank: int = 0
    attempt: int | None = None
    """None: all attempts."""
    job: bool = False
    """The output of the batch script, srun and Slurm."""
    node: str | None = None
    """The log of the agent of this node, with torchrun's output."""
    all_ranks: bool = False


def list_log_files(run: RunDir, selection: LogSelection) -> list[Path]:
    """Return the selected logs by attempt; a log of one rank or node may not exist."""
    if selection.job:
        return [run.job_log]
    selected = [a for a in run.attempts() if selection.attempt in (None, a.n)]
    if selection.node is not None:
        return [a.logs / f"agent-{selection.node}.log" for a in selected]
    if selection.all_ranks:
        return [path for a in selected for path in list_rank_logs(a)]
    return [a.rank_log(selection.rank) for a in selected]


def list_rank_logs(attempt: AttemptDir) -> list[Path]:
    """Return the logs of all ranks that have one, by rank."""
    ranks = ((rank_of(path), path) for path in attempt.logs.glob("rank-*.log") if path.is_file())
    return [path for _, path in sorted((rank, path) for rank, path in ranks if rank is not None)]


def leads_outside(run_or_attempt: RunDir | AttemptDir, path: Path) -> bool:
    """Return whether ``path``, in the folder of a run or attempt, is a link to a file elsewhere.

    The owner of a run may have planted it, so that whoever looks at the run reads a file that the owner may not read.
    """
    try:
        return not path.resolve().is_relative_to(run_or_attempt.path.resolve())
    except (OSError, RuntimeError):  # a link to itself
        return True


def rank_of(path: Path) -> int | None:
    """Return the rank that wrote a log; None for a file that is no rank's log."""
    match = _RANK_LOG.fullmatch(path.name)
    return int(match[1]) if match else None


def list_nodes(run: RunDir, attempt: int | None) -> list[str]:
    """Return the nodes of an attempt, or of all."""
    records = [attempts.load_attempt(run, a) for a in run.attempts() if attempt in (None, a.n)]
    return list(dict.fromkeys(node for record in records for node in record.nodes))
