"""The commands on the pages for users of other tools: each is run, on one machine and with fewer ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.runs import LOCAL, Run

pytestmark = pytest.mark.ranks
PAGES = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {{fsdp_version: 2}}
mixed_precision: bf16
num_machines: {machines}
num_processes: {processes}
"""
# It writes what it was started with. In the first attempt of a test that stops it, it waits.
PROGRAM = """
import json, os, pathlib, sys, time
record = {"argv": sys.argv[1:], "env": dict(os.environ)}
pathlib.Path(os.environ["OUT"], f"rank-{os.environ['RANK']}.json").write_text(json.dumps(record))
print("started", flush=True)
while os.environ["CLUSTERTRAIN_ATTEMPT"] == "1" and pathlib.Path(os.environ["OUT"], "wait").exists():
    time.sleep(0.05)
"""
SITE_OPTIONS = ("--nodes", "--gpus", "--time", "--partition", "--backend", "--device")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    (tmp_path / "package").mkdir()
    for script in ("train.py", "package/train.py"):
        (tmp_path / script).write_text(PROGRAM)
    return tmp_path


@pytest.fixture
def env(project: Path) -> Iterator[dict[str, str]]:
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_"))}
    variables |= {"HOME": str(project), "XDG_CONFIG_HOME": str(project / "config"), "OUT": str(project / "out")}
    variables |= {"CLUSTERTRAIN_HOME": str(project / "home"), "COLUMNS": "200"}
    variables["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), variables["PATH"]))
    yield variables
    for path in (project / "home").glob("runs/*"):
        run = Run(variables, {"run": path.name, "job_id": "", "run_dir": str(path)})
        run.cancel_if_active()
        run.wait_until_final()


def list_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def list_commands(page: Path) -> list[list[str]]:
    return [
        shlex.split(line, comments=True) for block in list_blocks(page, "sh") for line in block.splitlines() if line
    ]


def call(project: Path, env: Mapping[str, str], *argv: str) -> str:
    done = subprocess.run(argv, cwd=project, env=env, text=True, capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, f"{shlex.join(argv)}: {done.stdout}{done.stderr}"
    return done.stdout


def find_latest(project: Path, env: Mapping[str, str]) -> Run:
    answer = json.loads(call(project, env, "clustertrain", "status", "latest", "--json"))
    return Run(env, {"run": answer["run"], "job_id": "", "run_dir": answer["run_dir"]})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_submit_lines_of_the_page_render_the_job(page: Path, project: Path, env: Mapping[str, str]) -> None:
    """A dry run writes the job without a scheduler."""
    (project / "fsdp.yaml").write_text(FSDP.format(machines=2, processes=16))
    commands = list_commands(page)
    assert all(program == "clustertrain" for program, *_ in commands)
    submitted = [arguments for _, command, *arguments in commands if command == "submit"]
    assert submitted
    for arguments in submitted:
        backend = () if "--backend" in arguments else ("--backend", "slurm")
        rendered = call(project, env, "clustertrain", "submit", "--dry-run", *backend, *arguments)
        if "--nodes" in arguments:
            assert f"#SBATCH --nodes={arguments[arguments.index('--nodes') + 1]}" in rendered


def localize(arguments: list[str]) -> list[str]:
    """Return the arguments of ``submit`` for two ranks on this machine."""
    options, command = [], [argument for argument in arguments if argument != "--wait"]
    while command[0] not in ("--", "-m"):
        option = command.pop(0)
        value = command.pop(0)
        if option not in SITE_OPTIONS:
            options += [option, value]
    if "deepspeed" in command:
        for option, size in (("--num_nodes", "1"), ("--num_gpus", "2")):
            command[command.index(option) + 1] = size
    return [*LOCAL, "--gpus", "2", *options, *command]


def assert_started_as_typed(project: Path, arguments: list[str]) -> None:
    """Check what the ranks have got: their arguments, torchrun's variables and what the launcher stands for."""
    place = max(i for i, argument in enumerate(arguments) if argument in ("train.py", "package.train"))
    for rank in (0, 1):
        path = project / "out" / f"rank-{rank}.json"
        record = json.loads(path.read_text())
        path.unlink()
        given = [f"--local_rank={rank}"] if "deepspeed" in arguments else []
        assert record["argv"] == given + arguments[place + 1 :]
        started = record["env"]
        assert (started["RANK"], started["LOCAL_RANK"], started["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert started["MASTER_ADDR"] and started["MASTER_PORT"]
        if "accelerate" in arguments:
            assert started["ACCELERATE_MIXED_PRECISION"] == "bf16"
            assert ("FSDP_VERSION" in started) == ("--config_file" in arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_the_page_do_what_it_says(page: Path, project: Path, env: Mapping[str, str]) -> None:
    """Each submit line runs; the commands after the last one are about its run, which waits for them to stop it."""
    (project / "fsdp.yaml").write_text(FSDP.format(machines=1, processes=2))
    if "adopt" in page.read_text():
        (project / "job.sbatch").write_text(f"#!/bin/bash\n{list_blocks(page, 'bash')[0]}")
    commands = list_commands(page)
    stopping = {command for _, command, *_ in commands} & {"requeue", "cancel"}
    last = max(i for i, (_, command, *_) in enumerate(commands) if command == "submit")
    for number, (_, command, *arguments) in enumerate(commands):
        if command == "submit":
            waits = bool(stopping) and number == last
            if waits:
                (project / "out" / "wait").touch()
            wait = [] if waits else ["--wait"]
            call(project, env, "clustertrain", "submit", *wait, *localize(arguments))
            run = find_latest(project, env)
            if waits:
                run.wait_for(lambda _: len(list((project / "out").glob("rank-*.json"))) == 2, "both ranks")
            assert_started_as_typed(project, arguments)
        else:
            once = ["--once"] if command == "top" else []
            call(project, env, "clustertrain", command, *arguments, *once)
    if stopping:
        final = find_latest(project, env).wait_until_final()
        assert final["state"] == ("cancelled" if "cancel" in stopping else "completed")
        assert len(final["attempts"]) == (2 if "requeue" in stopping else 1)


def test_batch_script_of_the_page_is_adopted_as_it_says(project: Path, env: Mapping[str, str]) -> None:
    page = ROOT / "docs" / "coming-from" / "torchrun.md"
    script = list_blocks(page, "bash")[0].replace("srun ", "module load cuda\nsrun ")
    (project / "job.sbatch").write_text(f"#!/bin/bash\n{script}")
    (profile,) = list_blocks(page, "toml")
    (line,) = re.findall(r"^    (clustertrain submit .*)$", page.read_text(), re.MULTILINE)
    printed = call(project, env, "clustertrain", "adopt", "job.sbatch")
    assert profile in printed
    (command,) = (c for c in list_commands(page) if c[1] == "adopt")
    printed = call(project, env, *command)
    assert line in printed.splitlines()
    (written,) = project.rglob("site.toml")
    assert written.read_text().endswith(profile)
    options = shlex.split(line)[2:]
    rendered = call(project, env, "clustertrain", "submit", "--dry-run", "--backend", "slurm", *options)
    assert "module load cuda" in rendered and "#SBATCH --signal=" in rendered
