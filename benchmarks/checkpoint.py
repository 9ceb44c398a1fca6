"""Save and restore, against torch.distributed.checkpoint, torchsnapshot, torch.save, memory copies and plain files.

All run in the same processes, in rounds with changing order, and are compared within a round: the speed of a disk
changes by the minute. A restore reads what was saved in the same round, and not from memory.

stall    of the first save, with memory reserved beforehand (as the session does during training after the first step),
         against a copy into new memory; of later saves against a copy into existing memory; of both against the peers.
         A peer that saves in the background stalls until its call returns, any other until it has saved
write    bytes per second to the disk, from the call to the commit, against one file per rank and an fsync; of frozen
         parameters the later save, which links the file of the first, against the first
restore  with checksums, against reading as many bytes with as many processes
layout   restoring what other ranks have saved, or into shards of the other dimension, against the same layout
steps    during a save, against steps without one: with a core left for it, and with all cores busy

The other engines and the peers' restores have no goal, and are measured only at the smallest size.

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
from benchmarks.checkpoint_state import Shapes, State, choose_shapes, count_bytes, make_manager, rank_state
from benchmarks.checkpoint_steps import step_seconds
from benchmarks.checkpoint_writers import Writers
from benchmarks.cold import MEMORY_FILE_SYSTEMS, file_system
from benchmarks.measure import CannotRun
from benchmarks.rank_team import Team, run_team
from benchmarks.verdict import Goal, interval, verdict
from clustertrain.checkpoint.save.staging import available_memory

SIZES = [1 << 30, 4 << 30]
ROUNDS = 9
MIN_BYTES = 16 << 20
_RANK_BYTES = 400 << 20  # a process that has imported torch, and its writer process
_STATES_IN_MEMORY = 3.5  # the live state, the buffer, a staged or restored state, and pages being written
_STATES_ON_DISK = 6.0  # at most: all that a round reads, a replaced checkpoint, and one of other ranks
_READ_LATER = {writers.LATER, writers.RAW_WRITE, writers.DCP, writers.TAKE}  # kept for the readers

Round = dict[str, dict[str, float]]
STALL, DURABLE, READ, STEP = "stall", "durable", "read", "step"
CLEAN, WITH_CORE, ALL_BUSY = "no save under way", "a save under way, one core free", "a save under way, all cores busy"


@dataclass(frozen=True)
class Comparison:
    """The ratio ours / base in seconds; with a goal of "at least", the ratio of speeds, base / ours in seconds."""

    label: str
    measure: str
    ours: str
    base: str
    goal: Goal | None

    def ratios(self, rounds: Sequence[Round]) -> list[float]:
        both = [(r[self.ours][self.measure], r[self.base][self.measure]) for r in rounds
                if self.measure in r.get(self.ours, {}) and self.measure in r.get(self.base, {})]  # fmt: skip
        speed = self.goal is not None and self.goal.side == "at least"
        return [base / ours if speed else ours / base for ours, base in both]


FIRST_LABEL, LATER_LABEL = "stall of the first save, room made beforehand", "stall of a later save"
_BEAT_PEER = Goal(1.0, "less than")
_PEERS = (writers.DCP, writers.DCP_THREAD, writers.DCP_KEPT, writers.DCP_PROCESS, writers.TAKE, writers.ASYNC_TAKE,
          writers.TORCH_SAVE)  # fmt: skip
_PREPARED = (writers.DCP_KEPT, writers.DCP_PROCESS)  # compared only with a later save
_ENGINES = (writers.OF_DCP, writers.OF_TORCHSNAPSHOT)
_NO_GOAL = (*_ENGINES, writers.FROZEN, readers.DCP_LOAD, readers.TS_RESTORE)
COMPARISONS = (
    Comparison(FIRST_LABEL, STALL, writers.FIRST, writers.CLONE, Goal(1.3, "at most")),
    Comparison(LATER_LABEL, STALL, writers.LATER, writers.COPY, Goal(1.3, "at most")),
    *(Comparison(FIRST_LABEL, STALL, writers.FIRST, p, _BEAT_PEER) for p in _PEERS if p not in _PREPARED),
    *(Comparison(LATER_LABEL, STALL, writers.LATER, p, _BEAT_PEER) for p in _PEERS),
    Comparison("bytes/s to the disk", DURABLE, writers.LATER, writers.RAW_WRITE, Goal(0.9, "at least")),
    *(Comparison("bytes/s to the disk", DURABLE, e, writers.RAW_WRITE, None) for e in _ENGINES),
    Comparison("a save of what has not changed", DURABLE, writers.FROZEN_LATER, writers.FROZEN, None),
    Comparison("bytes/s restored", READ, readers.RESTORE, readers.RAW_READ, Goal(0.8, "at least")),
    Comparison("restore of other ranks' files", READ, readers.OTHER_RANKS, readers.RESTORE, Goal(1.3, "at most")),
    Comparison("restore into Shard(1)", READ, readers.OTHER_DIM, readers.RESTORE, Goal(1.3, "at most")),
    Comparison("a step during a save", STEP, WITH_CORE, CLEAN, Goal(1.1, "at most")),
    Comparison("a step during a save", STEP, ALL_BUSY, CLEAN, None),
)


def round_order(names: Sequence[str], n: int) -> list[str]:
    """Return the order in round ``n``: each round starts with the next name, and every second one is reversed."""
    first = n % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if n % 2 else order


# -- on the ranks


def save_once(team: Team, shapes: Shapes, folder: Path) -> int:
    """Job of a team: save one checkpoint; return the fingerprint of its content."""
    state = State(shapes)
    manager = make_manager(folder, team.new_control_group(), async_save=False)
    manager.save(1, state.objects, rank_state())
    manager.close()
    return state.fingerprint()


def save_and_restore(
    team: Team, shapes: Shapes, folder: Path, rounds: int, other: tuple[Path, int], shared: bool, without: Sequence[str]
) -> list[Round]:
    """Job of a team: run all rounds, in each of which all writers save and then all readers restore.

    Writers and readers in ``without`` are omitted.
    """
    state = State(shapes)
    buffer = torch.ones(sum(p.numel() for p in state.locals()), dtype=torch.uint8)
    content = state.fingerprint()
    save = Writers(team, state, buffer, shared=shared)
    restore = Readers(team, shapes, buffer, folder, other)
    counted = []
    for n in range(rounds + 1):  # the first warms up
        seconds: Round = {}
        for name in round_order([name for name in save.all if name not in without], n):
            team.on_rank_0(os.sync)  # flush the deletions of earlier writers
            seconds |= save.all[name](folder / name)
            gc.collect()
            if name not in _READ_LATER:
                _delete(team, folder / name)
        for name in round_order([name for name in restore.all if name not in without], n):
            seconds.setdefault(name, {})[READ] = restore.all[name](content)
            gc.collect()
        for name in _READ_LATER:
            _delete(team, folder / name)
        if n:
            counted.append(seconds)
        stalls = ", ".join(f"{k} {seconds[k][STALL]:.3f} s" for k in (writers.LATER, writers.COPY))
        writes = ", ".join(f"{k} {seconds[k][DURABLE]:.3f} s" for k in (writers.LATER, writers.RAW_WRITE))
        reads = ", ".join(f"{k} {seconds[k][READ]:.3f} s" for k in (readers.RESTORE, readers.RAW_READ))
        team.log(f"  round {n or '0 (not counted)'}: stall {stalls}; write {writes}; restore {reads}")
    return counted


def _delete(team: Team, folder: Path) -> None:
    team.on_rank_0(lambda: shutil.rmtree(folder, ignore_errors=True))


# -- in the parent process


def other_ranks(ranks: int) -> int:
    """Return how many ranks save what ``ranks`` ranks restore under another layout. The defaults 2 and 4 swap."""
    return 2 * ranks if ranks < 4 else ranks // 2


def measure_rounds(size: int, ranks: int, rounds: int, folder: Path, without: Sequence[str] = ()) -> list[Round]:
    """Measure one size on ``ranks`` ranks, except those in ``without``; return the seconds of each round."""
    shapes, cores = choose_shapes(size), os.cpu_count() or 1
    threads = max(1, cores // ranks)
    shared = shutil.disk_usage("/dev/shm").free > 1.2 * size if Path("/dev/shm").is_dir() else False
    others, other = other_ranks(ranks), folder / "other"
    content = run_team(others, max(1, cores // others), save_once, shapes, other)
    job = (shapes, folder, rounds, (other, content), shared, without)
    results = run_team(ranks, threads, save_and_restore, *job)
    shutil.rmtree(other)
    settings = [(ALL_BUSY, ranks, threads)]
    if cores > 1:
        few = min(ranks, cores - 1)
        settings.append((WITH_CORE, few, (cores - 1) // few))
    for label, team_size, team_threads in settings:
        pairs = run_team(team_size, team_threads, step_seconds, shapes, folder / "steps", rounds, label)
        # Separate rounds, since each is compared with its own steps without a save.
        results += [{label: {STEP: saving}, CLEAN: {STEP: clean}} for clean, saving in pairs]
    return results


def build_rows(rounds: Sequence[Round], about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row with the verdict of each comparison."""
    for c in COMPARISONS:
        ratios = c.ratios(rounds)
        if not ratios:
            continue
        low, high = interval(ratios)
        yield {
            **about,
            "what": c.label,
            "ours": c.ours,
            "base": c.base,
            "pairs": len(ratios),
            "ours_s": measure.spread(_seconds(rounds, c.ours, c.measure, c.base)),
            "base_s": measure.spread(_seconds(rounds, c.base, c.measure, c.ours)),
            "ratio": {**measure.spread(ratios), "low": round(low, 4), "high": round(high, 4)},
            "goal": str(c.goal) if c.goal else None,
            "verdict": verdict(ratios, c.goal) if c.goal else None,
        }


