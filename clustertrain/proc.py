"""The one door to child processes: argument lists only, never a shell; a timeout always; the error quotes the child."""

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
from typing import TYPE_CHECKING

from clustertrain import clock
from clustertrain.errors import CommandFailed

if TYPE_CHECKING:
    import psutil


@dataclass(frozen=True)
class CommandResult:
    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str


def python_module_argv(python: str, module: str, *arguments: str) -> list[str]:
    """The argument list of ``python -m MODULE``, without the current folder among the places that it imports from:
    a ``torch.py`` that lies there would be run."""
    return [python, "-P", "-m", module, *arguments]


def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
) -> CommandResult:
    """Run a command to its end and return what it printed.

    Raises:
        CommandFailed: it is not installed, took longer than ``timeout_s``, or (with ``check``) returned non-zero.
    """
    command = tuple(os.fspath(a) for a in argv)
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, env=env, cwd=cwd, check=False
        )
    except FileNotFoundError as e:
        raise CommandFailed(f"{command[0]}: command not found", fix=f"install it, or put it on PATH ({e})") from e
    except subprocess.TimeoutExpired as e:
        raise CommandFailed(f"{shlex.join(command)} gave no answer in {timeout_s:g} s") from e
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
    """Start a child with no standard input; stdout and stderr are appended to ``log`` (or inherited). With
    ``keep_stdin_open`` its input stays open until the caller closes ``stdin`` of what this returns, or dies.

    With ``ignore_stop_signals`` it starts with TERM, USR1 and USR2 ignored. That survives exec, and keeps a warning
    meant for the agent from killing torchrun and the ranks while they still import. A one-line sh does it, because
    ``preexec_fn`` may deadlock in a process with threads.
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


def start_with_stdout_pipe(
    argv: Sequence[str], *, env: Mapping[str, str], stderr_path: Path
) -> subprocess.Popen[bytes]:
    """Start a child that is listened to: its standard output is a pipe to read, what else it says goes to
    ``stderr_path``. In a session of its own, so that Ctrl-C in the terminal is for its parent to hand on.

    Raises:
        CommandFailed: it cannot be started.
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
            raise CommandFailed(f"{argv[0]}: {e.strerror or e}", fix="install it, or name another one") from e


def run_with_stdin(argv: Sequence[str], data: bytes, *, timeout_s: float, should_cancel: Callable[[], bool]) -> None:
    """Run a command with ``data`` on its standard input, in a session of its own. It and what it started are killed
    when ``timeout_s`` is over, or as soon as ``should_cancel()`` says so, which then is no error.

    Raises:
        CommandFailed: it could not be started, took too long, or returned non-zero; with the end of what it said.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as stdin:
        # Files, not pipes: a command that reads nothing, or leaves a child behind with its output open, blocks nobody.
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
                    raise CommandFailed(f"{argv[0]} did not end in {timeout_s:g} s")
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
    """Make this process the parent of every descendant whose own parent dies, so that none gets away.

    torchrun starts each rank in a session of its own: neither a process group nor a session holds them all.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_parent_death_signal(parent_pid: int) -> None:
    """Have the kernel kill this process as soon as its parent ``parent_pid`` is dead. A parent that is killed cannot
    end what it has started, and torchrun and the ranks would go on with nobody to watch them.

    The parent must have started this process from a thread that lasts, its main thread: the end of that thread counts.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before that
        os.kill(os.getpid(), signal.SIGKILL)


def list_descendants() -> list[psutil.Process]:
    import psutil  # not at the top: it would be half of what `clustertrain status` imports

    return psutil.Process().children(recursive=True)


def kill_descendants(timeout_s: float = 30.0, *, exclude_pid: int | None = None) -> bool:
    """SIGKILL to everything below this process, until nothing is left or the time is over; whether nothing is left.
    The process ``exclude_pid`` and what is below it stay."""
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
    """A process and what is below it; empty where it has ended."""
    import psutil

    try:
        return {pid, *(p.pid for p in psutil.Process(pid).children(recursive=True))}
    except psutil.NoSuchProcess:
        return set()


def kill_process_tree(child: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a child that still runs and to all below it. One that hangs in the filesystem is left behind."""
    import psutil

    if child.poll() is None:
        for pid in _list_tree_pids(child.pid) - {child.pid}:
            with contextlib.suppress(psutil.NoSuchProcess):
                send_signal(psutil.Process(pid), signal.SIGKILL)
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1.0)


def terminate(child: subprocess.Popen[bytes], timeout_s: float) -> None:
    """SIGTERM to a child that still runs, and after ``timeout_s`` SIGKILL to it and all below it."""
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
    """To a process that may have ended meanwhile."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signum)
