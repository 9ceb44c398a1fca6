"""The only access to child processes: argument lists, never a shell; timeouts on waits; errors that quote the child."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from clustertrain import clock
from clustertrain.errors import CommandFailed

if TYPE_CHECKING:
    import psutil

SHELLS = frozenset({"bash", "dash", "ksh", "sh", "zsh"})


@dataclass(frozen=True)
class CommandResult:
    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str


def python_module_argv(python: str, module: str, *arguments: str) -> list[str]:
    """Return the arguments of ``python -P -m MODULE``.

    ``-P`` keeps the current folder off the import path: otherwise a ``torch.py`` there would be imported.
    """
    return [python, "-P", "-m", module, *arguments]


def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
) -> CommandResult:
    """Run a command to its end and return its output.

    Raises:
        CommandFailed: the command is not installed, took longer than ``timeout_s``, or (with ``check``) failed.
    """
    command = tuple(os.fspath(a) for a in argv)
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, env=env, cwd=cwd, check=False
        )
    except FileNotFoundError as e:
        raise CommandFailed(f"{command[0]}: command not found", fix=f"install it, or add it to PATH ({e})") from e
    except subprocess.TimeoutExpired as e:
        raise CommandFailed(f"{shlex.join(command)} did not end within {timeout_s:g} s") from e
    result = CommandResult(command, process.returncode, process.stdout, process.stderr)
    if check and process.returncode != 0:
        output = (process.stderr or process.stdout).strip() or "(it printed nothing)"
        raise CommandFailed(f"{shlex.join(command)} failed with exit code {process.returncode}: {output}")
    return result


def start(
    argv: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    log: Path | None = None,
    new_session: bool = False,
    ignore_stop_signals: bool = False,
    keep_stdin_open: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a child process without standard input.

    Args:
        log: file to which stdout and stderr are appended; default: they are inherited.
        ignore_stop_signals: start with TERM, USR1 and USR2 ignored, so that a warning to the agent does not kill
            torchrun and the ranks while they import. It is set by a line of sh, since ``preexec_fn`` may deadlock in a
            process with threads.
        keep_stdin_open: give the child a pipe as standard input, open until the caller closes it or dies.
    """
    command = [os.fspath(a) for a in argv]
    if ignore_stop_signals:
        command = ["/bin/sh", "-c", 'trap "" TERM USR1 USR2; exec "$@"', "sh", *command]
    log_file = log.open("ab") if log is not None else None
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE if keep_stdin_open else subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            env=env,
            cwd=cwd,
            start_new_session=new_session,
        )
    finally:
        if log_file is not None:
            log_file.close()


