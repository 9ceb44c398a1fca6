"""Starts the process that does the checks, and takes what it tells line by line."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from clustertrain import proc, schema
from clustertrain.agent import scratch_run
from clustertrain.config.contract import ContractSpec
from clustertrain.config.recipe import CheckpointSpec, Recipe, RehearsalSpec
from clustertrain.config.tracking import TrackingSpec
from clustertrain.diagnose.registry import Finding, Verdict, overall
from clustertrain.errors import EXIT_CONFIG, ClusterTrainError, CommandFailed, ConfigError, UsageError
from clustertrain.plan.layout import Batch, Layout
from clustertrain.submit.preflight import data
from clustertrain.submit.request import Prepared, SubmitRequest, prepare

# (check, how much is done, of how much)
Progress = Callable[[str, int, int], None]
# One process does them, whatever layout the run is for; compiling would take longer than a check.
_ALONE: Mapping[str, object] = {
    "backend": "local", "nodes": 1, "gpus": 1, "layout": "auto", "tp": 1, "pp": 1, "cp": 1, "dp_replicate": 0,
    "dp_shard": 0,
}  # fmt: skip
_PLAIN = tuple(f"parallel.{key}=false" for key in ("compile", "async_tp", "offload", "activation_offload"))


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """``device`` in words; ``verdict`` is the worst of ``checks``."""

    recipe: str
    device: str
    checks: list[Finding]
    verdict: Verdict

    def document(self) -> dict[str, Any]:
        """What --json prints; plots and rows are its evidence once more, for people."""
        found = [{n: getattr(c, n) for n in ("check", "verdict", "evidence", "text", "fix")} for c in self.checks]
        return {"recipe": self.recipe, "device": self.device, "checks": found, "verdict": self.verdict}


def request(recipe: str, assignments: Sequence[str], environ: Mapping[str, str] = os.environ) -> Prepared:
    """``recipe`` with ``assignments``, planned for one process on this machine.

    Raises:
        UsageError: it is no recipe.
        ConfigError: a bad recipe or profile, or data that is not there.
    """
    if not recipe.endswith(".toml"):
        raise UsageError(
            f"{recipe}: the checks are of a recipe (*.toml), and a script has a loop of its own",
            fix="write a recipe with model.entry and data.entry for the script's model and data",
        )
    asked = SubmitRequest(target=recipe, job=_ALONE, assignments=(*assignments, *_PLAIN), environ=environ)
    found = prepare(asked, purpose="here")
    data.check(found)
    return found


def diagnose(
    prepared: Prepared,
    recipe: str,
    checks: Sequence[str],
    tell: Progress,
    found: Callable[[Finding], None],
    environ: Mapping[str, str] = os.environ,
) -> Diagnosis:
    """Do ``checks`` in a process of the job's Python, which is ended with all below it however this is left.

    Args:
        tell: is told how far a check is; ``found`` what each has found, as it has.

    Raises:
        ConfigError: model or data cannot be made.
        ClusterTrainError: the process has ended without a word.
    """
    with tempfile.TemporaryDirectory(prefix="clustertrain-diagnose-", ignore_cleanup_errors=True) as folder:
        run = scratch_run.run_folder(_quiet(prepared), Layout(), _batch(prepared), Path(folder))
        env = scratch_run.environment(prepared, run, environ)
        argv = proc.python_module(prepared.python, "clustertrain.diagnose.child", *checks)
        said = Path(folder) / "said.log"
        device, findings = "", []
        with scratch_run.interruptible():
            for told in _lines(argv, env, said):
                if "error" in told:
                    error = ConfigError if told["exit_code"] == EXIT_CONFIG else ClusterTrainError
                    raise error(told["error"], fix=told["fix"])
                if "device" in told:
                    device = told["device"]
                elif "progress" in told:
                    tell(*told["progress"])
                else:
                    findings.append(schema.convert(told["finding"], Finding))
                    found(findings[-1])
    return Diagnosis(recipe=recipe, device=device, checks=findings, verdict=overall(f.verdict for f in findings))


def _quiet(prepared: Prepared) -> Prepared:
    """Without what a real run sets off: trackers, budgets, copies elsewhere, preemptions on purpose, profiles."""
    old = prepared.spec.recipe
    recipe: Recipe = msgspec.structs.replace(
        old,
        contract=ContractSpec(),
        evaluation=msgspec.structs.replace(old.evaluation, samples=prepared.plan.batch.micro_batch, patience=0),
        tracking=TrackingSpec(),
        # What is thawed later is looked at as it will be then.
        optim=msgspec.structs.replace(old.optim, unfreeze=()),
        rehearsal=RehearsalSpec(),
        checkpoint=CheckpointSpec(engine=old.checkpoint.engine, background=old.checkpoint.background),
        train=msgspec.structs.replace(old.train, profile=""),
    )
    return dataclasses.replace(prepared, spec=msgspec.structs.replace(prepared.spec, recipe=recipe))


def _batch(prepared: Prepared) -> Batch:
    """One micro-batch a step."""
    micro = prepared.plan.batch.micro_batch
    return Batch(micro_batch=micro, global_batch=micro, tokens_per_step=micro * prepared.spec.recipe.tokens_per_sample)


def _lines(argv: Sequence[str], env: Mapping[str, str], said: Path) -> Iterator[dict[str, Any]]:
    """What the process tells. All else that it and the user's code print goes to ``said``.

    Raises:
        ClusterTrainError: it cannot be started, or ends without having told that it is done.
    """
    try:
        child = proc.start_telling(argv, env=env, said=said)
    except CommandFailed as e:
        raise ConfigError(e.message, fix="name the job's Python in the profile") from e
    assert child.stdout is not None
    done = False
    try:
        for line in child.stdout:
            told = json.loads(line)
            done = done or "done" in told or "error" in told
            if "done" not in told:
                yield told
        child.wait()
    finally:
        proc.kill_descendants()
        child.stdout.close()
        child.wait()
    if not done:
        raise _died(child.returncode, said)


def _died(code: int, said: Path) -> ClusterTrainError:
    lines = said.read_text(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "it printed nothing"
    if "No module named" in last:
        return ConfigError(last, fix="name the job's Python in the profile, with torch and clustertrain in it")
    if code == -signal.SIGKILL:
        return ClusterTrainError(
            "the process of the checks was killed, as the kernel does when memory runs out",
            fix="scale the model or the batch down with --set, as --set train.micro_batch=1",
        )
    return ClusterTrainError(
        f"the process of the checks ended with exit code {code}: {last}", fix="the model or the data ends it"
    )
