"""``python -m tests.harness.fuzz``: run hostile inputs of every class and print the smallest input for each fault.

Replay a fault with the seed that it prints: ``--class NAME --seed S --inputs 250``.
Exit status: 0 if there is no fault, 1 otherwise.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import sys

from clustertrain import clock
from tests.harness.fuzz.catalog import CLASSES, play_class, shares
from tests.harness.fuzz.play import Played


def play_in_process(name: str, seed: int, inputs: int, until: float | None) -> Played:
    """Play a class in a separate process, so that an input that crashes the interpreter ends only this class."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(play_class, name, seed, inputs, until).result()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--inputs", type=int, default=10_000, metavar="N", help="number of inputs of all classes together"
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="start no more inputs after M minutes")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)), metavar="S")
    parser.add_argument("--class", dest="names", action="append", choices=sorted(CLASSES), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="J", help="number of concurrent processes")
    args = parser.parse_args()
    names = args.names or list(CLASSES)
    print(f"seed {args.seed}", flush=True)
    until = clock.monotonic() + 60 * args.minutes if args.minutes else None
    start = clock.monotonic()
    results: list[Played] = []
    broken = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        by_cost = sorted(shares(args.inputs, names).items(), key=lambda s: -s[1] * CLASSES[s[0]].cost_ms)
        tasks = {pool.submit(play_in_process, name, args.seed, count, until): name for name, count in by_cost}
        for task in concurrent.futures.as_completed(tasks):
            try:
                results.append(task.result())
            except concurrent.futures.process.BrokenProcessPool:
                broken += 1
                print(f"{tasks[task]}: its process died", flush=True)
                continue
            show(results[-1])
    total = sum(p.inputs for p in results)
    faults = sum(len(p.found) for p in results) + broken
    duration_s = clock.monotonic() - start
    print(f"seed {args.seed}: {total} inputs of {len(results)} classes in {duration_s:.0f} s, {faults} faults")
    return 1 if faults else 0


def show(played: Played) -> None:
    ms_per_input = 1000 * played.seconds / max(1, played.inputs)
    exits = ", ".join(f"{count} x {code}" for code, count in played.exits.items())
    text = f"{played.inputs} inputs, {ms_per_input:.0f} ms each, {len(played.found)} faults; exit statuses: {exits}"
    print(f"{played.name}: {text}", flush=True)
    for result in played.found:
        print(f"  {result.fault}".replace("\n", "\n    "))
        print(f"    input: {result.input!r}"[:2000])
        print(f"    seed {result.seed}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
