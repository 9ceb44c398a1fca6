"""Ranks that execute a command: environment, output, signals and the records of how they ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from clustertrain import clock
from clustertrain.agent.node_result import RankObservations, build_node_result, read_rank_records
from clustertrain.agent.ranks import command_ranks
from clustertrain.agent.ranks.command_ranks import CommandRanks, build_rank_environment
from clustertrain.config.command_options import parse_stop_signal
from clustertrain.scheduler.rendezvous import Rendezvous

Start = Callable[..., CommandRanks]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def start_ranks(
        *command: str, ranks: int = 1, stop_requested: bool = False, stop_signal: str = "TERM"
    ) -> CommandRanks:
        rdzv = Rendezvous("127.0.0.1", 29_500, "run")
        env = {**os.environ, "CLUSTERTRAIN_STOP_SIGNAL": stop_signal.partition(":")[0]}
        environments = {
            rank: build_rank_environment(env, rdzv, local_rank=rank, ranks_per_node=ranks, nodes=1, node_rank=0)
            for rank in range(ranks)
        }
        return CommandRanks(
            command, environments, cwd=tmp_path, rank_dir=tmp_path, stop_requested=lambda: stop_requested,
            logs={rank: tmp_path / f"rank-{rank}.log" for rank in environments},
            stop_signal=parse_stop_signal(stop_signal),
        )  # fmt: skip

    return start_ranks


def run(ranks: CommandRanks) -> int:
    assert clock.wait_until(lambda: ranks.poll() is not None, 30.0)
    code = ranks.poll()
    assert code is not None
    return code


def test_ranks_have_torchrun_s_environment(start: Start, tmp_path: Path) -> None:
    program = "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_PORT')))"
    assert run(start(sys.executable, "-c", program, ranks=2)) == 0
    assert [(tmp_path / f"rank-{r}.log").read_text() for r in (0, 1)] == ["0 0 2 29500\n", "1 1 2 29500\n"]
    records = read_rank_records(tmp_path, [0, 1])
    assert [(r.ending, r.finished) for r in records.values()] == [("completed", False)] * 2


@pytest.mark.parametrize(("tasks", "expected"), [("8", ("5", "1")), ("2", ("1", "0"))])
def test_rank_in_slurm_s_variables(tasks: str, expected: tuple[str, str]) -> None:
    """With a task per rank, a program may take its rank from them."""
    env = {"SLURM_STEP_NUM_TASKS": tasks, "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    rdzv = Rendezvous("node0", 29_500, "run")
    rank_env = build_rank_environment(env, rdzv, local_rank=1, ranks_per_node=4, nodes=2, node_rank=1)
    assert (rank_env["SLURM_PROCID"], rank_env["SLURM_LOCALID"]) == expected


def test_rank_of_second_node() -> None:
    rdzv = Rendezvous("node0", 29_500, "run")
    env = build_rank_environment({}, rdzv, local_rank=1, ranks_per_node=4, nodes=2, node_rank=1)
    assert {name: env[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")} == {
        "RANK": "5", "WORLD_SIZE": "8", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("program", "kind", "text"),
    [
        ("raise ValueError('a is 0')", "error", "ValueError: a is 0"),
        ("import sys; sys.exit('[rank0]: Traceback\\n[rank0]: KeyError: 3')", "error", "KeyError: 3"),
        ("import os; os._exit(3)", "exited", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "killed", "SIGKILL"),
        ("import os; os.kill(os.getpid(), 11)", "crashed", "SIGSEGV"),
        ("import os; os.kill(os.getpid(), 40)", "killed", "signal 40"),
        ("raise MemoryError", "out_of_memory", "MemoryError"),
        ("raise RuntimeError('[gloo/transport/tcp] Connection reset by peer')", "communication", "Connection reset"),
    ],
)
def test_failure_is_explained_by_exit_code_and_traceback(
    start: Start, tmp_path: Path, program: str, kind: str, text: str
) -> None:
    assert run(start(sys.executable, "-c", program)) == 1
    record = read_rank_records(tmp_path, [0])[0]
    assert (record.ending, record.kind) == ("failed", kind)
    assert record.error is not None and text in f"{record.error.type}: {record.error.message}"


@pytest.mark.parametrize("end", ["sys.exit(1)", "os.kill(os.getpid(), 15)", "sys.exit(75)"])
def test_end_after_stop_request_is_a_stop(start: Start, tmp_path: Path, end: str) -> None:
    run(start(sys.executable, "-c", f"import os, sys; {end}", stop_requested=True))
    record = read_rank_records(tmp_path, [0])[0]
    assert (record.ending, record.finished) == ("completed", False)
    assert record.reason is not None and "after the stop request" in record.reason
    observations = RankObservations(stop_requested=True)
    (outcome,) = build_node_result("n1", 0, [0], {0: record}, observations).ranks
    assert (outcome.ending, outcome.ended_by_script) == ("stopped", True)  # which no retry budget is charged for


def test_program_killed_after_stop_request_is_charged(start: Start, tmp_path: Path) -> None:
    run(start(sys.executable, "-c", "import os; os.kill(os.getpid(), 9)", stop_requested=True))
    record = read_rank_records(tmp_path, [0])[0]
    (outcome,) = build_node_result("n1", 0, [0], {0: record}, RankObservations(stop_requested=True)).ranks
    assert (outcome.ending, outcome.ended_by_script) == ("stopped", False)


def test_program_that_vanished_is_named(start: Start, tmp_path: Path) -> None:
    run(start("/no/such/program"))
    record = read_rank_records(tmp_path, [0])[0]
    assert record.kind == "environment"
    assert record.error is not None and "/no/such/program: No such file" in record.error.message


HANDLES_TERM = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
child = subprocess.Popen([sys.executable, "-c", "import time; print('child', flush=True); time.sleep(60)"])
print("ready", flush=True)
try:
    signal.pause()
finally:
    print("child alive" if child.poll() is None else "child dead", flush=True)
    child.kill()
"""


