"""A command as the program of a run: the file or module of the user that it executes, and whether it exists."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from msgspec.structs import replace

from clustertrain import proc
from clustertrain.config.job import ScriptSpec
from clustertrain.errors import CommandFailed, UsageError
from clustertrain.submit import container
from clustertrain.submit.program.python_words import find_python_program, is_python
from clustertrain.submit.program.wrappers import MODULE_OPTIONS, find_program
from clustertrain.submit.request import SubmitRequest
from clustertrain.submit.snapshot import python_path

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
# Options of shells with a value in the next argument.
_SHELL_OPTIONS_WITH_VALUE = frozenset({"-o", "-O", "+o", "+O", "--rcfile", "--init-file"})
_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})
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
    start, file = _find_file_argument(command)
    if file is None:
        return base
    if file.index == 0:
        # A console script is installed; anything else in the user's folders is code.
        is_code = program.is_relative_to(request.cwd) and not _is_installed(program)
        return replace(base, path=str(program), path_index=0) if is_code else base
    if file.module:
        package = _find_module(request, None if start else program, file.module)
        return replace(base, path=str(package) if package else "")
    name = command[file.index]
    path = request.cwd / name
    if not is_file(path):
        problem = "it is a folder" if path.is_dir() else "no such file"
        raise UsageError(f"{name}: {problem}", fix="name the script by its path from this folder")
    if (file.index == start and _is_installed(path)) or not _PACKAGE_FOLDERS.isdisjoint(path.parts):
        return base
    return replace(base, path=str(path), path_index=file.index)


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
    _, file = _find_file_argument(command)
    spec = ScriptSpec(cwd=str(request.cwd), command=tuple(command), local_rank_index=request.local_rank_index)
    if file is None or (file.index == 0 and os.sep not in name):
        return spec
    if file.module:
        package = python_path.find_entry(file.module, python_path.list_search_folders([request.cwd]))
        return replace(spec, path=str(package)) if package is not None else spec
    word = command[file.index]
    path = Path(os.path.normpath(request.cwd / word))
    if path.is_file() and path.is_relative_to(request.cwd) and not _is_installed(path):
        return replace(spec, path=str(path), path_index=file.index)
    if not word.startswith("/"):
        problem = "it is a folder" if path.is_dir() else "no such file"
        raise UsageError(
            f"{word}: {problem}", fix="name it by its path from this folder, or by its full path in the image"
        )
    return spec


@dataclass(frozen=True)
class _FileArgument:
    """The word of a command that names the user's code."""

    index: int
    module: str = ""
    """Name of the module; empty: the word is a path."""


def _find_file_argument(command: Sequence[str]) -> tuple[int, _FileArgument | None]:
    """Return the index of the program behind wrappers, and its file: a script, a module after ``-m``, itself.

    No file: it is a command of an environment, it has another folder, or it gets its code in another way.
    """
    place = find_program(command)
    start, inner = place.index, command[place.index :]
    if place.changes_folder:
        return start, None
    if start and inner[0] in MODULE_OPTIONS:
        return start, _FileArgument(start + 1, inner[1]) if len(inner) > 1 else None
    if is_python(inner[0]):
        program = find_python_program(inner)
        has_file = program.kind in ("script", "module")
        return start, _FileArgument(start + program.index, program.module) if has_file else None
    if PurePath(inner[0]).name in proc.SHELLS:
        index = find_shell_script(inner)
        return start, None if index is None else _FileArgument(start + index)
    is_script = inner[0].endswith(".py") and any(PurePath(word).name == "uv" for word in command[:start])
    has_file = start == 0 or is_script or inner[0].startswith(("./", "../"))
    return start, _FileArgument(start) if has_file else None


def is_file(path: Path) -> bool:
    """Return whether ``path`` is a file; a name that is too long for one is not."""
    try:
        return path.is_file()
    except OSError:
        return False


def _find_program(request: SubmitRequest) -> Path:
    name = label = request.command[0]
    fix = "name a program by its path from this folder"
    if python := str(request.job.get("python", "")):
        if os.sep in name or not is_python(name):
            raise UsageError(
                f"--python {python}: no effect on {name}, which names its interpreter itself",
                fix="leave it out, or put `python` before the script",
            )
        name, label, fix = python, f"--python {python}", "name an existing interpreter"
    if os.sep in name:
        path = request.cwd / name
        if not path.exists():
            raise UsageError(f"{label}: no such file", fix=fix)
        if path.is_dir():
            raise UsageError(f"{label}: it is a folder", fix="name the program in it")
        if not os.access(path, os.X_OK):
            way = _find_way_to_start(name.removeprefix("./"), path)
            raise UsageError(f"{label} is not executable", fix=f"write {way}" if way else f"run `chmod +x {name}`")
        return Path(os.path.normpath(path))
    found = shutil.which(name, path=request.environ.get("PATH", os.defpath))
    if found is None:
        if is_file(request.cwd / name):
            way = _find_way_to_start(name, request.cwd / name) or f"bash {name}"
            raise UsageError(f"{name}: not a command in PATH", fix=f"write ./{name}, or {way}")
        raise UsageError(
            f"{label}: command not found", fix="install it in this environment, or name it by its path (./NAME)"
        )
    return Path(os.path.normpath(request.cwd / found))


def _find_way_to_start(name: str, path: Path) -> str:
    """Return a command that starts the script ``path``; empty if it is none."""
    if path.suffix == ".py":
        return f"python {name}"
    return f"bash {name}" if path.suffix in (".sh", ".bash", ".sbatch", ".slurm") else ""


def find_shell_script(command: Sequence[str]) -> int | None:
    """Return the index of the script that a shell at the start of ``command`` runs; None for ``-c`` and no script."""
    index = 1
    while index < len(command):
        argument = command[index]
        if argument == "--":
            return index + 1 if index + 1 < len(command) else None
        if re.fullmatch(r"-[A-Za-z]*c[A-Za-z]*", argument):
            return None
        if not argument.startswith(("-", "+")):
            return index
        index += 2 if argument in _SHELL_OPTIONS_WITH_VALUE else 1
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
