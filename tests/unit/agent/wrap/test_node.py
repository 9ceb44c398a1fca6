"""The agents in the user's own job step: their ends, signals and exit codes, with real processes in place of agents."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from clustertrain import clock
from clustertrain.agent.signals import Signals
from clustertrain.agent.wrap import node
from clustertrain.agent.wrap.rank_output import RankOutput
from clustertrain.errors import UnsuitableEnvironment
from clustertrain.run import run_dir
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.slurm_step import StepTask
from clustertrain.submit.templates import read_template

TASK = StepTask(
    job_id="17", cluster="c", restart=0, step="0-1", nodes=("n1", "n2"), node_rank=0, local_rank=0, tasks_per_node=1,
    num_gpus=0,
)  # fmt: skip
Build = Callable[[str], RunDir]


@pytest.fixture
def build_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Return a function that creates a run whose agents are a shell script."""
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(node, "POLL_S", 0.05)

    def build(script: str) -> RunDir:
        run = run_dir.create_run("wrapped")
        run.job_script.write_text(f"#!/bin/bash\n{script}\n")
        run.agent_end_script.write_text(read_template("agent_end.sh"))
        run.agent_end_script.chmod(0o755)
        attempt = run.attempt(1)
        for folder in (attempt.results, attempt.logs):
            folder.mkdir(parents=True)
        attempt.nonce.write_text("abc")
        return run

    return build


def wait_for_end(agents: node.StepAgents) -> int:
    assert clock.wait_until(lambda: agents.poll() is not None, 30.0)
    assert agents.returncode is not None
    return agents.returncode


def test_step_ends_with_the_last_agent(build_run: Build) -> None:
    names = ("RUN_DIR", "ATTEMPT", "NONCE", "NODE", "NODE_RANK", "NODE_LIST")
    values = " ".join(f"${{CLUSTERTRAIN_{name}-}}" for name in names)
    run = build_run(f'echo "{values}" > "$CLUSTERTRAIN_HOME/seen"; : > "$CLUSTERTRAIN_HOME/ended"')
    attempt = run.attempt(1)
    attempt.result_path("n1").write_text("{}")
    agents = node.StepAgents(TASK, run, attempt)
    assert clock.wait_until(lambda: agents.poll() is None and (attempt.wrap / "n1.json").exists(), 30.0)
    assert not clock.wait_until(lambda: agents.poll() is not None, 0.2, 0.05)  # the agent of n2 has not ended
    node.report_agent_end(replace(TASK, node_rank=1), run, attempt, 75)
    assert wait_for_end(agents) == 75
    assert (run.path.parents[1] / "seen").read_text().split() == ["1", "abc", "n1", "0", "n1,n2"]
    assert attempt.nodes_without_agent() == {"n2"}  # it wrote no result


def test_killed_agent_of_the_first_node_ends_the_step_like_under_srun(build_run: Build) -> None:
    run = build_run("exec sleep 60")
    agents = node.StepAgents(TASK, run, run.attempt(1))
    assert agents.poll() is None
    agents.kill()
    assert wait_for_end(agents) == 128 + signal.SIGKILL


def test_signals_reach_the_agent(build_run: Build) -> None:
    run = build_run('trap "exit 75" USR2; : > "$CLUSTERTRAIN_HOME/ready"; while :; do sleep 0.05; done')
    agents = node.StepAgents(replace(TASK, nodes=("n1",)), run, run.attempt(1))
    assert clock.wait_until((run.path.parents[1] / "ready").exists, 30.0)
    agents.send_signal(signal.SIGUSR2)
    assert wait_for_end(agents) == 75


def test_other_node_exits_with_the_code_of_the_first(build_run: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    run = build_run("exit 3")
    attempt, second = run.attempt(1), replace(TASK, node_rank=1)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(node.run_node(second, Signals())))
    thread.start()
    node.publish_start(TASK, node.StepStart(run=run.id, attempt=1))
    assert clock.wait_until((attempt.wrap / "n2.json").exists, 30.0)
    assert json.loads((attempt.wrap / "n2.json").read_text()) == {"exit_code": 3}
    assert codes == []
    node.report_exit(attempt, 93)
    thread.join(30)
    assert codes == [93]


def test_other_node_without_a_run(build_run: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "START_S", 0.1)
    build_run("")
    second = replace(TASK, node_rank=1)
    with pytest.raises(UnsuitableEnvironment, match="n2: the first task, on n1, has not started a run"):
        node.wait_for_start(second)
    node.publish_start(TASK, node.StepStart(exit_code=2))
    assert node.wait_for_start(second).exit_code == 2
    # A start of the job before its requeue is another one.
    with pytest.raises(UnsuitableEnvironment):
        node.wait_for_start(replace(second, restart=1))


def test_log_of_rank_0_appears_on_standard_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "rank-0.log"
    output = RankOutput(log)
    output.start()
    log.write_text("one\n")
    copied = ""

    def has_copied() -> bool:
        nonlocal copied
        copied += capfd.readouterr().out
        return copied == "one\n"

    assert clock.wait_until(has_copied, 30.0)
    with log.open("a") as file:
        file.write("two \x1b[1m\r")
    output.end()
    assert capfd.readouterr().out == "two \x1b[1m\r"
