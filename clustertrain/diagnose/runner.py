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
from clustertrain.config.checkpoint import CheckpointSpec
from clustertrain.config.contract import ContractSpec
from clustertrain.config.recipe import Recipe
from clustertrain.config.rehearsal import RehearsalSpec
from clustertrain.config.tracking import TrackingSpec
from clustertrain.diagnose.registry import Finding, Verdict, overall_verdict
from clustertrain.errors import EXIT_CONFIG, ClusterTrainError, CommandFailed, ConfigError, UsageError
from clustertrain.plan.layout import Batch, Layout
from clustertrain.submit.preflight import data
from clustertrain.submit.request import PreparedRun, SubmitRequest, prepare

# (check, how much is done, of how much)
CheckProgressCallback = Callable[[str, int, int], None]
# One process does them, whatever layout the run is for; compiling would take longer than a check.
_SINGLE_PROCESS_JOB: Mapping[str, object] = {
    "backend": "local", "nodes": 1, "gpus": 1, "layout": "auto", "tp": 1, "pp": 1, "cp": 1, "dp_replicate": 0,
    "dp_shard": 0,
}  # fmt: skip
_DISABLED_OPTIONS = tuple(f"parallel.{key}=false" for key in ("compile", "async_tp", "offload", "activation_offload"))


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """``device`` in words; ``verdict`` is the worst of ``checks``."""

    recipe: str
    device: str
    checks: list[Finding]
    verdict: Verdict

    def to_dict(self) -> dict[str, Any]:
        """What --json prints; plots and rows are its evidence once more, for people."""
        checks = [{n: getattr(c, n) for n in ("check", "verdict", "evidence", "text", "fix")} for c in self.checks]
        return {"recipe": self.recipe, "device": self.device, "checks": checks, "verdict": self.verdict}


def prepare_diagnosis(recipe: str, assignments: Sequence[str], environ: Mapping[str, str] = os.environ) -> PreparedRun:
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
    submit_request = SubmitRequest(
        target=recipe, job=_SINGLE_PROCESS_JOB, assignments=(*assignments, *_DISABLED_OPTIONS), environ=environ
    )
    prepared = prepare(submit_request, purpose="here")
    data.check_data(prepared)
    return prepared


def diagnose(
    prepared: PreparedRun,
    recipe: str,
    checks: Sequence[str],
    on_progress: CheckProgressCallback,
    on_finding: Callable[[Finding], None],
    environ: Mapping[str, str] = os.environ,
) -> Diagnosis:
    """Do ``checks`` in a process of the job's Python, which is ended with all below it however this is left.

    Args:
        tell: is told how far a check is; ``on_finding`` what each has found, as it has.

    Raises:
        ConfigError: model or data cannot be made.
        ClusterTrainError: the process has ended without a word.
    """
    with tempfile.TemporaryDirectory(prefix="clustertrain-diagnose-", ignore_cleanup_errors=True) as folder:
        run = scratch_run.write_run_dir(
            _without_side_effects(prepared), Layout(), _one_micro_batch_per_step(prepared), Path(folder)
        )
        env = scratch_run.build_environment(prepared, run, environ)
        argv = proc.python_module_argv(prepared.python, "clustertrain.diagnose.child", *checks)
        log_path = Path(folder) / "said.log"
        device, findings = "", []
        with scratch_run.interruptible():
            for message in _read_messages(argv, env, log_path):
                if "error" in message:
                    error = ConfigError if message["exit_code"] == EXIT_CONFIG else ClusterTrainError
                    raise error(message["error"], fix=message["fix"])
                if "device" in message:
                    device = message["device"]
                elif "progress" in message:
                    on_progress(*message["progress"])
                else:
                    findings.append(schema.convert(message["finding"], Finding))
                    on_finding(findings[-1])
    return Diagnosis(
        recipe=recipe, device=device, checks=findings, verdict=overall_verdict(f.verdict for f in findings)
    )


def _without_side_effects(prepared: PreparedRun) -> PreparedRun:
    """Without what a real run sets off: trackers, budgets, copies elsewhere, preemptions on purpose, profiles."""
    original = prepared.spec.recipe
    recipe: Recipe = msgspec.structs.replace(
        original,
        contract=ContractSpec(),
        evaluation=msgspec.structs.replace(original.evaluation, samples=prepared.plan.batch.micro_batch, patience=0),
        tracking=TrackingSpec(),
        # What is thawed later is looked at as it will be then.
        optim=msgspec.structs.replace(original.optim, unfreeze=()),
        rehearsal=RehearsalSpec(),
        checkpoint=CheckpointSpec(engine=original.checkpoint.engine, background=original.checkpoint.background),
        train=msgspec.structs.replace(original.train, profile=""),
    )
    return dataclasses.replace(prepared, spec=msgspec.structs.replace(prepared.spec, recipe=recipe))


def _one_micro_batch_per_step(prepared: PreparedRun) -> Batch:
    """One micro-batch a step."""
    micro_batch = prepared.plan.batch.micro_batch
    return Batch(
        micro_batch=micro_batch,
        global_batch=micro_batch,
        tokens_per_step=micro_batch * prepared.spec.recipe.tokens_per_sample,
    )


def _read_messages(argv: Sequence[str], env: Mapping[str, str], log_path: Path) -> Iterator[dict[str, Any]]:
    """What the process tells. All else that it and the user's code print goes to ``log_path``.

    Raises:
        ClusterTrainError: it cannot be started, or ends without having told that it is done.
    """
    try:
        child = proc.start_with_stdout_pipe(argv, env=env, stderr_path=log_path)
    except CommandFailed as e:
        raise ConfigError(e.message, fix="name the job's Python in the profile") from e
    assert child.stdout is not None
    finished = False
    try:
        for line in child.stdout:
            message = json.loads(line)
            finished = finished or "done" in message or "error" in message
            if "done" not in message:
                yield message
        child.wait()
    finally:
        proc.kill_descendants()
        child.stdout.close()
        child.wait()
    if not finished:
        raise _error_from_exit(child.returncode, log_path)


def _error_from_exit(returncode: int, log_path: Path) -> ClusterTrainError:
    lines = log_path.read_text(errors="replace").strip().splitlines()
    last_line = lines[-1] if lines else "it printed nothing"
    if "No module named" in last_line:
        return ConfigError(last_line, fix="name the job's Python in the profile, with torch and clustertrain in it")
    if returncode == -signal.SIGKILL:
        return ClusterTrainError(
            "the process of the checks was killed, as the kernel does when memory runs out",
            fix="scale the model or the batch down with --set, as --set train.micro_batch=1",
        )
    return ClusterTrainError(
        f"the process of the checks ended with exit code {returncode}: {last_line}", fix="the model or the data ends it"
    )
