"""Compare an uninterrupted run with one that is killed and resumed from its checkpoint.

Loss, gradient norm and learning rate of each step after the resume must be equal to the last bit, and so must the model
and optimizer state in a later checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from clustertrain import clock, fsio, proc, schema, settings
from clustertrain.checkpoint.offline import inspect
from clustertrain.diagnose.child_output import ProgressCallback
from clustertrain.diagnose.registry import Finding, Verdict
from clustertrain.diagnose.subject import Subject
from clustertrain.errors import ClusterTrainError
from clustertrain.run.results import parse_rank_result
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.submit.transaction import format_spec

CHECKPOINT_EVERY = 3  # steps
TIMEOUT_S = 900.0  # for one process
POLL_S = 0.05
COMPARED_SCALARS = ("loss", "grad_norm", "lr")

Rows = dict[int, dict[str, Any]]


def check(subject: Subject, on_progress: ProgressCallback) -> Finding:
    interval = min(CHECKPOINT_EVERY, (subject.recipe.train.steps - 3) // 2)
    if interval < 1:
        text = f"train.steps = {subject.recipe.train.steps} is too short for an interruption"
        return Finding(check="resume", verdict="skipped", text=text, fix="--set train.steps=9")
    last_step = 2 * interval + 2
    reference = _TrialRun(subject, "whole", interval)
    resumed = _TrialRun(subject, "cut", interval)
    on_progress(0, 3)
    reference.run_attempt(1, last_step, 2 * interval)
    on_progress(1, 3)
    resumed.run_attempt(1, interval + 2, interval)
    killed_at = max(resumed.read_rows(1), default=0)
    on_progress(2, 3)
    resumed.run_attempt(2, last_step, 2 * interval)
    on_progress(3, 3)
    resumed_rows = resumed.read_rows(2)
    differences = find_differences(reference.read_rows(1), resumed_rows)
    is_state_equal = reference.digest(2 * interval) == resumed.digest(2 * interval)
    is_reproducible: bool | None = None
    if differences or not is_state_equal:
        repeat_run = _TrialRun(subject, "again", interval)
        repeat_run.run_attempt(1, last_step, 2 * interval)
        is_reproducible = repeat_run.digest(2 * interval) == reference.digest(2 * interval)
    evidence: dict[str, Any] = {
        "checkpoint_step": interval,
        "killed_after_step": killed_at,
        "resumed_from_step": min(resumed_rows, default=0) - 1,
        "compared_steps": sorted(resumed_rows),
        "differences": differences,
        "state_compared_at_step": 2 * interval,
        "state_equal": is_state_equal,
        "reproducible": is_reproducible,
    }
    rows = [
        ("interrupted", f"checkpoint at step {interval}, SIGKILL after step {killed_at}, "
                        f"resumed from step {evidence['resumed_from_step']}"),
        (
            "compared", f"{', '.join(COMPARED_SCALARS)} of steps {min(resumed_rows, default=0)} "
            f"to {max(resumed_rows, default=0)}"),
        ("state", f"model and optimizer after step {2 * interval}: {'equal' if is_state_equal else 'different'}"),
    ]  # fmt: skip
    verdict, text, fix = assess(
        resumed_rows, interval, differences, is_state_equal=is_state_equal, is_reproducible=is_reproducible
    )
    return Finding(check="resume", verdict=verdict, text=text, fix=fix, evidence=evidence, rows=rows)


def find_differences(reference: Rows, resumed_rows: Rows) -> list[dict[str, Any]]:
    """Return the scalars that are not equal to the last bit."""
    return [
        {"step": step, "name": name, "uninterrupted": reference[step].get(name), "resumed": row.get(name)}
        for step, row in sorted(resumed_rows.items())
        if step in reference
        for name in COMPARED_SCALARS
        if row.get(name) != reference[step].get(name)
    ]


def assess(
    resumed_rows: Rows,
    interval: int,
    differences: list[dict[str, Any]],
    *,
    is_state_equal: bool,
    is_reproducible: bool | None,
) -> tuple[Verdict, str, str]:
    """Return (verdict, text, fix).

    Args:
        resumed_rows: the metric rows after the resume.
        interval: the step of the checkpoint to resume from.
        differences: see :func:`find_differences`.
        is_state_equal: whether model and optimizer are equal in a later checkpoint.
        is_reproducible: whether two uninterrupted runs are equal; None if that was not measured.
    """
    if min(resumed_rows, default=0) != interval + 1:
        text = f"training resumed at step {min(resumed_rows, default=0)} instead of {interval + 1}"
        return "fail", text, "run `clustertrain checkpoint verify` on the checkpoint"
    if not differences and is_state_equal:
        return (
            "pass",
            f"the resumed run is bit-exact ({len(resumed_rows)} steps, then model and optimizer)",
            "",
        )
    first = differences[0] if differences else None
    message = "the model or optimizer state differs after a resume"
    if first is not None:
        values = f"{first['resumed']} after a resume, {first['uninterrupted']} without"
        message = f"{first['name']} of step {first['step']} is {values}"
    if is_reproducible is False:
        fix = "set train.deterministic = true if you need reproducible runs"
        return "warn", f"{message}; two uninterrupted runs differ too", fix
    return (
        "fail",
        message,
        (
            "look for state of the model or the dataset that no checkpoint holds: a separate random generator, "
            "counters or caches that are not buffers, an order that depends on time"
        ),
    )


class _TrialRun:
    """A run in a subfolder of the scratch run."""

    def __init__(self, subject: Subject, name: str, interval: int) -> None:
        self._run = RunDir(subject.run.path / name)
        spec = load_spec(subject.run)
        checkpoint = msgspec.structs.replace(spec.recipe.checkpoint, every=interval, keep=4)
        recipe = msgspec.structs.replace(spec.recipe, checkpoint=checkpoint)
        for folder in (self._run.metrics, self._run.checkpoints):
            folder.mkdir(parents=True)
        fsio.write_text(self._run.spec, format_spec(msgspec.structs.replace(spec, recipe=recipe)))
        fsio.write_json(self._run.plan, json.loads(subject.run.plan.read_text()))

    def run_attempt(self, n: int, kill_step: int, checkpoint_step: int) -> None:
        """Run a rank that kills itself before step ``kill_step``, once the checkpoint of ``checkpoint_step`` exists.

        Raises:
            ClusterTrainError: the rank ended in any other way.
        """
        attempt = self._run.attempt(n)
        for folder in (attempt.events, attempt.logs):
            folder.mkdir(parents=True)
        rank_dir = attempt.logs
        env = {
            **os.environ,
            settings.RUN_DIR: str(self._run.path),
            settings.RANK_DIR: str(rank_dir),
            settings.ATTEMPT: str(n),
        }
        argv = proc.python_module_argv(
            sys.executable, "clustertrain.diagnose.crash_rank", str(kill_step), str(checkpoint_step)
        )
        child = proc.start(argv, env=env, log=attempt.rank_log(0))
        try:
            if not clock.wait_until(lambda: child.poll() is not None, TIMEOUT_S, POLL_S):
                raise ClusterTrainError(f"a rank did not complete {kill_step} steps in {TIMEOUT_S:g} s")
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if child.returncode != -signal.SIGKILL:
            raise ClusterTrainError(
                f"attempt {n} of the resume check failed: {_failure_reason(rank_dir, attempt.rank_log(0), child)}"
            )

    def read_rows(self, attempt: int) -> Rows:
        path = self._run.metrics_path(attempt)
        if not path.exists():
            return {}
        rows = [schema.decode(line, dict[str, Any]) for line in path.read_bytes().splitlines() if line.endswith(b"}")]
        return {row["step"]: row for row in rows}

    def digest(self, step: int) -> str:
        return inspect.digest(self._run.checkpoints / f"step-{step:08d}")


def _failure_reason(rank_dir: Path, log: Path, child: subprocess.Popen[bytes]) -> str:
    rank_result = parse_rank_result(fsio.read_json(rank_dir / "rank-0.json"))
    if rank_result is not None and rank_result.error is not None:
        return rank_result.error.message
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else f"exit code {child.returncode}"
