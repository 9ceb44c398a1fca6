"""``--ship-env``: the ranks run from a node-local copy of their environment, which later attempts and runs reuse."""

from __future__ import annotations

import json
import os
import sysconfig
import venv
from pathlib import Path

import pytest

from clustertrain.run import event_types, events
from clustertrain.run.run_dir import RunDir
from tests import runs
from tests.paths import ROOT
from tests.runs import DEVICE, LOCAL, Run

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(DEVICE != "cpu", reason="the environment has no emulated device")]
TOOL = """#!{prefix}/bin/python
import os, pathlib, signal, sys, time
import only_in_environment
print("tool in", sys.prefix, only_in_environment.__file__, os.__file__, flush=True)
if os.environ["CLUSTERTRAIN_ATTEMPT"] == "1":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    while True:
        time.sleep(0.05)
"""
SESSION = """
import sys
import clustertrain as ct

with ct.session() as session:
    print("session in", sys.prefix, flush=True)
"""


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the environment of a shell with an active virtual environment, which has the packages of these tests."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    prefix = tmp_path / "shared" / "venv"
    venv.create(prefix, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(prefix), "platbase": str(prefix)}))
    (packages / "only_in_environment.py").touch()
    (packages / "project.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    tool = prefix / "bin" / "tool"
    tool.write_text(TOOL.format(prefix=prefix))
    tool.chmod(0o755)
    node = tmp_path / "node"
    node.mkdir()
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_"))}
    return inherited | {
        "CLUSTERTRAIN_HOME": str(tmp_path / "home"),
        "TMPDIR": str(node),
        "VIRTUAL_ENV": str(prefix),
        "PATH": f"{prefix}/bin:{os.environ['PATH']}",
    }


def copies(run: Run, attempt: int) -> list[event_types.EnvironmentCopied]:
    log = events.for_attempt(RunDir(run.path).attempt(attempt))
    return list(events.select(log, event_types.EnvironmentCopied))


def logs(run: Run, attempt: int) -> list[str]:
    return [path.read_text() for path in sorted((run.path / "attempts" / str(attempt) / "logs").glob("rank-*.log"))]


def has_started(run: Run) -> bool:
    texts = logs(run, 1)
    return len(texts) == 2 and all("tool in" in text for text in texts)


def test_ranks_run_from_one_copy_per_node(env: dict[str, str]) -> None:
    run = runs.submit(env, *LOCAL, "--nodes", "2", "--gpus", "1", "--ship-env", "--", "tool")
    run.wait_for(lambda _: has_started(run), "the start of both ranks")
    run.call("requeue", run.id)
    run.complete()
    first, second = copies(run, 1), copies(run, 2)
    assert sorted(event.reused is True for event in first) == [False, True]  # the nodes are one machine
    assert [event.reused for event in second] == [True, True]
    copy = first[0].path
    assert copy is not None and copy.startswith(env["TMPDIR"]) and {e.path for e in (*first, *second)} == {copy}
    for text in (*logs(run, 1), *logs(run, 2)):
        assert text.count(f"tool in {copy}/environment {copy}/environment/lib") == 1, text
        assert f" {copy}/base/lib/" in text  # the standard library too
    record = json.loads((run.path / "record.json").read_text())
    assert record["environment"]["hash"] == first[0].hash


def test_session_runs_from_the_copy_under_torchrun(env: dict[str, str]) -> None:
    Path("train.py").write_text(SESSION)
    python = f"{env['VIRTUAL_ENV']}/bin/python"
    run = runs.submit(env, *LOCAL, "--gpus", "1", "--ship-env", "--python", python, "train.py")
    run.complete()
    (text,), (event,) = logs(run, 1), copies(run, 1)
    assert f"session in {event.path}/environment" in text and event.reused is False
