"""Values that end up in job.sh: the script is run by bash, and its environment compared with what was typed."""

from __future__ import annotations

import json
import re
import subprocess

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.fuzz.inputs.text import arguments
from tests.fuzz.judge import Fault, FaultFound
from tests.fuzz.play import InputClass
from tests.fuzz.sandbox import Sandbox

# Stands for the interpreter of the job: shows the environment that it was given.
SPY = "#!/bin/sh\nexec /usr/bin/env -0\n"
OPTIONS = (
    "--partition", "--account", "--qos", "--time", "--mem", "--constraint", "--exclude", "--nodelist", "--reservation",
    "--dependency", "--name", "--checkpoint-dir",
)  # fmt: skip


def submissions() -> SearchStrategy[tuple[dict[str, str], list[tuple[str, str]], list[str]]]:
    env = st.dictionaries(st.from_regex(r"\AV_[A-Z]{1,5}\Z"), arguments(), max_size=3)
    options = st.lists(st.tuples(st.sampled_from(OPTIONS), arguments()), max_size=2)
    passed = st.lists(st.builds("comment={}".format, arguments()) | arguments(), max_size=1)
    return st.tuples(env, options, passed)


def play(box: Sandbox, drawn: tuple[dict[str, str], list[tuple[str, str]], list[str]]) -> None:
    env, options, passed = drawn
    _profile(box)
    env = {name: box.arm(value) for name, value in env.items()}
    argv = ["submit", "--dry-run", "--json", "--backend", "slurm", "--cluster", "spy", "--nodes", "2", "--gpus", "4"]
    argv += [f"{option}={value}" for option, value in options]
    argv += [f"--sbatch={word}" for word in passed]
    argv += [f"--env={name}={value}" for name, value in env.items()]
    said = box.call(argv)
    if said.code:
        return
    script = box.site / "job.sh"
    script.write_text(json.loads(said.out)["script"], newline="")
    done = subprocess.run(
        ["bash", str(script)], cwd=box.site, capture_output=True, check=False, timeout=30,
        env={"PATH": "/usr/bin:/bin", "HOME": str(box.site)},
    )  # fmt: skip
    box.check()
    if done.returncode:
        raise FaultFound(Fault("exit", "job.sh", f"{done.returncode}\n{done.stderr.decode(errors='replace')}"))
    seen = dict(entry.split(b"=", 1) for entry in done.stdout.split(b"\0") if b"=" in entry)
    for name, value in env.items():
        if seen.get(name.encode()) != value.encode("utf-8", "surrogateescape") and not _is_kept_apart(
            script.read_text(), name
        ):
            raise FaultFound(
                Fault("leak", "environment", f"{name} is {seen.get(name.encode())!r}, typed was {value!r}")
            )


def _is_kept_apart(script: str, name: str) -> bool:
    """Whether the job reads the variable from a file of the run, which a dry run does not write."""
    return re.search(rf"\b{name}\b", script) is None


def _profile(box: Sandbox) -> None:
    spy = box.site / "spy"
    if not spy.exists():
        spy.write_text(SPY)
        spy.chmod(0o755)
        (box.site / "profiles").mkdir(exist_ok=True)
    (box.site / "profiles" / "spy.toml").write_text(f"python = {json.dumps(str(spy))}\n")


CLASSES = (InputClass("scripts", submissions, play, 30),)
