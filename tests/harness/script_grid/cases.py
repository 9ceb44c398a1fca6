"""A grid of submissions that covers every pair of values of any two options, and their job scripts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from clustertrain.cli.submit import submit
from clustertrain.cli.sweep import sweep
from tests.harness.script_grid import options
from tests.harness.script_grid.covering import pairwise
from tests.harness.script_grid.options import ABSENT, Value

# Recipe keys: a batch that divides over the ranks of every shape, and two heads per rank of tp = 4.
DIVISIBLE = ("--set", "train.global_batch=96", "--set", "model.heads=8", "--set", "model.kv_heads=4")
SCRIPT = "import clustertrain as ct\n\nwith ct.session() as session:\n    session.train_step(None, None)\n"
RECIPE = '[data]\nseq_len = 64\n[job]\nnodes = 9\npartition = "high"\n[job.sbatch]\nnice = "5"\n[env]\nR = "it\'s $1"\n'
HOSTILE_SCRIPT = 'it\'s a "script" $(touch pwned).py'
SCRIPTS = ("train.py", HOSTILE_SCRIPT, "with src/train.py")

# Replaces the Python interpreter of every case: as the batch process, it prints its environment.
SPY_NAME = "py thon's"
SPY = '#!/bin/sh\n[ "$*" = "${*#-P -m clustertrain batch -- srun }" ] && exit 9\nexec /usr/bin/env -0\n'


@dataclass(frozen=True)
class Case:
    """Arguments of a `submit` or, with --grid, a `sweep`; for ``reads`` and ``exports`` see :class:`options.Value`."""

    number: int
    args: tuple[str, ...]
    reads: Mapping[str, str]
    exports: Mapping[str, str]

    @property
    def command(self) -> str:
        return "sweep" if "--grid" in self.args else "submit"


@dataclass(frozen=True)
class Scripts:
    """Job scripts of a case: sbatch gets ``submitted``; those of a sweep's runs are in numbered folders next to it."""

    case: Case
    submitted: Path

    @property
    def all(self) -> list[Path]:
        return [self.submitted, *self.submitted.parent.glob("*/job.sh")]


def make_cases(site: Path) -> list[Case]:
    """Return the grid, and write its profiles, recipes and scripts to ``site``, from which the cases are submitted."""
    targets = _write_targets(site)
    choices: list[Sequence[Any]] = [
        options.SHAPES, options.HOST_SELECTIONS, options.DEVICES, options.GPUS_FLAGS, options.CPUS_PER_GPU,
        options.PROFILES, targets, *options.VALUES.values(),
    ]  # fmt: skip
    result_cases = []
    for number, row in enumerate(pairwise([len(values) for values in choices])):
        selected = [values[n] for values, n in zip(choices, row, strict=True)]
        shape, place, device, gpus_flag, cpus_per_gpu, profile, target, *rest = selected
        resources = _resources(shape, device, gpus_flag, cpus_per_gpu)
        # Later ones take precedence: profile, recipe, options.
        values = [profile, target, resources, options.host_selection(place, shape.nodes), *rest]
        args = [] if {*SCRIPTS} & {*target.args} else [*DIVISIBLE]
        args += [word for value in values if value is not target for word in value.args]
        result_cases.append(
            Case(
                number=number,
                args=(f"--cluster={_profile(site, values)}", *args, *target.args),
                reads={key: read for value in values for key, read in value.reads.items()},
                exports={name: text for value in values for name, text in value.exports.items()},
            )
        )
    return result_cases


def _profile(site: Path, values: Sequence[Value]) -> str:
    """Write a profile with the lines of ``values`` and return its name."""
    text = "\n".join([f"python = {json.dumps(str(site / SPY_NAME))}", *(v.profile for v in values if v.profile)])
    path = site / "profiles" / f"p{zlib.crc32(text.encode())}.toml"
    path.write_text(text)
    return path.stem


def _resources(shape: options.Shape, device: tuple[str, str], gpus_flag: str, cpus_per_gpu: int) -> Value:
    device_name, gpu_type = device
    args = [f"--nodes={shape.nodes}", f"--gpus={shape.gpus}", *shape.layout]
    args += [f"--device={device_name}"] * bool(device_name) + [f"--gpu-type={gpu_type}"] * bool(gpu_type)
    args += [f"--cpus-per-gpu={cpus_per_gpu}"] * bool(cpus_per_gpu)
    reads = {"nodes": str(shape.nodes), "ntasks-per-node": "1"}
    if device_name != "cpu" or gpu_type:
        count = f"{gpu_type}:{shape.gpus}" if gpu_type else str(shape.gpus)
        reads[gpus_flag] = f"gres:gpu:{count}" if gpus_flag == "gres" else count
    cores = shape.gpus * (cpus_per_gpu or (1 if device_name == "cpu" else 0))
    if cores:
        reads["cpus-per-task"] = str(cores)
    return Value(tuple(args), profile=f'gpus_flag = "{gpus_flag}"', reads=reads)


