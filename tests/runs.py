"""Helpers that drive the real command line: submit a run, watch it, and compare its result."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from clustertrain import clock
from clustertrain.checkpoint.offline import inspect
from clustertrain.report.documents.encode import to_document
from clustertrain.report.documents.runs import RunList, build_run_entry
from clustertrain.report.progress import Progress
from clustertrain.run.run_dir import RunDir
from clustertrain.run.state import FINAL
from clustertrain.scheduler.run_status import run_status
from tests.documents import check_document
from tests.paths import DEVICE_VARIABLE

# The device of the ranks: cpu, or the emulated cuda (pytest --device).
DEVICE = os.environ.get(DEVICE_VARIABLE, "cpu")
LOCAL = ("--backend", "local", "--device", DEVICE)

POLL_S = 0.6
# Background jobs of a shell ignore SIGINT, and the test run may be one of them.
INTERRUPTIBLE = ("env", "--default-signal=INT")
CLI = [sys.executable, "-m", "clustertrain"]
# Small, so that importing torch is most of the work. Without a periodic checkpoint before the last step, a run resumes
# from the checkpoint of its stop.
RECIPE = """
[model]
dim = 32
layers = 2
heads = 2
kv_heads = 1
[data]
{data}
seq_len = 64
[train]
steps = {steps}
global_batch = 16
[checkpoint]
every = {every}
"""
PACED_DATA = """kind = "custom"
entry = "paced_text:PacedText"
args = { size = 4096, seq_len = 64 }"""
BUILT_IN_DATA = "max_bytes = 262144"


def write_recipe(folder: Path, *, steps: int = 60, every: int = 100_000, more: str = "", paced: bool = True) -> Path:
    """Write a recipe into a folder of its own in ``folder``.

    Args:
        paced: use the data of ``paced_text.py``, with which a step takes at least its PACE_S.
    """
    snapshot = folder / "recipe"  # submit copies the folder of the data's entry
    snapshot.mkdir()
    shutil.copy(Path(__file__).with_name("paced_text.py"), snapshot)
    path = snapshot / "recipe.toml"
    path.write_text(RECIPE.format(data=PACED_DATA if paced else BUILT_IN_DATA, steps=steps, every=every) + more)
    return path


def describe_status(run: RunDir) -> dict[str, Any]:
    """Return the keys of ``list --json`` for a run, without reading its metrics."""
    entry = build_run_entry(run_status(run), Progress())
    document = to_document("list", RunList(runs=(entry,), unreadable=()))
    status: dict[str, Any] = document["runs"][0]
    return status


class Run:
    """A submitted run, and the environment of its commands."""

    def __init__(self, env: Mapping[str, str], submitted: Mapping[str, Any]) -> None:
        self.env = env
        self.id = str(submitted["run"])
        self.job_id = str(submitted["job_id"])
        self.path = Path(str(submitted["run_dir"]))

    def call(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return call(self.env, *argv, check=check)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = check_document("status", self.call("status", self.id, "--json").stdout)
        return answer

    def poll_status(self) -> dict[str, Any]:
        """Return the status without a new process, because polling would take a quarter of a core from the ranks."""
        with mock.patch.dict(os.environ, self.env, clear=True):
            return describe_status(RunDir(self.path))

    def endings(self) -> list[str]:
        return [a["state"] for a in self.poll_status()["attempts"]]

    def digest(self) -> str:
        return inspect.digest(inspect.find_checkpoint(self.path / "checkpoints", None))

    def cancel_if_active(self) -> None:
        """Cancel the run for the end of a test, without a process for a run that has ended."""
        if self.poll_status()["state"] not in FINAL:
            self.call("cancel", self.id, check=False)

    def explain(self) -> str:
        """Return what a failing test should show: the status and the logs."""
        parts = [self.call("status", self.id, check=False).stdout]
        logs = [self.path / "job.log", *sorted(self.path.glob("attempts/*/logs/*"))]
        parts += [
            f"--- {p.relative_to(self.path)}\n{p.read_text(errors='replace')[-3000:]}" for p in logs if p.is_file()
        ]
        return "\n".join(parts)

    def wait_for(
        self, condition: Callable[[dict[str, Any]], bool], description: str, timeout_s: float = 180.0
    ) -> dict[str, Any]:
        last: dict[str, Any] = {}

        def is_met() -> bool:
            nonlocal last
            last = self.poll_status()
            return condition(last)

        assert clock.wait_until(is_met, timeout_s, POLL_S), (
            f"{description}: not within {timeout_s:g} s\n{self.explain()}"
        )
        return last

    def wait_for_step(self, step: int, attempt: int = 1) -> None:
        """Wait until ``attempt`` has trained ``step``."""
        self.wait_for(lambda s: self.has_done(s, step, attempt), f"step {step} of attempt {attempt}")

    def has_done(self, status: dict[str, Any], step: int, attempt: int = 1) -> bool:
        assert status["state"] not in FINAL, self.explain()
        return any(a["n"] == attempt and (a["last_step"] or 0) >= step for a in status["attempts"])

    def wait_until_final(self, timeout_s: float = 300.0) -> dict[str, Any]:
        return self.wait_for(lambda s: s["state"] in FINAL, "the end", timeout_s)

    def complete(self, timeout_s: float = 300.0) -> dict[str, Any]:
        last = self.wait_until_final(timeout_s)
        assert last["state"] == "completed", self.explain()
        return last


def call(env: Mapping[str, str], *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    result = subprocess.run([*CLI, *argv], env=env, capture_output=True, text=True, timeout=120, check=False)
    if check:
        assert result.returncode == 0, (
            f"clustertrain {' '.join(argv)}: {result.returncode}\n{result.stdout}{result.stderr}"
        )
    return result


def submit(env: Mapping[str, str], *argv: str) -> Run:
    return Run(env, json.loads(call(env, "submit", "--json", *argv).stdout))


def at_step(step: int, acts: Mapping[Run, Callable[[Run], object]]) -> None:
    """Call each run's function when its first attempt has trained ``step``, in the order in which they reach it."""
    remaining = dict(acts)

    def all_called() -> bool:
        for run in list(remaining):
            if run.has_done(run.poll_status(), step):
                remaining.pop(run)(run)
        return not remaining

    assert clock.wait_until(all_called, 180.0, POLL_S), "\n".join(run.explain() for run in remaining)


def resumed_at_the_next_step(status: dict[str, Any]) -> bool:
    """Return whether each attempt continued at the step after the previous one's last."""
    attempts = [a for a in status["attempts"] if a["last_step"] is not None]
    pairs = itertools.pairwise(attempts)
    return len(attempts) > 1 and all(b["first_step"] == a["last_step"] + 1 for a, b in pairs)
