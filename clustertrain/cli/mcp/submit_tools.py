"""Tools that plan and submit a run, and those that end one or start it again."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from clustertrain.cli.common import find_run
from clustertrain.cli.job_options import build_request
from clustertrain.cli.mcp.answer import Document
from clustertrain.cli.plan import format_verdict
from clustertrain.cli.submit import submit as submit_command
from clustertrain.errors import NotFound, UsageError
from clustertrain.report.documents.encode import to_document
from clustertrain.report.documents.runs import RequeuedRun, build_cancelled
from clustertrain.submit.provenance import redact_argv

if TYPE_CHECKING:
    from clustertrain.submit.request import SubmitRequest

_OPTIONS = {
    "nodes": "--nodes", "gpus_per_node": "--gpus", "gpu_type": "--gpu-type", "cluster_profile": "--cluster",
    "backend": "--backend", "time": "--time", "partition": "--partition", "account": "--account", "qos": "--qos",
    "layout": "--layout", "name": "--name",
}  # fmt: skip


class Job(BaseModel):
    """What to train, and on what."""

    model_config = ConfigDict(extra="forbid")

    folder: Annotated[str, Field(description="Absolute path of the folder that relative paths start from.")]
    target: Annotated[
        str,
        Field(description="A recipe (*.toml) or a script (*.py). Empty: the default recipe, or `command`."),
    ] = ""
    args: Annotated[list[str], Field(description="Arguments of the script.")] = []
    command: Annotated[
        list[str], Field(description='Any other program with its arguments, such as ["torchrun", "train.py"].')
    ] = []
    settings: Annotated[list[str], Field(description="Recipe keys, each as KEY=VALUE, such as `optim.lr=1e-4`.")] = []
    nodes: Annotated[int | None, Field(ge=1)] = None
    gpus_per_node: Annotated[int | None, Field(ge=1, description="On the CPU: ranks per node.")] = None
    gpu_type: Annotated[str, Field(description="Such as h100 or a100-80gb.")] = ""
    cluster_profile: Annotated[str, Field(description="Name of the site's profile. Empty: the default one.")] = ""
    backend: Literal["auto", "slurm", "local"] = "auto"
    time: Annotated[str, Field(description="Time limit: minutes, H:M:S or D-H:M:S.")] = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    layout: Annotated[str, Field(description="auto, ddp, zero1, fsdp, fsdp-grad-op or hybrid-shard.")] = ""
    name: Annotated[str, Field(description="First part of the run id.")] = ""


def _build_argv(job: Job) -> list[str]:
    """Return the arguments of `submit` that say the same, so that people can type them and `rerun` repeats them."""
    argv = [
        f"{option}={value}"
        for field, option in _OPTIONS.items()
        if (value := getattr(job, field)) not in (None, "", "auto")
    ]
    argv += [f"--set={assignment}" for assignment in job.settings]
    if job.command:
        if job.target:
            raise UsageError("target and command exclude each other", fix="name one of them")
        return [*argv, "--", *job.command]
    if job.target.startswith("-"):
        raise UsageError(f"target {job.target!r} is an option", fix="name a recipe or a script: ./NAME")
    if job.args and not job.target:
        raise UsageError("args belong to a script, and there is no target", fix="name the script as target")
    return [*argv, *([job.target] if job.target else []), *job.args]


def _build_request(job: Job) -> tuple[SubmitRequest, str]:
    """Return the request, and the command that a person would type for it."""
    folder = Path(job.folder)
    if not folder.is_absolute() or not folder.is_dir():
        raise NotFound(f"folder {job.folder!r} is not the absolute path of a folder", fix="name the project's folder")
    argv = _build_argv(job)
    with submit_command.make_context("submit", list(argv)) as context:
        options = {key: value for key, value in context.params.items() if key not in ("dry_run", "wait", "follow")}
        request = build_request(options)
    line = f"cd {shlex.quote(str(folder))} && clustertrain submit {shlex.join(redact_argv(argv))}"
    return replace(request, cwd=folder, argv=("clustertrain", "submit", *argv)), line


def plan(job: Job) -> Document:
    """Predict layout, memory, speed and duration of a job; submit nothing. `verdict` is the answer in one line."""
    from clustertrain.submit.prepare import prepare

    request, line = _build_request(job)
    prepared = prepare(request, purpose="plan")
    document = to_document("plan", prepared.plan)
    return {"verdict": format_verdict(prepared), "submit_command": line, **document}


def preview(job: Job) -> Document:
    """Return what `submit` would do: its checks, the plan's verdict and warnings, and the batch script."""
    from clustertrain.submit.transaction import dry_run

    request, line = _build_request(job)
    result = dry_run(request)
    return {
        "submitted": False,
        "submit_command": line,
        "layout": result.plan.layout.describe(),
        "warnings": list(result.plan.warnings),
        "notes": list(result.notes),
        "script": result.script,
    }


def make_submit_tool(*, allowed: bool) -> Callable[..., Document]:
    """Return the tool, which really submits only if the server was started with ``--allow-submit``."""

    def submit(
        job: Job,
        dry_run: Annotated[
            bool,
            Field(description="Only check the job and show its script. False submits it and costs GPU-hours."),
        ] = True,
    ) -> Document:
        """Check a job and show its batch script or, with dry_run false, submit it."""
        if dry_run:
            return preview(job)
        if not allowed:
            raise UsageError(
                "this server does not submit runs: it was started without --allow-submit",
                fix="show the user `submit_command` of a dry run, or ask for `clustertrain mcp --allow-submit`",
            )
        from clustertrain.report.documents.submissions import build_submitted
        from clustertrain.submit import transaction

        request, line = _build_request(job)
        submitted = transaction.submit(request)
        document = to_document("submit", build_submitted(submitted))
        return {"submitted": True, "submit_command": line, "notes": list(submitted.notes), **document}

    return submit


RequiredRun = Annotated[str, Field(min_length=1, description="Id of the run, or a unique prefix of one.")]


def cancel_run(run: RequiredRun) -> Document:
    """End a pending or running run for good. Its checkpoints stay."""
    from clustertrain.submit.cancel_runs import cancel_runs

    result = cancel_runs([find_run(run)])
    return {**to_document("cancel", build_cancelled(result)), "notes": result.notes}


def requeue_run(
    run: RequiredRun,
    time: Annotated[str, Field(description="New time limit. Empty: as before.")] = "",
) -> Document:
    """Stop a running run at a checkpoint and start it again, or continue a run that has ended."""
    from clustertrain.submit import requeue_run as requeuing

    found = find_run(run)
    job_id = requeuing.requeue_run(found, {"time": time} if time else {})
    return to_document("requeue", RequeuedRun(run=found.id, job_id=job_id, state="requeued"))