def _write_targets(site: Path) -> list[Value]:
    (site / "profiles").mkdir()
    (site / "with src" / "src").mkdir(parents=True)
    spy = site / SPY_NAME
    spy.write_text(SPY)
    spy.chmod(0o755)
    (site / "a recipe #1.toml").write_text(RECIPE)
    for script in SCRIPTS:
        (site / script).write_text(SCRIPT)
    return [
        ABSENT,
        Value(("a recipe #1.toml", "--json"), reads={"partition": "high", "nice": "5"}, exports={"R": "it's $1"}),
        Value(("train.py",)),
        Value((HOSTILE_SCRIPT, "--lr", "1e-4", *options.HOSTILE, "--", "-x")),
        Value(("with src/train.py", "--name", "not ours")),
    ]


def make_text_cases(first: int) -> list[Case]:
    """Return cases with options that the testbed cannot accept, because of TmpDisk, GRES or clusters."""
    passed = ("tmp=1G", "gres=lscratch:100", "clusters=a,it's b")
    return [Case(n, ("--sbatch", option), {}, {}) for n, option in enumerate(passed, first)]


def submission_environment(site: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environ`` for submissions from ``site``, with a home whose name needs quoting."""
    plain = {name: value for name, value in environ.items() if name not in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")}
    home = site / "ho me $(touch pwned)'\"é"
    return {**plain, "CLUSTERTRAIN_HOME": str(home), "CLUSTERTRAIN_CLUSTER_PATH": str(site / "profiles")}


def dry_run(case: Case, env: Mapping[str, str]) -> list[str]:
    """Return the scripts of a dry run in this process: first the one that sbatch gets, then those of a sweep's runs."""
    unset = dict.fromkeys(os.environ.keys() - env.keys())
    result = CliRunner().invoke(
        {"submit": submit, "sweep": sweep}[case.command], ["--dry-run", "--json", *case.args], env={**unset, **env}
    )
    assert result.exception is None and result.exit_code == 0, (case, result.exception, result.output)
    return texts_in(result.stdout)


def texts_in(output: str) -> list[str]:
    document = json.loads(output)
    return [document["script"], *(run["script"] for run in document.get("runs", ()))]


def render(cases: Sequence[Case], site: Path, env: Mapping[str, str]) -> list[Scripts]:
    """Write the scripts of every case, submitted from ``site``, to folders like those of `submit`."""
    scripts = []
    with contextlib.chdir(site):
        for case in cases:
            folder = site / "scripts" / str(case.number)
            for n, text in enumerate(dry_run(case, env)):
                path = folder / (str(n - 1) if n else "") / "job.sh"
                path.parent.mkdir(parents=True)
                path.write_text(text)
            scripts.append(Scripts(case, folder / "job.sh"))
    return scripts


def environment_of(scripts: Scripts, home: str) -> dict[str, str]:
    """Run ``scripts`` in bash and return the environment of the batch process, for a sweep that of its first run."""
    result = subprocess.run(
        ["bash", "job.sh"], cwd=scripts.submitted.parent, capture_output=True, check=False, timeout=60,
        env={"PATH": "/usr/bin:/bin", "HOME": home, "SLURM_ARRAY_TASK_ID": "0"},
    )  # fmt: skip
    assert result.returncode == 0, (scripts, result.stderr.decode())
    return dict(entry.split("=", 1) for entry in result.stdout.decode().split("\0") if entry)


def shellcheck(paths: Sequence[Path]) -> str:
    """Return the messages of shellcheck, and of bash as a parser, for the scripts."""
    checker = Path(sys.executable).parent / "shellcheck"
    result = subprocess.run([checker, *paths], capture_output=True, text=True, check=False)
    parse_each = 'for script in "$@"; do bash -n "$script" || exit; done'
    parsed = subprocess.run(["bash", "-c", parse_each, "bash", *paths], capture_output=True, text=True, check=False)
    return result.stdout + result.stderr + parsed.stderr
