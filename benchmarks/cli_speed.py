"""Wall time of commands, as whole processes, alternating with a peer (A B A B).

help            clustertrain --help             against  python -c "import click"
help-module     python -m clustertrain --help   against  python -c "import click"
submit          clustertrain submit, which plans the default preset, against a script with submitit's documented API
                that submits one function and plans nothing
submit-command  clustertrain submit -- torchrun train.py, in a git repository with that one file, against clustertrain
                submit, which plans the default preset and has no code to copy
submit-torchx   clustertrain submit against `torchx run -s slurm`, which plans nothing either

The jobs are submitted to a real cluster and cancelled by their ids: ours and submitit's while they are held. torchx has
no option to hold a job, so its job may run for a moment. torchx has a separate environment in the user's cache folder,
created on first use; if it cannot be installed, its row is skipped with the reason.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.cluster import Cluster, cluster
from benchmarks.measure import CannotRun, Command, child_environ, run_alternating, spread

HELP_ROUNDS = 40
SUBMIT_ROUNDS = 20
TORCHX = "0.7.0"
# It imports no torch. setuptools: a dependency of torchx imports pkg_resources on some Python versions.
_TORCHX_PACKAGES = (f"torchx=={TORCHX}", "setuptools")

_SUBMITIT = """\
import sys

import submitit


def hello() -> int:
    return 1


executor = submitit.AutoExecutor(folder=sys.argv[1], cluster="slurm")
executor.update_parameters(timeout_min=5, slurm_additional_parameters={"hold": True})
print("job", executor.submit(hello).job_id)
"""


@dataclass(frozen=True)
class Target:
    """A bound on the median of the pairwise ratios ours / peer's."""

    at_most: float
    description: str


def main() -> int:
    """Run all rows; return 1 if a target was missed."""
    result = measure.context(("clustertrain", "click", "submitit"))
    rows = result["rows"] = list(_rows(result["versions"]))
    path = measure.write("cli_speed", result)
    for row in rows:
        print(_line(row))
    print(f"load before: {result['machine']['load_1min']}; written to {path.relative_to(measure.ROOT)}")
    return int(any(row.get("met") is False for row in rows))


def _rows(versions: dict[str, str]) -> Iterator[dict[str, Any]]:
    python, script = sys.executable, str(Path(sysconfig.get_path("scripts")) / "clustertrain")
    with tempfile.TemporaryDirectory(prefix="clustertrain-benchmark-") as folder:
        env, cwd = child_environ(os.environ), Path(folder)
        click = Command('python -c "import click"', [python, "-c", "import click"], env, cwd)
        target = Target(1.6, "less than 1.6 times the import of click")
        ours = Command("clustertrain --help", [script, "--help"], env, cwd)
        yield _row("help", ours, click, HELP_ROUNDS, target)
        ours = Command("python -m clustertrain --help", [python, "-m", "clustertrain", "--help"], env, cwd)
        yield _row("help-module", ours, click, HELP_ROUNDS, target)
    try:
        with cluster() as slurm, _scratch_folder() as scratch:
            versions["slurm"] = slurm.version
            yield from _submissions(script, slurm, scratch, versions)
    except CannotRun as e:
        yield {"name": "submit", "skipped": str(e)}


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """Yield a folder in the checkout: /tmp is often a tmpfs, where clustertrain refuses to create runs."""
    parent = measure.ROOT / ".demo"
    parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=parent) as folder:
        yield Path(folder)


