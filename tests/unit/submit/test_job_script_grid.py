"""Scripts rendered for a grid of options: shellcheck, bash, and the values that a job sees.

tests/slurm/test_script_grid.py checks them with Slurm.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness.script_grid import cases, covering
from tests.harness.script_grid.cases import Scripts

pytestmark = pytest.mark.long
# Just enough of Slurm to be detected: hundreds of starts of tests/fakes/slurm, which is Python, would take seconds.
ANSWERS = {"sbatch": "echo slurm-wlm 22.05.8", "scontrol": "exit 1"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("grid")
    (site / "bin").mkdir()
    for name, answer in ANSWERS.items():
        (site / "bin" / name).write_text(f"#!/bin/sh\n{answer}\n")
        (site / "bin" / name).chmod(0o755)
    return site


@pytest.fixture(scope="module")
def env(site: Path) -> dict[str, str]:
    return {**cases.submission_environment(site), "PATH": f"{site / 'bin'}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def grid(site: Path, env: dict[str, str]) -> list[Scripts]:
    return cases.render(cases.make_cases(site), site, env)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1, 4, 2), (5, 5, 2, 3, 3, 2)])
def test_grid_rows_cover_all_pairs(sizes: Sequence[int]) -> None:
    rows = covering.pairwise(sizes)
    covered = {pair for row in rows for pair in covering.pairs_of(row)}
    assert covered == {pair for row in itertools.product(*map(range, sizes)) for pair in covering.pairs_of(row)}
    assert rows == covering.pairwise(sizes) and len(set(rows)) == len(rows)


def test_shellcheck_and_bash_accept_grid_scripts(grid: list[Scripts], site: Path, env: dict[str, str]) -> None:
    # No two cases have the same arguments or the same scripts.
    assert len({scripts.case.args for scripts in grid}) == len(grid) >= 200
    assert len({scripts.submitted.read_text() + scripts.all[-1].read_text() for scripts in grid}) == len(grid)
    text_only = cases.render(cases.make_text_cases(len(grid)), site, env)
    # Most runs of a sweep differ only in their spec.toml.
    different = {path.read_text(): path for scripts in (*grid, *text_only) for path in scripts.all}
    assert cases.shellcheck(list(different.values())) == ""


def test_values_reach_job_unchanged(grid: list[Scripts], site: Path, env: dict[str, str]) -> None:
    for scripts in grid:
        environment = cases.environment_of(scripts, str(site))
        expected = {**scripts.case.exports, "CLUSTERTRAIN_HOME": env["CLUSTERTRAIN_HOME"]}
        assert {name: environment.get(name) for name in expected} == expected, scripts
    assert not list(site.rglob("pwned"))


def test_dry_run_prints_grid_scripts(grid: list[Scripts], site: Path, env: dict[str, str]) -> None:
    for scripts in grid[::90]:
        argv = [sys.executable, "-m", "clustertrain", scripts.case.command, "--dry-run", "--json", *scripts.case.args]
        result = subprocess.run(argv, cwd=site, env=env, capture_output=True, text=True, check=True, timeout=60)
        assert sorted(cases.texts_in(result.stdout)) == sorted(path.read_text() for path in scripts.all)
