"""Runs the steps of a job in ``.github/workflows`` on this machine, in order, as GitHub's runner does.

    python -m tests.workflow_runner .github/workflows/testbed.yml preemption

It knows what the workflow of ``slurm/testbed`` uses: ``run`` in bash, actions of this repository (``./…``) with inputs
and outputs, ``env``, ``if: failure()`` and ``if: always()``, the files GITHUB_ENV, GITHUB_OUTPUT and GITHUB_PATH, and
expressions of ``inputs`` and ``steps``. Checking out the repository does nothing. Anything else is an error, so that no
step is silently left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.paths import ROOT

EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
OUTPUT = re.compile(r"steps\.([\w-]+)\.outputs\.([\w-]+)")
STEP_KEYS = {"name", "id", "if", "uses", "with", "env", "run", "shell"}


class CannotRun(Exception):
    """The workflow uses something that this runner does not know."""


class StepList:
    """The steps of a job or of a composite action, with their outputs."""

    def __init__(self, runner: Runner, inputs: Mapping[str, str]) -> None:
        self._runner, self._inputs = runner, inputs
        self._outputs: dict[str, dict[str, str]] = {}
        self.failed = False

    def run(self, steps: list[dict[str, Any]], environ: Mapping[str, str]) -> bool:
        """Run the steps; return whether all succeeded."""
        for step in steps:
            if unknown := set(step) - STEP_KEYS:
                raise CannotRun(f"unknown keys of a step: {', '.join(sorted(unknown))}")
            condition = step.get("if", "success()")
            if condition not in ("success()", "failure()", "always()"):
                raise CannotRun(f"unknown condition: {condition}")
            if condition != "always()" and self.failed != (condition == "failure()"):
                continue
            print(f"--- {step.get('name') or step.get('uses')}", flush=True)
            ok, outputs = self._run_step(step, environ)
            self.failed = self.failed or not ok
            if "id" in step:
                self._outputs[step["id"]] = outputs
        return not self.failed

    def _run_step(self, step: dict[str, Any], environ: Mapping[str, str]) -> tuple[bool, dict[str, str]]:
        extra = {key: self.expand(value) for key, value in step.get("env", {}).items()}
        if "run" in step:
            return self._runner.run_script(self.expand(step["run"]), {**environ, **extra})
        action = step["uses"]
        if action.startswith("actions/checkout@"):
            return True, {}
        if not action.startswith("./"):
            raise CannotRun(f"unknown action: {action}")
        arguments = {key: self.expand(value) for key, value in step.get("with", {}).items()}
        return self._runner.run_action(ROOT / action, arguments, {**environ, **extra})

    def expand(self, text: str) -> str:
        """Return the text with the values of its expressions."""
        return EXPRESSION.sub(lambda match: self._evaluate(match[1]), text)

    def _evaluate(self, expression: str) -> str:
        if (match := OUTPUT.fullmatch(expression)) is not None:
            return self._outputs.get(match[1], {}).get(match[2], "")  # as GitHub: missing ones are empty
        if expression.startswith("inputs.") and (name := expression.removeprefix("inputs.")) in self._inputs:
            return self._inputs[name]
        raise CannotRun(f"unknown expression: {expression}")


class Runner:
    """The environment that steps share, and the files by which they change it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environ: dict[str, str] = {}
        self._path: list[str] = []
        self._started = 0

    def run_script(self, script: str, environ: Mapping[str, str]) -> tuple[bool, dict[str, str]]:
        """Run one ``run`` block; return whether it succeeded, and its outputs."""
        self._started += 1
        step = self._folder / str(self._started)
        step.mkdir()
        files = {name: step / name for name in ("GITHUB_ENV", "GITHUB_OUTPUT", "GITHUB_PATH")}
        for file in files.values():
            file.touch()
        (step / "script.sh").write_text(script)
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", step / "script.sh"],
            cwd=self._folder, stdin=subprocess.DEVNULL, check=False,
            env={
                **os.environ, **self._environ, **environ, **{name: str(file) for name, file in files.items()},
                "PATH": os.pathsep.join([*self._path, os.environ["PATH"]]),
            },
        )  # fmt: skip
        self._environ |= read_assignments(files["GITHUB_ENV"])
        self._path = [*reversed(files["GITHUB_PATH"].read_text().splitlines()), *self._path]
        if done.returncode:
            print(f"exit status {done.returncode}", flush=True)
        return done.returncode == 0, read_assignments(files["GITHUB_OUTPUT"])

    def run_action(
        self, folder: Path, arguments: Mapping[str, str], environ: Mapping[str, str]
    ) -> tuple[bool, dict[str, str]]:
        """Run a composite action; return whether it succeeded, and its outputs."""
        action = yaml.safe_load((folder / "action.yml").read_text())
        if action["runs"]["using"] != "composite":
            raise CannotRun(f"{folder}: not a composite action")
        declared = action.get("inputs", {})
        if unknown := set(arguments) - set(declared):
            raise CannotRun(f"{folder}: unknown inputs: {', '.join(sorted(unknown))}")
        steps = StepList(self, {name: arguments.get(name, item.get("default", "")) for name, item in declared.items()})
        ok = steps.run(action["runs"]["steps"], {**environ, "GITHUB_ACTION_PATH": str(folder)})
        outputs = action.get("outputs", {})
        return ok, {name: steps.expand(item["value"]) for name, item in outputs.items()}


def read_assignments(file: Path) -> dict[str, str]:
    """Return the ``NAME=VALUE`` lines of GITHUB_ENV or GITHUB_OUTPUT."""
    lines = file.read_text().splitlines()
    if invalid := [line for line in lines if not re.match(r"[\w-]+=", line)]:
        raise CannotRun(f"no assignment: {invalid[0]}")
    return dict(line.split("=", 1) for line in lines)


def run_job(workflow: Path, job: str) -> bool:
    """Run the job's steps in a new folder; return whether all succeeded."""
    document = yaml.safe_load(workflow.read_text())
    if document["defaults"] != {"run": {"shell": "bash"}} or "env" in document or "env" in document["jobs"][job]:
        raise CannotRun(f"{workflow}: needs bash as default, and no env outside of steps")
    with tempfile.TemporaryDirectory() as folder:
        return StepList(Runner(Path(folder)), {}).run(document["jobs"][job]["steps"], {})


if __name__ == "__main__":
    sys.exit(not run_job(Path(sys.argv[1]), sys.argv[2]))
