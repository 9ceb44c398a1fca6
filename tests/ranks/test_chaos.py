"""Three rounds of ``make chaos-checkpoint``: short runs with faults, each continued to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.chaos.faults import KINDS
from tests.harness.chaos.rounds import Plan, Reference, plan_of, play, undisturbed
from tests.harness.parity.measure import one_thread

PLANS = [plan_of("317", number) for number in range(3)]


@pytest.mark.long
def test_rounds_cover_all_kinds_of_faults() -> None:
    """If this fails because the set of faults has changed, choose another seed."""
    assert {f.kind for p in PLANS for f in p.faults} >= KINDS - {"local damage"}
    assert any(p.local for p in PLANS) and any(p.overlap for p in PLANS)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    with one_thread():
        return {s: undisturbed(s, tmp_path_factory.mktemp(s)) for s in {p.strategy for p in PLANS}}


@pytest.mark.ranks
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)
def test_disturbed_run_ends_like_undisturbed_run(plan: Plan, references: dict[str, Reference], tmp_path: Path) -> None:
    with one_thread():
        report = play(plan, references[plan.strategy], tmp_path / "round")
    assert not report.broken, "\n".join([str(plan), *report.story, report.broken])
