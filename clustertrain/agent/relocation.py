"""Let a Python environment run from another folder: its scripts, its path files, and variables that name it.

What still names the old folder works too, because that folder exists: it only takes the time of the shared filesystem.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clustertrain import settings
from clustertrain.run.shipped_environment import BASE, PREFIX, ShippedEnvironment

_MAX_SCRIPT_BYTES = 2**20
_SHEBANG_BYTES = 127  # of Linux before 5.1
_SAFE = re.compile(r"[\w./@+-]+")  # in a line of sh, quoted or not


@dataclass(frozen=True)
class RankPython:
    """The Python of a node's ranks: the agent's own, or a copy of a shipped environment."""

    prefixes: Sequence[str] = ()
    copy: Path | None = None
    """Folder of the copy; None if the ranks use the shared one."""

    @property
    def python(self) -> str:
        """The interpreter; empty for the agent's own."""
        return str(self.copy / PREFIX / "bin" / "python") if self.copy is not None else ""

    def relocate(self, path: str) -> str:
        """Return the path in the copy of a file of the environment; other paths as they are."""
        for prefix in self.prefixes if self.copy is not None else ():
            if path == prefix or path.startswith(f"{prefix}/"):
                return f"{self.copy}/{PREFIX}{path.removeprefix(prefix)}"
        return path

    def relocate_variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return ``env`` with the copy in place of the environment."""
        relocated = dict(env)
        relocated.pop(settings.ENVIRONMENT_COPIES, None)
        if self.prefixes:
            copies = [str(self.copy / PREFIX)] if self.copy is not None else []
            relocated[settings.ENVIRONMENT_COPIES] = json.dumps([*copies, *self.prefixes])
        for name in settings.ENVIRONMENT_LISTS:
            if name in env:
                relocated[name] = os.pathsep.join(self.relocate(path) for path in env[name].split(os.pathsep))
        for name in settings.ENVIRONMENT_FOLDERS:
            if name in env:
                relocated[name] = self.relocate(env[name])
        return relocated


def relocate_files(folder: Path, environment: ShippedEnvironment, final: Path) -> None:
    """Change the files of an unpacked environment in ``folder`` that name its folder, for its place ``final``."""
    python = RankPython(environment.prefixes, final)
    prefix = folder / PREFIX
    for path in (prefix / "bin").iterdir():
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= _MAX_SCRIPT_BYTES:
            _rewrite(path, relocate_script(path.read_bytes(), python))
    for path in prefix.glob("lib/python3.*/site-packages/*.pth"):
        lines = path.read_bytes().decode(errors="surrogateescape").splitlines(keepends=True)
        _rewrite(path, "".join(map(python.relocate, lines)).encode(errors="surrogateescape"))
    if environment.base_python:
        config = prefix / "pyvenv.cfg"
        home = b"home = " + os.fsencode(final / BASE / "bin")
        _rewrite(config, re.sub(rb"(?m)^home *=.*$", lambda match: home, config.read_bytes()))


def _rewrite(path: Path, data: bytes) -> None:
    if data != path.read_bytes():
        path.write_bytes(data)


def relocate_script(script: bytes, python: RankPython) -> bytes:
    """Return a script with the interpreter of the copy in its first lines; other files as they are."""
    first, _, rest = script.partition(b"\n")
    if not first.startswith(b"#!"):
        return script
    old, *arguments = os.fsdecode(first[2:]).split(maxsplit=1) or [""]
    new = python.relocate(old)
    if new != old:
        line = os.fsencode("#!" + " ".join([new, *arguments]))
        if len(line) > _SHEBANG_BYTES or len(new.split()) > 1:
            # As pip writes it for a path that is too long for the kernel or has spaces: text for Python, a line for sh.
            line = b"#!/bin/sh\n'''exec' " + os.fsencode(" ".join([shlex.quote(new), *arguments]))
            line += b" \"$0\" \"$@\"\n' '''"
        return line + b"\n" + rest
    second, _, body = rest.partition(b"\n")
    if second.startswith(b"'''exec'") and _SAFE.fullmatch(str(python.copy)):
        for prefix in python.prefixes:
            second = second.replace(os.fsencode(f"{prefix}/"), os.fsencode(f"{python.copy}/{PREFIX}/"))
        return b"\n".join((first, second, body))
    return script
