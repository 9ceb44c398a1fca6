"""``agent_end.sh``, which runs on a node after its agent has ended."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from clustertrain.run.run_dir import RunDir
from clustertrain.submit import templates

SCRIPT = templates.find_template_folder() / "agent_end.sh"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "a run; $(touch pwned)")
    run.attempt(2).results.mkdir(parents=True)
    return run


def run_agent_end(run: RunDir, tmp: Path, **env: str) -> None:
    """Run the script as slurmstepd does: with the environment of the task."""
    environ = {"CLUSTERTRAIN_RUN_DIR": str(run.path), "CLUSTERTRAIN_ATTEMPT": "2", "TMPDIR": str(tmp), **env}
    done = subprocess.run([SCRIPT], env=environ, cwd=tmp, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp / "pwned").exists()


def test_node_whose_agent_left_no_result_is_recorded(run: RunDir, tmp_path: Path) -> None:
    run.attempt(2).result_path("n1.example").write_text("{}")
    run_agent_end(run, tmp_path, SLURMD_NODENAME="n1.example")
    run_agent_end(run, tmp_path, SLURMD_NODENAME="n2.example")
    assert run.attempt(2).nodes_without_agent() == {"n2.example"}
    run_agent_end(run, tmp_path, SLURMD_NODENAME="n3", CLUSTERTRAIN_NODE="local-3")
    assert run.attempt(2).nodes_without_agent() == {"n2.example", "local-3"}


def test_only_the_agents_own_temporary_folder_is_removed(run: RunDir, tmp_path: Path) -> None:
    tmp = tmp_path / "tmp of the node"
    others = {"2-n2-abcd_123", "2-n1-b-abcd_123", "1-n1-abcd_123"}
    names = {n: tmp / f"clustertrain-{run.id}-{n}" for n in ("2-n1-abcd_123", *others)}
    for folder in names.values():
        folder.mkdir(parents=True)
        (folder / "stop").touch()
    run_agent_end(run, tmp, SLURMD_NODENAME="n1")
    assert {n for n, folder in names.items() if folder.exists()} == others


def test_containers_of_a_killed_agent_are_ended(run: RunDir, tmp_path: Path) -> None:
    folder, other = (tmp_path / f"clustertrain-{run.id}-2-{node}-abcd_123" for node in ("n1", "n1-b"))
    (folder / "containers").mkdir(parents=True)
    (folder / "containers" / "clean-up.sh").write_text(f"echo >> '{tmp_path}/cleaned'\n")
    ranks = [subprocess.Popen(["sleep", "60"], env={"CLUSTERTRAIN_RANK_DIR": str(f)}) for f in (folder, other)]
    try:
        run_agent_end(run, tmp_path, SLURMD_NODENAME="n1")
        assert ranks[0].wait(10) == -signal.SIGKILL
        assert (ranks[1].poll(), (tmp_path / "cleaned").exists(), folder.exists()) == (None, True, False)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_run_folder_that_the_node_cannot_see_is_not_created(run: RunDir, tmp_path: Path) -> None:
    run_agent_end(RunDir(tmp_path / "elsewhere"), tmp_path, SLURMD_NODENAME="n1")
    assert not (tmp_path / "elsewhere").exists()
