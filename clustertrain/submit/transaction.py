"""The transaction: everything is checked before anything is made, and a refusal leaves nothing behind."""

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
from clustertrain.config.checks import storage_paths
from clustertrain.config.job import RunSpec
from clustertrain.errors import ClusterTrainError, CommandFailed, ConfigError, UnsuitableEnvironment
from clustertrain.plan.layout import pluralize
from clustertrain.plan.planner import Plan, check_fits
from clustertrain.run import contract_status, run_dir
from clustertrain.run.events import EventLog
from clustertrain.run.recipe_hash import hash_run_spec
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.backend import PENDING, Submission
from clustertrain.submit import code_snapshot, job_script, provenance, python_path, templates
from clustertrain.submit.code_snapshot import CodeSnapshot
from clustertrain.submit.preflight import alerts as alerting
from clustertrain.submit.preflight import data, entry_points, filesystem, packages, trackers
from clustertrain.submit.request import PreparedRun, SubmitRequest, check_script_layout, has_gpu, prepare

MAX_LISTED_SECRETS = 5  # secrets that a note names


@dataclass(frozen=True)
class SubmittedRun:
    """``notes`` are warnings for the user; the rest is ``submit --json``."""

    run: RunDir
    job_id: str
    backend: str
    state: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DryRun:
    plan: Plan
    script: str
    notes: tuple[str, ...]


def submit(request: SubmitRequest) -> SubmittedRun:
    """Check, plan, write the run directory and hand it to the backend.

    Raises:
        UsageError, ConfigError: before anything is made.
        SchedulerError: with Slurm's words; the run directory is gone again.
    """
    prepared = prepare(request)
    notes = [*prepared.plan.warnings, *check_prepared(prepared), *get_backend_advice(prepared)]
    run = run_dir.create_run(prepared.spec.job.name, share=prepared.spec.job.share)
    try:
        with fsio.group_umask(run.path):
            snapshot = snapshot_code(request, prepared, run.code)
            write(prepared, run, snapshot, collect_record(request, snapshot))
    except BaseException:
        remove_run(run, prepared.spec)
        raise
    try:
        with fsio.group_umask(run.path):  # Slurm gives its job.log the umask of the submission
            job_id = prepared.backend.submit(Submission(run, environ=request.environ))
    except ClusterTrainError:
        # Not for other exceptions: a Ctrl-C may come after sbatch has taken the job, which then needs its folder.
        remove_run(run, prepared.spec)
        raise
    notes += snapshot_notes(snapshot)
    return record_submission(run, job_id, prepared.backend.name, notes)


def record_submission(run: RunDir, job_id: str, backend: str, notes: Sequence[str] = ()) -> SubmittedRun:
    """Write down that the backend has taken the run."""
    with fsio.group_umask(run.path):
        log = EventLog(run.events / "submit.jsonl")
    log.write("submitted", job_id=job_id, backend=backend)
    log.close()
    return SubmittedRun(run, job_id, backend, PENDING.lower(), tuple(notes))


def dry_run(request: SubmitRequest) -> DryRun:
    """The plan, and job.sh as it would be submitted but for the end of the run's name. Makes nothing."""
    prepared = prepare(request, purpose="dry-run")
    notes = [*check_prepared(prepared), *get_backend_advice(prepared)]
    return DryRun(prepared.plan, render_dry_run_script(prepared), tuple(notes))


def get_backend_advice(prepared: PreparedRun) -> list[str]:
    """The backend's, which a dry run on a machine without Slurm does without."""
    try:
        return prepared.backend.advice(prepared.spec.job.partition)
    except CommandFailed:
        return []


def render_dry_run_script(prepared: PreparedRun) -> str:
    run = RunDir(run_dir.runs_folder() / f"{run_dir.slugify(prepared.spec.job.name)}-xxxxxx")
    paths: list[Path] = []
    if prepared.code is not None:
        root, package = python_path.locate_in_snapshot(prepared.code)
        paths = python_path.build_python_path(run.code, root, None if prepared.spec.script is not None else package)
    return job_script.render_job_script(script_input(prepared, run, prepared.spec, paths))


