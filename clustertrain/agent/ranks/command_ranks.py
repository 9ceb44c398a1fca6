"""The ranks of a node that execute a command: start, signals, and a record of how each ended.

A command knows nothing of clustertrain, so the agent starts it without torchrun and writes the records that a rank of
the trainer writes itself. The environment of a rank is torchrun's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import msgspec

from clustertrain import fsio, proc, settings
from clustertrain.agent.containers.ranks import RankContainers
from clustertrain.agent.node_result import CRASH_SIGNALS
from clustertrain.agent.ranks import rank_exec
from clustertrain.config.command_options import StopSignal
from clustertrain.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_SUCCESS
from clustertrain.run.results import ErrorInfo, FailureKind, RankResult, parse_rank_result
from clustertrain.scheduler.rendezvous import Rendezvous

if TYPE_CHECKING:
    import psutil

DEFAULT_STOP_SIGNAL = StopSignal(signal.SIGTERM)
_TAIL_BYTES = 16_384
# The last line of a Python traceback.
_EXCEPTION = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Timeout|Exit)\w*)(?:: (.*))?$", re.MULTILINE)
# torch begins each line of a traceback with it once torch.distributed is initialized.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|MemoryError", re.IGNORECASE)
_COMMUNICATION = re.compile(
    r"NCCL (?:communicator|error)|ncclRemoteError|ncclSystemError|DistBackendError|DistNetworkError|DistStoreError"
    r"|Connection (?:reset|refused|closed)|gloo/transport",
    re.IGNORECASE,
)


class CommandRanks:
    """The processes of a node's ranks, with the interface of the process that the agent otherwise starts.

    Args of the constructor:
        logs: log file by rank.
        local_rank_index: which element of ``command`` is an option that gets the local rank of each rank.
        stop_requested: whether the ranks have been asked to stop.
        stop_signal: the signal that asks them.
        containers: what starts the command in a container of each rank; None: it runs on the node itself.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Mapping[int, Mapping[str, str]],
        *,
        cwd: Path,
        rank_dir: Path,
        logs: Mapping[int, Path],
        stop_requested: Callable[[], bool],
        stop_signal: StopSignal = DEFAULT_STOP_SIGNAL,
        local_rank_index: int | None = None,
        containers: RankContainers | None = None,
    ) -> None:
        self.pid = os.getpid()
        self.stop_signal = stop_signal
        self._command, self._local_rank_index = tuple(command), local_rank_index
        self._is_shell = _starts_shell(self._command[0])
        self._rank_dir, self._logs, self._stop_requested = rank_dir, logs, stop_requested
        self._containers = containers
        self._processes = {
            rank: self._start(rank, env, cwd if cwd.is_dir() else None, logs[rank])
            for rank, env in environments.items()
        }
        self._codes: dict[int, int] = {}

    def _start(self, rank: int, env: Mapping[str, str], cwd: Path | None, log: Path) -> subprocess.Popen[bytes]:
        cpus = env.get(settings.RANK_CPUS, "").split(";")
        local_rank = int(env["LOCAL_RANK"])
        own_cpus = cpus[local_rank] if local_rank < len(cpus) else ""
        command: Sequence[str] = self._command
        if self._local_rank_index is not None:
            index = self._local_rank_index
            option = f"{command[index]}={local_rank}"
            command = [*command[:index], option, *command[index + 1 :]]
            env = {**env, settings.ADDED_ARGS: json.dumps([*json.loads(env.get(settings.ADDED_ARGS, "[]")), option])}
        if self._containers is not None:
            command, env = self._containers.build_launch(rank, command, env)
        argv = [sys.executable, "-P", "-S", "-E", rank_exec.__file__, str(self.pid), str(log), own_cpus, *command]
        return proc.start(argv, env=env, cwd=cwd, new_session=True)

    def poll(self) -> int | None:
        """Record the ranks that have ended; return None while one runs, otherwise 0 or 1."""
        for rank in self._processes:
            code = self._poll_code(rank)
            if code is not None and rank not in self._codes and not self._is_still_stopping(rank, code):
                self._codes[rank] = code
                self._write_record(rank, code)
        if len(self._codes) < len(self._processes):
            return None
        return EXIT_FAILED if any(self._codes.values()) else EXIT_SUCCESS

    def _poll_code(self, rank: int) -> int | None:
        code = self._processes[rank].poll()
        return code if code is None or self._containers is None else self._containers.to_exit_code(code)

    def _is_still_stopping(self, rank: int, code: int) -> bool:
        """Return whether a signal has ended the shell that is the rank, and the program that it started still runs.

        Slurm sends SIGTERM to all processes, and it ends a shell at once. The program saves until the deadline.
        """
        if -code not in self._ending_signals or not self._is_shell or not self._stop_requested():
            return False
        return any(_is_alive(other) for other in _list_session(self._read_pid(rank)))

    @property
    def _ending_signals(self) -> tuple[int, ...]:
        """The signals that may end a process at a stop: Slurm's, and the stop signal."""
        return signal.SIGTERM, self.stop_signal.number or signal.SIGTERM

    def wait(self) -> None:
        for process in self._processes.values():
            process.wait()
        self.poll()

    def kill(self) -> None:
        """Kill the ranks that run, and record that: whoever else waits for them would take their exit code away."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        for rank in self._processes:
            code = self._poll_code(rank)
            if rank not in self._codes and code is not None:
                self._codes[rank] = code
                self._write_record(rank, code)

    def clean_up(self) -> None:
        """Remove the containers whose runtime was killed; called after all processes have ended."""
        for rank, process in self._processes.items():
            if self._containers is not None and process.returncode < 0:
                self._containers.clean_up(rank)

    def send_stop_signal(self) -> None:
        """Send the stop signal to the program of each rank, and not to the processes that it started.

        A shell is not the program: it gets the signal, and so do its children.
        """
        number = self.stop_signal.number
        if number is None:
            return
        for rank, process in self._processes.items():
            if rank not in self._codes:
                for target in self._list_other_targets(rank):
                    proc.send_signal(target, number)
                if process.poll() is None:
                    _send_to(self._find_program(rank), number)

    def use_signal(self, number: signal.Signals) -> None:
        """Make ``number`` the stop signal."""
        self.stop_signal = StopSignal(number)

    def handle(self, number: signal.Signals) -> bool:
        """Return whether the program of every rank that runs handles a signal itself."""
        return all(
            any(_handles(target, number) for target in self._list_targets(rank))
            for rank in self._processes
            if rank not in self._codes
        )

    def _list_targets(self, rank: int) -> list[int]:
        return [self._find_program(rank), *(process.pid for process in self._list_other_targets(rank))]

    def _find_program(self, rank: int) -> int:
        """Return the PID of the rank's program; of the runtime if its container has not started."""
        # A runtime passes signals on, but then they do not reach the program alone.
        pid = self._containers.find_program(rank) if self._containers is not None else None
        return pid or self._processes[rank].pid

    def _list_other_targets(self, rank: int) -> list[psutil.Process]:
        """Return the processes that get the stop signal beside the rank's program."""
        pid = self._read_pid(rank)
        if self.stop_signal.to_all:
            return _list_all(pid)
        if not self._is_shell:
            return []
        # The scheduler's SIGTERM may have ended the shell.
        return _list_programs(pid) if _is_alive(pid) else _list_orphans(pid)

    def _read_pid(self, rank: int) -> int:
        """Return the PID that the rank's program has, or had; of the runtime if its container has not started."""
        pid = self._containers.read_pid(rank) if self._containers is not None else None
        return pid or self._processes[rank].pid

    def _write_record(self, rank: int, code: int) -> None:
        path = self._rank_dir / f"rank-{rank}.json"
        if path.exists():  # the program has opened a session of clustertrain
            return
        progress = fsio.poll_json(self._rank_dir / f"progress-{rank}.json")  # of the hooks
        # A shell may have gone on after a training that was done, and lost the next one to the stop.
        is_done = isinstance(progress, dict) and progress.get("finished") is True and not self._is_shell
        record = build_record(
            rank, code, self._stop_requested(), self._logs[rank], is_done=is_done, ended_by=self._name_end(code)
        )
        if record.ending == "failed" and self._containers is not None and not self._containers.has_started(rank):
            record = msgspec.structs.replace(record, kind="environment", error=_explain_start(code, self._logs[rank]))
        if isinstance(progress, dict):
            steps = {name: progress.get(name) for name in ("step", "committed_step")}
            record = parse_rank_result({**msgspec.to_builtins(record), **steps}) or record
        try:
            fsio.write_json(path, msgspec.to_builtins(record))
        except OSError as e:  # a full /tmp: the rank counts as killed, and the other ranks are still watched
            print(f"clustertrain agent: {path}: {e}", file=sys.stderr, flush=True)

    def _name_end(self, code: int) -> str:
        """Return the stop signal that ended a program without a handler; empty for another end, or of a shell's."""
        return _signal_name(-code) if -code in self._ending_signals and not self._is_shell else ""


