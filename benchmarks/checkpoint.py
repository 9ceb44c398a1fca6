"""Saving and restoring against torch.distributed.checkpoint, torchsnapshot, torch.save, bare copies and bare files.

All in the same processes, round by round in changing order, and compared within the round: the speed of a disk changes
by the minute. What is restored was saved in the same round and is not in memory any more.

stall    of a first save, for which room was made beforehand (as the session does beside the training after the first
         step), against a copy into new memory; of later ones against a copy into memory that is there; of both against
         the peers'. A peer that saves in the background stalls until its call returns, another one until it has saved
write    bytes to the disk per second, from the call to the commit, against one file a rank and an fsync
restore  with checksums, against reading as many bytes with as many processes
layout   restoring what other ranks have saved, or to shards of the other dimension, against the same layout
steps    while a save is being written, against none: with a core left for it, and with all cores busy

Other engines of ours and the peers' restores have no goal, and are measured at the smallest size alone.

    python -m benchmarks.checkpoint --sizes 1GiB --ranks 2 --rounds 9
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import checkpoint_readers as readers
from benchmarks import checkpoint_writers as writers
from benchmarks import measure
from benchmarks.checkpoint_readers import Readers
from benchmarks.checkpoint_state import Shapes, State, bytes_in, manager_of, rank_state, shapes_of
from benchmarks.checkpoint_steps import step_seconds
from benchmarks.checkpoint_writers import Writers
from benchmarks.cold import IN_MEMORY, file_system
from benchmarks.measure import CannotRun
from benchmarks.rank_team import Team, together
from benchmarks.verdict import Goal, interval, verdict
from clustertrain.checkpoint.save.staging import available_memory

SIZES = [1 << 30, 4 << 30]
ROUNDS = 9
LEAST_BYTES = 16 << 20
_RANK_BYTES = 400 << 20  # of a process that has imported torch, with the one that writes for it
_STATES = 3.5  # in memory at a time: the live one, the room, a staged or restored one, and pages on their way
_ON_DISK = 6.0  # at a time, at most: what is read in a round, a replaced checkpoint, one of other ranks
_KEPT = {writers.LATER, writers.RAW_WRITE, writers.DCP, writers.TAKE}  # for the readers

Round = dict[str, dict[str, float]]
STALL, DURABLE, READ, STEP = "stall", "durable", "read", "step"
CLEAN, WITH_CORE, ALL_BUSY = "no save under way", "a save under way, one core free", "a save under way, all cores busy"


@dataclass(frozen=True)
class Compared:
    """The seconds of ``ours`` over those of ``base``; with a goal of "at least" the speeds instead, base over ours."""

    words: str
    measure: str
    ours: str
    base: str
    goal: Goal | None

    def ratios(self, rounds: Sequence[Round]) -> list[float]:
        both = [(r[self.ours][self.measure], r[self.base][self.measure]) for r in rounds
                if self.measure in r.get(self.ours, {}) and self.measure in r.get(self.base, {})]  # fmt: skip
        speed = self.goal is not None and self.goal.side == "at least"
        return [base / ours if speed else ours / base for ours, base in both]


FIRST_WORDS, LATER_WORDS = "stall of the first save, room made beforehand", "stall of a later save"
_LESS = Goal(1.0, "less than")
_PEERS = (writers.DCP, writers.DCP_THREAD, writers.DCP_KEPT, writers.DCP_PROCESS, writers.TAKE, writers.ASYNC_TAKE,
          writers.TORCH_SAVE)  # fmt: skip
_PREPARED = (writers.DCP_KEPT, writers.DCP_PROCESS)  # which only a later save compares with
_ENGINES = (writers.OF_DCP, writers.OF_TORCHSNAPSHOT)
_WITHOUT_GOAL = (*_ENGINES, readers.DCP_LOAD, readers.TS_RESTORE)
COMPARED = (
    Compared(FIRST_WORDS, STALL, writers.FIRST, writers.CLONE, Goal(1.3, "at most")),
    Compared(LATER_WORDS, STALL, writers.LATER, writers.COPY, Goal(1.3, "at most")),
    *(Compared(FIRST_WORDS, STALL, writers.FIRST, p, _LESS) for p in _PEERS if p not in _PREPARED),
    *(Compared(LATER_WORDS, STALL, writers.LATER, p, _LESS) for p in _PEERS),
    Compared("bytes/s to the disk", DURABLE, writers.LATER, writers.RAW_WRITE, Goal(0.9, "at least")),
    *(Compared("bytes/s to the disk", DURABLE, e, writers.RAW_WRITE, None) for e in _ENGINES),
    Compared("bytes/s restored", READ, readers.RESTORE, readers.RAW_READ, Goal(0.8, "at least")),
    Compared("restore of other ranks' files", READ, readers.OTHER_RANKS, readers.RESTORE, Goal(1.3, "at most")),
    Compared("restore into Shard(1)", READ, readers.OTHER_DIM, readers.RESTORE, Goal(1.3, "at most")),
    Compared("a step during a save", STEP, WITH_CORE, CLEAN, Goal(1.1, "at most")),
    Compared("a step during a save", STEP, ALL_BUSY, CLEAN, None),
)


def in_turn(names: Sequence[str], n: int) -> list[str]:
    """In round ``n`` they begin with another one, and every second time go backwards."""
    first = n % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if n % 2 else order


# -- on the ranks


def save_once(team: Team, shapes: Shapes, folder: Path) -> int:
    """Job of a team: one checkpoint. Returns the fingerprint of its content."""
    state = State(shapes)
    manager = manager_of(folder, team.own_group(), async_save=False)
    manager.save(1, state.objects, rank_state())
    manager.close()
    return state.fingerprint()


def save_and_restore(
    team: Team, shapes: Shapes, folder: Path, rounds: int, other: tuple[Path, int], shared: bool, without: Sequence[str]
) -> list[Round]:
    """Job of a team: all rounds of all that save, then all that restore, but for those in ``without``."""
    state = State(shapes)
    room = torch.ones(sum(p.numel() for p in state.locals()), dtype=torch.uint8)
    content = state.fingerprint()
    save = Writers(team, state, room, shared=shared)
    restore = Readers(team, shapes, room, folder, other)
    found = []
    for n in range(rounds + 1):  # the first warms up
        took: Round = {}
        for name in in_turn([name for name in save.all if name not in without], n):
            team.on_rank_0(os.sync)  # what others have deleted
            took |= save.all[name](folder / name)
            gc.collect()
            if name not in _KEPT:
                _delete(team, folder / name)
        for name in in_turn([name for name in restore.all if name not in without], n):
            took.setdefault(name, {})[READ] = restore.all[name](content)
            gc.collect()
        for name in _KEPT:
            _delete(team, folder / name)
        if n:
            found.append(took)
        stalls = ", ".join(f"{k} {took[k][STALL]:.3f} s" for k in (writers.LATER, writers.COPY))
        writes = ", ".join(f"{k} {took[k][DURABLE]:.3f} s" for k in (writers.LATER, writers.RAW_WRITE))
        reads = ", ".join(f"{k} {took[k][READ]:.3f} s" for k in (readers.RESTORE, readers.RAW_READ))
        team.say(f"  round {n or '0 (not counted)'}: stall {stalls}; write {writes}; restore {reads}")
    return found


def _delete(team: Team, folder: Path) -> None:
    team.on_rank_0(lambda: shutil.rmtree(folder, ignore_errors=True))


# -- here


def other_ranks(ranks: int) -> int:
    """Who saves what ``ranks`` restore under another layout: with the default of 2 and 4 one the other's."""
    return 2 * ranks if ranks < 4 else ranks // 2