def check_prepared(prepared: PreparedRun) -> list[str]:
    """What else can be refused before anything is made; returns warnings."""
    check_fits(prepared.plan)
    _check_gpu(prepared)
    shared = prepared.backend.name == "slurm"
    _check_home_path(slurm=shared)
    notes = [filesystem.check_folder(settings.home(), settings.HOME, shared=shared)]
    job = prepared.spec.job
    if job.checkpoint_dir:
        notes.append(filesystem.check_folder(Path(job.checkpoint_dir), "checkpoint_dir", shared=shared))
    notes += [_check_checkpoint_paths(prepared), _check_python(prepared)]
    if prepared.backend.name == "slurm":
        job_script.build_directives(script_input(prepared))
    notes += [
        data.check_data(prepared),
        data.check_epoch_size(prepared),
        _local_backend_note(prepared),
        check_script_layout(prepared),
    ]
    alerts = prepared.spec.recipe.telemetry.alerts
    public_env = {name: value for name, value in prepared.spec.env.items() if name not in prepared.spec.secret_env}
    secret_names = prepared.spec.secret_env
    notes += alerting.check_alerts(alerts, share=job.share, environ={*os.environ, *secret_names}, public_env=public_env)
    if prepared.spec.script is None:
        packages.check_packages(prepared.spec.recipe, prepared.python)
        notes += entry_points.check_entries(prepared)
    environ = {**os.environ, **prepared.spec.env}
    notes += trackers.check_trackers(prepared.spec.recipe.tracking, prepared.python, environ)
    return [note for note in notes if note]


def _check_gpu(prepared: PreparedRun) -> None:
    """Every rank would fail, some minutes later."""
    if prepared.backend.name != "local" or prepared.plan.device != "cuda" or has_gpu():
        return
    gpu_type = prepared.spec.job.gpu_type
    gpu_note = f" (job.gpu_type = {gpu_type!r} asks for one)" if gpu_type else ""
    raise UnsuitableEnvironment(
        f"device is cuda{gpu_note}, but this machine has no GPU",
        fix="use --device cpu, or submit on a login node of the cluster that has them",
    )


def _check_python(prepared: PreparedRun) -> str | None:
    """That of the cluster profile, as far as it can be seen from here."""
    python = Path(prepared.profile.python)
    if not prepared.profile.python or (python.is_file() and os.access(python, os.X_OK)):
        return None
    problem = "cannot be executed" if os.path.lexists(python) else "is not there"
    filesystem_type = filesystem.find_shared_filesystem_type(python)
    if prepared.backend.name == "local" or filesystem_type:
        location_note = f", and {filesystem_type} is the same on all nodes" if filesystem_type else ""
        raise ConfigError(
            f"python = {str(python)!r} of the cluster profile {problem}{location_note}",
            fix="change python in the profile, or leave it out for the Python that runs submit",
        )
    return (
        f"python = {str(python)!r} of the cluster profile {problem} on this machine: the job fails on nodes without it"
    )


def _check_checkpoint_paths(prepared: PreparedRun) -> str | None:
    """Of where checkpoints are copied to, and of the nodes' own folder for them, as much as can be told from here.
    Nothing is asked of an object store."""
    checkpoint = prepared.spec.recipe.checkpoint
    if checkpoint.remote:
        storage_paths.find_filesystem_class(checkpoint.remote)
    if not checkpoint.local or prepared.backend.name != "local":
        return None
    try:
        folder = storage_paths.resolve_node_folder(checkpoint.local, {**os.environ, **prepared.spec.env})
    except UnsuitableEnvironment as e:
        return f"checkpoint.local: {e.message}; it is used where it can be"
    return filesystem.check_folder(folder, "checkpoint.local", shared=False)


def _local_backend_note(prepared: PreparedRun) -> str | None:
    """Where a run without Slurm goes: who meant a cluster learns it before the ranks start."""
    if prepared.backend.name != "local":
        return None
    plan, cores = prepared.plan, len(os.sched_getaffinity(0))
    device = "CPU" if plan.device == "cpu" else "GPU"
    nodes = f"{plan.nodes} nodes, " if plan.nodes > 1 else ""
    core_note = f" with {pluralize(cores, 'core')}" if plan.world_size > cores else ""
    return f"local backend: {device}, {nodes}{pluralize(plan.world_size, 'rank')} on this machine{core_note}"


