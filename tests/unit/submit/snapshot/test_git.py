"""Programs in the configuration of a repository do not run when its code is copied and recorded."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from clustertrain.errors import CommandFailed
from clustertrain.submit import provenance
from clustertrain.submit.snapshot import code_snapshot, git


def run_git(folder: Path, *argv: str) -> None:
    options = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", *options, "-C", folder, *argv], check=True, capture_output=True)


def make_repository(root: Path) -> Path:
    (root / "src").mkdir(parents=True)
    (root / "train.py").write_text("print('train')\n")
    (root / "src" / "lib.py").write_text("x = 1\n")
    (root / ".gitattributes").write_text("* filter=evil diff=evil\n")
    run_git(root.parent, "init", "-q", root.name)
    run_git(root, "add", "-A")
    run_git(root, "commit", "-q", "-m", "first")
    return root


def arm(root: Path, canary: Path) -> None:
    """Make every program that the configuration can name touch the canary."""
    touch = f"touch {canary}"
    hooks = root / ".git" / "armed"
    hooks.mkdir()
    for name in ("post-index-change", "post-checkout", "reference-transaction", "fsmonitor-watchman"):
        (hooks / name).write_text(f"#!/bin/sh\n{touch}\n")
        (hooks / name).chmod(0o755)
    with (root / ".git" / "config").open("a") as f:
        f.write(
            f"[core]\n\tfsmonitor = {touch}\n\thooksPath = {hooks}\n\tsshCommand = {touch}\n\tpager = {touch}\n"
            f'[diff]\n\texternal = {touch}\n\tsubmodule = log\n[diff "evil"]\n\ttextconv = {touch}\n'
            f"\tcommand = {touch}\n"
            f'[filter "evil"]\n\tclean = {touch}; cat\n\tsmudge = {touch}\n\tprocess = {touch}\n\trequired\n'
            f"[alias]\n\tls-files = !{touch}\n\tstatus = !{touch}\n[credential]\n\thelper = !{touch}\n"
        )


def test_repository_programs_are_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    root = make_repository(tmp_path / "project")
    nested = make_repository(root / "nested")
    run_git(root, "add", "-A")  # recorded like the commit of a submodule
    for repository in (root, nested):
        arm(repository, canary)
        (repository / "train.py").write_text("print('edited')\n")
        os.utime(repository / "src" / "lib.py", (1, 1))  # so that git reads it again
    (tmp_path / "run").mkdir()
    snapshot = code_snapshot.take_snapshot(root / "train.py", tmp_path / "run" / "code")
    assert snapshot.root == root and (tmp_path / "run" / "code" / "nested" / "src" / "lib.py").is_file()
    assert not code_snapshot.is_git_ignored(root / "train.py")
    state = provenance.read_git_state(root)
    assert state is not None and state["dirty"] and "+print('edited')" in state["diff"]
    assert not canary.exists()


def test_partial_clone_fetches_nothing(tmp_path: Path) -> None:
    root = make_repository(tmp_path / "project")
    blob = subprocess.run(["git", "-C", root, "rev-parse", "HEAD:train.py"], text=True, capture_output=True, check=True)
    name = blob.stdout.strip()
    (root / ".git" / "objects" / name[:2] / name[2:]).unlink()
    with (root / ".git" / "config").open("a") as f:
        f.write(
            f"[core]\n\tsshCommand = touch {tmp_path / 'struck'}\n\trepositoryformatversion = 1\n[extensions]\n"
            '\tpartialClone = origin\n[remote "origin"]\n\turl = ssh://host/x\n\tpromisor = true\n'
        )
    (root / "train.py").write_text("print('edited')\n")
    provenance.read_git_state(root)
    assert not (tmp_path / "canary").exists()


def test_user_filters_stay_enabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user").write_text('[filter "evil"]\n\tclean = tr a-z A-Z\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "user"))
    root = make_repository(tmp_path / "project")
    with (root / ".git" / "config").open("a") as f:
        f.write(f'[filter "evil"]\n\tclean = touch {tmp_path / "canary"}\n')
    (root / "train.py").write_text("print('edited')\n")
    state = provenance.read_git_state(root)
    assert state is not None and "+PRINT('EDITED')" in state["diff"] and not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["a=b", "a.b=c.d"])
def test_filter_that_cannot_be_disabled_is_not_run(name: str, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "project")
    (root / ".gitattributes").write_text(f"* filter={name}\n")
    with (root / ".git" / "config").open("a") as f:
        f.write(f'[filter "{name}"]\n\tclean = touch {tmp_path / "canary"}\n')
    (root / "train.py").write_text("print('edited')\n")
    assert provenance.read_git_state(root) is None and not (tmp_path / "canary").exists()
    with pytest.raises(CommandFailed, match="disabled"):
        git.list_filter_overrides(root)


def test_diff_omits_secret_files(tmp_path: Path) -> None:
    root = make_repository(tmp_path / "project")
    (root / "conf").mkdir()
    for name in (".env", "conf/.env", "new.py"):
        (root / name).write_text("TOKEN=s3cret\n" if "env" in name else "x = 2\n")
    run_git(root, "add", "-A")
    state = provenance.read_git_state(root)
    assert state is not None and "x = 2" in state["diff"] and "s3cret" not in json.dumps(state)
    assert "s3cret" not in json.dumps(provenance.read_git_state(root / "conf"))


@pytest.mark.parametrize(
    ("argv", "recorded"),
    [
        (["submit", "--env", "TOKEN=s3cret=x", "train.py"], ["submit", "--env", "TOKEN=***", "train.py"]),
        (["submit", "--env=TOKEN=s3cret"], ["submit", "--env=TOKEN=***"]),
        (["--set", "telemetry.alerts.webhook=https://s3cret"], ["--set", "telemetry.alerts.webhook=***"]),
        (["--set=telemetry.alerts={webhook='s3cret'}"], ["--set=telemetry.alerts=***"]),
        (["--set", "optim.lr=1", "--nodes=2", "--env"], ["--set", "optim.lr=1", "--nodes=2", "--env"]),
    ],
)
def test_recorded_argv_has_no_secrets(argv: list[str], recorded: list[str]) -> None:
    assert provenance.redact_argv(argv) == recorded