def measured(size: int, ranks: int, rounds: int, folder: Path, without: Sequence[str] = ()) -> list[Round]:
    """Of one size on so many ranks: a round's seconds by who and what, but for those in ``without``."""
    shapes, cores = shapes_of(size), os.cpu_count() or 1
    threads = max(1, cores // ranks)
    shared = shutil.disk_usage("/dev/shm").free > 1.2 * size if Path("/dev/shm").is_dir() else False
    others, other = other_ranks(ranks), folder / "other"
    content = together(others, max(1, cores // others), save_once, shapes, other)
    job = (shapes, folder, rounds, (other, content), shared, without)
    found = together(ranks, threads, save_and_restore, *job)
    shutil.rmtree(other)
    settings = [(ALL_BUSY, ranks, threads)]
    if cores > 1:
        few = min(ranks, cores - 1)
        settings.append((WITH_CORE, few, (cores - 1) // few))
    for words, trained, each in settings:
        pairs = together(trained, each, step_seconds, shapes, folder / "steps", rounds, words)
        # Rounds of their own, since each is compared with its own steps without a save.
        found += [{words: {STEP: saving}, CLEAN: {STEP: clean}} for clean, saving in pairs]
    return found


def rows_of(rounds: Sequence[Round], about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What was compared, each with its verdict."""
    for c in COMPARED:
        ratios = c.ratios(rounds)
        if not ratios:
            continue
        low, high = interval(ratios)
        yield {
            **about,
            "what": c.words,
            "ours": c.ours,
            "base": c.base,
            "pairs": len(ratios),
            "ours_s": measure.spread(_seconds(rounds, c.ours, c.measure, c.base)),
            "base_s": measure.spread(_seconds(rounds, c.base, c.measure, c.ours)),
            "ratio": {**measure.spread(ratios), "low": round(low, 4), "high": round(high, 4)},
            "goal": str(c.goal) if c.goal else None,
            "verdict": verdict(ratios, c.goal) if c.goal else None,
        }


def _seconds(rounds: Sequence[Round], name: str, what: str, beside: str) -> list[float]:
    return [r[name][what] for r in rounds if what in r.get(name, {}) and what in r.get(beside, {})]


def seconds_of(rounds: Sequence[Round], size: int) -> dict[str, dict[str, float]]:
    """Medians of everybody, and GB/s of what moved all bytes."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(n for r in rounds for n in r if n != CLEAN):
        of = found[name] = {}
        for what in dict.fromkeys(w for r in rounds for w in r.get(name, {})):
            median = statistics.median(r[name][what] for r in rounds if what in r.get(name, {}))
            of[f"{what}_s"] = round(median, 4)
            if what in (DURABLE, READ):
                of[f"{what}_gb_per_s"] = round(size / median / 1e9, 3)
    return found


def check_room(size: int, ranks: int, folder: Path) -> None:
    """Raises CannotRun where memory or disk do not suffice."""
    kind = file_system(folder)
    if kind in IN_MEMORY:
        raise CannotRun(f"{folder} is in memory ({kind}); name a --folder on a disk")
    most = max(ranks, other_ranks(ranks))
    memory, disk = _STATES * size + 2 * most * _RANK_BYTES, _ON_DISK * size
    for name, wanted, there in (
        ("memory", memory, available_memory()),
        (f"disk in {folder}", disk, shutil.disk_usage(folder).free),
    ):
        if there < wanted:
            raise CannotRun(
                f"{size / 2**30:.3g} GiB on {ranks} ranks takes {wanted / 2**30:.1f} GiB of {name}, "
                f"{there / 2**30:.1f} GiB are free; choose smaller --sizes or another --folder"
            )


def bytes_of(text: str) -> int:
    """Of "64MiB" or "4GiB". Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d+)(MiB|GiB)", text)
    size = int(match[1]) << {"MiB": 20, "GiB": 30}[match[2]] if match else 0
    if size < LEAST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r}: a size is like 64MiB or 4GiB, and at least {LEAST_BYTES >> 20}MiB")
    return size


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint")
    parser.add_argument("--sizes", nargs="+", type=bytes_of, default=SIZES, metavar="SIZE", help="of all ranks' state")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], metavar="N")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="that count; fewer than 7 tell nothing")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure; default: this one")
    options = parser.parse_args(argv if argv is not None else [])
    for size in options.sizes:
        for ranks in options.ranks:
            check_room(size, ranks, options.folder)
    result = measure.context(("clustertrain", "torch", "torchsnapshot", "xxhash"))
    result["file_system"] = file_system(options.folder)
    print(f"in {options.folder.resolve()}, a file system of type {result['file_system']}")
    result["rows"], result["medians"] = [], []
    for size in options.sizes:
        for ranks in options.ranks:
            _measure_one(size, ranks, options, result)
    return end(result)


def _measure_one(size: int, ranks: int, options: Any, result: dict[str, Any]) -> None:
    about = {"mib": size >> 20, "ranks": ranks}
    print(f"{size >> 20} MiB, {ranks} ranks", flush=True)
    with tempfile.TemporaryDirectory(prefix="checkpoint-benchmark-", dir=options.folder) as folder:
        without = () if size == min(options.sizes) else _WITHOUT_GOAL
        rounds = measured(size, ranks, options.rounds, Path(folder).resolve(), without)
    for row in rows_of(rounds, about):
        result["rows"].append(row)
        print(_line(row), flush=True)
    medians = seconds_of(rounds, bytes_in(shapes_of(size)))
    result["medians"].append({**about, **medians})
    for name, of in medians.items():
        print(f"  {name}: " + ", ".join(f"{k} {v}" for k, v in of.items()), flush=True)


def _line(row: dict[str, Any]) -> str:
    ratio = row["ratio"]
    return (
        f"{row['what']}, {row['ours']} / {row['base']}: {row['ours_s']['median']} s / {row['base_s']['median']} s, "
        f"ratio {ratio['median']} ({ratio['low']} to {ratio['high']})"
        + (f", goal {row['goal']}: {row['verdict']}" if row["goal"] else "")
    )


def end(result: dict[str, Any]) -> int:
    """Write what is worth it. Raises CannotRun where the machine was too busy for some rows, and none was missed."""
    verdicts = [row["verdict"] for row in result["rows"] if row["goal"]]
    noisy = verdicts.count("noisy")
    if noisy == len(verdicts):
        raise CannotRun("the machine is too busy to tell, or there were too few rounds; nothing is written")
    path = measure.write("checkpoint", result)
    print(f"written to {path.relative_to(measure.ROOT)}")
    if "missed" in verdicts:
        return 1
    if noisy:
        raise CannotRun(f"{noisy} of {len(verdicts)} rows are noisy, and marked so in what is written")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except CannotRun as e:
        print(f"cannot run: {e}", file=sys.stderr)
        sys.exit(3)