def _check_home_path(*, slurm: bool) -> None:
    """Slurm expands %j and the like, and takes backslashes out, in the path of the job's log, even where they come from
    the working directory (seen on 22.05: the job fails at once and says nothing); ':' separates PYTHONPATH."""
    invalid = [c for c in (":%\\" if slurm else ":") if c in str(settings.home())]
    if invalid:
        raise ConfigError(
            f"{settings.HOME} = {settings.home()}: the path contains {' and '.join(invalid)}, which cannot be used",
            fix=f"set {settings.HOME} to another folder",
        )


def snapshot_code(request: SubmitRequest, prepared: PreparedRun, target: Path) -> CodeSnapshot | None:
    if prepared.code is None:
        if request.snapshot_include:
            raise ConfigError("--snapshot-include: this recipe names no code of your own, so no files are copied")
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
    return provenance.collect(
        request.argv, request.cwd, code_snapshot.find_repository_root(snapshot.root) if snapshot else None
    )


def snapshot_notes(snapshot: CodeSnapshot | None) -> list[str]:
    """What of the code was not copied, or from somewhere else."""
    if snapshot is None:
        return []
    notes = [f"not copied, the job will use the original: {link}" for link in snapshot.external_links]
    if snapshot.script_source:
        notes.append(f"{snapshot.script} is a link out of {snapshot.root}; copied is {snapshot.script_source}")
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
    # Names come from the repository, and a terminal acts on control characters.
    return [note if note.isprintable() else ascii(note) for note in notes]


def write(prepared: PreparedRun, run: RunDir, snapshot: CodeSnapshot | None, record: dict[str, Any]) -> None:
    """All files of a run but its code, which is there already."""
    spec = prepared.spec
    paths: list[Path] = []
    if snapshot is not None:
        if spec.script is not None:
            spec = msgspec.structs.replace(spec, script=msgspec.structs.replace(spec.script, path=snapshot.script))
        paths = python_path.build_python_path(run.code, run.code, snapshot.script if spec.script is None else None)
    mode = 0o640 if spec.job.share else 0o600
    script = job_script.render_job_script(script_input(prepared, run, spec, paths))
    if secrets := job_script.format_secrets(spec):
        fsio.write_text(run.secrets, secrets, mode=0o600)
    fsio.write_text(run.spec, format_spec(spec), mode=mode)
    plan = msgspec.json.format(msgspec.json.encode(prepared.plan), indent=1).decode()
    fsio.write_text(run.plan, plan + "\n", mode=mode)
    fsio.write_text(run.job_script, script, mode=mode | 0o100)
    fsio.write_text(run.agent_end_script, templates.read_template("agent_end.sh"), mode=mode | 0o100)
    record = {**record, "contract": contract_status.build_record(spec.recipe), "recipe_hash": hash_run_spec(spec)}
    fsio.write_json(run.record, record)
    _create_checkpoint_dir(run, spec)


def script_input(
    prepared: PreparedRun, run: RunDir | None = None, spec: RunSpec | None = None, code_paths: Sequence[Path] = ()
) -> job_script.ScriptInput:
    """Without ``run`` for what does not depend on it: the directives but for the job's name."""
    return job_script.ScriptInput(
        run=run or RunDir(run_dir.runs_folder() / "unnamed"),
        spec=spec or prepared.spec,
        profile=prepared.profile,
        plan=prepared.plan,
        python=prepared.python,
        home=settings.home(),
        code_paths=code_paths,
    )


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
        raise ConfigError(f"no folder for checkpoints: {e}", fix="choose another --checkpoint-dir") from e


def _checkpoint_path(run: RunDir, spec: RunSpec) -> Path | None:
    return Path(spec.job.checkpoint_dir) / run.id if spec.job.checkpoint_dir else None


def remove_run(run: RunDir, spec: RunSpec) -> None:
    target = _checkpoint_path(run, spec)
    if target is not None:
        shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(run.path, ignore_errors=True)


def format_spec(spec: RunSpec) -> str:
    """What spec.toml says, which has no secrets."""
    return tomli_w.dumps(_drop_none(msgspec.to_builtins(job_script.redact_secrets(spec))))


def _drop_none(value: Any) -> Any:
    """TOML has no null: a key that is absent means it."""
    if isinstance(value, dict):
        return {k: _drop_none(v) for k, v in value.items() if v is not None}
    return value
