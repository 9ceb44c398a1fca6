"""Invariants that must hold after each round. Each function returns the violations as text.

Lines are those that ``script.py`` logs: per rank and attempt one ``begin`` line with the newest committed step, and one
line per step. Their monotonic times are comparable, because all processes run on one machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from clustertrain import settings
from clustertrain.run import endings
from tests.harness.chaos_slurm.subject import processes_of

Line = Mapping[str, Any]


def _by_attempt(lines: Iterable[Line], key: str) -> dict[int, list[Line]]:
    lines_by_attempt: dict[int, list[Line]] = {}
    for line in lines:
        if key in line:
            lines_by_attempt.setdefault(int(line["attempt"]), []).append(line)
    return dict(sorted(lines_by_attempt.items()))


def overlaps(lines: Sequence[Line], cut_off: Set[int] = frozenset()) -> list[str]:
    """Check that only one attempt trains at a time: no step ends after the first step of a later attempt has started.

    Args:
        cut_off: attempts on an unreachable node. Slurm starts the run on another node, and they notice it only when
            they commit, which :func:`late_commits` checks.
    """
    steps = _by_attempt(lines, "step")
    broken = []
    for earlier, later in itertools.combinations(steps, 2):
        first_start = min(line["start"] for line in steps[later])
        late = [line for line in steps[earlier] if line["end"] > first_start]
        if late and earlier not in cut_off:
            overlap_s = max(line["end"] for line in late) - first_start
            broken.append(
                f"attempts {earlier} and {later} trained at the same time for {overlap_s:.2f} s "
                f"({len(late)} steps of attempt {earlier}, up to step {max(line['step'] for line in late)})"
            )
    return broken


def late_commits(lines: Sequence[Line], commits: Mapping[int, Sequence[Line]]) -> list[str]:
    """Check that no attempt commits a checkpoint after a later attempt has started to train.

    Args:
        commits: the ``checkpoint`` events of each attempt.
    """
    steps = _by_attempt(lines, "step")
    broken = []
    for earlier, later in itertools.combinations(sorted({*steps, *commits}), 2):
        first_start = min((line["wall"] for line in steps.get(later, [])), default=None)
        late = [c["step"] for c in commits.get(earlier, []) if first_start is not None and c["t"] > first_start]
        if late:
            broken.append(f"attempt {earlier} committed steps {late} after attempt {later} had started to train")
    return broken


def lost_steps(lines: Sequence[Line]) -> list[str]:
    """Check that no attempt loses, skips or repeats steps.

    An attempt continues after the newest step that was committed when its ranks started, or after a later one that a
    writer of the previous attempt has committed since. The steps of each rank have no gaps.
    """
    begins, steps = _by_attempt(lines, "begin"), _by_attempt(lines, "step")
    broken = []
    for attempt, attempt_lines in steps.items():
        first = min(line["step"] for line in attempt_lines)
        committed = max((line["committed"] for line in begins.get(attempt, [])), default=0)
        reached = max(
            (line["step"] for a, other_lines in steps.items() if a < attempt for line in other_lines), default=0
        )
        if first <= committed:
            broken.append(f"attempt {attempt} started at step {first}, but step {committed} was committed")
        elif first > reached + 1:
            broken.append(f"attempt {attempt} started at step {first}, but no attempt has trained step {first - 1}")
        for rank in sorted({line["rank"] for line in attempt_lines}):
            rank_steps = sorted(line["step"] for line in attempt_lines if line["rank"] == rank)
            if rank_steps != list(range(rank_steps[0], rank_steps[0] + len(rank_steps))):
                broken.append(f"rank {rank} of attempt {attempt} skipped or repeated a step: {_gaps(rank_steps)}")
    return broken


def _gaps(steps: Sequence[int]) -> str:
    return ", ".join(f"{a} then {b}" for a, b in itertools.pairwise(steps) if b != a + 1)


def wrong_endings(
    attempts: Sequence[Mapping[str, Any]], allowed: Mapping[int, Set[str]], lines: Sequence[Line], total: int
) -> list[str]:
    """Check that the recorded ending of each attempt is correct.

    Args:
        attempts: ``attempts`` of ``status --json``.
        allowed: the endings that the faults can cause, by attempt, in addition to ``completed``.
        total: the run's last step, which a completed attempt must have trained.
    """
    steps = _by_attempt(lines, "step")
    newest = max((int(a["n"]) for a in attempts), default=0)
    broken = []
    for attempt in attempts:
        n, ending = int(attempt["n"]), attempt["state"]
        if ending == "running":
            if n != newest:
                broken.append(f"attempt {n} has no ending, although attempt {newest} followed")
        elif ending == endings.COMPLETED:
            last = max((line["step"] for line in steps.get(n, [])), default=None)
            if last is not None and last < total:
                broken.append(f"attempt {n} is recorded as completed, but its last step was {last} of {total}")
        elif ending not in allowed.get(n, ()):
            expected = ", ".join(sorted(allowed.get(n, ()))) or "no end"
            broken.append(f"attempt {n} is recorded as {ending} ({attempt['reason']}); correct would be: {expected}")
    return broken


def remaining_processes(run: Path, *, before: int | None = None) -> list[str]:
    """List the processes of the run, or only those of attempts before ``before``."""
    remaining = []
    for process, env in processes_of(run):
        attempt = env.get(settings.ATTEMPT)
        if before is None or (attempt is not None and int(attempt) < before):
            remaining.append(f"process {process.pid} of attempt {attempt} on {env.get(settings.SLURMD_NODENAME)}")
    return remaining


def remaining_files(run: Path, orphaned_rank_dirs: int = 0) -> list[str]:
    """List the temporary files of a run that has ended.

    Args:
        orphaned_rank_dirs: number of killed agents, whose node-local folders may remain.
    """
    remaining = [str(p) for p in run.rglob(".*") if "code" not in p.relative_to(run).parts]  # it may have any name
    rank_dirs = [str(p) for p in Path("/tmp").glob(f"clustertrain-{run.name}-*")]
    if len(rank_dirs) > orphaned_rank_dirs:
        remaining += rank_dirs
    return remaining + [str(p) for p in Path("/dev/shm").glob(f"*{run.name}*")]
