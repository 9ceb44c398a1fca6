"""What is run on a node after its agent has ended: ``agent_end.sh``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from clustertrain.run.run_dir import RunDir
from clustertrain.submit import templates

SCRIPT = templates.find_template_folder() / "agent_end.sh"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "a run; $(touch pwned)")
    made.attempt(2).results.mkdir(parents=True)
    return made


def end(run: RunDir, tmp: Path, **env: str) -> None:
    """As slurmstepd runs it: with the environment of the task."""
    given = {"CLUSTERTRAIN_RUN_DIR": str(run.path), "CLUSTERTRAIN_ATTEMPT": "2", "TMPDIR": str(tmp), **env}
    done = subprocess.run([SCRIPT], env=given, cwd=tmp, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp / "pwned").exists()


def test_an_agent_without_a_result_is_noted(run: RunDir, tmp_path: Path) -> None:
    run.attempt(2).result_path("n1.example").write_text("{}")
    end(run, tmp_path, SLURMD_NODENAME="n1.example")
    end(run, tmp_path, SLURMD_NODENAME="n2.example")
    assert run.attempt(2).nodes_without_agent() == {"n2.example"}
    end(run, tmp_path, SLURMD_NODENAME="n3", CLUSTERTRAIN_NODE="local-3")
    assert run.attempt(2).nodes_without_agent() == {"n2.example", "local-3"}


def test_its_temporary_folder_is_removed_and_no_other(run: RunDir, tmp_path: Path) -> None:
    tmp = tmp_path / "tmp of the node"
    others = {"2-n2-abcd_123", "2-n1-b-abcd_123", "1-n1-abcd_123"}
    names = {n: tmp / f"clustertrain-{run.id}-{n}" for n in ("2-n1-abcd_123", *others)}
    for folder in names.values():
        folder.mkdir(parents=True)
        (folder / "stop").touch()
    end(run, tmp, SLURMD_NODENAME="n1")
    assert {n for n, folder in names.items() if folder.exists()} == others


def test_a_run_that_is_not_seen_there_is_left_alone(run: RunDir, tmp_path: Path) -> None:
    end(RunDir(tmp_path / "elsewhere"), tmp_path, SLURMD_NODENAME="n1")
    assert not (tmp_path / "elsewhere").exists()