def _starts_shell(program: str) -> bool:
    """Return whether ``program`` is a shell or a script for one."""
    if PurePath(program).name in proc.SHELLS:
        return True
    try:
        with Path(program).open("rb") as file:
            first_line, second_line = file.readline(256), file.readline(256)
    except OSError:
        return False
    if second_line.startswith(b"'''exec'"):  # a Python script whose interpreter has a path too long for `#!`
        return False
    return re.match(rb"#!.*\b(?:ba|da|k|z)?sh\b", first_line) is not None


def _list_programs(pid: int) -> list[psutil.Process]:
    """Return the children of a shell and, for each child that is a shell, its children too."""
    import psutil

    programs = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            programs.append(child)
            if child.name() in proc.SHELLS:
                programs += _list_programs(child.pid)
    return programs


def _handles(pid: int, number: signal.Signals) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) & (1 << (number - 1)))


def _send_to(pid: int, number: signal.Signals) -> None:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        proc.send_signal(psutil.Process(pid), number)


def _list_orphans(pid: int) -> list[psutil.Process]:
    """Return the processes that a shell has started, which was the rank ``pid`` and has ended."""
    import psutil

    orphans = []
    for other in _list_session(pid):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(other)
            if _get_session(process.ppid()) != pid:
                orphans.append(process)
    return orphans


