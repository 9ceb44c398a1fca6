"""Check that the target of a submission is a Python script; the error names the type of another file."""

from __future__ import annotations

import re
from pathlib import Path

from clustertrain.errors import UsageError

_HEAD_BYTES = 4096
_PYTHON_SHEBANG = re.compile(rb"#![^\n]*\bpython[0-9.]*\b")
_SHELL = re.compile(rb"#![^\n]*\b(ba|da|z|k|c|tc|fi)?sh\b")
_CONFIG_SUFFIXES = {
    ".yaml": "YAML", ".yml": "YAML", ".json": "JSON", ".ini": "configuration", ".cfg": "configuration",
    ".conf": "configuration",
}  # fmt: skip
_RECIPE_FIX = "a recipe is TOML and its name ends in .toml; a script's name ends in .py"
_PROGRAM_FIX = "start it from a Python script, with subprocess.run, and submit that script"


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
        raise UsageError(f"{name}: a binary file, not a Python script", fix=_PROGRAM_FIX)
    if path.suffix == ".py" or _PYTHON_SHEBANG.match(head):
        return
    description, fix = _describe_file(path.suffix.lower(), head)
    raise UsageError(f"{name}: {description}, neither a recipe nor a Python script", fix=fix)


def _describe_file(suffix: str, head: bytes) -> tuple[str, str]:
    """Return a description of the file and what to do instead."""
    if suffix in _CONFIG_SUFFIXES:
        return f"a {_CONFIG_SUFFIXES[suffix]} file", _RECIPE_FIX
    if suffix == ".ipynb":
        return "a notebook", "convert it with `jupyter nbconvert --to script`"
    if suffix in (".sh", ".bash", ".zsh", ".sbatch", ".slurm") or _SHELL.match(head):
        return "a shell script", _PROGRAM_FIX
    if head.startswith(b"#!"):
        interpreter = head.splitlines()[0][2:].decode(errors="replace").strip()
        return f"a script for {interpreter!r}", _PROGRAM_FIX
    return "an unknown file type", f"{_RECIPE_FIX}, or its first line is #!/usr/bin/env python3"
