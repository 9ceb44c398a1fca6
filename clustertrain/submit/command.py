"""A command as the program of a run: the file or module of the user that it executes, and whether it exists."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePath

from msgspec.structs import replace

from clustertrain import proc
from clustertrain.config.job import ScriptSpec
from clustertrain.errors import CommandFailed, UsageError
from clustertrain.submit import container, python_path
from clustertrain.submit.request import SubmitRequest
from clustertrain.submit.wrappers import MODULE_OPTIONS, find_program

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
# Options of Python and of shells with a value in the next argument.
_OPTIONS_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs", "-o", "-O", "--rcfile", "--init-file"})
_IMPORT_TIMEOUT_S = 30.0
# Without importing a package that contains the module, which may take seconds.
_HAS_MODULE = """
import importlib.machinery, importlib.util, sys
name, *parts = sys.argv[1].split(".")
spec = importlib.util.find_spec(name)
for part in parts:
    name += "." + part
    path = spec and spec.submodule_search_locations
    spec = path and importlib.machinery.PathFinder.find_spec(name, path)
sys.exit(not spec)
"""


def build_script_spec(request: SubmitRequest) -> ScriptSpec:
    """Return the program of a request with a command, with the path of the program made absolute.

    Raises:
        UsageError: the program, its script or its module does not exist, or an argument contains a NUL character.
    """
    if "\0" in "".join(request.command):
        raise UsageError("an argument of the command contains a NUL character", fix="remove it")
    name = request.command[0]
    if _ASSIGNMENT.fullmatch(name) and not is_file(request.cwd / name):
        raise UsageError(
            f"{name}: a variable, not a program",
            fix=f"write env {shlex.quote(name)} before the program"
            if request.wrapped
            else f"give it with --env {shlex.quote(name)}",
        )
    if container.find_image(request):
        return _build_container_spec(request)
    program = _find_program(request)
    command = [str(program), *request.command[1:]]
    base = ScriptSpec(cwd=str(request.cwd), command=tuple(command), local_rank_index=request.local_rank_index)
    start, index = _find_file_argument(command)
    if index is None:
        return base
    if index == 0:
        # A console script is installed; anything else in the user's folders is code.
        is_code = program.is_relative_to(request.cwd) and not _is_installed(program)
        return replace(base, path=str(program), path_index=0) if is_code else base
    if command[index - 1] in MODULE_OPTIONS:
        package = _find_module(request, None if start else program, command[index])
        return replace(base, path=str(package) if package else "")
    path = request.cwd / command[index]
    if not is_file(path):
        problem = "it is a folder" if path.is_dir() else "no such file"
        raise UsageError(f"{command[index]}: {problem}", fix="name the script by its path from this folder")
    if index == start and _is_installed(path):
        return base
    return replace(base, path=str(path), path_index=index)


def _build_container_spec(request: SubmitRequest) -> ScriptSpec:
    """Return the program of a request whose ranks run in containers.

    Programs and modules are the image's. A path in the folder of ``submit``, which the container sees, is the user's
    code; other paths are looked for in the image.
    """
    python = str(request.job.get("python", ""))
    name = request.command[0]
    if python and not is_python(name):
        raise UsageError(
            f"--python {python}: no effect on {name}, which names its interpreter itself",
            fix="leave it out, or put `python` before the script",
        )
    command = [python or name, *request.command[1:]]
    _, index = _find_file_argument(command)
    spec = ScriptSpec(cwd=str(request.cwd), command=tuple(command), local_rank_index=request.local_rank_index)
    if index is None or (index == 0 and os.sep not in name):
        return spec
    if index and command[index - 1] in MODULE_OPTIONS:
        package = python_path.find_entry(command[index], python_path.list_search_folders([request.cwd]))
        return replace(spec, path=str(package)) if package is not None else spec
    path = Path(os.path.normpath(request.cwd / command[index]))
    if path.is_file() and path.is_relative_to(request.cwd) and not _is_installed(path):
        return replace(spec, path=str(path), path_index=index)
    if not command[index].startswith("/"):
        problem = "it is a folder" if path.is_dir() else "no such file"
        raise UsageError(
            f"{command[index]}: {problem}", fix="name it by its path from this folder, or by its full path in the image"
        )
    return spec


def _find_file_argument(command: Sequence[str]) -> tuple[int, int | None]:
    """Return the indices of the program behind wrappers and of its file: a script, a module after ``-m``, itself.

    No file: it is a command of an environment, it has another folder, or it gets its code in another way.
    """
    place = find_program(command)
    start, inner = place.index, command[place.index :]
    if place.changes_folder:
        return start, None
    if start and inner[0] in MODULE_OPTIONS:
        return start, start + 1 if len(inner) > 1 else None
    if is_python(inner[0]) or PurePath(inner[0]).name in proc.SHELLS:
        index = _find_script(inner)
        return start, None if index is None else start + index
    is_script = inner[0].endswith(".py") and any(PurePath(word).name == "uv" for word in command[:start])
    has_file = start == 0 or is_script or inner[0].startswith(("./", "../"))
    return start, start if has_file else None


def is_file(path: Path) -> bool:
    """Return whether ``path`` is a file; a name that is too long for one is not."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_python(program: str) -> bool:
    return _PYTHON.fullmatch(PurePath(program).name) is not None


