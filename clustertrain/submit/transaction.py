"""Last phase, submit: write the run folder and pass it to the backend. A failure removes the folder again."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from clustertrain import fsio, settings
from clustertrain.config.job import RunSpec
from clustertrain.errors import ClusterTrainError, CommandFailed, ConfigError
from clustertrain.plan.planner import Plan
from clustertrain.run import run_dir
from clustertrain.run.events import EventLog
from clustertrain.run.recipe_hash import hash_run_spec
from clustertrain.run.run_dir import RunDir
from clustertrain.run.shipped_environment import ShippedEnvironment
from clustertrain.run.usage import contract_status
from clustertrain.scheduler.backend import PENDING, Submission
from clustertrain.submit import checks, job_script, provenance, templates
from clustertrain.submit.prepare import prepare
from clustertrain.submit.prepared_run import PreparedRun
from clustertrain.submit.request import SubmitRequest
from clustertrain.submit.shipping.ship import EnvironmentPacker, OnProgress
from clustertrain.submit.snapshot import code_snapshot, python_path
from clustertrain.submit.snapshot.code_snapshot import CodeSnapshot

MAX_LISTED_SECRETS = 5  # files in a note
LARGE_SNAPSHOT_MIB = 10  # outside git; a larger one probably has more than code


@dataclass(frozen=True)
class SubmittedRun:
    """A run that the backend has accepted. ``submit --json`` prints the fields except ``notes``."""

    run: RunDir
    job_id: str
    backend: str
    state: str
    notes: tuple[str, ...] = ()
    """Warnings for the user."""


@dataclass(frozen=True)
class DryRun:
    plan: Plan
    script: str
    notes: tuple[str, ...]


def submit(request: SubmitRequest, on_progress: OnProgress | None = None) -> SubmittedRun:
    """Check and plan the run, write its folder and pass it to the backend.

    Args:
        on_progress: called with the bytes done and the total while the environment is packed.

    Raises:
        UsageError, ConfigError: the request is refused; nothing was created.
        SchedulerError: Slurm refused the job (the message is Slurm's); the run folder was removed.
    """
    prepared = prepare(request)
    notes = [*prepared.plan.warnings, *checks.check_plan(prepared), *get_backend_advice(prepared)]
    packer = EnvironmentPacker(on_progress)
    run, snapshot = create(request, prepared, packer.pack(prepared))
    try:
        with fsio.group_umask(run.path):  # Slurm gives its job.log the umask of the submission
            job_id = prepared.backend.submit(Submission(run, environ=request.environ))
    except ClusterTrainError:
        # Not after Ctrl-C, which may come after sbatch has accepted the job: the job then needs its folder.
        remove_run(run, prepared.spec)
        raise
    notes += [*packer.notes, *snapshot_notes(snapshot)]
    return record_submission(run, job_id, prepared.backend.name, notes)


def create(
    request: SubmitRequest, prepared: PreparedRun, environment: ShippedEnvironment | None = None
) -> tuple[RunDir, CodeSnapshot | None]:
    """Create the folder of a run with all its files; a failure removes it."""
    run = run_dir.create_run(prepared.spec.job.name, share=prepared.spec.job.share)
    try:
        with fsio.group_umask(run.path):
            snapshot = snapshot_code(request, prepared, run.code)
            write(prepared, run, snapshot, collect_record(request, snapshot), environment)
    except BaseException:
        remove_run(run, prepared.spec)
        raise
    return run, snapshot


def record_submission(run: RunDir, job_id: str, backend: str, notes: Sequence[str] = ()) -> SubmittedRun:
    """Record in the run's events that the backend accepted the run."""
    with fsio.group_umask(run.path):
        log = EventLog(run.events / "submit.jsonl")
    log.write("submitted", job_id=job_id, backend=backend)
    log.close()
    return SubmittedRun(run, job_id, backend, PENDING.lower(), tuple(notes))


def dry_run(request: SubmitRequest) -> DryRun:
    """Return the plan, and job.sh as it would be submitted except for the random end of the run id. Create nothing."""
    prepared = prepare(request, purpose="dry-run")
    notes = [*checks.check_plan(prepared), *get_backend_advice(prepared)]
    return DryRun(prepared.plan, job_script.render_dry_run_script(prepared), tuple(notes))


def get_backend_advice(prepared: PreparedRun) -> list[str]:
    """Return the backend's advice; none if Slurm does not answer, as in a dry run elsewhere."""
    try:
        return prepared.backend.advice(prepared.spec.job.partition)
    except CommandFailed:
        return []


def snapshot_code(request: SubmitRequest, prepared: PreparedRun, target: Path) -> CodeSnapshot | None:
    if prepared.code is None:
        if request.snapshot_include:
            raise ConfigError("--snapshot-include: this recipe uses no code of yours, so no files are copied")
        return None
    snapshot = code_snapshot.take_snapshot(
        prepared.code,
        target,
        limit_mib=request.snapshot_limit_mib,
        exclude=settings.home(),
        include=request.snapshot_include,
    )
    code_snapshot.grant_group_access(target, 0o050 if prepared.spec.job.share else 0o000)
    return snapshot


def collect_record(request: SubmitRequest, snapshot: CodeSnapshot | None) -> dict[str, Any]:
    return provenance.collect(request.argv, request.cwd, snapshot.repository if snapshot else None)


def snapshot_notes(snapshot: CodeSnapshot | None) -> list[str]:
    """Return notes on files that were not copied, or that were copied from outside the repository."""
    if snapshot is None:
        return []
    notes = [f"not copied, the job will use the original: {link}" for link in snapshot.external_links]
    if snapshot.script_source:
        notes.append(f"{snapshot.script} is a link out of {snapshot.root}; copied from {snapshot.script_source}")
    if snapshot.skipped_secrets:
        description = "looks like a secret" if len(snapshot.skipped_secrets) == 1 else "look like secrets"
        suffix = (
            f" and {len(snapshot.skipped_secrets) - MAX_LISTED_SECRETS} more"
            if len(snapshot.skipped_secrets) > MAX_LISTED_SECRETS
            else ""
        )
        notes.append(
            f"not copied: {', '.join(snapshot.skipped_secrets[:MAX_LISTED_SECRETS])}{suffix} ({description}); copy with"
            f" --snapshot-include {shlex.quote(snapshot.skipped_secrets[0])}"
        )
    if snapshot.repository is None and snapshot.size_bytes > LARGE_SNAPSHOT_MIB * 1024**2:
        size = f"{snapshot.size_bytes / 1024**2:.1f} MiB"
        notes.append(
            f"{size} copied: {snapshot.root} is not a git repository, so the copy has all files beside the script,"
            f" including {snapshot.largest_file}"
        )
    # File names may contain control characters, which a terminal would interpret.
    return [note if note.isprintable() else ascii(note) for note in notes]


def write(
    prepared: PreparedRun,
    run: RunDir,
    snapshot: CodeSnapshot | None,
    record: dict[str, Any],
    environment: ShippedEnvironment | None = None,
) -> None:
    """Write all files of a run except its code, which has already been copied."""
    spec = prepared.spec
    paths: list[Path] = []
    if snapshot is not None:
        if spec.script is not None:
            spec = msgspec.structs.replace(spec, script=msgspec.structs.replace(spec.script, path=snapshot.script))
        package = snapshot.script if spec.script is None or spec.script.is_package else None
        paths = python_path.build_python_path(run.code, run.code, package)
    mode = 0o640 if spec.job.share else 0o600
    script = job_script.render_job_script(job_script.script_input(prepared, run, spec, paths))
    if secrets := job_script.format_secrets(spec):
        fsio.write_text(run.secrets, secrets, mode=0o600)
    fsio.write_text(run.spec, format_spec(spec), mode=mode)
    plan = msgspec.json.format(msgspec.json.encode(prepared.plan), indent=1).decode()
    fsio.write_text(run.plan, plan + "\n", mode=mode)
    fsio.write_text(run.job_script, script, mode=mode | 0o100)
    fsio.write_text(run.agent_end_script, templates.read_template("agent_end.sh"), mode=mode | 0o100)
    record = {**record, "contract": contract_status.build_record(spec.recipe), "recipe_hash": hash_run_spec(spec)}
    if environment is not None:
        record = {**record, "environment": msgspec.to_builtins(environment)}
        fsio.write_json(run.environment, record["environment"])
    fsio.write_json(run.record, record)
    _create_checkpoint_dir(run, spec)


def _create_checkpoint_dir(run: RunDir, spec: RunSpec) -> None:
    mode = 0o750 if spec.job.share else 0o700
    target = _checkpoint_path(run, spec)
    try:
        if target is None:
            fsio.claim_folder(run.checkpoints, mode=mode)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            if not fsio.claim_folder(target, mode=mode):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
            run.checkpoints.symlink_to(target)
    except OSError as e:
        raise ConfigError(
            f"cannot create the folder for checkpoints: {e}", fix="choose another --checkpoint-dir"
        ) from e


def _checkpoint_path(run: RunDir, spec: RunSpec) -> Path | None:
    return Path(spec.job.checkpoint_dir) / run.id if spec.job.checkpoint_dir else None


def remove_run(run: RunDir, spec: RunSpec) -> None:
    target = _checkpoint_path(run, spec)
    if target is not None:
        shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(run.path, ignore_errors=True)


def format_spec(spec: RunSpec) -> str:
    """Return the text of spec.toml, without secrets."""
    return tomli_w.dumps(_drop_none(msgspec.to_builtins(job_script.redact_secrets(spec))))


def _drop_none(value: Any) -> Any:
    """Return ``value`` without None, which TOML lacks: a missing key means the same."""
    if isinstance(value, dict):
        return {k: _drop_none(v) for k, v in value.items() if v is not None}
    return value
