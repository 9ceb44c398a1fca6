"""Documents that the tests of the single commands do not print; the fixture of tests/unit checks them all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from clustertrain.cli.jobs import wait
from clustertrain.cli.plan import plan
from tests.unit.report import live_runs

NOW = 1.8e9


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    return tmp_path


def call(command: Any, *argv: str) -> tuple[Any, Any]:
    done = CliRunner().invoke(command, [*argv, "--json"], standalone_mode=False)
    assert done.exception is None, done.exception
    return done.return_value, json.loads(done.stdout)


def test_wait_prints_how_the_runs_ended(home: Path, documents_match_their_schemas: list[str]) -> None:
    run = live_runs.new_run(home, NOW)
    live_runs.begin(run, NOW, ["a"])
    live_runs.create_job("local-1", run, state="CANCELLED")
    run.cancel_marker.write_text("{}")
    code, document = call(wait, run.id)
    assert (code, document["runs"]) == (1, [{"run": run.id, "state": "cancelled", "reason": None}])
    assert documents_match_their_schemas == ["wait"]


def test_plans_for_several_sizes_and_tables(home: Path, documents_match_their_schemas: list[str]) -> None:
    _, sizes = call(plan, "--gpu-type", "h100", "--gpus", "8", "--gpus-range", "8-16")
    assert [row["gpus"] for row in sizes["sizes"]] == [8, 16] and sizes["sizes"][1]["efficiency"] <= 1.05
    table = home / "in.csv"
    table.write_text("gpu,seq,n_gpus,model\nh100,8192,8,llama3.1-8b\nnone,8192,8,llama3.1-8b\n")
    _, rows = call(plan, "--table", str(table))
    assert len(rows["rows"]) == 2 and rows["not_predicted"] == [2]
    assert documents_match_their_schemas == ["plan-gpus-range", "plan-table"]
