"""Check that the target of a submission is a Python script; the error names the type of another file."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from clustertrain.errors import UsageError

_HEAD_BYTES = 4096
_PYTHON_SHEBANG = re.compile(rb"#![^\n]*\bpython[0-9.]*\b")
_SHELL = re.compile(rb"#![^\n]*\b(ba|da|z|k|c|tc|fi)?sh\b")
_DIRECTIVE = re.compile(rb"^#SBATCH\s", re.MULTILINE)
_CONFIG_SUFFIXES = {
    ".yaml": "YAML", ".yml": "YAML", ".json": "JSON", ".ini": "configuration", ".cfg": "configuration",
    ".conf": "configuration",
}  # fmt: skip
_RECIPE_FIX = "a recipe is TOML and its name ends in .toml; a script's name ends in .py"


def check_script_file(name: str, path: Path) -> None:
    """Check that ``path``, typed as ``name``, is a Python script: it ends in .py or starts with ``#!…python``.

    Raises:
        UsageError: the file is not a Python script or cannot be read.
    """
    try:
        with path.open("rb") as f:
            head = f.read(_HEAD_BYTES)
    except OSError as e:
        raise UsageError(f"{name}: {e.strerror}", fix="make it readable, or name another file") from e
    if b"\0" in head:
        raise UsageError(f"{name}: a binary file, not a Python script", fix=_fix_program(name))
    if path.suffix == ".py" or _PYTHON_SHEBANG.match(head):
        return
    description, fix = _describe_file(name, path.suffix.lower(), head)
    raise UsageError(f"{name}: {description}, neither a recipe nor a Python script", fix=fix)


def _describe_file(name: str, suffix: str, head: bytes) -> tuple[str, str]:
    """Return a description of the file and what to do instead."""
    if suffix in _CONFIG_SUFFIXES:
        return f"a {_CONFIG_SUFFIXES[suffix]} file", _RECIPE_FIX
    if suffix == ".ipynb":
        return "a notebook", "convert it with `jupyter nbconvert --to script`"
    if _DIRECTIVE.search(head):
        return "a batch script", f"translate it: clustertrain adopt {shlex.quote(name)}"
    if suffix in (".sh", ".bash", ".zsh", ".sbatch", ".slurm") or _SHELL.match(head):
        shell = "zsh" if suffix == ".zsh" else "bash"
        return "a shell script", f"run it as a command: clustertrain submit -- {shell} {shlex.quote(name)}"
    if head.startswith(b"#!"):
        interpreter = head.splitlines()[0][2:].decode(errors="replace").strip()
        return f"a script for {interpreter!r}", _fix_program(name)
    return "an unknown file type", f"{_RECIPE_FIX}, or its first line is #!/usr/bin/env python3"


def _fix_program(name: str) -> str:
    path = name if "/" in name else f"./{name}"
    return f"run it as a command: clustertrain submit -- {shlex.quote(path)}"
