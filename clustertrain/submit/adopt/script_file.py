"""The text of a batch script, and whether it is one."""

from __future__ import annotations

import re
from pathlib import Path, PurePath

from clustertrain import proc, reading
from clustertrain.errors import NotFound, UsageError

MAX_BYTES = reading.MIB // 4
DIRECTIVE = re.compile(r"^#SBATCH(?P<options>.*)$", re.MULTILINE)
_RESERVED = re.compile("[\ue000\ue001]")


def read_script(path: Path, name: str) -> str:
    """Return the text of the batch script at ``path``; ``name`` is what the user typed.

    Raises:
        NotFound: there is no such file.
        UsageError: it is not a batch script that a POSIX shell runs.
    """
    try:
        data = reading.read_bytes(path, MAX_BYTES, allow_fifo=True)
    except reading.UnusableFile as e:
        raise UsageError(f"{name}: {e.strerror}", fix="name a batch script, as sbatch takes it") from e
    except FileNotFoundError as e:
        raise NotFound(f"{name}: no such file", fix="name a batch script by its path from this folder") from e
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it contains a NUL character"
        raise UsageError(f"{name}: cannot be read: {reason}", fix="name a batch script, as sbatch takes it") from e
    return check_script(data, name)


def check_script(data: bytes, name: str) -> str:
    """Return ``data`` as text.

    Raises:
        UsageError: as :func:`read_script`.
    """
    if not data.strip():
        raise UsageError(f"{name}: is empty", fix="name a batch script, as sbatch takes it")
    if b"\0" in data:
        raise UsageError(f"{name}: is a binary file", fix="name a batch script, as sbatch takes it")
    try:
        text = data.decode()
    except UnicodeDecodeError as e:
        line = data[: e.start].count(b"\n") + 1
        raise UsageError(f"{name}, line {line}: is not UTF-8", fix="convert it, for example with iconv -t UTF-8") from e
    if "\r\n" in text:
        raise UsageError(
            f"{name}: has DOS line breaks, which sbatch refuses", fix=f"convert it: sed -i 's/\\r$//' {name}"
        )
    _check_interpreter(text, name)
    # These two mark what only a shell can expand (shell/expansion.py).
    return _RESERVED.sub("\ufffd", text)


def find_interpreter(text: str) -> list[str]:
    """Return the interpreter of a script and its options, without ``env``; nothing without a ``#!`` line."""
    first = text.split("\n", 1)[0]
    words = first[2:].split() if first.startswith("#!") else []
    if words and PurePath(words[0]).name == "env":
        words = [word for word in words[1:] if word != "-S"]
    return words


def _check_interpreter(text: str, name: str) -> None:
    words = find_interpreter(text)
    if words:
        shell = PurePath(words[0]).name
        if shell not in proc.SHELLS:
            raise UsageError(
                f"{name}: is a script for {shell}; adopt reads those for bash and sh",
                fix="submit the program itself: clustertrain submit -- COMMAND",
            )
    elif text.startswith("#!"):
        raise UsageError(f"{name}: its first line names no interpreter", fix="start it with #!/bin/bash")
    elif not DIRECTIVE.search(text):
        raise UsageError(
            f"{name}: is not a batch script: it has neither a first line such as #!/bin/bash nor #SBATCH lines",
            fix="name a batch script, as sbatch takes it",
        )