def _list_all(pid: int) -> list[psutil.Process]:
    """Return all other processes of the rank ``pid``: its descendants, and orphans in its session."""
    import psutil

    processes: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.Error):
        processes.update((child.pid, child) for child in psutil.Process(pid).children(recursive=True))
    for other in _list_session(pid):
        with contextlib.suppress(psutil.Error):
            processes.setdefault(other, psutil.Process(other))
    return list(processes.values())


def _list_session(pid: int) -> list[int]:
    """Return the other processes of the session of the rank ``pid``."""
    import psutil

    return [other for other in psutil.pids() if other != pid and _get_session(other) == pid]


def _get_session(pid: int) -> int:
    """Return the session of a process, whose id is the PID of a rank; 0 if the process is gone."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _is_alive(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def build_record(
    rank: int, code: int, stop_requested: bool, log: Path, *, is_done: bool = False, ended_by: str = ""
) -> RankResult:
    """Return how a command ended.

    Args:
        code: its exit code, negative for a signal.
        is_done: it has reported that its training did all its steps.
        ended_by: the signal of a stop that has ended it; empty for another end.
    """
    how = f"exit code {code}" if code >= 0 else _signal_name(-code)
    if code == EXIT_SUCCESS and is_done:
        return RankResult(rank=rank, ending="completed", finished=True, exit_code=code)
    if code == EXIT_SUCCESS or (stop_requested and code != -signal.SIGKILL):
        # Not finished: the program does not say whether it was done. After a stop request, whatever the exit code, the
        # run continues, and a program that was done ends at once in the next attempt.
        reason = f"the command ended with {how} after the stop request" if stop_requested else None
        if stop_requested and ended_by:
            reason = f"{reason}; it does not handle the signal, so it saved nothing"
        return RankResult(
            rank=rank, ending="completed", finished=False, exit_code=code, reason=reason,
            ended_by_signal=stop_requested and bool(ended_by),
        )  # fmt: skip
    if code == EXIT_STOPPED or stop_requested:
        when = "after the stop request" if stop_requested else "which requests another attempt"
        return RankResult(
            rank=rank, ending="stopped", finished=False, exit_code=code, reason=f"the command ended with {how}, {when}"
        )
    kind, error = _explain_failure(code, _read_tail(log), log)
    return RankResult(rank=rank, ending="failed", finished=False, exit_code=code, kind=kind, error=error)


def _explain_failure(code: int, tail: str, log: Path) -> tuple[FailureKind, ErrorInfo]:
    if code < 0:
        kind: FailureKind = "crashed" if -code in CRASH_SIGNALS else "killed"
        return kind, ErrorInfo(type=_signal_name(-code), message=f"see logs/{log.name}")
    if code in (rank_exec.NOT_FOUND, rank_exec.NOT_EXECUTABLE):
        return "environment", ErrorInfo(type=f"exit code {code}", message=tail.strip().splitlines()[-1] if tail else "")
    exceptions = _EXCEPTION.findall(tail)
    if not exceptions:
        message = f"the command ended with exit code {code}: see logs/{log.name}"
        return "exited", ErrorInfo(type=f"exit code {code}", message=message)
    name, message = exceptions[-1]
    text = f"{name}: {message}"
    kind = (
        "out_of_memory" if _OUT_OF_MEMORY.search(text)
        else "communication" if _COMMUNICATION.search(text)
        else "error"
    )  # fmt: skip
    return kind, ErrorInfo(type=name, message=message or f"see logs/{log.name}", traceback=_last_traceback(tail))


def _explain_start(code: int, log: Path) -> ErrorInfo:
    """Return why a container did not start the command, from the last error that the runtime has printed."""
    lines = _read_tail(log).strip().splitlines() or ["it printed nothing"]
    errors = [line for line in lines if re.search("error", line, re.IGNORECASE)]  # usage may follow
    message = f"the container was not started (exit code {code}): {(errors or lines)[-1]}"
    return ErrorInfo(type="container", message=message)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _last_traceback(tail: str) -> str | None:
    begin = tail.rfind("Traceback (most recent call last)")
    return tail[begin:] if begin >= 0 else None


def _read_tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return _RANK_PREFIX.sub("", file.read().decode(errors="replace"))
    except OSError:
        return ""


def build_rank_environment(
    env: Mapping[str, str], rdzv: Rendezvous, *, local_rank: int, ranks_per_node: int, nodes: int, node_rank: int
) -> dict[str, str]:
    """Return ``env`` with the variables that torchrun sets for a rank (torch 2.13, ``local_elastic_agent.py``)."""
    rank, world_size = node_rank * ranks_per_node + local_rank, nodes * ranks_per_node
    sizes = {
        "LOCAL_RANK": local_rank, "RANK": rank, "GROUP_RANK": node_rank, "ROLE_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks_per_node, "WORLD_SIZE": world_size, "GROUP_WORLD_SIZE": nodes,
        "ROLE_WORLD_SIZE": world_size, "MASTER_PORT": rdzv.port,
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
    }  # fmt: skip
    texts = {"ROLE_NAME": "default", "MASTER_ADDR": rdzv.host, "TORCHELASTIC_RUN_ID": rdzv.id}
    if env.get(settings.SLURM_STEP_NUM_TASKS) == str(world_size):
        # A program that srun starts for each GPU may take its rank from Slurm.
        sizes |= {settings.SLURM_PROCID: rank, settings.SLURM_LOCALID: local_rank}
    # torchrun sets it too: without it, each rank of a program on CPUs starts a thread for each core.
    threads = {"OMP_NUM_THREADS": "1"} if ranks_per_node > 1 and "OMP_NUM_THREADS" not in env else {}
    return {**env, **threads, **{name: str(n) for name, n in sizes.items()}, **texts}
