"""``python -m tests.harness.interruptions``: interrupt other people's programs and count what each interruption costs.

Each training has 2 ranks, on Slurm on 2 nodes. The lanes on Slurm need root, and start the testbed unless it is up.
Exit status: 0 if clustertrain resumed every training at the right step with the right losses, 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clustertrain import fsio
from tests.harness.chaos_slurm import testbed
from tests.harness.interruptions.judge import Verdict
from tests.harness.interruptions.lane import Lane, draw_lane, play
from tests.harness.interruptions.programs import PROGRAMS
from tests.harness.interruptions.steps import Steps
from tests.harness.interruptions.subjects import TrainingEnded
from tests.harness.interruptions.table import find_faults, format_table, to_row
from tests.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "interruptions.json"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.interruptions", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", action="append", help="seed of the interruptions (repeatable; default: random)")
    parser.add_argument("--backend", action="append", choices=("local", "slurm"), help="only this backend (repeatable)")
    parser.add_argument("--system", action="append", choices=("clustertrain", "alone"), help="only this system")
    parser.add_argument("--program", action="append", choices=sorted(PROGRAMS), help="only this program (repeatable)")
    parser.add_argument("--kind", choices=("faults", "time-limit"), help="only faults, or only time limits")
    parser.add_argument("--table", action="store_true", help="print the table of the stored results, run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of the results, which are added to it")
    args = parser.parse_args()
    if args.table:
        print(format_table(fsio.read_json(args.out) or []))
        return 0
    lanes = list_lanes(args)
    on_slurm = any(lane.backend == "slurm" for lane in lanes)
    folder = Path(tempfile.mkdtemp(prefix="interruptions-"))
    failed = False
    with testbed.testbed() if on_slurm else contextlib.nullcontext():
        references: dict[str, Sequence[Steps]] = {}
        for number, lane in enumerate(lanes):
            rows, ok = play_lane(lane, folder / f"lane-{number}", references)
            failed = failed or not ok
            store(args.out, rows)
    print(format_table(fsio.read_json(args.out) or []))
    if failed:
        print(f"evidence: {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


def list_lanes(args: argparse.Namespace) -> list[Lane]:
    return [
        draw_lane(seed, program, system, backend, by_time_limit=by_time_limit)
        for seed in args.seed or [os.urandom(3).hex()]
        for backend in args.backend or ("local", "slurm")
        for by_time_limit in {"faults": (False,), "time-limit": (True,), None: (False, True)}[args.kind]
        for program in args.program or PROGRAMS
        for system in args.system or ("clustertrain", "alone")
        if system == "clustertrain" or (backend == "slurm" and PROGRAMS[program].has_own_answer)
    ]


def play_lane(lane: Lane, folder: Path, references: dict[str, Sequence[Steps]]) -> tuple[list[dict[str, Any]], bool]:
    """Return the rows of a lane's results, and whether they are as they have to be."""
    program = PROGRAMS[lane.program]
    if program.has_exact_resume and lane.program not in references:
        reference_folder = folder.with_name(f"{folder.name}-reference")
        reference_folder.mkdir()
        references[lane.program] = program.run_uninterrupted(reference_folder)
    verdicts: list[Verdict] = []
    faults: list[str] = []
    try:
        play(lane, folder, references.get(lane.program), verdicts)
    except (TrainingEnded, testbed.TestbedFailed) as e:
        faults.append(str(e))
    faults += find_faults(verdicts, program)
    for fault in faults:
        print(f"{lane}: {fault}", flush=True)
    rows = [to_row(lane, number, verdict) for number, verdict in enumerate(verdicts)]
    missing = len(lane.kinds) - len(verdicts)
    if missing:
        print(f"{lane}: {missing} of {len(lane.kinds)} interruptions were not reached", flush=True)
    return rows, lane.system == "alone" or not (faults or missing)


def store(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows to the file; rows of the same lane are replaced."""
    keys = {row["lane"] for row in rows}
    kept = [row for row in fsio.read_json(path) or [] if row["lane"] not in keys]
    fsio.write_json(path, [*kept, *rows])


if __name__ == "__main__":
    sys.exit(main())
