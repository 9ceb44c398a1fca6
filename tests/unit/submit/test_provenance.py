"""record.json."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from clustertrain.submit import provenance


def git(folder: Path, *argv: str) -> None:
    options = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", *options, "-C", folder, *argv], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "-b", "work")
    (tmp_path / "a.py").write_text("one\n")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_git_state_has_commit_branch_and_diff(repository: Path) -> None:
    clean = provenance.read_git_state(repository)
    assert clean is not None and len(clean["commit"]) == 40 and clean["branch"] == "work"
    assert clean["dirty"] is False and clean["diff"] == ""
    (repository / "a.py").write_text("two\n")
    dirty = provenance.read_git_state(repository)
    assert dirty is not None and dirty["dirty"] is True and "+two" in dirty["diff"] and dirty["diff_truncated"] is False


def test_long_diff_is_cut(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "DIFF_LIMIT_BYTES", 100)
    (repository / "a.py").write_text("ü" * 500 + "\n")
    state = provenance.read_git_state(repository)
    assert state is not None and state["diff_truncated"] is True and len(state["diff"].encode()) <= 100


def test_git_state_is_none_without_repository_or_commit(tmp_path: Path) -> None:
    assert provenance.read_git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert provenance.read_git_state(tmp_path) is None


def test_record_is_json_with_versions_and_argv(repository: Path) -> None:
    record = provenance.collect(["clustertrain", "submit"], repository, repository)
    assert json.loads(json.dumps(record)) == record
    assert {"time", "user", "host", "cwd", "argv", "clustertrain", "python", "packages", "git"} <= set(record)
    assert "torch" in record["packages"]
