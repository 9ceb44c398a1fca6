"""Programs of other frameworks, unmodified: they stop at one step on all ranks, save, and resume where they stopped."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clustertrain.run import attempts
from clustertrain.run.run_dir import RunDir
from tests import runs
from tests.paths import ROOT
from tests.runs import LOCAL, Run

pytestmark = pytest.mark.ranks
PROGRAMS = ROOT / "tests" / "fixtures" / "programs"
STEPS = 130
# Another environment with torch and the frameworks, for `make oldest-torch`.
RANKS_PYTHON = os.environ.get("CLUSTERTRAIN_TEST_RANKS_PYTHON", sys.executable)
Submit = Callable[..., Run]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Submit]:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_"))}
    env |= {"CLUSTERTRAIN_HOME": str(tmp_path / "home")}
    submitted: list[Run] = []

    def submit_program(
        name: str,
        *options: str,
        out: str = "out",
        arguments: tuple[str, ...] = (),
        start: tuple[str, ...] = (),
        python: str = RANKS_PYTHON,
        as_script: bool = False,
    ) -> Run:
        shutil.copy(PROGRAMS / name, folder)
        (tmp_path / out).mkdir(exist_ok=True)
        program = ("--python", python) if as_script else ("--", *start, python)
        command = (*program, name, str(tmp_path / out), str(STEPS), *arguments)
        submitted.append(runs.submit(env, *LOCAL, "--gpus", "2", *options, *command))
        return submitted[-1]

    yield submit_program
    for run in submitted:
        run.cancel_if_active()
        run.wait_until_final()


def list_steps(run: Run, attempt: int, rank: int) -> dict[int, str]:
    """Return the losses that a rank printed in an attempt, by step."""
    lines = (run.path / "attempts" / str(attempt) / "logs" / f"rank-{rank}.log").read_text().splitlines()
    fields = [line.split() for line in lines if line.startswith("STEP ")]
    return {int(step): loss[0] if loss else "" for _, step, *loss in fields}


def assert_stopped_together(run: Run) -> int:
    """Check that attempt 1 stopped at one step on both ranks and attempt 2 did the rest; return the step."""
    stopped = [max(list_steps(run, 1, rank)) for rank in (0, 1)]
    assert stopped[0] == stopped[1] < STEPS
    for rank in (0, 1):
        assert list(list_steps(run, 2, rank)) == list(range(stopped[0] + 1, STEPS + 1))
    first, second = attempts.load_attempts(RunDir(run.path))
    assert (first.last_step, first.committed_step, second.restored_step) == (stopped[0],) * 3
    return stopped[0]


PREEMPT = ("--set", "preemption_test.preempt_at_steps=[4]")


# On CPUs, FSDP2 of torch 2.6 does not train, and its torch.load does not know cpu:0, the device of a Trainer's rank.
NEEDS_NEW_TORCH = pytest.mark.skipif(sys.executable != RANKS_PYTHON, reason="torch 2.6 cannot do this on CPUs")


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("transformers_trainer.py", marks=NEEDS_NEW_TORCH),
        "attached_loop.py",
        pytest.param("fsdp2_dcp.py", marks=NEEDS_NEW_TORCH),
    ],
)
def test_preempted_program_has_the_losses_of_an_uninterrupted_one(submit: Submit, program: str) -> None:
    run = submit(program, *PREEMPT)
    run.complete()
    assert run.endings() == ["preempted", "completed"]
    assert_stopped_together(run)
    whole = submit(program, out="whole")
    whole.complete()
    assert list_steps(run, 1, 0) | list_steps(run, 2, 0) == list_steps(whole, 1, 0)
    assert "where the time went" in run.call("status", run.id).stdout.lower()


def test_shell_before_the_program_may_end_first(submit: Submit, tmp_path: Path) -> None:
    """The signal of a preemption goes to all processes, and a shell ends at once."""
    wrapper = tmp_path / "project" / "run.sh"
    wrapper.write_text('#!/bin/bash\n"$@"\necho the program has ended\n')
    wrapper.chmod(0o755)
    run = submit("attached_loop.py", *PREEMPT, start=("./run.sh",))
    run.complete()
    assert run.endings() == ["preempted", "completed"]
    assert_stopped_together(run)
    assert "has not ended in time" not in (run.path / "job.log").read_text()


def test_arguments_that_the_agent_adds_do_not_hide_the_checkpoints(submit: Submit, tmp_path: Path) -> None:
    """deepspeed's ``--local_rank`` differs by rank, and the arguments of a resumed attempt by attempt."""
    deepspeed = tmp_path / "deepspeed"
    deepspeed.write_text(f"#!{RANKS_PYTHON}\n")  # its Python counts, which runs no launcher
    run = submit("attached_loop.py", *PREEMPT, "--resume-args", "--attempt {attempt}", python=str(deepspeed))
    run.complete()
    assert run.endings() == ["preempted", "completed"]
    assert_stopped_together(run)


