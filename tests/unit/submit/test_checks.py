"""The ordered list of checks, and its table in the docs."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from clustertrain.submit import checks
from clustertrain.submit.request import SubmitRequest
from clustertrain.submit.transaction import dry_run
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


def test_gpu_type_that_the_plan_does_not_use_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "home"))
    (tmp_path / "on_cpu.toml").write_text('[job]\ndevice = "cpu"\nbackend = "local"\n')

    def notes(**job: str) -> list[str]:
        request = SubmitRequest(target="on_cpu.toml", cwd=tmp_path, job=job)
        return [note for note in dry_run(request).plan.warnings if "--gpu-type" in note]

    (note,) = notes(gpu_type="h100")
    assert note.startswith("--gpu-type h100 is not used") and "add --device cuda" in note
    assert notes() == notes(gpu_type="h100", device="cpu") == []