def _find_program(request: SubmitRequest) -> Path:
    name = request.command[0]
    if python := str(request.job.get("python", "")):
        if os.sep in name or not is_python(name):
            raise UsageError(
                f"--python {python}: no effect on {name}, which names its interpreter itself",
                fix="leave it out, or put `python` before the script",
            )
        name = python
    if os.sep in name:
        path = request.cwd / name
        if not path.exists():
            raise UsageError(f"{name}: no such file", fix="name a program by its path from this folder")
        if path.is_dir():
            raise UsageError(f"{name}: it is a folder", fix="name the program in it")
        if not os.access(path, os.X_OK):
            raise UsageError(f"{name}: it cannot be executed", fix=f"run `chmod +x {name}`, or put `bash` before it")
        return Path(os.path.normpath(path))
    found = shutil.which(name, path=request.environ.get("PATH", os.defpath))
    if found is None:
        if is_file(request.cwd / name):
            way = f"python {name}" if name.endswith(".py") else f"bash {name}"
            raise UsageError(f"{name}: not a command in PATH", fix=f"write ./{name}, or {way}")
        raise UsageError(
            f"{name}: command not found", fix="install it in this environment, or name it by its path (./NAME)"
        )
    return Path(os.path.normpath(request.cwd / found))


def _find_script(command: Sequence[str]) -> int | None:
    """Return the index of the script, or of the module after ``-m``; None for ``-c`` and an interactive shell."""
    index = 1
    while index < len(command):
        argument = command[index]
        if argument in ("-m", "--"):
            return index + 1 if index + 1 < len(command) else None
        if argument == "-c" or (argument == "-" and is_python(command[0])):
            return None
        if not argument.startswith("-"):
            return index
        index += 2 if argument in _OPTIONS_WITH_VALUE else 1
    return None


def _find_module(request: SubmitRequest, python: Path | None, module: str) -> Path | None:
    """Return the package of the user's code that contains ``module``; None if it is installed.

    Args:
        python: the interpreter that imports it; None: only a wrapper knows it.

    Raises:
        UsageError: neither exists.
    """
    package = python_path.find_entry(module, python_path.list_search_folders([request.cwd]))
    if package is not None:
        path = package.parent.joinpath(*module.split("."))
        if not path.is_dir() and not path.with_name(f"{path.name}.py").is_file():
            raise UsageError(f"-m {module}: no such module in {package.parent}", fix="check its name")
        return package
    if python is None:
        return None
    try:
        result = proc.run(
            [str(python), "-c", _HAS_MODULE, module],
            timeout_s=_IMPORT_TIMEOUT_S, env=request.environ, cwd=request.cwd, check=False,
        )  # fmt: skip
    except CommandFailed:
        return None  # a slow file system: the job will tell
    if result.returncode:
        raise UsageError(
            f"{python} has no module {module}",
            fix="activate the environment that has it, or name its Python by its path: -- /PATH/TO/python -m …",
        )
    return None


def _is_installed(program: Path) -> bool:
    """Return whether ``program`` lies in a virtual environment."""
    return any((parent / "pyvenv.cfg").is_file() for parent in program.parents)
