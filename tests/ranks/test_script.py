"""Custom scripts under torchrun, as the node agent starts it, and standalone."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from clustertrain import clock, fsio, proc
from clustertrain.checkpoint.offline import inspect
from clustertrain.plan.layout import Layout
from clustertrain.run import metrics
from clustertrain.run.run_dir import RunDir
from tests.paths import ROOT
from tests.ranks.rank_pool import DEVICE, Ranks, digest, make_run

pytestmark = pytest.mark.ranks

EXAMPLE = ROOT / "examples" / "train_script.py"
ANY_LAYOUT = EXAMPLE.with_name("layouts_script.py")


def torchrun(run: RunDir, attempt: int, rank_dir: Path) -> subprocess.Popen[bytes]:
    rank_dir.mkdir()
    run.attempt(attempt).path.mkdir()
    environ = {
        **os.environ,
        "CLUSTERTRAIN_RUN_DIR": str(run.path),
        "CLUSTERTRAIN_ATTEMPT": str(attempt),
        "CLUSTERTRAIN_RANK_DIR": str(rank_dir),
        "CLUSTERTRAIN_DEVICE": DEVICE,
    }
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    argv += ["--rdzv-endpoint=127.0.0.1:0", "--signals-to-handle=SIGINT", "-m", "clustertrain", "train"]
    log = run.path / f"torchrun-{attempt}.log"
    return proc.start(argv, env=environ, log=log, new_session=True, ignore_stop_signals=True)


def test_example_under_torchrun_stops_on_warning_and_resumes(tmp_path: Path) -> None:
    args = ("--steps", "100000", "--checkpoint-every", "50000")
    run = make_run(tmp_path / "run", "ddp", 2, script=(EXAMPLE, args))
    first = torchrun(run, 1, tmp_path / "ranks-1")
    events = run.attempt(1).events_path("rank-0")
    try:
        assert clock.wait_until(lambda: any(e["event"] == "first_step" for e in fsio.read_jsonl(events)), 120.0)
        # Signals to all processes, torchrun included, do not end them; the stop file stops the ranks.
        os.killpg(first.pid, signal.SIGUSR2)
        (tmp_path / "ranks-1" / "stop").touch()
        assert first.wait(120.0) == 0, (run.path / "torchrun-1.log").read_text()
    finally:
        first.kill()
    results = [fsio.read_json(tmp_path / "ranks-1" / f"rank-{r}.json") for r in range(2)]
    assert {r["ending"] for r in results} == {"stopped"}
    step = results[0]["committed_step"]
    assert step == results[1]["step"] > 0
    assert "step 0: loss" in run.attempt(1).rank_log(0).read_text()
    run.spec.write_text(run.spec.read_text().replace("100000", str(step + 3)))
    second = torchrun(run, 2, tmp_path / "ranks-2")
    assert second.wait(120.0) == 0, (run.path / "torchrun-2.log").read_text()
    assert fsio.read_json(tmp_path / "ranks-2" / "rank-1.json")["ending"] == "completed"
    assert [c["step"] for c in inspect.list_checkpoints(run.checkpoints)] == [step + 3]  # without the stop's


def test_example_resumes_bit_by_bit(tmp_path: Path) -> None:
    def example(name: str, steps: int) -> RunDir:
        args = ("--steps", str(steps), "--checkpoint-every", "5")
        return make_run(tmp_path / name, "ddp", 4, script=(EXAMPLE, args))

    reference = example("whole", 12)
    Ranks(reference, 4).expect(0)
    parts = example("parts", 7)
    Ranks(parts, 4, 1).expect(0)
    parts.spec.write_text(parts.spec.read_text().replace('"7"', '"12"'))
    second = Ranks(parts, 4, 2).expect(0)
    assert second.events("restored")[0]["step"] == 7
    assert digest(parts) == digest(reference)


def test_example_for_every_layout_matches_when_split(tmp_path: Path) -> None:
    layouts = (
        Layout(),
        Layout(tp=2, sequence_parallel=True),
        Layout(cp=2),
        Layout(pp=2, schedule="1f1b"),
    )
    expected: list[float] = []
    for i, layout in enumerate(layouts):
        run = make_run(tmp_path / str(i), layout, layout.world_size, script=(ANY_LAYOUT, ("--steps", "3")))
        losses = [loss for loss, _ in Ranks(run, layout.world_size).expect(0).losses().values()]
        expected = expected or losses
        assert losses == pytest.approx(expected, rel=2e-5), layout.describe()


RANDOM = """
import random, sys
import numpy as np
import torch
from torch import nn
import clustertrain as ct

