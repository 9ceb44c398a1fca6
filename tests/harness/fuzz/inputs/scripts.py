"""Values that end up in job.sh, which bash runs; its environment must be what the user typed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.harness.fuzz.inputs.text import arguments
from tests.harness.fuzz.judge import Fault, FaultFound
from tests.harness.fuzz.play import InputClass
from tests.harness.fuzz.sandbox import Sandbox

# Replaces the job's Python interpreter and prints its environment.
SPY = "#!/bin/sh\nexec /usr/bin/env -0\n"
OPTIONS = (
    "--partition", "--account", "--qos", "--time", "--mem", "--constraint", "--exclude", "--nodelist", "--reservation",
    "--dependency", "--name", "--checkpoint-dir",
)  # fmt: skip


def submissions() -> SearchStrategy[tuple[dict[str, str], list[tuple[str, str]], list[str]]]:
    env = st.dictionaries(st.from_regex(r"\AV_[A-Z]{1,5}\Z"), arguments(), max_size=3)
    options = st.lists(st.tuples(st.sampled_from(OPTIONS), arguments()), max_size=2)
    sbatch_options = st.lists(st.builds("comment={}".format, arguments()) | arguments(), max_size=1)
    return st.tuples(env, options, sbatch_options)


def play(box: Sandbox, drawn: tuple[dict[str, str], list[tuple[str, str]], list[str]]) -> None:
    env, options, sbatch_options = drawn
    # Users may write to any folder that they name, but the judge allows only the site and the home.
    options = [(option, value) for option, value in options if option != "--checkpoint-dir" or _within(box, value)]
    _profile(box)
    env = {name: box.arm(value) for name, value in env.items()}
    argv = ["submit", "--json", "--backend", "slurm", "--cluster", "spy", "--nodes", "2", "--gpus", "4"]
    argv += [f"{option}={value}" for option, value in options]
    argv += [f"--sbatch={word}" for word in sbatch_options]
    argv += [f"--env={name}={value}" for name, value in env.items()]
    submission = box.call(argv)
    if submission.code:
        return
    run = Path(json.loads(submission.out)["run_dir"])
    try:
        _judge(box, run, env, box.arm(" ".join((*sbatch_options, *(value for _, value in options)))))
    finally:
        shutil.rmtree(run)


def _within(box: Sandbox, folder: str) -> bool:
    path = os.path.normpath(box.site / folder.removeprefix("file://"))
    return Path(path).is_relative_to(box.site)


def _judge(box: Sandbox, run: Path, env: dict[str, str], public: str) -> None:
    """Raise FaultFound if a value of --env leaks or is changed; values that also occur in ``public`` are not secret."""
    # Short values, and values that occur in the sandbox's paths, would be found by chance.
    secrets = {
        value for value in env.values() if len(value) >= 8 and value not in str(box.site) and value not in public
    }
    for path in run.iterdir():
        if (
            path.is_file()
            and path.stat().st_mode & 0o077
            and any(v in path.read_bytes().decode(errors="replace") for v in secrets)
        ):
            raise FaultFound(Fault("leak", path.name, "contains a value of --env and is readable by others"))
    result = subprocess.run(
        ["bash", "job.sh"], cwd=run, capture_output=True, check=False, timeout=30,
        env={"PATH": "/usr/bin:/bin", "HOME": str(box.site)},
    )  # fmt: skip
    box.check()
    if result.returncode:
        raise FaultFound(Fault("exit", "job.sh", f"{result.returncode}\n{result.stderr.decode(errors='replace')}"))
    environment = dict(entry.split(b"=", 1) for entry in result.stdout.split(b"\0") if b"=" in entry)
    for name, value in env.items():
        if environment.get(name.encode()) != value.encode("utf-8", "surrogateescape"):
            raise FaultFound(
                Fault("leak", "environment", f"{name} is {environment.get(name.encode())!r}, the user typed {value!r}")
            )


def _profile(box: Sandbox) -> None:
    spy = box.site / "spy"
    if not spy.exists():
        spy.write_text(SPY)
        spy.chmod(0o755)
        (box.site / "profiles").mkdir(exist_ok=True)
    (box.site / "profiles" / "spy.toml").write_text(f"python = {json.dumps(str(spy))}\n")


CLASSES = (InputClass("scripts", submissions, play, 30),)
