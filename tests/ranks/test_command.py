"""Commands that know nothing of clustertrain, on the local backend: stops, resumes and explained failures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from clustertrain import fsio
from tests import runs
from tests.runs import LOCAL, Run

pytestmark = pytest.mark.ranks
Submit = Callable[..., Run]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Submit]:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_"))}
    env |= {"CLUSTERTRAIN_HOME": str(tmp_path / "home"), "OUT": str(tmp_path)}
    submitted: list[Run] = []

    def submit_command(text: str, *options: str, command: tuple[str, ...] = (sys.executable, "program.py")) -> Run:
        (folder / "program.py").write_text(text)
        submitted.append(runs.submit(env, *LOCAL, "--gpus", "2", *options, "--", *command))
        return submitted[-1]

    yield submit_command
    for run in submitted:
        run.cancel_if_active()
        run.wait_until_final()


def wait_for_log(run: Run, text: str, attempt: int = 1) -> None:
    logs = [run.path / "attempts" / str(attempt) / "logs" / f"rank-{r}.log" for r in (0, 1)]
    run.wait_for(lambda _: all(p.exists() and text in p.read_text() for p in logs), f"{text!r} in the logs")


SAVES_ON_TERM = """
import os, pathlib, signal, sys, time

saved = pathlib.Path(os.environ["OUT"], "saved-" + os.environ["RANK"])
if saved.exists():
    print("resumed at", saved.read_text(), flush=True)
    sys.exit()


def save(*_):
    saved.write_text("17")
    print("saved", flush=True)
    END


signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_program_that_saves_on_sigterm_is_requeued_and_resumes(submit: Submit, end: str) -> None:
    run = submit(SAVES_ON_TERM.replace("END", end))
    wait_for_log(run, "ready")
    run.call("requeue", run.id)
    run.complete()
    wait_for_log(run, "resumed at 17", attempt=2)
    assert run.endings() == ["preempted", "completed"]


IGNORES_SIGNALS = """
import os, signal, time
if os.environ["CLUSTERTRAIN_ATTEMPT"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(3600)
"""


def test_program_that_ignores_signals_is_ended_at_the_deadline(submit: Submit) -> None:
    run = submit(IGNORES_SIGNALS, "--set", "preemption_test.grace_s=2")
    wait_for_log(run, "ready")
    run.call("requeue", run.id)
    run.complete()
    assert run.endings() == ["preempted", "completed"]
    assert "has not ended in time" in (run.path / "job.log").read_text()


# A new session, a second fork, all signals ignored that can be, and nothing of the environment of the rank left.
FORKS_DAEMON = """
import os, pathlib, signal, sys, time

DAEMON = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(3600)"
pid_file = pathlib.Path(os.environ["OUT"], "daemon-" + os.environ["RANK"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        os.chdir("/")
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        os.execve(sys.executable, [sys.executable, "-c", DAEMON, str(pid_file)], {})
    os._exit(0)
while not pid_file.exists() or not pid_file.read_text():
    time.sleep(0.05)
print("ready", flush=True)
END
"""


@pytest.mark.parametrize("ends", [True, False], ids=["program ends", "cancelled"])
def test_daemon_of_a_program_ends_with_the_run(submit: Submit, ends: bool) -> None:
    run = submit(FORKS_DAEMON.replace("END", "" if ends else "time.sleep(3600)"))
    wait_for_log(run, "ready")
    daemons = [int((Path(run.env["OUT"]) / f"daemon-{rank}").read_text()) for rank in (0, 1)]
    if ends:
        run.complete()
    else:
        run.call("cancel", run.id)
        run.wait_until_final()
    left = [pid for pid in daemons if psutil.pid_exists(pid)]
    assert not left, [psutil.Process(pid) for pid in left]


def test_framework_without_what_the_hooks_need_still_gets_the_stop_signal(submit: Submit) -> None:
    Path("transformers").mkdir()
    Path("transformers", "__init__.py").write_text("__version__ = '9.8.7'")
    Path("transformers", "trainer.py").write_text("class Trainer: pass")
    run = submit("import transformers.trainer\n" + SAVES_ON_TERM.replace("END", "sys.exit(0)"))
    wait_for_log(run, "ready")
    run.call("requeue", run.id)
    run.complete()
    wait_for_log(run, "the hooks for transformers 9.8.7 do not work (AttributeError")
    wait_for_log(run, "signals still work")
    wait_for_log(run, "resumed at 17", attempt=2)
    assert run.endings() == ["preempted", "completed"]


def test_failed_program_is_explained_and_not_repeated(submit: Submit) -> None:
    """Started with deepspeed, whose launcher passes the local rank."""
    Path("deepspeed").write_text(f"#!{sys.executable}\n")  # its Python counts, which runs no launcher
    run = submit(
        "import os, sys, time\nif os.environ['RANK'] == '1': raise KeyError(sys.argv)\ntime.sleep(60)\n",
        command=("./deepspeed", "--num_gpus", "2", "program.py", "--lr", "1"),
    )
    (attempt,) = run.wait_until_final()["attempts"]
    error = "program.py', '--local_rank=1', '--lr', '1']"
    assert (attempt["state"], error in attempt["reason"]) == ("failed", True), attempt


def test_edits_after_submit_do_not_reach_the_run(submit: Submit) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    Path("package").mkdir()
    Path("package", "__init__.py").touch()
    Path("package", "part.py").write_text("NAME = 'submitted'")
    wait = "import os, pathlib, time\nwhile not pathlib.Path(os.environ['OUT'], 'go').exists(): time.sleep(0.05)\n"
    Path("package", "main.py").write_text(f"{wait}from . import part; print(part.NAME, os.getcwd())")
    run = submit("", command=(sys.executable, "-m", "package.main"))
    Path("package", "part.py").write_text("NAME = 'edited'")
    Path(run.env["OUT"], "go").touch()
    run.complete()
    wait_for_log(run, f"submitted {Path.cwd()}")


SESSION = """
import torch
import clustertrain as ct

with ct.session() as session:
    model = session.parallelize(torch.nn.Linear(2, 1))
    optimizer = session.optimizer(torch.optim.AdamW)
    for step in session.steps(total=7):
        batch = torch.ones(2, 2, device=session.device), torch.ones(2, 1, device=session.device)
        session.train_step(batch, torch.nn.functional.mse_loss)
"""


def test_session_of_a_command_reports_each_step_once(submit: Submit) -> None:
    run = submit(SESSION)
    run.complete()
    rows = list(fsio.read_jsonl(run.path / "metrics" / "attempt-1.jsonl"))
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert not list((run.path / "attempts" / "1" / "events").glob("hooks-*"))