def _submissions(script: str, slurm: Cluster, scratch: Path, versions: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Run the rows that need a cluster. None leaves a job behind."""

    def cancel(printed: str) -> None:
        job = re.search(r"(?:\bjob |slurm://\S*/)(\d+)", printed)
        if job is None:
            raise CannotRun(f"no job id in {printed!r}")
        slurm.cancel(job[1])

    env = child_environ({**slurm.env, "CLUSTERTRAIN_HOME": str(scratch / "home")})
    ours = Command("clustertrain submit --sbatch hold", [script, "submit", "--sbatch", "hold"], env, scratch, cancel)
    (scratch / "hello.py").write_text(_SUBMITIT)
    argv = [sys.executable, "hello.py", str(scratch / "submitit")]
    submitit = Command("a script with submitit.AutoExecutor.submit(hello)", argv, env, scratch, cancel)
    target = Target(1.5, "at most 1.5 times submitit")
    yield {**_row("submit", ours, submitit, SUBMIT_ROUNDS, target), "cluster": slurm.name}
    # Its own repository, or the snapshot would copy the checkout around the scratch folder.
    subprocess.run(["git", "init", "--quiet", str(scratch)], check=True)
    (scratch / "train.py").write_text("print('hello')\n")
    argv = [*ours.argv, "--", "torchrun", "train.py"]
    command_line = Command("clustertrain submit --sbatch hold -- torchrun train.py", argv, env, scratch, cancel)
    target = Target(1.1, "at most 1.1 times a recipe")
    yield {**_row("submit-command", command_line, ours, SUBMIT_ROUNDS, target), "cluster": slurm.name}
    try:
        executable = _torchx(child_environ(os.environ))
        versions["torchx"] = TORCHX
        argv = ["run", "-s", "slurm", "utils.echo", "--msg", "hello"]
        torchx = Command(f"torchx {' '.join(argv)}", [executable, *argv], env, scratch, cancel)
        target = Target(0.25, "4 times faster than torchx")
        yield {**_row("submit-torchx", ours, torchx, SUBMIT_ROUNDS, target), "cluster": slurm.name}
    except CannotRun as e:
        yield {"name": "submit-torchx", "skipped": str(e)}


def _row(name: str, ours: Command, peer: Command, rounds: int, target: Target) -> dict[str, Any]:
    print(f"{name}: {rounds} rounds …", flush=True)
    pairs = run_alternating(ours, peer, rounds)
    ratio = spread([a.wall_s / b.wall_s for a, b in pairs])
    return {
        "name": name,
        "ours": ours.label,
        "peer": peer.label,
        "rounds": rounds,
        "load_1min_after": round(os.getloadavg()[0], 2),
        "ours_s": spread([a.wall_s for a, _ in pairs]),
        "peer_s": spread([b.wall_s for _, b in pairs]),
        "ratio": ratio,
        "ours_cpu_s": spread([a.cpu_s for a, _ in pairs]),
        "peer_cpu_s": spread([b.cpu_s for _, b in pairs]),
        "cpu_ratio": spread([a.cpu_s / b.cpu_s for a, b in pairs]),
        "target": target.description,
        "met": ratio["median"] <= target.at_most,
        "pairs_s": [[round(a.wall_s, 4), round(b.wall_s, 4)] for a, b in pairs],
    }


def _torchx(env: dict[str, str]) -> str:
    """Return the path of the command; install it first if it is missing.

    Raises:
        CannotRun: the installation failed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "clustertrain" / "benchmarks"
    tag = f"torchx-{TORCHX}-{sys.implementation.cache_tag}"
    home, stamp = cache / tag, cache / tag / "complete"
    if not stamp.exists():
        shutil.rmtree(home, ignore_errors=True)
        print(f"installing torchx {TORCHX} into {home} …", flush=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for argv in ([sys.executable, "-m", "venv", str(home)], [*pip, *_TORCHX_PACKAGES]):
            done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                raise CannotRun(f"torchx {TORCHX} cannot be installed: {(done.stderr or done.stdout).strip()[-500:]}")
        stamp.touch()
    return str(home / "bin" / "torchx")


def _line(row: dict[str, Any]) -> str:
    if "skipped" in row:
        return f"{row['name']:14} skipped: {row['skipped']}"

    def format_spread(key: str) -> str:
        return "{median:.3f} ({min:.3f} to {max:.3f})".format_map(row[key])

    return (
        f"{row['name']:14} {format_spread('ours_s')} s, peer {format_spread('peer_s')} s, "
        f"ratio {format_spread('ratio')}, of processor time {row['cpu_ratio']['median']:.2f}; "
        f"target {row['target']}: {'met' if row['met'] else 'MISSED'}"
    )


if __name__ == "__main__":
    sys.exit(main())