def test_signal_reaches_the_program_alone(start: Start, tmp_path: Path) -> None:
    ranks = start(sys.executable, "-c", HANDLES_TERM)
    log = tmp_path / "rank-0.log"
    assert clock.wait_until(lambda: log.exists() and {"ready", "child"} <= set(log.read_text().split()), 30.0)
    ranks.send_stop_signal()
    assert run(ranks) == 0
    assert log.read_text().splitlines()[-2:] == ["saved", "child alive"]


def test_early_warnings_do_not_kill_a_program(start: Start, tmp_path: Path) -> None:
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); os.kill(os.getpid(), signal.SIGUSR2)"
    assert run(start(sys.executable, "-c", kill)) == 0


def test_program_has_default_signals(start: Start, tmp_path: Path) -> None:
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        ranks = start("sleep", "60")
    finally:
        signal.signal(signal.SIGTERM, previous)
    clock.wait_until(
        lambda: Path(f"/proc/{next(iter(ranks._processes.values())).pid}/comm").read_text() == "sleep\n", 30
    )
    ranks.send_stop_signal()
    assert run(ranks) == 1
    assert read_rank_records(tmp_path, [0])[0].kind == "killed"


@pytest.mark.parametrize(
    "command", [("bash", "-c", "{program} & wait"), pytest.param(("./run.sh",), marks=pytest.mark.long)]
)
def test_program_below_a_shell_gets_the_signal_and_may_save(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """The signal ends the shell at once; the rank has ended when the program has."""
    (tmp_path / "program.py").write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), pathlib.Path('saved').touch(), sys.exit()))\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(60)\n"
    )
    program = f"{sys.executable} program.py"
    (tmp_path / "run.sh").write_text(f"#!/usr/bin/env bash\n{program}\necho done\n")
    (tmp_path / "run.sh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    ranks = start(*(part.format(program=program) for part in command), stop_requested=True)
    assert clock.wait_until((tmp_path / "ready").exists, 30.0)
    ranks.send_stop_signal()
    run(ranks)
    assert (tmp_path / "saved").exists()


def test_killed_rank_is_recorded_as_killed(start: Start, tmp_path: Path) -> None:
    ranks = start("sleep", "60", stop_requested=True)
    ranks.kill()
    assert ranks.poll() == 1
    record = read_rank_records(tmp_path, [0])[0]
    assert (record.ending, record.exit_code, record.reason) == (
        "stopped", -9, "the command ended with SIGKILL, after the stop request",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("program", "code", "ending"),
    [("python", 0, ("completed", True)), ("python", 3, ("completed", False)), ("sh", 0, ("completed", False))],
)
def test_program_that_was_done_at_a_stop_request_is_not_started_again(
    start: Start, tmp_path: Path, program: str, code: int, ending: tuple[str, bool]
) -> None:
    (tmp_path / "progress-0.json").write_text('{"step": 500, "committed_step": 480, "finished": true}')
    command = ("sh", "-c", "exit 0") if program == "sh" else (sys.executable, "-c", f"raise SystemExit({code})")
    run(start(*command, stop_requested=True))
    record = read_rank_records(tmp_path, [0])[0]
    assert (record.ending, record.finished) == ending
    assert (record.step, record.committed_step) == (500, 480)


LOGS_SIGNALS = r"""
import os, signal, subprocess, sys, time
def note(number, _):
    os.write(1, f"{NAME} {signal.Signals(number).name}\n".encode())
    sys.exit()
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, note)
os.write(1, f"{NAME} ready\n".encode())
time.sleep(60)
"""


@pytest.mark.parametrize("stop_signal", ["USR1", "USR2:all", "HUP:all", "INT", "none"])
def test_chosen_signal_reaches_the_program_or_all_its_processes(start: Start, tmp_path: Path, stop_signal: str) -> None:
    (tmp_path / "child.py").write_text(f"NAME = 'child'{LOGS_SIGNALS}")
    starts_child = 'import os; os.system(f"{__import__("sys").executable} child.py &")'.replace('"sys"', "'sys'")
    (tmp_path / "program.py").write_text(f"{starts_child}\nNAME = 'program'{LOGS_SIGNALS}")
    ranks = start(sys.executable, "program.py", stop_signal=stop_signal)
    log = tmp_path / "rank-0.log"
    assert clock.wait_until(lambda: log.exists() and log.read_text().count("ready") == 2, 30.0)
    ranks.send_stop_signal()
    name, _, target = stop_signal.partition(":")
    expected = ({"program"} if name != "none" else set()) | ({"child"} if target else set())
    assert clock.wait_until(lambda: log.read_text().count(f" SIG{name}") == len(expected), 30.0)
    if "program" in expected:
        run(ranks)
    else:
        assert ranks.poll() is None
    ranks.kill()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[1:] == ["child.py"] and process.cwd() == str(tmp_path):
                process.kill()
    assert {line.split()[0] for line in log.read_text().splitlines() if "ready" not in line} == expected


@pytest.mark.parametrize(("stop_signal", "code"), [("TERM", -15), ("USR1", -10)])
def test_stop_signal_ends_a_program_without_a_handler(
    start: Start, tmp_path: Path, stop_signal: str, code: int
) -> None:
    ranks = start(sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)", stop_requested=True,
                  stop_signal=stop_signal)  # fmt: skip
    log = tmp_path / "rank-0.log"
    assert clock.wait_until(lambda: log.exists() and log.read_text() == "1\n", 30.0)
    ranks.send_stop_signal()
    run(ranks)
    record = read_rank_records(tmp_path, [0])[0]
    assert (record.exit_code, record.ended_by_signal) == (code, True)
    assert record.reason is not None and "it does not handle the signal" in record.reason


