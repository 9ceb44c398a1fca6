"""Checkpoints of the frameworks: which ones a run has saved, and which one a restarted program continues from."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .checkpoint_checks import find_problem
from .rank import Rank, read_json, write_json

_CHOICE_PATIENCE_S = 300.0  # for rank 0 to check large checkpoints on a slow filesystem
_POLL_S = 0.05
_trainings: dict[str, int] = {}  # by framework: trainings of this process


def begin_training(framework: str) -> str:
    """Return the name of a training of this program, the same in all attempts and on all ranks.

    A program may train several times, and a script may start several programs: each has its own checkpoints.
    """
    number = _trainings[framework] = _trainings.get(framework, 0) + 1
    program = zlib.crc32("\0".join(restore_arguments(sys.argv, os.environ)).encode(errors="surrogateescape"))
    return f"{framework}-{number}-{program:08x}"


def restore_arguments(argv: list[str], environ: Mapping[str, str]) -> list[str]:
    """Return ``argv`` as the user has typed it, without what the agent has changed in some attempt or on some rank."""
    program, *arguments = argv or [""]
    for added in json.loads(environ.get("CLUSTERTRAIN_ADDED_ARGS", "[]")):
        if added in arguments:
            arguments.remove(added)
    # A shipped environment is the node's copy on one node, and the shared folder on another.
    folders = json.loads(environ.get("CLUSTERTRAIN_ENVIRONMENT_FOLDERS", "[]"))
    folder = next((f for f in folders if program.startswith(f + "/")), None)
    return [program if folder is None else folders[-1] + program[len(folder) :], *arguments]


def choose(
    rank: Rank,
    training: str,
    list_candidates: Callable[[], Iterable[str]],
    check: Callable[[str], str] | None = None,
) -> str | None:
    """Return the checkpoint that rank 0 chooses, the same on all ranks; None if there is none.

    Args:
        training: the name from :func:`begin_training`.
        list_candidates: called on rank 0; returns paths, newest first.
        check: returns why a candidate is not whole, empty if it is; by default :func:`find_problem`
            with the ranks of this attempt.

    Raises:
        SystemExit: rank 0 has not answered; this rank must not start elsewhere than the others.
    """
    path = os.path.join(rank.attempt_dir, f"resume-{training}.json")
    is_in_run = rank.attempt > 0
    if rank.rank == 0 or not is_in_run:
        chosen = None
        check = check or (lambda path: find_problem(path, rank.world_size))
        try:
            chosen = next((c for c in list_candidates() if _is_whole(c, check)), None)
        finally:
            if is_in_run:  # after an error too: the other ranks wait
                write_json(path, {"path": chosen})
        return chosen
    give_up_at = time.monotonic() + _CHOICE_PATIENCE_S
    while time.monotonic() < give_up_at:
        answer = read_json(path)
        if answer is not None:
            published: str | None = answer["path"]
            return published
        os.listdir(os.path.dirname(path))  # an NFS client then asks its server for new files
        time.sleep(_POLL_S)
    sys.exit(f"clustertrain: rank 0 has chosen no checkpoint within {_CHOICE_PATIENCE_S:.0f} s: {path}")


def _is_whole(path: str, check: Callable[[str], str]) -> bool:
    """Return whether ``path`` is whole; print why if it is not."""
    problem = check(path)
    if problem:
        print(f"clustertrain: skipping checkpoint {path}: {problem}", flush=True)
    return not problem


def list_saved(rank: Rank, training: str | None = None) -> list[str]:
    """Return the checkpoints that a training, or any of the run, has saved in earlier attempts, newest first."""
    return [path for path, source, _ in _read_saved(rank) if training is None or source == training]


def find_step(rank: Rank, path: str) -> int:
    """Return the steps that were done when an earlier attempt saved ``path``; 0 if none has."""
    return next((step for saved, _, step in _read_saved(rank) if saved == path), 0)


def _read_saved(rank: Rank) -> list[tuple[str, str, int]]:
    """Return path, training and step of the checkpoints of earlier attempts, newest first."""
    saved: dict[str, tuple[str, str, int]] = {}
    for attempt in range(1, rank.attempt):
        events = os.path.join(rank.run_dir, "attempts", str(attempt), "events", "hooks-rank-0.jsonl")
        for event in _read_lines(events):
            path = str(event.get("path") or "")
            if event.get("event") in ("checkpoint", "checkpoint_overwriting"):
                saved.pop(path, None)  # a newer one comes last
            if event.get("event") == "checkpoint" and path:
                saved[path] = (path, str(event.get("source") or ""), int(event.get("step") or 0))
    return list(reversed(saved.values()))


def _read_lines(path: str) -> list[dict[str, Any]]:
    records = []
    if os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    records.append(json.loads(line))
                except ValueError:  # torn by a kill
                    continue
    return [record for record in records if isinstance(record, dict)]


def list_numbered(folder: str, pattern: str) -> list[str]:
    """Return the entries of ``folder`` whose whole name matches ``pattern``, by its number, the highest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    numbered = [(int(match.group(1)), name) for name in names if (match := re.fullmatch(pattern, name))]
    return [os.path.join(folder, name) for _, name in sorted(numbered, reverse=True)]