def _seconds(rounds: Sequence[Round], name: str, what: str, other: str) -> list[float]:
    return [r[name][what] for r in rounds if what in r.get(name, {}) and what in r.get(other, {})]


def compute_medians(rounds: Sequence[Round], size: int) -> dict[str, dict[str, float]]:
    """Return the median seconds of each participant, and GB/s if it moved all bytes."""
    medians: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(n for r in rounds for n in r if n != CLEAN):
        row = medians[name] = {}
        for what in dict.fromkeys(w for r in rounds for w in r.get(name, {})):
            median = statistics.median(r[name][what] for r in rounds if what in r.get(name, {}))
            row[f"{what}_s"] = round(median, 4)
            if what in (DURABLE, READ):
                row[f"{what}_gb_per_s"] = round(size / median / 1e9, 3)
    return medians


def check_space(size: int, ranks: int, folder: Path) -> None:
    """Raise CannotRun if memory or disk space is too small."""
    kind = file_system(folder)
    if kind in MEMORY_FILE_SYSTEMS:
        raise CannotRun(f"{folder} is in memory ({kind}); set --folder to a folder on a disk")
    most = max(ranks, other_ranks(ranks))
    memory, disk = _STATES_IN_MEMORY * size + 2 * most * _RANK_BYTES, _STATES_ON_DISK * size
    for name, required, available in (
        ("memory", memory, available_memory()),
        (f"disk in {folder}", disk, shutil.disk_usage(folder).free),
    ):
        if available < required:
            raise CannotRun(
                f"{size / 2**30:.3g} GiB on {ranks} ranks needs {required / 2**30:.1f} GiB of {name}, "
                f"{available / 2**30:.1f} GiB are available; set smaller --sizes or another --folder"
            )


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "64MiB" or "4GiB". Raise ArgumentTypeError for anything else."""
    match = re.fullmatch(r"(\d+)(MiB|GiB)", text)
    size = int(match[1]) << {"MiB": 20, "GiB": 30}[match[2]] if match else 0
    if size < MIN_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r}: a size is like 64MiB or 4GiB, and at least {MIN_BYTES >> 20}MiB")
    return size


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint")
    parser.add_argument(
        "--sizes", nargs="+", type=parse_size, default=SIZES, metavar="SIZE", help="of all ranks together"
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], metavar="N")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="counted; fewer than 7 give no verdict")
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), help="on the disk to measure; default: the current one"
    )
    options = parser.parse_args(argv if argv is not None else [])
    for size in options.sizes:
        for ranks in options.ranks:
            check_space(size, ranks, options.folder)
    result = measure.context(("clustertrain", "torch", "torchsnapshot", "xxhash"))
    result["file_system"] = file_system(options.folder)
    print(f"folder {options.folder.resolve()}, file system {result['file_system']}")
    result["rows"], result["medians"] = [], []
    for size in options.sizes:
        for ranks in options.ranks:
            _measure_one(size, ranks, options, result)
    return finish(result)


def _measure_one(size: int, ranks: int, options: Any, result: dict[str, Any]) -> None:
    about = {"mib": size >> 20, "ranks": ranks}
    print(f"{size >> 20} MiB, {ranks} ranks", flush=True)
    with tempfile.TemporaryDirectory(prefix="checkpoint-benchmark-", dir=options.folder) as folder:
        without = () if size == min(options.sizes) else _NO_GOAL
        rounds = measure_rounds(size, ranks, options.rounds, Path(folder).resolve(), without)
    for row in build_rows(rounds, about):
        result["rows"].append(row)
        print(_line(row), flush=True)
    medians = compute_medians(rounds, count_bytes(choose_shapes(size)))
    result["medians"].append({**about, **medians})
    for name, row in medians.items():
        print(f"  {name}: " + ", ".join(f"{k} {v}" for k, v in row.items()), flush=True)


def _line(row: dict[str, Any]) -> str:
    ratio = row["ratio"]
    return (
        f"{row['what']}, {row['ours']} / {row['base']}: {row['ours_s']['median']} s / {row['base_s']['median']} s, "
        f"ratio {ratio['median']} ({ratio['low']} to {ratio['high']})"
        + (f", goal {row['goal']}: {row['verdict']}" if row["goal"] else "")
    )


def finish(result: dict[str, Any]) -> int:
    """Write the result unless all rows are noisy; return 1 if a goal was missed.

    Raises:
        CannotRun: some rows are noisy and no goal was missed.
    """
    verdicts = [row["verdict"] for row in result["rows"] if row["goal"]]
    noisy = verdicts.count("noisy")
    if noisy == len(verdicts):
        raise CannotRun("the machine is too busy, or there were too few rounds; nothing is written")
    path = measure.write("checkpoint", result)
    print(f"written to {path.relative_to(measure.ROOT)}")
    if "missed" in verdicts:
        return 1
    if noisy:
        raise CannotRun(f"{noisy} of {len(verdicts)} rows are noisy, and marked as such in the result")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except CannotRun as e:
        print(f"cannot run: {e}", file=sys.stderr)
        sys.exit(3)
