"""The one door to child processes: argument lists only, never a shell; a timeout always; the error quotes the child."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clustertrain.errors import CommandFailed


@dataclass(frozen=True)
class Completed:
    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str


def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
) -> Completed:
    """Run a command to its end and return what it printed.

    Raises:
        CommandFailed: it is not installed, took longer than ``timeout_s``, or (with ``check``) returned non-zero.
    """
    words = tuple(os.fspath(a) for a in argv)
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=timeout_s, env=env, cwd=cwd, check=False
        )
    except FileNotFoundError as e:
        raise CommandFailed(f"{words[0]}: command not found", fix=f"install it, or put it on PATH ({e})") from e
    except subprocess.TimeoutExpired as e:
        raise CommandFailed(f"{shlex.join(words)} gave no answer in {timeout_s:g} s") from e
    result = Completed(words, done.returncode, done.stdout, done.stderr)
    if check and done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or "(it printed nothing)"
        raise CommandFailed(f"{shlex.join(words)} failed with exit code {done.returncode}: {said}")
    return result


def start(
    argv: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    log: Path | None = None,
    new_session: bool = False,
    ignore_stop_signals: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a child with no standard input; stdout and stderr are appended to ``log`` (or inherited).

    With ``ignore_stop_signals`` it starts with TERM, USR1 and USR2 ignored. That survives exec, and keeps a warning
    meant for the agent from killing torchrun and the ranks while they still import. A one-line sh does it, because
    ``preexec_fn`` may deadlock in a process with threads.
    """
    words = [os.fspath(a) for a in argv]
    if ignore_stop_signals:
        words = ["/bin/sh", "-c", 'trap "" TERM USR1 USR2; exec "$@"', "sh", *words]
    out = log.open("ab") if log is not None else None
    try:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, cwd=cwd, start_new_session=new_session
        )
    finally:
        if out is not None:
            out.close()