def become(argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Replace this process by a command.

    Raises:
        CommandFailed: the command is not installed or cannot be executed.
    """
    try:
        os.execvpe(argv[0], list(argv), env)
    except OSError as e:
        raise CommandFailed(f"{argv[0]}: {e.strerror}", fix="install it, or add it to PATH") from e


def start_with_stdout_pipe(
    argv: Sequence[str], *, env: Mapping[str, str], stderr_path: Path
) -> subprocess.Popen[bytes]:
    """Start a child process whose stdout is a pipe and whose stderr is written to ``stderr_path``.

    It runs in a separate session, so that Ctrl-C in the terminal reaches only the parent, which may forward it.

    Raises:
        CommandFailed: the command cannot be started.
    """
    with stderr_path.open("wb") as log:
        try:
            return subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        except OSError as e:
            raise CommandFailed(f"{argv[0]}: {e.strerror or e}", fix="install it, or choose another one") from e


def start_with_pipes(argv: Sequence[str], *, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a child process with a pipe for each standard stream, in a separate session as Ctrl-C is for the parent.

    Raises:
        CommandFailed: the command cannot be started.
    """
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(list(argv), stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True)
    except OSError as e:
        raise CommandFailed(f"{argv[0]}: {e.strerror or e}", fix="install it, or add it to PATH") from e


def run_with_stdin(argv: Sequence[str], data: bytes, *, timeout_s: float, should_cancel: Callable[[], bool]) -> None:
    """Run a command in a separate session, with ``data`` on its standard input.

    The command and its children are killed after ``timeout_s``, or as soon as ``should_cancel()`` returns True. A
    cancellation is not an error.

    Raises:
        CommandFailed: the command cannot be started, took too long, or failed; the message has the end of its output.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as stdin:
        # With pipes, a command that does not read, or a child that keeps the output open, would block this process.
        stdin.write(data)
        stdin.seek(0)
        try:
            child = subprocess.Popen(list(argv), stdin=stdin, stdout=output, stderr=output, start_new_session=True)
        except OSError as e:
            raise CommandFailed(f"{argv[0]}: {e.strerror or e}") from e
        deadline = clock.monotonic() + timeout_s
        try:
            while child.poll() is None:
                if should_cancel():
                    return
                if clock.monotonic() >= deadline:
                    raise CommandFailed(f"{argv[0]} did not end within {timeout_s:g} s")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(0.05)
        finally:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if child.returncode:
            output.seek(max(0, output.seek(0, os.SEEK_END) - 400))
            message = output.read().decode(errors="replace").strip() or "it printed nothing"
            raise CommandFailed(f"{argv[0]} failed with exit code {child.returncode}: {message}")


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def become_subreaper() -> None:
    """Make this process the parent of every descendant whose parent dies, so that none is lost.

    torchrun starts each rank in a separate session, so no process group or session contains all of them.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_parent_death_signal(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ``parent_pid`` dies.

    A killed parent cannot end its children, so torchrun and the ranks would continue without supervision. The parent
    must start this process from its main thread: the kernel sends the signal when the starting thread ends.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def list_descendants() -> list[psutil.Process]:
    """Return all processes below this one."""
    import psutil  # not at the top: it would be half of the import time of `clustertrain status`

    return psutil.Process().children(recursive=True)


def kill_descendants(timeout_s: float = 30.0, *, exclude_pid: int | None = None) -> bool:
    """Send SIGKILL to all descendants until none is left or ``timeout_s`` has passed; return whether none is left.

    The process ``exclude_pid`` and its descendants are left alone.
    """
    import psutil

    def list_remaining() -> list[psutil.Process]:
        excluded_pids = _list_tree_pids(exclude_pid) if exclude_pid is not None else set()
        return [child for child in list_descendants() if child.pid not in excluded_pids]

    deadline = clock.monotonic() + timeout_s
    while children := list_remaining():
        for child in children:
            send_signal(child, signal.SIGKILL)
        psutil.wait_procs(children, timeout=0.5)
        if clock.monotonic() > deadline:
            return False
    return True


def _list_tree_pids(pid: int) -> set[int]:
    """Return the pids of a process and its descendants; empty if it has ended."""
    import psutil

    try:
        return {pid, *(p.pid for p in psutil.Process(pid).children(recursive=True))}
    except psutil.NoSuchProcess:
        return set()


def kill_process_tree(child: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a running child and its descendants. Do not wait for one that hangs in the file system."""
    import psutil

    if child.poll() is None:
        for pid in _list_tree_pids(child.pid) - {child.pid}:
            with contextlib.suppress(psutil.NoSuchProcess):
                send_signal(psutil.Process(pid), signal.SIGKILL)
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1.0)


def terminate(child: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Send SIGTERM to a running child, and after ``timeout_s`` SIGKILL to it and its descendants."""
    import psutil

    if child.poll() is None:
        child.terminate()
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            for process in psutil.Process(child.pid).children(recursive=True):
                send_signal(process, signal.SIGKILL)
            child.kill()
            child.wait()


def send_signal(process: psutil.Process, signum: int) -> None:
    """Send a signal to a process that may have ended."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signum)
