"""Start the child process that runs the checks and read its messages."""

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
from clustertrain.config.preemption_test import PreemptionTestSpec
from clustertrain.config.recipe import Recipe
from clustertrain.config.tracking import TrackingSpec
from clustertrain.diagnose.registry import Finding, Verdict, overall_verdict
from clustertrain.errors import EXIT_CONFIG, ClusterTrainError, CommandFailed, ConfigError, UsageError
from clustertrain.plan.layout import Batch, Layout
from clustertrain.submit import checks
from clustertrain.submit.preflight import data
from clustertrain.submit.prepare import prepare
from clustertrain.submit.prepared_run import PreparedRun
from clustertrain.submit.request import SubmitRequest

CheckProgressCallback = Callable[[str, int, int], None]  # (check, completed, total)
# The checks use one process whatever the run's layout; compilation would take longer than a check.
_SINGLE_PROCESS_JOB: Mapping[str, object] = {
    "backend": "local", "nodes": 1, "gpus": 1, "layout": "auto", "tp": 1, "pp": 1, "cp": 1, "dp_replicate": 0,
    "dp_shard": 0,
}  # fmt: skip
_DISABLED_OPTIONS = tuple(f"parallel.{key}=false" for key in ("compile", "async_tp", "offload", "activation_offload"))


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The result of all requested checks."""

    recipe: str
    device: str
    """The GPU's model name, or "cpu"."""
    checks: list[Finding]
    verdict: Verdict
    """The worst verdict of ``checks``."""


def prepare_diagnosis(recipe: str, assignments: Sequence[str], environ: Mapping[str, str] = os.environ) -> PreparedRun:
    """Plan ``recipe`` with ``assignments`` for one process on this machine.

    Raises:
        UsageError: ``recipe`` is not a .toml file.
        ConfigError: the recipe or profile is invalid, the data is missing, or the job's Python lacks torch.
    """
    if not recipe.endswith(".toml"):
        raise UsageError(
            f"{recipe}: only recipes (*.toml) can be checked; a script runs its own training loop",
            fix="write a recipe with model.entry and data.entry for the script's model and data",
        )
    submit_request = SubmitRequest(
        target=recipe, job=_SINGLE_PROCESS_JOB, assignments=(*assignments, *_DISABLED_OPTIONS), environ=environ
    )
    prepared = prepare(submit_request, purpose="here")
    checks.check_job_python(prepared)
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
    """Run ``checks`` in a child process of the job's Python; the child and its descendants are killed on every exit.

    Args:
        on_progress: called while a check runs.
        on_finding: called with each finding as soon as it is known.

    Raises:
        ConfigError: the model or the data cannot be built.
        ClusterTrainError: the child ended without a result.
    """
    with tempfile.TemporaryDirectory(prefix="clustertrain-diagnose-", ignore_cleanup_errors=True) as folder:
        run = scratch_run.write_run_dir(
            _without_side_effects(prepared), Layout(), _one_micro_batch_per_step(prepared), Path(folder)
        )
        env = scratch_run.build_environment(prepared, run, environ)
        argv = proc.python_module_argv(prepared.python.ranks.path, "clustertrain.diagnose.child", *checks)
        log_path = Path(folder) / "stderr.log"
        device, findings = "", []
        with scratch_run.interruptible() as raise_if_interrupted:
            for message in _read_messages(argv, env, log_path):
                raise_if_interrupted()
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
    """Return the run without trackers, budgets, checkpoint copies, preemption tests and profiles."""
    original = prepared.spec.recipe
    recipe: Recipe = msgspec.structs.replace(
        original,
        contract=ContractSpec(),
        evaluation=msgspec.structs.replace(original.evaluation, samples=prepared.plan.batch.micro_batch, patience=0),
        tracking=TrackingSpec(),
        # Parameters that unfreeze later are checked in their unfrozen state.
        optim=msgspec.structs.replace(original.optim, unfreeze=()),
        preemption_test=PreemptionTestSpec(),
        checkpoint=CheckpointSpec(engine=original.checkpoint.engine, async_save=original.checkpoint.async_save),
        train=msgspec.structs.replace(original.train, profile=""),
    )
    return dataclasses.replace(prepared, spec=msgspec.structs.replace(prepared.spec, recipe=recipe))


def _one_micro_batch_per_step(prepared: PreparedRun) -> Batch:
    """Return a batch of one micro-batch per step."""
    micro_batch = prepared.plan.batch.micro_batch
    return Batch(
        micro_batch=micro_batch,
        global_batch=micro_batch,
        tokens_per_step=micro_batch * prepared.spec.recipe.tokens_per_sample,
    )


def _read_messages(argv: Sequence[str], env: Mapping[str, str], log_path: Path) -> Iterator[dict[str, Any]]:
    """Yield the messages of the child process; its standard error goes to ``log_path``.

    Raises:
        ClusterTrainError: the child cannot be started, or ends without reporting that it is done.
    """
    try:
        child = proc.start_with_stdout_pipe(argv, env=env, stderr_path=log_path)
    except CommandFailed as e:
        raise ConfigError(e.message, fix="set the job's Python in the profile") from e
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
    last_line = lines[-1] if lines else "no output"
    if "No module named" in last_line:
        return ConfigError(last_line, fix="set the profile's Python to one with torch and clustertrain installed")
    if returncode == -signal.SIGKILL:
        return ClusterTrainError(
            "the process that runs the checks was killed (SIGKILL), probably because memory ran out",
            fix="scale down the model or the batch with --set, for example --set train.micro_batch=1",
        )
    return ClusterTrainError(
        f"the process that runs the checks ended with exit code {returncode}: {last_line}",
        fix="check the model and data code for an early exit or a crash",
    )
