"""What a chaos round does to a run: drawn from a menu, done by the ranks themselves or between two attempts."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertrain import clock, fsio, settings
from clustertrain.checkpoint.format import manifest as index

RANKS = 2
EVERYBODY = -1
AT_RANKS = ("before_staging", "during_staging", "after_staging")
AT_WRITERS = ("before_write", "during_write", "after_write", "after_part_done_marker")
AT_FIRST_WRITER = ("before_commit_marker", "after_commit_marker", "during_publish", "during_prune")
AT_LOCAL = ("after_local_write", "during_copy_to_shared")  # of writers that have a disk of the node's own


@dataclass(frozen=True)
class Fault:
    """``kind`` is one of ``KINDS``; what it means, and the other fields with it, says ``MENU``."""

    kind: str
    rank: int = 0
    step: int = 0
    point: str = ""
    nth: int = 1
    what: str = ""

    def __str__(self) -> str:
        who = "everybody" if self.rank == EVERYBODY else f"rank {self.rank}"
        where = f" {self.point}, time {self.nth}" if self.point else f" at step {self.step}" if self.step else ""
        return f"{self.kind}{f' ({self.what})' if self.what else ''}: {who}{where}"


def _kill_at_step(rng: random.Random, steps: int, local: bool) -> Fault:
    return Fault("kill", rng.choice([0, 1, EVERYBODY]), step=rng.randint(1, steps))


def _kill_at_point(rng: random.Random, steps: int, local: bool) -> Fault:
    return Fault("kill", rng.randrange(RANKS), point=rng.choice(AT_RANKS), nth=_nth(rng))


def _nth(rng: random.Random) -> int:
    return rng.choice([1, 1, 2, 3])


def _point_of_writer(rng: random.Random, local: bool) -> dict[str, Any]:
    point = rng.choice([*AT_WRITERS, *AT_FIRST_WRITER, *AT_LOCAL * local])
    nth = rng.randint(1, 60) if point == "during_write" else _nth(rng)  # a writer comes to this one with each tensor
    return {"rank": 0 if point in AT_FIRST_WRITER else rng.randrange(RANKS), "point": point, "nth": nth}


def _kill_writer_at_point(rng: random.Random, steps: int, local: bool) -> Fault:
    return Fault("kill writer", **_point_of_writer(rng, local))


def _orphan(rng: random.Random, steps: int, local: bool) -> Fault:
    return Fault("orphan", **_point_of_writer(rng, local))


def _kill_writer_at_step(rng: random.Random, steps: int, local: bool) -> Fault:
    return Fault("kill writer", rng.randrange(RANKS), step=rng.randint(1, steps))


def _kill_node(rng: random.Random, steps: int, local: bool) -> Fault:
    where = {"rank": rng.randrange(RANKS), "point": rng.choice(AT_RANKS), "nth": _nth(rng)}
    return Fault("kill node", **(where if rng.random() < 0.3 else _point_of_writer(rng, local)))


def _disk(rng: random.Random, steps: int, local: bool) -> Fault:
    what = rng.choice(["ENOSPC", "EIO", "EDQUOT", "ESTALE"])
    return Fault("disk", **_point_of_writer(rng, local), what=what)


def _stop(rng: random.Random, steps: int, local: bool) -> Fault:
    how = rng.choice(["told", "signal", "too late"])
    return Fault("stop", rng.randrange(RANKS) if how == "signal" else EVERYBODY, step=rng.randint(1, steps), what=how)


def _damage(rng: random.Random, steps: int, local: bool) -> Fault:
    kind = rng.choice(["damage", "local damage"]) if local else "damage"
    return Fault(kind, what=rng.choice(list(DAMAGES)), nth=rng.choice([1, 1, 1, 2]))


# A rank dies; the process that writes for a rank; the rank that it writes for, when that process has come to a point;
# all processes at once, likewise; the file system fails a writer; the run is told to stop, one rank by a signal, or so
# late that no save is begun; files of the newest ``nth`` checkpoints, or of the node's own disk, are damaged between
# two attempts.
MENU: tuple[tuple[int, Callable[[random.Random, int, bool], Fault]], ...] = (
    (2, _kill_at_step),
    (3, _kill_at_point),
    (4, _kill_writer_at_point),
    (2, _kill_writer_at_step),
    (3, _orphan),
    (4, _kill_node),
    (4, _disk),
    (3, _stop),
    (3, _damage),
)


KINDS = frozenset({"kill", "kill writer", "orphan", "kill node", "disk", "stop", "damage", "local damage"})


def draw(rng: random.Random, steps: int, local: bool) -> Fault:
    weights, makers = zip(*MENU, strict=True)
    return rng.choices(makers, weights)[0](rng, steps, local)


# -- done by the ranks


def inject(fault: Fault) -> None:
    """Setup, in each rank: see :class:`tests.ranks.rank_pool.Ranks`."""
    if fault.point:
        named = {"kill": "KILL", "kill writer": "KILL", "orphan": "ORPHAN", "kill node": "STOP"}
        what = named.get(fault.kind, fault.what)
        os.environ[settings.FAULT_AT] = f"{fault.point}:{fault.rank}:{fault.nth}:{what}"
    elif fault.step:
        act = {"kill": _die, "kill writer": _kill_own_writer, "stop": _tell_to_stop}[fault.kind]
        _at_step(fault, act)


def _at_step(fault: Fault, act: Callable[[Any, Fault], None]) -> None:
    """In the middle of the step, before its update."""
    from clustertrain.train.session.session import Session

    original = Session.train_step

    def train_step(self: Session, *args: Any, **kw: Any) -> Any:
        if self.step + 1 == fault.step and fault.rank in (self.rank, EVERYBODY):
            act(self, fault)
        return original(self, *args, **kw)

    Session.train_step = train_step  # type: ignore[method-assign]


def _die(session: Any, fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_own_writer(session: Any, fault: Fault) -> None:
    from clustertrain.train.session.session import get_runtime

    process = getattr(get_runtime(session).checkpointer._manager._pending.worker, "_process", None)
    if process is not None:
        process.kill()


def _tell_to_stop(session: Any, fault: Fault) -> None:
    if fault.what == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
        return
    order = {"deadline": clock.now() - 1} if fault.what == "too late" else {}
    fsio.write_json(Path(os.environ[settings.RANK_DIR], "stop"), order)


# -- done between two attempts


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(max(1, path.stat().st_size)))


def _remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def _empty(path: Path, rng: random.Random) -> None:
    os.truncate(path, 0)


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "flipped bit": _flip,
    "truncated": _truncate,
    "missing": _remove,
    "empty": _empty,
}


def damage(fault: Fault, root: Path, rng: random.Random) -> list[int]:
    """Damage one file of each of the newest ``fault.nth`` committed checkpoints; returns the steps."""
    committed = [p for p in index.list_checkpoint_folders(root) if index.is_committed(p)][-fault.nth :]
    for folder in committed:
        DAMAGES[fault.what](rng.choice(_files(folder)), rng)
    return [index.parse_step(p) or 0 for p in committed]


def local_damage(fault: Fault, root: Path, rng: random.Random) -> list[str]:
    """Damage one file on the node's own disk; returns its name."""
    files = _files(root)[-1:] if fault.nth == 1 else _files(root)[:1]
    for path in files:
        DAMAGES[fault.what](path, rng)
    return [str(p.relative_to(root)) for p in files]


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())
