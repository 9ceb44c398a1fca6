"""The judge of interruptions finds what must not happen."""

from __future__ import annotations

import itertools
from pathlib import Path

from clustertrain import fsio
from tests.harness.interruptions.__main__ import RESULTS
from tests.harness.interruptions.judge import Verdict, judge
from tests.harness.interruptions.lane import draw_lane
from tests.harness.interruptions.programs import EVERY, PROGRAMS, TOTAL
from tests.harness.interruptions.steps import Steps, read_steps
from tests.harness.interruptions.table import MOST_LOST, find_faults, format_table, to_row
from tests.paths import ROOT

PROGRAM = PROGRAMS["DDP with a handler"]
REFERENCE = [{step: f"{rank}.{step}" for step in range(1, 101)} for rank in (0, 1)]


def part(first: int, last: int) -> list[Steps]:
    return [{step: whole[step] for step in range(first, last + 1)} for whole in REFERENCE]


def verdict(kind: str, before: list[Steps], after: list[Steps], *, needed_hand: bool = False) -> Verdict:
    return judge(kind, before, after, REFERENCE, needed_hand=needed_hand)


def test_correct_resumes_have_no_faults() -> None:
    resumes = [
        verdict("preemption", part(1, 40), part(41, 60)),
        verdict("kill -9", part(1, 45), part(41, 60)),
        verdict("node loss", part(1, MOST_LOST), part(1, 60)),
    ]
    assert find_faults(resumes, PROGRAM) == []
    assert [v.lost_steps for v in resumes] == [0, 5, MOST_LOST]


def test_each_fault_is_found() -> None:
    shifted = [{step: whole[step - 1] for step in range(41, 50)} for whole in REFERENCE]
    cases = {
        "1 steps were lost, at most 0": verdict("preemption", part(1, 41), part(41, 50)),
        "42 steps were lost, at most 41": verdict("kill -9", part(1, 82), part(41, 50)),
        "2 steps were skipped": verdict("preemption", part(1, 40), part(43, 50)),
        "18 losses are wrong": verdict("preemption", part(1, 40), shifted),
        "resumed at different steps": verdict("kill -9", part(1, 45), [part(41, 50)[0], part(42, 50)[1]]),
        "nothing restarted it": verdict("kill -9", part(1, 45), part(41, 50), needed_hand=True),
    }
    for text, case in cases.items():
        assert any(text in fault for fault in find_faults([case], PROGRAM)), text


def test_program_that_cannot_stop_at_any_step_goes_back_to_its_checkpoint() -> None:
    case = verdict("preemption", part(1, 45), part(41, 50))
    assert find_faults([case], PROGRAM)
    assert find_faults([case], PROGRAMS["Accelerate"]) == []


def test_drawn_interruptions_have_a_checkpoint_between_them() -> None:
    for by_time_limit in (False, True):
        lane = draw_lane("7", PROGRAM.name, "clustertrain", "slurm", by_time_limit=by_time_limit)
        assert lane == draw_lane("7", PROGRAM.name, "clustertrain", "slurm", by_time_limit=by_time_limit)
        bounds = [0, *lane.at_steps, TOTAL]
        assert all(b - a > EVERY for a, b in itertools.pairwise(bounds))
    assert set(lane.kinds) == {"time limit"}


def test_programs_have_the_texts_that_are_edited(tmp_path: Path) -> None:
    for program in PROGRAMS.values():
        for alone in (False, True):
            compile(program.write(tmp_path, alone=alone, pace=0.2).read_text(), program.file, "exec")


def test_truncated_last_line_is_no_step(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("STEP 1 0.5\nother\nSTEP 2 0.25\nSTEP 3 0.1")
    assert read_steps(tmp_path / "log") == {1: "0.5", 2: "0.25"}
    assert read_steps(tmp_path / "missing") == {}


def test_table_counts_by_program_system_and_kind() -> None:
    lane = draw_lane("7", PROGRAM.name, "alone", "slurm", by_time_limit=False)
    rows = [
        to_row(lane, 0, verdict("preemption", part(1, 40), part(41, 60))),
        to_row(lane, 1, verdict("preemption", part(1, 59), part(41, 60), needed_hand=True)),
    ]
    assert "| DDP with a handler | alone | preemption | 2 | 1 | 9.5 (19) | 0 | 1 |" in format_table(rows)


def test_page_has_the_table_of_the_stored_results() -> None:
    page = (ROOT / "docs" / "reference" / "interruptions.md").read_text()
    assert format_table(fsio.read_json(RESULTS) or []) in page
