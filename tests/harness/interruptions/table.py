"""The table of interruptions: by program, system and kind."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from tests.harness.interruptions.judge import WARNED, Verdict
from tests.harness.interruptions.lane import Lane
from tests.harness.interruptions.programs import EVERY, Program

# A checkpoint that was under way at a kill does not count, and the ranks' logs may be a step apart.
MOST_LOST = 2 * EVERY + 1


def find_faults(verdicts: Sequence[Verdict], program: Program) -> list[str]:
    """Return what clustertrain must not let happen to ``program``."""
    faults = []
    for number, verdict in enumerate(verdicts):
        bound = 0 if verdict.kind in WARNED and program.stops_at_any_step else MOST_LOST
        problems = {
            "the ranks resumed at different steps": not verdict.ranks_agree,
            f"{verdict.skipped_steps} steps were skipped": verdict.skipped_steps > 0,
            f"{verdict.wrong_losses} losses are wrong": verdict.wrong_losses > 0,
            f"{verdict.lost_steps} steps were lost, at most {bound} may be": verdict.lost_steps > bound,
            "nothing restarted it": verdict.needed_hand,
        }
        faults += [f"interruption {number} ({verdict.kind}): {text}" for text, holds in problems.items() if holds]
    return faults


def to_row(lane: Lane, number: int, verdict: Verdict) -> dict[str, Any]:
    key = f"{lane.seed} {lane}"
    where = {"lane": key, "number": number, "program": lane.program, "system": lane.system, "backend": lane.backend}
    return {**where, **msgspec.to_builtins(verdict)}


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of the results."""
    lines = [
        "| program | system | interruption | count | nothing lost | steps repeated, mean (worst) | wrong resumes "
        "| needed a person |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, str], list[Verdict]] = {}
    for row in rows:
        fields = {name: row[name] for name in Verdict.__struct_fields__}
        groups.setdefault((row["program"], row["system"], row["kind"]), []).append(Verdict(**fields))
    for (program, system, kind), verdicts in sorted(groups.items()):
        lost = [v.lost_steps for v in verdicts]
        wrong = sum(v.wrong_losses > 0 or not v.ranks_agree or v.skipped_steps > 0 for v in verdicts)
        lines.append(
            f"| {program} | {system} | {kind} | {len(verdicts)} | {sum(n <= 0 for n in lost)} "
            f"| {statistics.mean(lost):.1f} ({max(lost)}) | {wrong} | {sum(v.needed_hand for v in verdicts)} |"
        )
    ours = [row for row in rows if row["system"] == "clustertrain"]
    return "\n".join([*lines, "", f"{len(rows)} interruptions, {len(ours)} of them with clustertrain"])
