"""The interpreters of a job: which run the ranks and the agents, and what is refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import clustertrain
from clustertrain.config.job import ScriptSpec
from clustertrain.errors import UsageError
from clustertrain.submit.program import inspect_python, job_python
from clustertrain.submit.program.command import build_script_spec
from clustertrain.submit.program.job_python import JobPython
from clustertrain.submit.request import SubmitRequest

VERSION = clustertrain.__version__
AGENTS = {"clustertrain": VERSION, "msgspec": ""}
TRAINER = AGENTS | {"torch": "2.13.0+cpu"}


def make_python(path: Path, packages: dict[str, str], version: tuple[int, int] = (3, 12)) -> str:
    """Write an interpreter that only says what it has."""
    answer = json.dumps({"version": version, "packages": packages})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    return str(path)


def choose(folder: Path, requested: str = "", script: str = "", **options: Any) -> JobPython:
    program = None
    if script:
        (folder / "train.py").write_text(script)
        program = ScriptSpec(path=str(folder / "train.py"), args=("--lr", "1"), cwd=str(folder))
    request = SubmitRequest(cwd=folder, environ={"PATH": str(folder / "shell")})
    return job_python.choose(requested, program, request, {}, has_setup=options.get("has_setup", False))


def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter of these tests one without torch."""
    answer = {"version": sys.version_info[:2], "packages": AGENTS}
    monkeypatch.setattr(inspect_python, "inspect", lambda names: answer)


def test_own_python_is_the_default(tmp_path: Path) -> None:
    make_python(tmp_path / "shell" / "python", TRAINER)
    for script in ("", "import clustertrain\n"):
        chosen = choose(tmp_path, script=script)
        assert (chosen.ranks.path, chosen.agents.path, chosen.note) == (sys.executable, sys.executable, "")
        assert chosen.ranks.packages is not None and chosen.ranks.packages["clustertrain"] == VERSION
        assert chosen.ranks.find_trainer_problem() is None


@pytest.mark.parametrize(("packages", "is_used"), [({"torch": "2.3.1"}, True), ({}, False), (None, False)])
def test_plain_script_runs_with_the_python_of_the_shell(
    tmp_path: Path, packages: dict[str, str] | None, is_used: bool
) -> None:
    """As at the prompt, unless it has no torch and that of submit has, or it does not run here."""
    python = make_python(tmp_path / "shell" / "python", packages or {})
    if packages is None:
        Path(python).write_text("#!/bin/sh\nexit 1\n")
    chosen = choose(tmp_path, script="print()\n")
    assert (chosen.ranks.path, chosen.agents.path) == (python if is_used else sys.executable, sys.executable)
    assert (
        chosen.note
        == f"train.py opens no session of clustertrain, so it runs as a command: {chosen.ranks.path} train.py"
    )


def test_script_that_cannot_be_parsed_is_noted(tmp_path: Path) -> None:
    """It may be valid for the Python of the ranks."""
    make_python(tmp_path / "shell" / "python", TRAINER)
    fault = f"{tmp_path / 'train.py'}, line 1 is not valid for Python"
    plain = choose(tmp_path, script="print 'started'\n")
    assert plain.note.startswith("train.py opens no session of clustertrain, so it runs as a command: ")
    assert f"; {fault}" in plain.note
    assert choose(tmp_path, script="print 'started'; import clustertrain\n").note.startswith(fault)


def test_named_python_runs_ranks_and_agents(tmp_path: Path) -> None:
    python = make_python(tmp_path / "env" / "bin" / "python", TRAINER)
    make_python(tmp_path / "shell" / "python3.12", TRAINER)
    for requested, path in (
        (python, python), ("env/bin/python", python), ("python3.12", str(tmp_path / "shell" / "python3.12")),
    ):  # fmt: skip
        chosen = choose(tmp_path, requested)
        assert (chosen.ranks.path, chosen.agents.path) == (path, path)
    with pytest.raises(UsageError, match="--python python4: command not found"):
        choose(tmp_path, "python4")


