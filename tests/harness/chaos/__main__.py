"""``python -m tests.harness.chaos``: inject faults into short runs and compare each with an undisturbed run.

``--seed S --rounds N`` choose the faults; ``--round N`` replays one round and keeps its folder.
Exit status: 0 if every round held, 1 otherwise.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import tempfile
from pathlib import Path

from clustertrain import clock
from tests.harness.chaos.rounds import Reference, Report, plan_of, play, undisturbed
from tests.harness.parity.measure import one_thread


def rounds(seed: str, numbers: range, folder: Path) -> list[Report]:
    references: dict[str, Reference] = {}
    reports = []
    for number in numbers:
        plan = plan_of(seed, number)
        if plan.strategy not in references:
            references[plan.strategy] = undisturbed(plan.strategy, folder / plan.strategy)
        started = clock.monotonic()
        report = play(plan, references[plan.strategy], folder / f"round-{number}")
        reports.append(report)
        print(f"{number} {plan} [{clock.monotonic() - started:.1f} s]", flush=True)
        for line in report.story:
            print(f"    {line}", flush=True)
        if report.broken:
            print(f"    BROKEN {report.broken}\n    {folder / f'round-{number}'}", flush=True)
    return reports


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", default=os.urandom(3).hex(), help="seed of the faults (default: random)")
    parser.add_argument("--rounds", type=int, default=100, metavar="N", help="number of rounds (default: 100)")
    parser.add_argument("--round", type=int, metavar="N", help="play only round N")
    args = parser.parse_args()
    numbers = range(args.rounds) if args.round is None else range(args.round, args.round + 1)
    print(f"seed {args.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    started = clock.monotonic()
    with one_thread():
        reports = rounds(args.seed, numbers, folder)
    broken = [r for r in reports if r.broken]
    kinds = collections.Counter(f.kind for r in reports for f in r.plan.faults)
    counts = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
    print(
        f"seed {args.seed}: {len(reports) - len(broken)} of {len(reports)} rounds held, "
        f"{clock.monotonic() - started:.0f} s; faults: {counts}"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
