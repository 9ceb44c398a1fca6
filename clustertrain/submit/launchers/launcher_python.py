"""The Python of a launcher, which the ranks use too."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path, PurePath

from clustertrain.errors import UsageError
from clustertrain.submit.program.command import is_file
from clustertrain.submit.program.python_words import is_python
from clustertrain.submit.request import SubmitRequest

_MAX_LINE_BYTES = 4096


def name_python(word: str) -> str:
    """Return the Python of the environment whose launcher is ``word``, by the usual layout of environments."""
    path = PurePath(word)
    return word if is_python(path.name) else str(path.with_name("python"))


def find_python(request: SubmitRequest, word: str) -> str:
    """Return the Python that the launcher ``word`` of this machine uses.

    It is the one in the launcher's first line, otherwise the one beside it. ``python`` if a shell would find the same.

    Raises:
        UsageError: the launcher does not exist, or does not say which Python it uses.
    """
    if is_python(PurePath(word).name):
        return word
    search_path = request.environ.get("PATH", os.defpath)
    if "/" in word:
        path = request.cwd / word
        if not is_file(path):
            raise UsageError(f"{word}: no such file", fix="name the launcher by its path from this folder")
    else:
        found = shutil.which(word, path=search_path)
        if found is None:
            return "python"
        path = Path(found)
    python, beside = _read_interpreter(path), path.with_name("python")
    is_elsewhere = python and Path(python).parent != path.parent  # as that of ~/.local/bin/torchrun
    if is_file(beside) and not (is_elsewhere and "/" in python):
        if "/" in word:
            return name_python(word)
        own = shutil.which("python", path=search_path)
        return "python" if own and Path(own).parent == path.parent else str(beside)
    if not python:
        raise UsageError(
            f"{word}: there is no python beside it, and its first line names none",
            fix=f"start it as a module: -- PYTHON -m {_MODULES.get(path.name, 'MODULE')}",
        )
    return python


_MODULES = {
    "torchrun": "torch.distributed.run",
    "accelerate": "accelerate.commands.accelerate_cli",
    "accelerate-launch": "accelerate.commands.launch",
    "deepspeed": "deepspeed.launcher.runner",
    "trl": "trl.cli.main",
}


def _read_interpreter(path: Path) -> str:
    """Return the Python in the first line of a console script; empty if it names none that exists."""
    try:
        with path.open("rb") as file:
            line = file.readline(_MAX_LINE_BYTES).decode(errors="replace")
        words = shlex.split(line[2:]) if line.startswith("#!") else []
    except (OSError, ValueError):
        return ""
    if words and PurePath(words[0]).name == "env":
        words = words[1:]
        return words[0] if words and is_python(words[0]) else ""
    return words[0] if words and is_python(PurePath(words[0]).name) and is_file(Path(words[0])) else ""
