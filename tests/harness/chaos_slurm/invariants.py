"""What must hold after each round, whatever happened. Each function returns what does not, in words.

Lines are those of ``script.py``: ``begin`` (with the newest committed step at that moment) and ``step`` of each rank of
each attempt, with monotonic times, which all processes of one machine share.
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
    found: dict[int, list[Line]] = {}
    for line in lines:
        if key in line:
            found.setdefault(int(line["attempt"]), []).append(line)
    return dict(sorted(found.items()))


def overlaps(lines: Sequence[Line], cut_off: Set[int] = frozenset()) -> list[str]:
    """At most one attempt trains at any moment: none has a step that ends after a later attempt's first one began.

    Args:
        cut_off: attempts on a node that nobody reached. Slurm gives their run to another node, and they learn of it
            only when they commit, which :func:`late_commits` judges.
    """
    steps = _by_attempt(lines, "step")
    broken = []
    for earlier, later in itertools.combinations(steps, 2):
        began = min(line["start"] for line in steps[later])
        late = [line for line in steps[earlier] if line["end"] > began]
        if late and earlier not in cut_off:
            lasted = max(line["end"] for line in late) - began
            broken.append(
                f"attempts {earlier} and {later} trained at the same time for {lasted:.2f} s "
                f"({len(late)} steps of attempt {earlier}, up to step {max(line['step'] for line in late)})"
            )
    return broken


def late_commits(lines: Sequence[Line], commits: Mapping[int, Sequence[Line]]) -> list[str]:
    """No attempt commits a checkpoint after a later one has begun to train.

    Args:
        commits: by attempt its ``checkpoint`` events.
    """
    steps = _by_attempt(lines, "step")
    broken = []
    for earlier, later in itertools.combinations(sorted({*steps, *commits}), 2):
        began = min((line["wall"] for line in steps.get(later, [])), default=None)
        late = [c["step"] for c in commits.get(earlier, []) if began is not None and c["t"] > began]
        if late:
            broken.append(f"attempt {earlier} committed steps {late} after attempt {later} had begun to train")
    return broken


def lost_steps(lines: Sequence[Line]) -> list[str]:
    """Each attempt goes on at the step after the newest that was committed when its ranks began, or a later one that a
    writer of the attempt before has committed since; each rank's steps have no gap."""
    begins, steps = _by_attempt(lines, "begin"), _by_attempt(lines, "step")
    broken = []
    for attempt, done in steps.items():
        first = min(line["step"] for line in done)
        committed = max((line["committed"] for line in begins.get(attempt, [])), default=0)
        reached = max((line["step"] for a, of in steps.items() if a < attempt for line in of), default=0)
        if first <= committed:
            broken.append(f"attempt {attempt} began at step {first} where step {committed} was committed")
        elif first > reached + 1:
            broken.append(f"attempt {attempt} began at step {first} where no attempt had done step {first - 1}")
        for rank in sorted({line["rank"] for line in done}):
            own = sorted(line["step"] for line in done if line["rank"] == rank)
            if own != list(range(own[0], own[0] + len(own))):
                broken.append(f"rank {rank} of attempt {attempt} left out or repeated a step: {_gaps(own)}")
    return broken


def _gaps(steps: Sequence[int]) -> str:
    return ", ".join(f"{a} then {b}" for a, b in itertools.pairwise(steps) if b != a + 1)


def untrue_endings(
    attempts: Sequence[Mapping[str, Any]], allowed: Mapping[int, Set[str]], lines: Sequence[Line], total: int
) -> list[str]:
    """What is recorded of each attempt is what happened to it.

    Args:
        attempts: those of ``status --json``.
        allowed: by attempt, the endings that what the storm did to it can lead to, beside ``completed``.
        total: the run's last step, which a completed attempt has done.
    """
    steps = _by_attempt(lines, "step")
    newest = max((int(a["n"]) for a in attempts), default=0)
    broken = []
    for attempt in attempts:
        n, ending = int(attempt["n"]), attempt["state"]
        if ending == "running":
            if n != newest:
                broken.append(f"attempt {n} has no ending, and attempt {newest} follows it")
        elif ending == endings.COMPLETED:
            last = max((line["step"] for line in steps.get(n, [])), default=None)
            if last is not None and last < total:
                broken.append(f"attempt {n} is recorded as completed, and its last step was {last} of {total}")
        elif ending not in allowed.get(n, ()):
            wanted = ", ".join(sorted(allowed.get(n, ()))) or "no end"
            broken.append(f"attempt {n} is recorded as {ending} ({attempt['reason']}); true would be: {wanted}")
    return broken


def processes_left(run: Path, *, before: int | None = None) -> list[str]:
    """Processes of the run; with ``before`` those of attempts before that one."""
    left = []
    for process, env in processes_of(run):
        attempt = env.get(settings.ATTEMPT)
        if before is None or (attempt is not None and int(attempt) < before):
            left.append(f"process {process.pid} of attempt {attempt} on {env.get(settings.SLURMD_NODENAME)}")
    return left


def files_left(run: Path, lost_rank_dirs: int = 0) -> list[str]:
    """Temporary files of a run that is over.

    Args:
        lost_rank_dirs: how many agents were killed, none of which could remove its node-local folder.
    """
    left = [str(p) for p in run.rglob(".*") if "code" not in p.relative_to(run).parts]  # whose names are the user's
    rank_dirs = [str(p) for p in Path("/tmp").glob(f"clustertrain-{run.name}-*")]
    if len(rank_dirs) > lost_rank_dirs:
        left += rank_dirs
    return left + [str(p) for p in Path("/dev/shm").glob(f"*{run.name}*")]