@pytest.mark.parametrize(
    ("packages", "version", "message"),
    [
        ({"torch": "2.13.0"}, (3, 12), "clustertrain is not installed for"),
        ({"clustertrain": VERSION, "torch": "2.13.0"}, (3, 12), "finds clustertrain but not msgspec, which it needs"),
        (AGENTS, (3, 12), "torch is not installed for"),
        (AGENTS | {"clustertrain": "9.9", "torch": "2.13.0"}, (3, 12), f"has clustertrain 9.9, and {sys.executable}"),
        (AGENTS | {"torch": "2.3.1"}, (3, 12), "has torch 2.3.1, and the trainer and sessions need"),
        (TRAINER, (3, 9), "is Python 3.9, and clustertrain needs 3.11 or newer"),
    ],
)
def test_python_that_cannot_run_the_ranks(
    packages: dict[str, str], version: tuple[int, int], message: str, tmp_path: Path
) -> None:
    python = make_python(tmp_path / "python", packages, version)
    problem = choose(tmp_path, python).ranks.find_trainer_problem()
    assert problem is not None and message in problem.message and python in problem.message
    assert "--python" in str(problem.fix)
    # A script with a session is not changed, and a check refuses it.
    session = choose(tmp_path, python, "import clustertrain as ct\n")
    assert session.script is not None and not session.script.command
    # One without runs as a command, whose ranks need neither package.
    plain = choose(tmp_path, python, "print()\n")
    assert plain.script is not None and ("without torch" in plain.note) == ("torch" not in packages)
    assert plain.script.command == (python, "-u", str(tmp_path / "train.py"), "--lr", "1")
    assert plain.script.path_index == 2 and not plain.script.args
    has_agents = packages.get("clustertrain") == VERSION and "msgspec" in packages and version > (3, 9)
    assert plain.agents.path == (python if has_agents else sys.executable)


def test_python_that_cannot_be_asked_is_trusted(tmp_path: Path) -> None:
    """It may exist on the nodes only, or be built for their processor."""
    (tmp_path / "broken").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "broken").chmod(0o755)
    (tmp_path / "other_processor").write_bytes(b"\x7fELF")
    (tmp_path / "other_processor").chmod(0o755)
    for name in ("missing", "broken", "other_processor"):
        chosen = choose(tmp_path, str(tmp_path / name), "import clustertrain\n")
        assert chosen.ranks.packages is None and chosen.ranks.find_trainer_problem() is None
        assert chosen.agents is chosen.ranks and chosen.script is not None and not chosen.script.command


def test_setup_of_the_profile_may_bring_what_is_missing(tmp_path: Path) -> None:
    python = make_python(tmp_path / "python", {})
    for script in ("import clustertrain\n", "print()\n"):
        assert (chosen := choose(tmp_path, python, script, has_setup=True)).agents is chosen.ranks


def test_python_of_the_shell_where_only_that_has_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_torch(monkeypatch)
    assert choose(tmp_path).ranks.path == sys.executable  # there is no other
    python = make_python(tmp_path / "shell" / "python", {"torch": "2.13.0"})
    for script in ("", "import clustertrain\n"):  # without clustertrain it is of no use
        assert choose(tmp_path, script=script).ranks.path == sys.executable
    plain = choose(tmp_path, script="import torch\n")
    assert (plain.ranks.path, plain.agents.path) == (python, sys.executable)
    make_python(tmp_path / "shell" / "python", TRAINER)
    job_python._run_inspection.cache_clear()
    for script in ("", "import clustertrain\n"):
        chosen = choose(tmp_path, script=script)
        assert (chosen.ranks.path, chosen.agents.path) == (python, python)
        assert f"the ranks run with {python}, the python of this shell" in chosen.note


def test_python_of_a_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    python = make_python(tmp_path / "env" / "python", {"torch": "2.3.1"})
    environ = {"PATH": os.environ["PATH"]}

    def build(*command: str) -> ScriptSpec:
        return build_script_spec(SubmitRequest(command=command, cwd=tmp_path, job={"python": python}, environ=environ))

    script = build("python", "train.py")
    assert script.command == (python, "train.py")
    for program in ("sh", sys.executable):
        with pytest.raises(UsageError, match=f"--python {python}: no effect on {program}"):
            build(program, "train.py")
    request = SubmitRequest(cwd=tmp_path, environ=environ)
    chosen = job_python.choose(python, script, request, {}, has_setup=False)
    assert (chosen.agents.path, chosen.script) == (sys.executable, script)


def test_inspection_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError\n")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.3.1+cu118'\n")
    (tmp_path / "wandb").mkdir()  # a folder that wandb writes
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    python = job_python._run_inspection(sys.executable, tuple(environ.items()))
    assert python.packages is not None and python.packages["torch"] == "2.3.1+cu118"
    assert python.version == sys.version_info[:2]