def test_lightning_stops_saves_and_resumes(submit: Submit) -> None:
    run = submit("lightning_trainer.py", *PREEMPT)
    run.complete()
    assert run.endings() == ["preempted", "completed"]
    assert_stopped_together(run)


def test_accelerate_resumes_from_the_checkpoint_in_its_environment(submit: Submit) -> None:
    run = submit("accelerate_loop.py", *PREEMPT)
    run.complete()
    assert run.endings() == ["preempted", "completed"]
    first, second = attempts.load_attempts(RunDir(run.path))
    resumed = min(list_steps(run, 2, 0)) - 1
    assert first.committed_step == second.restored_step == resumed
    assert resumed % 10 == 0 < resumed <= max(list_steps(run, 1, 0)) < STEPS
    assert max(list_steps(run, 2, 0)) == STEPS


@NEEDS_NEW_TORCH
def test_callback_does_what_the_hooks_do(submit: Submit) -> None:
    run = submit("transformers_trainer.py", *PREEMPT, "--no-hooks", arguments=("--callback",))
    run.complete()
    assert run.endings() == ["preempted", "completed"]
    assert_stopped_together(run)


def test_resume_flag_of_first_attempt_is_not_an_error(submit: Submit) -> None:
    """With ``resume_from_checkpoint=True`` the Trainer itself refuses a folder without a checkpoint."""
    run = submit("transformers_trainer.py", arguments=("--resume",))
    run.complete()
    assert "there is no checkpoint yet" in (run.path / "attempts" / "1" / "logs" / "rank-0.log").read_text()


def test_own_handler_is_asked_and_its_steps_are_seen(submit: Submit) -> None:
    run = submit("own_handler.py")
    run.wait_for_step(5)
    run.call("requeue", run.id)
    run.complete()
    first, second = attempts.load_attempts(RunDir(run.path))
    stopped = max(list_steps(run, 1, 0))
    assert (first.last_step, second.restored_step) == (stopped, stopped)
    assert (second.first_step, second.last_step) == (stopped + 1, STEPS)


def test_script_stops_on_its_own_signal_and_resumes_with_further_arguments(submit: Submit, tmp_path: Path) -> None:
    """Slurm's SIGTERM, which the local backend sends to all processes, does not end it before its own signal."""
    run = submit(
        "usr1_script.py", *PREEMPT, "--stop-signal", "USR1", "--checkpoints", "../out/*.pt",
        "--resume-args", "--init-from '{checkpoint}'", as_script=True,
    )  # fmt: skip
    run.complete()
    assert run.endings() == ["preempted", "completed"]
    first, second = attempts.load_attempts(RunDir(run.path))
    stopped = max(list_steps(run, 1, 0))
    assert list(list_steps(run, 2, 1)) == list(range(stopped + 1, STEPS + 1))
    saved = tmp_path / "out" / "ckpt.pt"
    for rank in (0, 1):
        log = (run.path / "attempts" / "2" / "logs" / f"rank-{rank}.log").read_text()
        assert f"RESUMED {tmp_path / 'project' / '..' / 'out' / 'ckpt.pt'}" in log
    assert first.saved_checkpoint and first.made_progress and second.restored_step == stopped
    assert "ckpt.pt" in run.call("status", run.id).stdout
    assert saved.exists() and "out/half.pt: it ends too early" in (run.path / "job.log").read_text()


def test_without_hooks_the_signal_ends_the_program(submit: Submit) -> None:
    run = submit("lightning_trainer.py", "--no-hooks")
    logs = [run.path / "attempts" / "1" / "logs" / f"rank-{rank}.log" for rank in (0, 1)]
    run.wait_for(lambda _: all(p.exists() and "STEP 5 " in p.read_text() for p in logs), "steps in the logs")
    assert not list((run.path / "metrics").iterdir())
    run.call("cancel", run.id)
    run.wait_until_final()
