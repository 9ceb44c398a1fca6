"""``python -m tests.harness.chaos_slurm``: inject faults into runs on the one-machine Slurm cluster.

Needs root; starts the cluster and stops it. ``--round N`` replays one round; ``--first N`` resumes a seed at round N.
Exit status: 0 if every round held, 1 otherwise, 77 if this machine cannot run the cluster.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from clustertrain import clock
from tests.harness.chaos_slurm import testbed, waiting
from tests.harness.chaos_slurm.faults import MENU
from tests.harness.chaos_slurm.rounds import Report, plan_of
from tests.harness.chaos_slurm.storm import Storm


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.chaos_slurm", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", default=os.urandom(3).hex(), help="seed of the faults (default: random)")
    parser.add_argument("--rounds", type=int, default=100, metavar="N", help="number of rounds (default: 100)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first round's number (default: 0)")
    parser.add_argument("--round", type=int, metavar="N", help="play only round N")
    parser.add_argument(
        "--kind", action="append", choices=sorted(MENU), default=[], help="draw only this kind of fault (repeatable)"
    )
    args = parser.parse_args()
    first, rounds = (args.first, args.rounds) if args.round is None else (args.round, 1)
    numbers = range(first, first + rounds)
    print(f"seed {args.seed}", flush=True)
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: waiting.stop())
    folder = Path(tempfile.mkdtemp(prefix="chaos-slurm-"))
    storm = Storm(folder, [plan_of(args.seed, number, args.kind) for number in numbers])
    started = clock.monotonic()
    try:
        with storm.disks(), testbed.testbed():
            storm.play()
    except testbed.TestbedFailed as e:
        print(e, file=sys.stderr)
        return testbed.CANNOT_RUN
    except waiting.Stopped as e:
        print(e or "interrupted", file=sys.stderr)
        return 130
    finally:
        print_summary(args.seed, storm.reports, clock.monotonic() - started)
        clean_up(folder, storm.broken)
    played = sum(not r.after for r in storm.reports)
    return 1 if any(r.broken for r in storm.reports) or played < len(numbers) else 0


def clean_up(folder: Path, broken: Path) -> None:
    """Remove the storm's folder, except the evidence of violations in ``broken``."""
    for path in folder.iterdir():
        if path != broken:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
    if broken.exists():
        print(f"evidence: {broken}")
    else:
        shutil.rmtree(folder, ignore_errors=True)


def print_summary(seed: str, reports: list[Report], wall_s: float) -> None:
    rounds = [r for r in reports if not r.after]
    kinds = collections.Counter(r.plan.fault.kind for r in rounds)
    broken = [r for r in reports if r.broken]
    for report in broken:
        print(f"round {report.plan.number} ({report.plan.fault}):")
        for violation in report.broken:
            print(f"    {violation.splitlines()[0]}")
    print("faults: " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()))
    held = sum(not r.broken for r in rounds)
    violations = sum(len(r.broken) for r in broken)
    print(f"seed {seed}: {held} of {len(rounds)} rounds held, {violations} violations, {wall_s:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
