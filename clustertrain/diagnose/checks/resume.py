"""A rehearsal of a resume: one run to its end, and one that is killed and started again from its checkpoint. What
follows must be the same, to the last bit: loss, gradient norm and learning rate of each step, and then all that a
checkpoint holds of model and optimizer."""

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
from clustertrain.diagnose.child_output import Tell
from clustertrain.diagnose.registry import Finding, Verdict
from clustertrain.diagnose.subject import Subject
from clustertrain.errors import ClusterTrainError
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.submit.transaction import spec_text

EVERY = 3  # steps between checkpoints
TIMEOUT_S = 900.0  # of one process
POLL_S = 0.05
COMPARED = ("loss", "grad_norm", "lr")

Rows = dict[int, dict[str, Any]]


def check(subject: Subject, tell: Tell) -> Finding:
    every = min(EVERY, (subject.recipe.train.steps - 3) // 2)
    if every < 1:
        text = f"train.steps = {subject.recipe.train.steps} are too few to be interrupted"
        return Finding(check="resume", verdict="skipped", text=text, fix="--set train.steps=9")
    last = 2 * every + 2
    whole = _Rehearsal(subject, "whole", every)
    cut = _Rehearsal(subject, "cut", every)
    tell(0, 3)
    whole.attempt(1, last, 2 * every)
    tell(1, 3)
    cut.attempt(1, every + 2, every)
    killed_at = max(cut.rows(1), default=0)
    tell(2, 3)
    cut.attempt(2, last, 2 * every)
    tell(3, 3)
    after = cut.rows(2)
    different = differing(whole.rows(1), after)
    same_state = whole.digest(2 * every) == cut.digest(2 * every)
    repeats: bool | None = None
    if different or not same_state:
        again = _Rehearsal(subject, "again", every)
        again.attempt(1, last, 2 * every)
        repeats = again.digest(2 * every) == whole.digest(2 * every)
    evidence: dict[str, Any] = {
        "checkpoint_step": every,
        "killed_after_step": killed_at,
        "resumed_from_step": min(after, default=0) - 1,
        "compared_steps": sorted(after),
        "differences": different,
        "state_compared_at_step": 2 * every,
        "state_same": same_state,
        "repeats_without_interruption": repeats,
    }
    rows = [
        ("interrupted", f"checkpoint at step {every}, SIGKILL after step {killed_at}, "
                        f"resumed from step {evidence['resumed_from_step']}"),
        ("compared", f"{', '.join(COMPARED)} of the steps {min(after, default=0)} to {max(after, default=0)}"),
        ("state", f"model and optimizer after step {2 * every}: {'the same' if same_state else 'different'}"),
    ]  # fmt: skip
    verdict, text, fix = judged(after, every, different, same_state=same_state, repeats=repeats)
    return Finding(check="resume", verdict=verdict, text=text, fix=fix, evidence=evidence, rows=rows)


def differing(whole: Rows, after: Rows) -> list[dict[str, Any]]:
    """The scalars that are not the same to the last bit."""
    return [
        {"step": step, "name": name, "uninterrupted": whole[step].get(name), "resumed": row.get(name)}
        for step, row in sorted(after.items())
        if step in whole
        for name in COMPARED
        if row.get(name) != whole[step].get(name)
    ]


def judged(
    after: Rows, every: int, different: list[dict[str, Any]], *, same_state: bool, repeats: bool | None
) -> tuple[Verdict, str, str]:
    """(verdict, text, fix); ``after`` are the rows behind the resume, ``repeats`` says whether a run that nothing
    interrupts does the same twice."""
    if min(after, default=0) != every + 1:
        text = f"it went on with step {min(after, default=0)} and not with {every + 1}"
        return "fail", text, "see whether the checkpoint verifies: clustertrain checkpoint verify"
    if not different and same_state:
        return "pass", f"killed and resumed, it goes on bit by bit ({len(after)} steps, then model and optimizer)", ""
    first = different[0] if different else None
    what = "model or optimizer differ after a resume"
    if first is not None:
        values = f"{first['resumed']} after a resume and {first['uninterrupted']} without"
        what = f"{first['name']} of step {first['step']} is {values}"
    if repeats is False:
        fix = "train.deterministic = true takes algorithms that repeat, where one needs that"
        return "warn", f"{what}; but two runs without any interruption differ as well", fix
    return (
        "fail",
        what,
        (
            "something in the model or the data set is in no checkpoint: random numbers of a generator of its own, "
            "counters or caches that are no buffers, an order that depends on time"
        ),
    )


class _Rehearsal:
    """A run in a folder of its own below the scratch run."""

    def __init__(self, subject: Subject, name: str, every: int) -> None:
        self._run = RunDir(subject.run.path / name)
        spec = load_spec(subject.run)
        checkpoint = msgspec.structs.replace(spec.recipe.checkpoint, every=every, keep=4)
        recipe = msgspec.structs.replace(spec.recipe, checkpoint=checkpoint)
        for folder in (self._run.metrics, self._run.checkpoints):
            folder.mkdir(parents=True)
        fsio.write_text(self._run.spec, spec_text(msgspec.structs.replace(spec, recipe=recipe)))
        fsio.write_json(self._run.plan, json.loads(subject.run.plan.read_text()))

    def attempt(self, n: int, last: int, committed: int) -> None:
        """A rank that is killed before step ``last``, once ``committed`` is saved.

        Raises:
            ClusterTrainError: it ends in any other way.
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
        argv = proc.python_module(sys.executable, "clustertrain.diagnose.crash_rank", str(last), str(committed))
        child = proc.start(argv, env=env, log=attempt.rank_log(0))
        try:
            if not clock.wait_until(lambda: child.poll() is not None, TIMEOUT_S, POLL_S):
                raise ClusterTrainError(f"a rank has not done {last} steps in {TIMEOUT_S:g} s")
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if child.returncode != -signal.SIGKILL:
            raise ClusterTrainError(
                f"attempt {n} of the rehearsal failed: {_why(rank_dir, attempt.rank_log(0), child)}"
            )

    def rows(self, attempt: int) -> Rows:
        path = self._run.metrics_of(attempt)
        if not path.exists():
            return {}
        found = [schema.decode(line, dict[str, Any]) for line in path.read_bytes().splitlines() if line.endswith(b"}")]
        return {row["step"]: row for row in found}

    def digest(self, step: int) -> str:
        return inspect.digest(self._run.checkpoints / f"step-{step:08d}")


def _why(rank_dir: Path, log: Path, child: subprocess.Popen[bytes]) -> str:
    told = fsio.read_json(rank_dir / "rank-0.json")
    if isinstance(told, dict) and told.get("error"):
        return str(told["error"]["message"])
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else f"exit code {child.returncode}"
