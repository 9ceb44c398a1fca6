"""Submissions from repositories with hostile configuration, links, file modes, names and secrets."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.harness.fuzz.judge import Fault, FaultFound
from tests.harness.fuzz.play import InputClass
from tests.harness.fuzz.sandbox import CANARY, SECRET, Sandbox

TOUCH = f"touch {CANARY}"
CONFIGURATION = (
    f"[core]\n\tfsmonitor = {TOUCH}\n",
    f"[core]\n\tsshCommand = {TOUCH}\n\thooksPath = hooks\n",
    f"[core]\n\tpager = {TOUCH}\n\teditor = {TOUCH}\n\taskpass = {TOUCH}\n",
    f'[diff]\n\texternal = {TOUCH}\n[diff "x"]\n\ttextconv = {TOUCH}\n\tcommand = {TOUCH}\n',
    f'[filter "x=y"]\n\tclean = {TOUCH}\n',
    f'[filter "x"]\n\tclean = {TOUCH}; cat\n[diff]\n\tsubmodule = diff\n\tignoreSubmodules = none\n',
    f"[core]\n\tsshCommand = {TOUCH}\n\trepositoryformatversion = 1\n[extensions]\n\tpartialClone = origin\n"
    '[remote "origin"]\n\turl = ssh://host/x\n\tpromisor = true\n',
    f'[filter "x"]\n\tclean = {TOUCH}\n\tsmudge = {TOUCH}\n\tprocess = {TOUCH}\n\trequired = true\n',
    f"[alias]\n\tls-files = !{TOUCH}\n\tstatus = !{TOUCH}\n\trev-parse = !{TOUCH}\n",
    f"[gpg]\n\tprogram = {TOUCH}\n[log]\n\tshowSignature = true\n",
    f"[credential]\n\thelper = !{TOUCH}\n",
    f'[uploadpack]\n\tpackObjectsHook = {TOUCH}\n[remote "origin"]\n\turl = ext::{TOUCH}\n\tpromisor = true\n',
    "[include]\n\tpath = ../evil.config\n",
    "[core]\n\tworktree = ../../../outside\n",
    "[core]\n\tbare = true\n",
    "[core]\n\tuntrackedCache = maybe\n",
    "[broken",
)
ATTRIBUTES = ("* filter=x diff=x\n*.py filter=x\n", "* filter=x=y\n")
NAMES = (
    "-rf",
    "--exec=x",
    "two\nlines",
    'q"uote',
    "it's",
    "back\\slash",
    "é漢",
    "sp ace",
    "*",
    "..x",
    ":(top)x",
    "a" * 200,
)
SECRETS = (".env", ".env.local", "sub/.env", "id_rsa", "key.pem", ".netrc", ".git-credentials", ".aws/credentials",
           ".docker/config.json", "sub/credentials.json")  # fmt: skip
ACTIONS = ("config", "attributes", "nested config", "name", "link", "mode", "kind", "secret", "folder to link")
LINKS = (
    "/etc/passwd",
    ".env",
    "sub/.env",
    ".git/config",
    "../../outside/secret",
    "../../outside",
    ".",
    "loop",
    "missing",
    "/dev/zero",
    "..",
    "/",
)


def repositories() -> SearchStrategy[list[tuple[str, Any]]]:
    values = {
        "config": st.sampled_from(CONFIGURATION),
        "nested config": st.sampled_from(CONFIGURATION),
        "attributes": st.sampled_from(ATTRIBUTES),
        "name": st.sampled_from(NAMES),
        "link": st.tuples(st.sampled_from(("a", "sub/b", "loop", "src")), st.sampled_from(LINKS)),
        "mode": st.sampled_from((0o4755, 0o2755, 0o6777, 0o600, 0o400, 0o000, 0o1777)),
        "kind": st.sampled_from(("fifo", "socket", "hard link", "deep", "empty folder")),
        "secret": st.sampled_from(SECRETS),
        "folder to link": st.sampled_from(LINKS),
    }
    action_drawn = st.one_of([st.tuples(st.just(action), drawn) for action, drawn in values.items()])
    return st.lists(action_drawn, min_size=1, max_size=4)


def play(box: Sandbox, drawn: tuple[list[tuple[str, Any]], bool, bool]) -> None:
    actions, tracked, share = drawn
    root = _repository(box)
    for action, value in actions:
        _prepare(box, root, action, value)
    if tracked:
        # Without the repository's hooks and filters: only what `submit` starts is tested.
        argv = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-C", str(root), "add", "-A"]
        subprocess.run(argv, capture_output=True, check=False, timeout=30)
        box.canary.unlink(missing_ok=True)
    result = box.call([
        "submit", "--backend", "slurm", "--device", "cpu", "--nodes", "1", "--gpus", "1", "--json",
        *(["--share"] if share else []), str(root / "train.py"),
    ])  # fmt: skip
    runs = [p for p in (box.home / "runs").iterdir() if p.name.startswith("train-")]
    if result.code == 0:
        for run in runs:
            _judge_snapshot(run)
    elif any((run / "job.sh").exists() for run in runs):
        raise FaultFound(Fault("leak", "a run", f"remains after a failed submission: {result.err}"))
    for run in runs:
        shutil.rmtree(run)


def _repository(box: Sandbox) -> Path:
    template = box.root / "repository"
    if not template.exists():
        (template / "src").mkdir(parents=True)
        (template / "src" / "lib.py").write_text("x = 1\n")
        (template / "train.py").write_text("print('train')\n")
        subprocess.run(["git", "init", "-q", str(template)], check=True)
        subprocess.run(["git", "-C", str(template), "add", "-A"], check=True)
        author = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(template), *author, "commit", "-q", "-m", "first"], check=True)
    root = box.fresh("work") / "project"
    shutil.copytree(template, root)
    return root


def _prepare(box: Sandbox, root: Path, action: str, value: Any) -> None:
    if action == "config":
        with (root / ".git" / "config").open("a") as f:
            f.write(box.arm(value))
        (root / "evil.config").write_text(box.arm(CONFIGURATION[0]))
        hook = root / "hooks" / "post-index-change"
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(box.arm(f"#!/bin/sh\n{TOUCH}\n"))
        hook.chmod(0o755)
    elif action == "nested config":
        nested = root / "nested"
        if not nested.exists():
            shutil.copytree(box.root / "repository", nested)
        with (nested / ".git" / "config").open("a") as f:
            f.write(box.arm(value))
    elif action == "attributes":
        (root / ".gitattributes").write_text(value)
    elif action == "name":
        (root / value).write_text("x = 2\n")
    elif action == "link":
        path = root / value[0]
        path.parent.mkdir(exist_ok=True)
        if not (path.exists() or path.is_symlink()):
            path.symlink_to(value[1])
    elif action == "mode":
        if not (root / "src").is_symlink():
            (root / "src" / "lib.py").chmod(value)
    elif action == "kind":
        _odd_file(box, root, value)
    elif action == "secret":
        path = root / value
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"TOKEN={SECRET}\n")
        path.chmod(0o600)
    elif (root / "src").is_dir() and not (root / "src").is_symlink():
        shutil.rmtree(root / "src")
        (root / "src").symlink_to(value)


def _odd_file(box: Sandbox, root: Path, kind: str) -> None:
    path = root / f"odd {kind}"
    if path.exists():
        return
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as s:
            short = box.site / "tmp" / "s"
            short.unlink(missing_ok=True)
            s.bind(str(short))
            short.rename(path)
    elif kind == "hard link":
        path.hardlink_to(root / "train.py")
    elif kind == "deep":
        path = path.joinpath(*"d" * 60)
        path.mkdir(parents=True)
        (path / "x.py").write_text("")
    else:
        path.mkdir()


def _judge_snapshot(run: Path) -> None:
    """Raise FaultFound if the snapshot contains a secret, or a setuid or setgid bit."""
    for folder, _, files in os.walk(run):
        for name in files:
            path = Path(folder, name)
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                continue
            if status.st_mode & (stat.S_ISUID | stat.S_ISGID):
                raise FaultFound(Fault("leak", "mode", f"{path}: {stat.filemode(status.st_mode)}"))
            if SECRET.encode() in path.read_bytes():
                raise FaultFound(Fault("leak", "secret", f"{path} has the content of a secret file"))


CLASSES = (InputClass("repositories", lambda: st.tuples(repositories(), st.booleans(), st.booleans()), play, 250),)
