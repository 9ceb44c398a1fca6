"""A grid of submissions in which every value of every option meets every value of every other, and their scripts."""

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
from tests.harness.script_grid.options import NOT_GIVEN, Value

# Of a recipe: divides over the ranks of every shape; and two heads for each of four tensor-parallel ranks.
DIVISIBLE = ("--set", "train.global_batch=96", "--set", "model.heads=8", "--set", "model.kv_heads=4")
SCRIPT = "import clustertrain as ct\n\nwith ct.session() as session:\n    session.train_step(None, None)\n"
RECIPE = '[data]\nseq_len = 64\n[job]\nnodes = 9\npartition = "high"\n[job.sbatch]\nnice = "5"\n[env]\nR = "it\'s $1"\n'
HOSTILE_SCRIPT = 'it\'s a "script" $(touch pwned).py'
SCRIPTS = ("train.py", HOSTILE_SCRIPT, "with src/train.py")

# The interpreter of every case: as the batch process it shows the environment that it was given.
SPY_NAME = "py thon's"
SPY = '#!/bin/sh\n[ "$*" = "${*#-P -m clustertrain batch -- srun }" ] && exit 9\nexec /usr/bin/env -0\n'


@dataclass(frozen=True)
class Case:
    """Arguments of a `submit` or, with --grid, a `sweep`. ``reads`` and ``exports``: see :class:`options.Value`."""

    number: int
    words: tuple[str, ...]
    reads: Mapping[str, str]
    exports: Mapping[str, str]

    @property
    def command(self) -> str:
        return "sweep" if "--grid" in self.words else "submit"


@dataclass(frozen=True)
class Scripts:
    """``handed_over`` is what sbatch gets; the job.sh of a sweep's runs lie in folders below it, named by number."""

    case: Case
    handed_over: Path

    @property
    def all(self) -> list[Path]:
        return [self.handed_over, *self.handed_over.parent.glob("*/job.sh")]


def make_cases(site: Path) -> list[Case]:
    """The grid. Profiles, recipes and scripts are written below ``site``, which is where to submit from."""
    targets = _write_targets(site)
    choices: list[Sequence[Any]] = [
        options.SHAPES, options.PLACES, options.DEVICES, options.GPUS_FLAGS, options.CPUS_PER_GPU,
        options.PROFILES, targets, *options.VALUES.values(),
    ]  # fmt: skip
    made = []
    for number, row in enumerate(pairwise([len(values) for values in choices])):
        chosen = [values[n] for values, n in zip(choices, row, strict=True)]
        shape, place, device, gpus_flag, cpus_per_gpu, profile, target, *rest = chosen
        resources = _resources(shape, device, gpus_flag, cpus_per_gpu)
        # The later wins: what the profile says, the recipe, the options.
        values = [profile, target, resources, options.placed(place, shape.nodes), *rest]
        words = [] if {*SCRIPTS} & {*target.words} else [*DIVISIBLE]
        words += [word for value in values if value is not target for word in value.words]
        made.append(
            Case(
                number=number,
                words=(f"--cluster={_profile(site, values)}", *words, *target.words),
                reads={key: read for value in values for key, read in value.reads.items()},
                exports={name: text for value in values for name, text in value.exports.items()},
            )
        )
    return made


def _profile(site: Path, values: Sequence[Value]) -> str:
    """The name of the profile with the lines of ``values``, which is written where it is the first such."""
    text = "\n".join([f"python = {json.dumps(str(site / SPY_NAME))}", *(v.profile for v in values if v.profile)])
    path = site / "profiles" / f"p{zlib.crc32(text.encode())}.toml"
    path.write_text(text)
    return path.stem


