"""The files that GitHub reads fit their schemas, pin what they use, ask for few rights, and have sound scripts."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.paths import ROOT

GITHUB = ROOT / ".github"
ACTION = ROOT / "slurm" / "testbed" / "action.yml"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
EXPRESSION = re.compile(r"\$\{\{.*?\}\}")


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def list_steps(path: Path) -> list[dict[str, Any]]:
    document = load(path)
    jobs = document["jobs"].values() if "jobs" in document else [document["runs"]]
    return [step for job in jobs for step in job["steps"]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("schema", "paths"),
    [
        ("github-workflows", WORKFLOWS),
        ("github-actions", [ACTION]),
        ("dependabot", [GITHUB / "dependabot.yml"]),
        ("github-issue-forms", [GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml" for name in ("bug", "cluster", "feature")]),
        ("github-issue-config", [GITHUB / "ISSUE_TEMPLATE" / "config.yml"]),
        ("citation-file-format", [ROOT / "CITATION.cff"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_fit_their_published_schema(schema: str, paths: list[Path]) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(path: Path) -> None:
    for used in re.findall(r"uses: (.*)", path.read_text()):
        assert used.startswith("./") or re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", used), used


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_have_a_time_limit_and_only_the_rights_that_they_name(path: Path) -> None:
    document = load(path)
    assert document["permissions"] == {} and "concurrency" in document
    for name, job in document["jobs"].items():
        assert job["timeout-minutes"] <= 240, name
        writes = {right for right, level in job["permissions"].items() if level != "read"}
        assert not writes or "environment" in job, f"{name} writes without an environment: {writes}"


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda path: path.stem)
def test_scripts_of_steps_pass_shellcheck(path: Path, tmp_path: Path) -> None:
    scripts = [step["run"] for step in list_steps(path) if "run" in step]
    for number, script in enumerate(scripts):
        # An expression becomes a part of the script before bash reads it: values belong into env.
        assert not EXPRESSION.search(script), script
        (tmp_path / f"{number}.sh").write_text(f"#!/bin/bash\nset -eo pipefail\n{script}")
    files = sorted(tmp_path.glob("*.sh"))
    if files:
        # SC1091: files of the repository, in variables. SC2016: a script for another shell.
        command = [Path(sys.executable).parent / "shellcheck", "-e", "SC1091,SC2016", *files]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout


def test_python_versions_are_those_of_the_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)]
    jobs = load(GITHUB / "workflows" / "ci.yml")["jobs"]
    for job in ("fast", "wheel"):
        assert jobs[job]["strategy"]["matrix"]["python"] == declared
    assert project["requires-python"] == f">={declared[0]}"


def test_make_targets_of_the_workflows_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    used = {m for path in WORKFLOWS for m in re.findall(r"run: make ([\w-]+)", path.read_text())}
    assert used and [target for target in used if not re.search(rf"^{target}[: ]", makefile, re.MULTILINE)] == []


@pytest.mark.parametrize(
    ("tag", "heading", "message"),
    [
        ("v1.2.3", "## [1.2.3] - 2026-11-29", ""),
        ("v1.2.4", "## [1.2.3] - 2026-11-29", "the tag is v1.2.4, the version in pyproject.toml 1.2.3\n"),
        ("v1.2.3", "## [1.2.3] - not released yet", "CHANGELOG.md has no section '## [1.2.3] - DATE'\n"),
        ("v1.2.3", "## [1x2.3] - 2026-11-29", "CHANGELOG.md has no section '## [1.2.3] - DATE'\n"),
    ],
)
def test_release_needs_its_version_and_a_dated_section(tag: str, heading: str, message: str, tmp_path: Path) -> None:
    step = next(s for s in list_steps(GITHUB / "workflows" / "release.yml") if "changelog" in s.get("name", ""))
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=tmp_path, env={"TAG": tag, "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == (message, 1 if message else 0), done.stderr
