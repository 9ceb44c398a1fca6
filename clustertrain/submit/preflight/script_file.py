"""Whether a file that submit was given is a Python script, and what it looks like if it is not."""

from __future__ import annotations

import re
from pathlib import Path

from clustertrain.errors import UsageError

_HEAD_BYTES = 4096
_PYTHON_SHEBANG = re.compile(rb"#![^\n]*\bpython[0-9.]*\b")
_SHELL = re.compile(rb"#![^\n]*\b(ba|da|z|k|c|tc|fi)?sh\b")
_CONFIGURATION = {
    ".yaml": "YAML", ".yml": "YAML", ".json": "JSON", ".ini": "configuration", ".cfg": "configuration",
    ".conf": "configuration",
}  # fmt: skip
_RECIPE = "a recipe is TOML and its name ends in .toml; a script's name ends in .py"
_OTHER_PROGRAM = "start it from a Python script, with subprocess.run, and submit that script"


def check(name: str, path: Path) -> None:
    """``name`` is what was typed for the file ``path``.

    Raises:
        UsageError: it is no Python script: its name does not end in .py, nor does it begin with ``#!…python``; or it
            cannot be read.
    """
    try:
        with path.open("rb") as f:
            head = f.read(_HEAD_BYTES)
    except OSError as e:
        raise UsageError(f"{name}: {e.strerror}", fix="make it readable for you, or name another one") from e
    if b"\0" in head:
        raise UsageError(f"{name}: a binary file, not a Python script", fix=_OTHER_PROGRAM)
    if path.suffix == ".py" or _PYTHON_SHEBANG.match(head):
        return
    what, fix = _look(path.suffix.lower(), head)
    raise UsageError(f"{name}: {what}, neither a recipe nor a Python script", fix=fix)


def _look(suffix: str, head: bytes) -> tuple[str, str]:
    """What it looks like, and what to do instead."""
    if suffix in _CONFIGURATION:
        return f"a {_CONFIGURATION[suffix]} file", _RECIPE
    if suffix == ".ipynb":
        return "a notebook", "make a script of it with `jupyter nbconvert --to script`"
    if suffix in (".sh", ".bash", ".zsh", ".sbatch", ".slurm") or _SHELL.match(head):
        return "a shell script", _OTHER_PROGRAM
    if head.startswith(b"#!"):
        interpreter = head.splitlines()[0][2:].decode(errors="replace").strip()
        return f"a script for {interpreter!r}", _OTHER_PROGRAM
    return "a file of another kind", f"{_RECIPE}, or its first line is #!/usr/bin/env python3"