with ct.session() as session:
    # Running statistics differ between ranks until DDP broadcasts rank 0's; random numbers come from every library.
    network = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    model = session.parallelize(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    average = torch.zeros((), device=session.device)
    state = {"model": model, "optimizer": optimizer, "average": average, "seen": []}
    for step in session.steps(int(sys.argv[1]), state, checkpoint_every=3):
        x = torch.randn(6, 3) + random.random() + float(np.random.rand())
        loss = model(x.to(session.device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.lerp_(loss.detach(), 0.1)
        state["seen"] = [*state["seen"], step]
        session.log(loss=loss, average=average, seen=len(state["seen"]))
"""


def test_random_numbers_buffers_and_plain_state_resume(tmp_path: Path) -> None:
    script = tmp_path / "random_numbers.py"
    script.write_text(RANDOM)
    reference = Ranks(make_run(tmp_path / "whole", "ddp", 4, script=(script, ("10",))), 4).expect(0)
    parts = make_run(tmp_path / "parts", "ddp", 4, script=(script, ("7",)))
    Ranks(parts, 4, 1).expect(0)
    parts.spec.write_text(parts.spec.read_text().replace('"7"', '"10"'))
    Ranks(parts, 4, 2).expect(0)
    assert digest(parts) == digest(reference.run)

    def rows(run: RunDir) -> list[tuple[float, ...]]:
        return [(r["step"], r["loss"], r["average"], r["seen"]) for r in metrics.load_rows(run)]

    assert rows(parts) == rows(reference.run)
    assert [r[3] for r in rows(parts)] == list(range(1, 11))


TWO_SESSIONS = """
import torch
from torch import nn
import clustertrain as ct

for total in (2, 4):
    with ct.session() as session:
        network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        model = session.parallelize(network, tp_plan={"0": "colwise", "2": "rowwise"})
        optimizer = session.optimizer(torch.optim.SGD, lr=0.1)
        data = session.loader(torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 2)), global_batch=8)
        state = {"model": model, "optimizer": optimizer, "data": data}
        for step in session.steps(total, state):
            session.log(loss=session.train_step(next(data), nn.functional.mse_loss).loss)
"""


def test_second_session_continues_where_first_ended(tmp_path: Path) -> None:
    script = tmp_path / "two_sessions.py"
    script.write_text(TWO_SESSIONS)
    layout = Layout(strategy="fsdp", dp_shard=2, tp=2)
    run = make_run(tmp_path / "run", layout, 4, global_batch=8, script=(script, ()))
    ranks = Ranks(run, 4).expect(0)
    losses = [loss for _, loss in sorted((r["step"], r["loss"]) for r in ranks.rows())]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)
    assert [c["step"] for c in inspect.list_checkpoints(run.checkpoints)] == [2, 4]
    assert [e["step"] for e in ranks.events("restored")] == [2]


HANGS = """
import time
import torch
import torch.distributed as dist
import clustertrain as ct

with ct.session(timeout_s=3.0) as session:
    for step in session.steps(2):
        if session.rank == 1:
            time.sleep(600)
        dist.all_reduce(torch.zeros(1, device=session.device))
"""


def test_rank_missing_from_collective_is_a_hang(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    ranks = Ranks(make_run(tmp_path / "run", "ddp", 2, script=(script, ())), 2)
    waiting, hung = ranks.processes
    waiting.join(60.0)
    hung.kill()
    assert waiting.exitcode == 1
    (record,) = ranks.results()
    assert (record["kind"], record["ending"]) == ("hang", "failed"), ranks.logs()


def test_standalone_script_stops_on_sigterm_and_resumes(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        str(EXAMPLE),
        "--checkpoint-dir",
        str(tmp_path / "checkpoints"),
        "--checkpoint-every",
        "50000",
    ]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("CLUSTERTRAIN")}
    log = tmp_path / "log"
    process = proc.start([*argv, "--steps", "100000"], env=environ, log=log)
    try:
        assert clock.wait_until(lambda: log.exists() and "step 0: loss" in log.read_text(), 120.0)
        process.terminate()
        assert process.wait(120.0) == 75, log.read_text()
    finally:
        process.kill()
    step = inspect.list_checkpoints(tmp_path / "checkpoints")[-1]["step"]
    proc.run([*argv, "--steps", str(step + 2)], env=environ, timeout_s=120.0)
    assert inspect.list_checkpoints(tmp_path / "checkpoints")[-1]["step"] == step + 2


TWO_LOOPS = """
import clustertrain as ct

with ct.session() as session:
    for step in session.steps(4):
        pass
with ct.session({1}) as session:
    for step in session.steps({0}):
        pass
"""


@pytest.mark.parametrize(
    ("text", "kind", "code", "message"),
    [
        ("import no_such_module", "error", 1, "No module named"),
        ("import sys; sys.exit('bad input')", "error", 1, "bad input"),
        ("import clustertrain as ct\nwith ct.session(device='tpu'): pass", "environment", 78, "must be cpu or cuda"),
        ("raise MemoryError", "out_of_memory", 1, ""),
        (TWO_LOOPS.format(4, ""), "error", 1, "an earlier loop ends at step 4"),
        (TWO_LOOPS.format(9, "checkpoint_dir='apart'"), "error", 1, "start at step 0, but 4 steps of the run are"),
    ],
    ids=["import", "sys.exit", "device", "memory", "second loop", "second loop elsewhere"],
)
def test_error_of_script_is_recorded(tmp_path: Path, text: str, kind: str, code: int, message: str) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(text)
    run = make_run(tmp_path / "run", "single", 1, script=(script, ()))
    result = Ranks(run, 1).expect(code).results()[0]
    assert (result["ending"], result["kind"], result["exit_code"]) == ("failed", kind, code)
    assert message in result["error"]["message"]


def test_script_without_session_completes(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import os, sys\nprint(sys.argv[1:], os.getcwd())")
    run = make_run(tmp_path / "run", "single", 1, script=(script, ("a b", "--c")))
    ranks = Ranks(run, 1).expect(0)
    assert ranks.results()[0]["ending"] == "completed"
    assert f"['a b', '--c'] {run.path}" in ranks.logs()


CODE_AFTER_SESSION = """
import os, pathlib
import clustertrain as ct

record = pathlib.Path(os.environ["CLUSTERTRAIN_RANK_DIR"], "rank-0.json")
with ct.session() as session:
    for step in session.steps(2):
        pass
print("after the session:", record.exists())
"""


@pytest.mark.parametrize(
    ("last_line", "code", "ending"), [("", 0, "completed"), ("raise ValueError('export')", 1, "failed")]
)
def test_code_after_session_belongs_to_the_rank(tmp_path: Path, last_line: str, code: int, ending: str) -> None:
    script = tmp_path / "after.py"
    script.write_text(CODE_AFTER_SESSION + last_line)
    run = make_run(tmp_path / "run", "single", 1, script=(script, ()))
    ranks = Ranks(run, 1).expect(code)
    # No record yet: the agent gives a rank with a record 20 s to end, so a longer export would be killed.
    assert "after the session: False" in ranks.logs()
    assert stat.S_IMODE(ranks.attempt.rank_log(0).stat().st_mode) == 0o640  # the run folder restricts access
    assert [(r["ending"], r["step"]) for r in ranks.results()] == [(ending, 2)]


def test_session_in_plain_python_writes_its_record(tmp_path: Path) -> None:
    script = tmp_path / "after.py"
    script.write_text(CODE_AFTER_SESSION)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("CLUSTERTRAIN")}
    environ |= {"CLUSTERTRAIN_RANK_DIR": str(tmp_path), "CLUSTERTRAIN_DEVICE": DEVICE}
    result = proc.run([sys.executable, str(script)], env=environ, timeout_s=120.0)
    assert "after the session: True" in result.stdout
    assert fsio.read_json(tmp_path / "rank-0.json")["ending"] == "completed"


def test_child_processes_of_script_have_default_signals(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(
        "import clustertrain as ct, subprocess\n"
        "with ct.session() as s:\n"
        "    subprocess.run(['grep', 'SigIgn', '/proc/self/status'])\n"
    )
    run = make_run(tmp_path / "run", "single", 1, script=(script, ()))
    ranks = Ranks(run, 1).expect(0)
    ignored = int(ranks.logs().split("SigIgn:")[1].split()[0], 16)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        assert not ignored & 1 << (number - 1)


UNUSED_PARAMETER = Path(__file__).with_name("unused_parameter_script.py")


@pytest.mark.parametrize(("loop", "code"), [("custom-loop", 1), ("train-step", 78)])
def test_unused_parameter_is_named(loop: str, code: int, tmp_path: Path) -> None:
    """DDP itself would report only indices, at the next step."""
    run = make_run(tmp_path / "run", "ddp", 2, script=(UNUSED_PARAMETER, (loop,)))
    ranks = Ranks(run, 2)
    assert ranks.wait() == [code, code], ranks.logs()
    for result in ranks.results():
        message = result["error"]["message"]
        assert "the loss does not depend on spare.weight, spare.bias" in message
        assert "parallel.find_unused_parameters = true" in message


def test_find_unused_parameters_allows_unused_parameter(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run",
        "ddp",
        2,
        script=(UNUSED_PARAMETER, ("train-step",)),
        parallel={"find_unused_parameters": True},
    )
    Ranks(run, 2).expect(0)
