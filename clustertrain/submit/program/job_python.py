"""The interpreters of a job: that of the ranks, which may differ from the one that runs ``submit``, and the agents'.

The ranks of a recipe or of a script that opens a session need clustertrain and torch in their interpreter; those of a
command or of a plain script need neither (docs/decisions/0056).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

import clustertrain
from clustertrain import extras, proc, settings
from clustertrain.config.job import ScriptSpec
from clustertrain.errors import CommandFailed, UnsuitableEnvironment, UsageError
from clustertrain.submit.program import inspect_python, session_search
from clustertrain.submit.program.session_search import SessionUse
from clustertrain.submit.request import SubmitRequest

TIMEOUT_S = 60.0  # for an interpreter on a busy network file system
MIN_PYTHON = (3, 11)  # as in pyproject.toml
# A dependency of the agents: with a checkout on PYTHONPATH, any Python finds clustertrain.
_DEPENDENCY = "msgspec"
_NAMES = ("clustertrain", _DEPENDENCY, *extras.EXTRAS)


@dataclass(frozen=True)
class Interpreter:
    """A Python and what it can import."""

    path: str
    version: tuple[int, int] = (0, 0)
    packages: Mapping[str, str] | None = None
    """Versions of clustertrain, its dependency and the packages in :data:`extras.EXTRAS`, by import name. None: it
    cannot be asked on this machine."""

    def lacks(self, package: str) -> bool:
        """Return whether ``package`` is known to be missing."""
        return self.packages is not None and package not in self.packages

    def find_agent_problem(self) -> UnsuitableEnvironment | None:
        """Return why this interpreter cannot run the agents of a job of this clustertrain; None if it can or may."""
        if self.packages is None:
            return None
        if self.version < MIN_PYTHON:
            return UnsuitableEnvironment(
                f"{self.path} is Python {_dotted(self.version)}, and clustertrain needs {_dotted(MIN_PYTHON)} or newer",
                fix=_OTHER_PYTHON,
            )
        if "clustertrain" not in self.packages:
            fix = f"{extras.install_command('torch', self.path)}, or {_OTHER_PYTHON}"
            return UnsuitableEnvironment(f"clustertrain is not installed for {self.path}", fix=fix)
        if _DEPENDENCY not in self.packages:
            return UnsuitableEnvironment(
                f"{self.path} finds clustertrain but not {_DEPENDENCY}, which it needs",
                fix=f"{extras.install_command('torch', self.path)}, or {_OTHER_PYTHON}",
            )
        version = self.packages["clustertrain"]
        if version != clustertrain.__version__:
            return UnsuitableEnvironment(
                f"{self.path} has clustertrain {version}, and {sys.executable}, which runs this command, has "
                f"{clustertrain.__version__}",
                fix=f"install the same version for both, or {_OTHER_PYTHON}",
            )
        return None

    def find_trainer_problem(self) -> UnsuitableEnvironment | None:
        """Return why this interpreter cannot run ranks of the trainer or of a session; None if it can or may."""
        problem = self.find_agent_problem()
        if problem is not None or self.packages is None:
            return problem
        if "torch" not in self.packages:
            install = extras.install_command("torch", self.path)
            return UnsuitableEnvironment(
                f"torch is not installed for {self.path}", fix=f"{install}, or {_OTHER_PYTHON}"
            )
        numbers = re.match(r"(\d+)\.(\d+)", self.packages["torch"])
        if numbers and (int(numbers[1]), int(numbers[2])) < extras.MIN_TORCH:
            return UnsuitableEnvironment(
                f"{self.path} has torch {self.packages['torch']}, and the trainer and sessions need "
                f"{_dotted(extras.MIN_TORCH)} or newer",
                fix=f"{_OTHER_PYTHON}. A program without a session runs with any torch: submit -- COMMAND",
            )
        return None


_OTHER_PYTHON = "name another Python with --python, or as python in the cluster profile"


@dataclass(frozen=True)
class JobPython:
    """The interpreters of a job, and its program with them."""

    ranks: Interpreter
    agents: Interpreter
    """Runs the batch process and the agents, which need clustertrain but no torch."""
    script: ScriptSpec | None
    note: str = ""


def choose(
    requested: str, script: ScriptSpec | None, request: SubmitRequest, env: Mapping[str, str], *, has_setup: bool
) -> JobPython:
    """Choose the interpreters of a job.

    Args:
        requested: the user's interpreter, a path or a command name; empty: none is named.
        env: the variables that the job will have beside the user's.
        has_setup: shell lines run before the interpreter in the job, so what it lacks here it may have there.

    Raises:
        UsageError: no command ``requested`` exists.
    """
    environ = {**request.environ, **env}
    own = _inspect(sys.executable, environ)
    if script is not None and script.command:  # its ranks have the interpreter that the command names
        named = _inspect(_locate(requested, request), environ) if requested else own
        return JobPython(named, own if named.find_agent_problem() else named, script)
    use = session_search.find_use(Path(script.path)) if script is not None else SessionUse(None)
    user = use.path
    is_plain = script is not None and user is None
    ranks = (
        _inspect(_locate(requested, request), environ)
        if requested
        else _choose_default(own, request, env, is_plain=is_plain)
    )
    note = ""
    if not requested and ranks is not own and not is_plain:
        note = f"the ranks run with {ranks.path}, the python of this shell: {own.path} has no torch"
    if use.unparsed:
        note = f"{note}; {use.unparsed}" if note else use.unparsed
    if script is None or user is not None:  # a check refuses an interpreter that cannot run it
        if script is not None and user != Path(script.path).resolve():
            how = f"{script.name} imports {user}, which uses clustertrain: it starts as a script with a session"
            note = f"{how}; {note}" if note else how
        can_run = has_setup or ranks.find_trainer_problem() is None
        return JobPython(ranks, ranks, script, note if can_run else "")
    agents = own if ranks.find_agent_problem() and not has_setup else ranks
    without_torch = ", without torch" if ranks.lacks("torch") else ""
    argv = f"{ranks.path} {script.name}{without_torch}"
    how = f"{script.name} opens no session of clustertrain, so it runs as a command: {argv}"
    return JobPython(ranks, agents, _make_command(script, ranks), f"{how}; {note}" if note else how)


def choose_in_container(
    requested: str, node_python: str, script: ScriptSpec | None, request: SubmitRequest, env: Mapping[str, str]
) -> JobPython:
    """Return the interpreters of a job in containers: the image's for the ranks, one of the nodes for the agents.

    Nothing here can ask the image's. A script becomes a command.

    Args:
        requested: path or name of the image's interpreter; empty: ``python3``.
        node_python: the profile's interpreter for the agents; empty: the one that runs ``submit``.
    """
    ranks = Interpreter(requested or "python3")
    own = _inspect(sys.executable, {**request.environ, **env})
    named = _inspect(node_python, {**request.environ, **env}) if node_python else own
    agents = own if named.find_agent_problem() else named
    if script is not None and not script.command:
        script = _make_command(script, ranks)
    return JobPython(ranks, agents, script)


def _make_command(script: ScriptSpec, python: Interpreter) -> ScriptSpec:
    """Return a script as a command, whose output is not buffered: its log shows what it does."""
    command = (python.path, "-u", script.path, *script.args)
    return msgspec.structs.replace(script, args=(), command=command, path_index=2)


def _choose_default(own: Interpreter, request: SubmitRequest, env: Mapping[str, str], *, is_plain: bool) -> Interpreter:
    """Return this interpreter or the ``python`` of the user's shell.

    A plain script runs with the shell's, as at the prompt, unless only this one has torch. Other jobs run with this
    one, unless only the shell's can run them.
    """
    if not is_plain and not own.lacks("torch"):
        return own
    path = next((p for name in ("python", "python3") if (p := _find_command(name, request))), "")
    if not path:
        return own
    shell = _inspect(path, {**request.environ, **env})
    if is_plain:
        is_fit = shell.packages is not None and (own.lacks("torch") or not shell.lacks("torch"))
    else:
        is_fit = shell.find_trainer_problem() is None
    return shell if is_fit else own


def _locate(python: str, request: SubmitRequest) -> str:
    """Return the absolute path of the interpreter that the user has named.

    Raises:
        UsageError: it is the name of a command that does not exist.
    """
    if os.sep in python:
        return os.path.normpath(request.cwd / settings.expand_user_path(python, "--python"))
    found = _find_command(python, request)
    if not found:
        raise UsageError(f"--python {python}: command not found", fix="name the interpreter by its path")
    return found


def _find_command(name: str, request: SubmitRequest) -> str:
    found = shutil.which(name, path=request.environ.get("PATH", os.defpath))
    return os.path.normpath(request.cwd / found) if found else ""


def _inspect(path: str, environ: Mapping[str, str]) -> Interpreter:
    if path == sys.executable:
        return _parse(path, inspect_python.inspect(_NAMES))
    return _run_inspection(path, tuple(sorted(environ.items())))


@lru_cache(maxsize=16)  # a sweep asks for each of its runs
def _run_inspection(path: str, environ: tuple[tuple[str, str], ...]) -> Interpreter:
    try:
        result = proc.run([path, inspect_python.__file__, *_NAMES], timeout_s=TIMEOUT_S, env=dict(environ))
        return _parse(path, json.loads(result.stdout))
    except (CommandFailed, OSError, ValueError, LookupError, TypeError):
        # It does not exist here, is built for the nodes' processor, or needs the set-up of the profile.
        return Interpreter(path)


def _parse(path: str, answer: Mapping[str, Any]) -> Interpreter:
    major, minor = answer["version"]
    return Interpreter(path, (major, minor), answer["packages"])


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
