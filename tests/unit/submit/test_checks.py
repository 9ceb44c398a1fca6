"""The ordered list of checks, and its table in the docs."""

from __future__ import annotations

import inspect

from clustertrain.submit import checks
from tests.paths import ROOT

PHASES = (
    ("request", checks.REQUEST_CHECKS),
    ("recipe", checks.RECIPE_CHECKS),
    ("resolved run", checks.RUN_CHECKS),
    ("plan", checks.PLAN_CHECKS),
)


def test_docs_table_lists_all_checks_in_order() -> None:
    rows = []
    for phase, functions in PHASES:
        for check in functions:
            summary = (inspect.getdoc(check) or "").partition("\n")[0]
            assert summary.startswith(("Refuse ", "Note ")), check.__name__
            module = check.__module__.removeprefix("clustertrain.submit.").replace(".", "/")
            rows.append(f"| {phase} | `{module}.{check.__name__}` | {summary} |\n")
    assert "".join(rows) in (ROOT / "docs" / "reference" / "submission-checks.md").read_text()


def test_checks_run_in_order_and_return_notes() -> None:
    seen: list[str] = []

    def first(subject: str) -> list[str]:
        seen.append(subject)
        return ["a", "b"]

    def second(subject: str) -> None:
        seen.append(subject)

    assert checks.run_checks((first, second, first), "run") == ["a", "b", "a", "b"]
    assert seen == ["run"] * 3