def _resources(shape: options.Shape, device: tuple[str, str], gpus_flag: str, cpus_per_gpu: int) -> Value:
    on, gpu_type = device
    words = [f"--nodes={shape.nodes}", f"--gpus={shape.gpus}", *shape.layout]
    words += [f"--device={on}"] * bool(on) + [f"--gpu-type={gpu_type}"] * bool(gpu_type)
    words += [f"--cpus-per-gpu={cpus_per_gpu}"] * bool(cpus_per_gpu)
    reads = {"nodes": str(shape.nodes), "ntasks-per-node": "1"}
    if on != "cpu" or gpu_type:
        count = f"{gpu_type}:{shape.gpus}" if gpu_type else str(shape.gpus)
        reads[gpus_flag] = f"gres:gpu:{count}" if gpus_flag == "gres" else count
    cores = shape.gpus * (cpus_per_gpu or (1 if on == "cpu" else 0))
    if cores:
        reads["cpus-per-task"] = str(cores)
    return Value(tuple(words), profile=f'gpus_flag = "{gpus_flag}"', reads=reads)


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
        NOT_GIVEN,
        Value(("a recipe #1.toml", "--json"), reads={"partition": "high", "nice": "5"}, exports={"R": "it's $1"}),
        Value(("train.py",)),
        Value((HOSTILE_SCRIPT, "--lr", "1e-4", *options.HOSTILE, "--", "-x")),
        Value(("with src/train.py", "--name", "not ours")),
    ]


def texts_only(first: int) -> list[Case]:
    """Of options that the testbed cannot take: it has no TmpDisk, one kind of GRES, and is one cluster."""
    passed = ("tmp=1G", "gres=lscratch:100", "clusters=a,it's b")
    return [Case(n, ("--sbatch", option), {}, {}) for n, option in enumerate(passed, first)]


def surroundings(site: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``environ`` for submitting from ``site``, with a home whose name needs quoting."""
    plain = {name: value for name, value in environ.items() if name not in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")}
    home = site / "ho me $(touch pwned)'\"é"
    return {**plain, "CLUSTERTRAIN_HOME": str(home), "CLUSTERTRAIN_CLUSTER_PATH": str(site / "profiles")}


def dry_run(case: Case, env: Mapping[str, str]) -> list[str]:
    """Run `submit --dry-run` or `sweep --dry-run` here: the script that sbatch gets, then those of a sweep's runs."""
    gone = dict.fromkeys(os.environ.keys() - env.keys())
    done = CliRunner().invoke(
        {"submit": submit, "sweep": sweep}[case.command], ["--dry-run", "--json", *case.words], env={**gone, **env}
    )
    assert done.exception is None and done.exit_code == 0, (case, done.exception, done.output)
    return texts_in(done.stdout)


def texts_in(shown: str) -> list[str]:
    document = json.loads(shown)
    return [document["script"], *(run["script"] for run in document.get("runs", ()))]


def render(cases: Sequence[Case], site: Path, env: Mapping[str, str]) -> list[Scripts]:
    """The scripts of every case, submitted from ``site``, in folders like those that submit makes."""
    made = []
    with contextlib.chdir(site):
        for case in cases:
            folder = site / "scripts" / str(case.number)
            for n, text in enumerate(dry_run(case, env)):
                path = folder / (str(n - 1) if n else "") / "job.sh"
                path.parent.mkdir(parents=True)
                path.write_text(text)
            made.append(Scripts(case, folder / "job.sh"))
    return made


def environment_of(scripts: Scripts, home: str) -> dict[str, str]:
    """What the job's batch process would get from ``scripts``, the first run's of a sweep: bash runs them."""
    done = subprocess.run(
        ["bash", "job.sh"], cwd=scripts.handed_over.parent, capture_output=True, check=False, timeout=60,
        env={"PATH": "/usr/bin:/bin", "HOME": home, "SLURM_ARRAY_TASK_ID": "0"},
    )  # fmt: skip
    assert done.returncode == 0, (scripts, done.stderr.decode())
    return dict(entry.split("=", 1) for entry in done.stdout.decode().split("\0") if entry)


def shellcheck(paths: Sequence[Path]) -> str:
    """What shellcheck, and bash that only parses, say about the scripts."""
    checker = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([checker, *paths], capture_output=True, text=True, check=False)
    each = 'for script in "$@"; do bash -n "$script" || exit; done'
    parsed = subprocess.run(["bash", "-c", each, "bash", *paths], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr + parsed.stderr