def test_shell_may_trap_the_stop_signal(start: Start, tmp_path: Path) -> None:
    shell = "trap 'echo trapped; exit' USR1; echo ready; while :; do read -rt 0.05 < <(:); done"
    ranks = start("bash", "-c", shell, stop_requested=True, stop_signal="USR1")
    log = tmp_path / "rank-0.log"
    assert clock.wait_until(lambda: log.exists() and "ready" in log.read_text(), 30.0)
    ranks.send_stop_signal()
    run(ranks)
    assert "trapped" in log.read_text() and not read_rank_records(tmp_path, [0])[0].ended_by_signal


def test_program_gets_its_signal_after_the_scheduler_has_ended_the_shell(start: Start, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(f"NAME = 'program'{LOGS_SIGNALS.replace(', signal.SIGTERM', '')}")
    ranks = start("bash", "-c", f"{sys.executable} program.py; true", stop_requested=True, stop_signal="USR1")
    log = tmp_path / "rank-0.log"
    assert clock.wait_until(lambda: log.exists() and "ready" in log.read_text(), 30.0)
    next(iter(ranks._processes.values())).terminate()
    assert clock.wait_until(lambda: next(iter(ranks._processes.values())).poll() is not None, 30.0)
    assert ranks.poll() is None
    ranks.send_stop_signal()
    run(ranks)
    assert log.read_text().splitlines()[-1] == "program SIGUSR1"


@pytest.mark.parametrize(
    ("text", "is_shell"),
    [
        ("#!/bin/bash\necho\n", True),
        ("#!/usr/bin/env python3\n", False),
        ("#!/bin/sh\n'''exec' /long/path/python \"$0\" \"$@\"\n' '''\nimport sys\n", False),  # of pip
    ],
)
def test_console_script_with_a_long_interpreter_path_is_no_shell(tmp_path: Path, text: str, is_shell: bool) -> None:
    (tmp_path / "tool").write_text(text)
    assert command_ranks._starts_shell(str(tmp_path / "tool")) is is_shell
