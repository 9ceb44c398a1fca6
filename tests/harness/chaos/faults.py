"""Faults of a chaos round: drawn from a menu, and injected by the ranks themselves or between two attempts."""

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
ALL_RANKS = -1
AT_RANKS = ("before_staging", "during_staging", "after_staging")
AT_WRITERS = ("before_write", "during_write", "after_write", "after_part_done_marker")
AT_FIRST_WRITER = ("before_commit_marker", "after_commit_marker", "during_publish", "during_prune")
AT_LOCAL = ("after_local_write", "during_copy_to_shared")  # writers with a node-local disk


@dataclass(frozen=True)
class Fault:
    """One fault, as explained at ``MENU``.

    Attributes:
        kind: one of ``KINDS``.
        rank: the rank that it hits, or ``ALL_RANKS``.
        step: the step in which it happens, or 0 if ``point`` determines that.
        point: the fault point at which it happens, see :mod:`clustertrain.checkpoint.core.fault_points`.
        nth: the passage of the point at which it happens, or the number of damaged checkpoints.
        variant: the errno, the way of stopping or the damage.
    """

    kind: str
    rank: int = 0
    step: int = 0
    point: str = ""
    nth: int = 1
    variant: str = ""

    def __str__(self) -> str:
        target = "all ranks" if self.rank == ALL_RANKS else f"rank {self.rank}"
        where = f" at {self.point}, passage {self.nth}" if self.point else f" at step {self.step}" if self.step else ""
        return f"{self.kind}{f' ({self.variant})' if self.variant else ''}: {target}{where}"


def _kill_at_step(rng: random.Random, steps: int, local: bool) -> Fault:
    return Fault("kill", rng.choice([0, 1, ALL_RANKS]), step=rng.randint(1, steps))


def _kill_at_point(rng: random.Random, steps: int, local: bool) -> Fault:
    return Fault("kill", rng.randrange(RANKS), point=rng.choice(AT_RANKS), nth=_nth(rng))


def _nth(rng: random.Random) -> int:
    return rng.choice([1, 1, 2, 3])


def _draw_writer_point(rng: random.Random, local: bool) -> dict[str, Any]:
    point = rng.choice([*AT_WRITERS, *AT_FIRST_WRITER, *AT_LOCAL * local])
    nth = rng.randint(1, 60) if point == "during_write" else _nth(rng)  # passed once per tensor
    return {"rank": 0 if point in AT_FIRST_WRITER else rng.randrange(RANKS), "point": point, "nth": nth}


def _kill_writer_at_point(rng: random.Random, steps: int, local: bool) -> Fault:
    return Fault("kill writer", **_draw_writer_point(rng, local))


def _orphan(rng: random.Random, steps: int, local: bool) -> Fault:
    return Fault("orphan", **_draw_writer_point(rng, local))


def _kill_writer_at_step(rng: random.Random, steps: int, local: bool) -> Fault:
    return Fault("kill writer", rng.randrange(RANKS), step=rng.randint(1, steps))


def _kill_node(rng: random.Random, steps: int, local: bool) -> Fault:
    where = {"rank": rng.randrange(RANKS), "point": rng.choice(AT_RANKS), "nth": _nth(rng)}
    return Fault("kill node", **(where if rng.random() < 0.3 else _draw_writer_point(rng, local)))


def _disk(rng: random.Random, steps: int, local: bool) -> Fault:
    error = rng.choice(["ENOSPC", "EIO", "EDQUOT", "ESTALE"])
    return Fault("disk", **_draw_writer_point(rng, local), variant=error)


def _stop(rng: random.Random, steps: int, local: bool) -> Fault:
    variant = rng.choice(["stop file", "signal", "too late"])
    return Fault(
        "stop", rng.randrange(RANKS) if variant == "signal" else ALL_RANKS, step=rng.randint(1, steps), variant=variant
    )


def _damage(rng: random.Random, steps: int, local: bool) -> Fault:
    kind = rng.choice(["damage", "local damage"]) if local else "damage"
    return Fault(kind, variant=rng.choice(list(DAMAGES)), nth=rng.choice([1, 1, 1, 2]))


# (weight, function that draws the fault). The kinds:
# kill: a rank is killed.
# kill writer: the writer process of a rank is killed.
# orphan: a rank is killed when its writer process reaches a point.
# kill node: all processes are killed when one of them reaches a point.
# disk: the file system returns an error to a writer.
# stop: the run is stopped, by a file, by a signal to one rank, or with too little time for a save.
# damage, local damage: between two attempts, files of the newest ``nth`` checkpoints or of the local disk are damaged.
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
    weights, functions = zip(*MENU, strict=True)
    return rng.choices(functions, weights)[0](rng, steps, local)


# -- injected by the ranks


def inject(fault: Fault) -> None:
    """Setup: inject ``fault``, see :class:`tests.ranks.rank_pool.Ranks`."""
    if fault.point:
        actions = {"kill": "KILL", "kill writer": "KILL", "orphan": "ORPHAN", "kill node": "STOP"}
        action = actions.get(fault.kind, fault.variant)
        os.environ[settings.FAULT_AT] = f"{fault.point}:{fault.rank}:{fault.nth}:{action}"
    elif fault.step:
        function = {"kill": _kill_rank, "kill writer": _kill_writer, "stop": _request_stop}[fault.kind]
        _at_step(fault, function)


def _at_step(fault: Fault, act: Callable[[Any, Fault], None]) -> None:
    """Call ``act`` in the step of ``fault``, before the update."""
    from clustertrain.train.session.session import Session

    original = Session.train_step

    def train_step(self: Session, *args: Any, **kw: Any) -> Any:
        if self.step + 1 == fault.step and fault.rank in (self.rank, ALL_RANKS):
            act(self, fault)
        return original(self, *args, **kw)

    Session.train_step = train_step  # type: ignore[method-assign]


def _kill_rank(session: Any, fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_writer(session: Any, fault: Fault) -> None:
    from clustertrain.train.session.session import get_runtime

    process = getattr(get_runtime(session).checkpointer._manager._pending.worker, "_process", None)
    if process is not None:
        process.kill()


def _request_stop(session: Any, fault: Fault) -> None:
    if fault.variant == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
        return
    request = {"deadline": clock.now() - 1} if fault.variant == "too late" else {}
    fsio.write_json(Path(os.environ[settings.RANK_DIR], "stop"), request)


# -- injected between two attempts


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
    """Damage one file of each of the newest ``fault.nth`` committed checkpoints, and return the steps."""
    committed = [p for p in index.list_checkpoint_folders(root) if index.has_commit_marker(p)][-fault.nth :]
    for folder in committed:
        DAMAGES[fault.variant](rng.choice(_files(folder)), rng)
    return [index.parse_step(p) or 0 for p in committed]


def local_damage(fault: Fault, root: Path, rng: random.Random) -> list[str]:
    """Damage one file on the local disk and return its name."""
    files = _files(root)[-1:] if fault.nth == 1 else _files(root)[:1]
    for path in files:
        DAMAGES[fault.variant](path, rng)
    return [str(p.relative_to(root)) for p in files]


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())
