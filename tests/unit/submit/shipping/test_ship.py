"""``environment = "ship"`` at submission: which environment, what is refused, noted and recorded."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertrain.cli.main import main
from clustertrain.errors import ConfigError
from clustertrain.run.shipped_environment import load_shipped_environment
from clustertrain.submit.prepare import prepare
from clustertrain.submit.request import SubmitRequest
from clustertrain.submit.shipping.ship import find_python
from clustertrain.submit.sweep import submit_sweep
from clustertrain.submit.transaction import dry_run, submit
from tests.fakes.environments import VERSION, make_environment, write
from tests.fakes.slurm.fixture import FakeSlurm


def make_request(folder: Path, *command: str, **more: Any) -> SubmitRequest:
    project = folder / "project"
    project.mkdir(exist_ok=True)
    return SubmitRequest(command=command, cwd=project, job={"environment": "ship", "device": "cpu"}, **more)


@pytest.mark.long
def test_run_takes_its_environment(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    prefix = make_environment(tmp_path)
    progress: list[tuple[int, int]] = []
    request = make_request(tmp_path, str(prefix / "bin" / "tool"))
    result = submit(request, lambda *sizes: progress.append(sizes))
    shipped = load_shipped_environment(result.run)
    assert shipped is not None and Path(shipped.archive).is_file() and shipped.prefixes == (str(prefix),)
    assert json.loads(result.run.record.read_text())["environment"]["hash"] == shipped.hash
    assert 0 < progress[-1][0] == progress[-1][1]
    again = submit(request, lambda *sizes: progress.clear())
    assert load_shipped_environment(again.run) == shipped and progress  # it was not packed again
    assert not submit(SubmitRequest(cwd=tmp_path)).run.environment.exists()


def test_runs_of_a_sweep_share_one_archive(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    write(tmp_path / "cluster" / "site.toml", 'environment = "ship"\nenvironment_dir = "/local/{job}"\n')
    prefix = make_environment(tmp_path)
    request = SubmitRequest(
        command=(str(prefix / "bin" / "tool"),), cwd=tmp_path, job={"device": "cpu", "cluster": "site"},
        environ={**os.environ, "CLUSTERTRAIN_CLUSTER_PATH": str(tmp_path / "cluster")},
    )  # fmt: skip
    runs = [submitted.run for submitted, _ in submit_sweep(request, ["env.SEED=1,2"], None).runs]
    first, second = (load_shipped_environment(run) for run in runs)
    assert first is not None and first == second
    assert 'environment_dir = "/local/{job}"' in runs[0].spec.read_text()


def test_image_is_the_environment_of_its_ranks(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    write(tmp_path / "cluster" / "site.toml", 'environment = "ship"\npython = "/site/python"\n')
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "bin").mkdir()
    job = {"device": "cpu", "container": str(tmp_path / "image"), "container_runtime": "charliecloud"}
    environ = {**os.environ, "CLUSTERTRAIN_CLUSTER_PATH": str(tmp_path / "cluster")}
    request = SubmitRequest(command=("train",), cwd=tmp_path, job={**job, "cluster": "site"}, environ=environ)
    prepared = prepare(request).spec.job
    assert (prepared.environment, prepared.python) == ("shared", "")
    with pytest.raises(ConfigError, match="--ship-env: the ranks run in a container"):
        dry_run(replace(request, job={**request.job, "environment": "ship"}))


@pytest.mark.long
def test_refusals_and_dry_runs_create_nothing(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    prefix = make_environment(tmp_path)
    project = tmp_path / "code"
    project.mkdir()
    write(prefix / "lib" / VERSION / "site-packages" / "code.pth", f"{project}\n")
    preview = dry_run(make_request(tmp_path, str(prefix / "bin" / "tool")))
    assert f"--ship-env: still read from their own folders: {project} (linked from site-packages)" in preview.notes
    system = write(tmp_path / "system" / "bin" / "python", "#!/bin/sh\n", 0o755)
    with pytest.raises(ConfigError, match=f"{system} is not in a virtual environment or a conda environment"):
        submit(make_request(tmp_path, str(system)))
    environ = {"PATH": f"{system.parent}:/usr/bin:/bin"}
    with pytest.raises(ConfigError, match=re.escape(f"{system} (the python in your PATH) is not in a virtual")):
        submit(make_request(tmp_path, "sh", "-c", "python train.py", environ=environ))
    assert not (tmp_path / "home").exists() and not fake_slurm.calls("sbatch")


@pytest.mark.parametrize("ignored", [True, False])
def test_environment_in_the_code_is_noted(ignored: bool, fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    project = tmp_path / "project"
    prefix = make_environment(project)
    subprocess.run(["git", "init", "-q", project], check=True)
    write(project / "train.py")
    write(project / ".gitignore", "venv\n" if ignored else "\n")
    notes = dry_run(make_request(tmp_path, str(prefix / "bin" / "python"), "train.py")).notes
    assert any(f"{prefix} is part of the code" in note for note in notes) is not ignored


def test_python_of_a_command(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    prefix = make_environment(tmp_path)
    python = prefix / "bin" / "python"
    script = write(tmp_path / "project" / "run.sh", "#!/bin/sh\npython train.py\n", 0o755)
    environ = {"PATH": f"{prefix}/bin:/usr/bin:/bin"}
    for command in ((str(prefix / "bin" / "tool"),), (str(python), "-c", "pass"), (str(script),), ("sh", str(script))):
        origin = "the python in your PATH" if str(script) in command else ""
        assert find_python(prepare(make_request(tmp_path, *command, environ=environ))) == (python, origin)


def test_option_wins_over_the_profile(
    fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "cluster" / "site.toml", 'environment = "ship"\n')
    monkeypatch.setenv("CLUSTERTRAIN_CLUSTER_PATH", str(tmp_path / "cluster"))
    system = write(tmp_path / "python", "#!/bin/sh\n", 0o755)
    for options, code in (([], 78), (["--no-ship-env"], 0), (["--no-ship-env", "--ship-env"], 78)):
        argv = ["clustertrain", "submit", "--dry-run", "--cluster", "site", *options, "--", str(system)]
        monkeypatch.setattr("sys.argv", argv)
        assert main() == code
        assert ("fix: name the Python of an environment" in capsys.readouterr().err) is (code == 78)
