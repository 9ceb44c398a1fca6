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
from clustertrain.config import storage_paths
from clustertrain.config.job import RunSpec
from clustertrain.errors import ClusterTrainError, CommandFailed, ConfigError, EnvironmentNotFit
from clustertrain.plan.layout import counted
from clustertrain.plan.planner import Plan, require_fit
from clustertrain.run import contract_status, run_dir
from clustertrain.run.events import EventLog
from clustertrain.run.recipe_hash import hash_of
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.backend import PENDING, Submission
from clustertrain.submit import code_snapshot, job_script, provenance, python_path, templates
from clustertrain.submit.code_snapshot import Snapshot
from clustertrain.submit.preflight import alerts as alerting
from clustertrain.submit.preflight import data, entry_points, filesystem, packages, trackers
from clustertrain.submit.request import Prepared, SubmitRequest, has_gpu, prepare, script_note

SHOWN = 5  # secrets that a note names


@dataclass(frozen=True)
class Submitted:
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


def submit(request: SubmitRequest) -> Submitted:
    """Check, plan, write the run directory and hand it to the backend.

    Raises:
        UsageError, ConfigError: before anything is made.
        SchedulerRefused: with Slurm's words; the run directory is gone again.
    """
    prepared = prepare(request)
    notes = [*prepared.plan.warnings, *check(prepared), *advice(prepared)]
    run = run_dir.create(prepared.spec.job.name, share=prepared.spec.job.share)
    try:
        with fsio.as_open_as(run.path):
            taken = take_code(request, prepared, run.code)
            write(prepared, run, taken, collect(request, taken))
    except BaseException:
        remove(run, prepared.spec)
        raise
    try:
        with fsio.as_open_as(run.path):  # Slurm gives its job.log the umask of the submission
            job_id = prepared.backend.submit(Submission(run, environ=request.environ))
    except ClusterTrainError:
        # Not for other exceptions: a Ctrl-C may come after sbatch has taken the job, which then needs its folder.
        remove(run, prepared.spec)
        raise
    notes += outside_notes(taken)
    return announce(run, job_id, prepared.backend.name, notes)


def announce(run: RunDir, job_id: str, backend: str, notes: Sequence[str] = ()) -> Submitted:
    """Write down that the backend has taken the run."""
    with fsio.as_open_as(run.path):
        log = EventLog(run.events / "submit.jsonl")
    log.write("submitted", job_id=job_id, backend=backend)
    log.close()
    return Submitted(run, job_id, backend, PENDING.lower(), tuple(notes))


def dry_run(request: SubmitRequest) -> DryRun:
    """The plan, and job.sh as it would be submitted but for the end of the run's name. Makes nothing."""
    prepared = prepare(request, purpose="dry-run")
    notes = [*check(prepared), *advice(prepared)]
    return DryRun(prepared.plan, script_without_a_run(prepared), tuple(notes))


def advice(prepared: Prepared) -> list[str]:
    """The backend's, which a dry run on a machine without Slurm does without."""
    try:
        return prepared.backend.advice(prepared.spec.job.partition)
    except CommandFailed:
        return []


def script_without_a_run(prepared: Prepared) -> str:
    run = RunDir(run_dir.runs_folder() / f"{run_dir.slug(prepared.spec.job.name)}-xxxxxx")
    paths: list[Path] = []
    if prepared.code is not None:
        root, package = python_path.place(prepared.code)
        paths = python_path.python_path(run.code, root, None if prepared.spec.script is not None else package)
    return job_script.job_script(script_input(prepared, run, prepared.spec, paths))


def check(prepared: Prepared) -> list[str]:
    """What else can be refused before anything is made; returns warnings."""
    require_fit(prepared.plan)
    _refuse_missing_gpu(prepared)
    shared = prepared.backend.name == "slurm"
    _refuse_home_characters(slurm=shared)
    found = [filesystem.check(settings.home(), settings.HOME, shared=shared)]
    job = prepared.spec.job
    if job.checkpoint_dir:
        found.append(filesystem.check(Path(job.checkpoint_dir), "checkpoint_dir", shared=shared))
    found += [_check_places(prepared), _check_python(prepared)]
    if prepared.backend.name == "slurm":
        job_script.directives(script_input(prepared))
    found += [data.check(prepared), data.epoch(prepared), _place(prepared), script_note(prepared)]
    alerts = prepared.spec.recipe.telemetry.alerts
    given = {name: value for name, value in prepared.spec.env.items() if name not in prepared.spec.secret_env}
    secret = prepared.spec.secret_env
    found += alerting.notes(alerts, share=job.share, environ={*os.environ, *secret}, given=given)
    if prepared.spec.script is None:
        packages.check(prepared.spec.recipe, prepared.python)
        found += entry_points.check(prepared)
    environ = {**os.environ, **prepared.spec.env}
    found += trackers.check(prepared.spec.recipe.tracking, prepared.python, environ)
    return [note for note in found if note]


def _refuse_missing_gpu(prepared: Prepared) -> None:
    """Every rank would fail, some minutes later."""
    if prepared.backend.name != "local" or prepared.plan.device != "cuda" or has_gpu():
        return
    asked = prepared.spec.job.gpu_type
    named = f" (job.gpu_type = {asked!r} asks for one)" if asked else ""
    raise EnvironmentNotFit(
        f"device is cuda{named}, but this machine has no GPU",
        fix="use --device cpu, or submit on a login node of the cluster that has them",
    )


def _check_python(prepared: Prepared) -> str | None:
    """That of the cluster profile, as far as it can be seen from here."""
    python = Path(prepared.profile.python)
    if not prepared.profile.python or (python.is_file() and os.access(python, os.X_OK)):
        return None
    what = "cannot be executed" if os.path.lexists(python) else "is not there"
    kind = filesystem.seen_by_nodes(python)
    if prepared.backend.name == "local" or kind:
        where = f", and {kind} is the same on all nodes" if kind else ""
        raise ConfigError(
            f"python = {str(python)!r} of the cluster profile {what}{where}",
            fix="change python in the profile, or leave it out for the Python that runs submit",
        )
    return f"python = {str(python)!r} of the cluster profile {what} on this machine: the job fails on nodes without it"


def _check_places(prepared: Prepared) -> str | None:
    """Of where checkpoints are copied to, and of the nodes' own folder for them, as much as can be told from here.
    Nothing is asked of an object store."""
    asked = prepared.spec.recipe.checkpoint
    if asked.remote:
        storage_paths.storage_class(asked.remote)
    if not asked.local or prepared.backend.name != "local":
        return None
    try:
        here = storage_paths.node_folder(asked.local, {**os.environ, **prepared.spec.env})
    except EnvironmentNotFit as e:
        return f"checkpoint.local: {e.message}; it is used where it can be"
    return filesystem.check(here, "checkpoint.local", shared=False)


def _place(prepared: Prepared) -> str | None:
    """Where a run without Slurm goes: who meant a cluster learns it before the ranks start."""
    if prepared.backend.name != "local":
        return None
    chosen, cores = prepared.plan, len(os.sched_getaffinity(0))
    device = "CPU" if chosen.device == "cpu" else "GPU"
    nodes = f"{chosen.nodes} nodes, " if chosen.nodes > 1 else ""
    crowded = f" with {counted(cores, 'core')}" if chosen.world_size > cores else ""
    return f"local backend: {device}, {nodes}{counted(chosen.world_size, 'rank')} on this machine{crowded}"


def _refuse_home_characters(*, slurm: bool) -> None:
    """Slurm expands %j and the like, and takes backslashes out, in the path of the job's log, even where they come from
    the working directory (seen on 22.05: the job fails at once and says nothing); ':' separates PYTHONPATH."""
    bad = [c for c in (":%\\" if slurm else ":") if c in str(settings.home())]
    if bad:
        raise ConfigError(
            f"{settings.HOME} = {settings.home()}: the path contains {' and '.join(bad)}, which cannot be used",
            fix=f"set {settings.HOME} to another folder",
        )


def take_code(request: SubmitRequest, prepared: Prepared, target: Path) -> Snapshot | None:
    if prepared.code is None:
        if request.snapshot_include:
            raise ConfigError("--snapshot-include: this recipe names no code of your own, so no files are copied")
        return None
    taken = code_snapshot.take(
        prepared.code,
        target,
        limit_mib=request.snapshot_limit_mib,
        without=settings.home(),
        include=request.snapshot_include,
    )
    code_snapshot.open_to(target, 0o050 if prepared.spec.job.share else 0o000)
    return taken


def collect(request: SubmitRequest, taken: Snapshot | None) -> dict[str, Any]:
    return provenance.collect(request.argv, request.cwd, code_snapshot.toplevel(taken.root) if taken else None)


def outside_notes(taken: Snapshot | None) -> list[str]:
    """What of the code was not copied, or from somewhere else."""
    if taken is None:
        return []
    notes = [f"not copied, the job will use the original: {link}" for link in taken.outside]
    if taken.followed:
        notes.append(f"{taken.script} is a link out of {taken.root}; copied is {taken.followed}")
    if taken.secrets:
        looks = "looks like a secret" if len(taken.secrets) == 1 else "look like secrets"
        more = f" and {len(taken.secrets) - SHOWN} more" if len(taken.secrets) > SHOWN else ""
        notes.append(
            f"not copied: {', '.join(taken.secrets[:SHOWN])}{more} ({looks}); copy with --snapshot-include "
            f"{shlex.quote(taken.secrets[0])}"
        )
    # Names come from the repository, and a terminal acts on control characters.
    return [note if note.isprintable() else ascii(note) for note in notes]


def write(prepared: Prepared, run: RunDir, taken: Snapshot | None, made_from: dict[str, Any]) -> None:
    """All files of a run but its code, which is there already."""
    spec = prepared.spec
    paths: list[Path] = []
    if taken is not None:
        if spec.script is not None:
            spec = msgspec.structs.replace(spec, script=msgspec.structs.replace(spec.script, path=taken.script))
        paths = python_path.python_path(run.code, run.code, taken.script if spec.script is None else None)
    mode = 0o640 if spec.job.share else 0o600
    script = job_script.job_script(script_input(prepared, run, spec, paths))
    if secrets := job_script.secrets(spec):
        fsio.write_text(run.secrets, secrets, mode=0o600)
    fsio.write_text(run.spec, spec_text(spec), mode=mode)
    plan = msgspec.json.format(msgspec.json.encode(prepared.plan), indent=1).decode()
    fsio.write_text(run.plan, plan + "\n", mode=mode)
    fsio.write_text(run.script, script, mode=mode | 0o100)
    fsio.write_text(run.agent_end, templates.text("agent_end.sh"), mode=mode | 0o100)
    made_from = {**made_from, "contract": contract_status.recorded(spec.recipe), "recipe_hash": hash_of(spec)}
    fsio.write_json(run.record, made_from)
    _make_checkpoints(run, spec)


def script_input(
    prepared: Prepared, run: RunDir | None = None, spec: RunSpec | None = None, paths: Sequence[Path] = ()
) -> job_script.ScriptInput:
    """Without ``run`` for what does not depend on it: the directives but for the job's name."""
    return job_script.ScriptInput(
        run=run or RunDir(run_dir.runs_folder() / "unnamed"),
        spec=spec or prepared.spec,
        profile=prepared.profile,
        plan=prepared.plan,
        python=prepared.python,
        home=settings.home(),
        code_paths=paths,
    )


def _make_checkpoints(run: RunDir, spec: RunSpec) -> None:
    mode = 0o750 if spec.job.share else 0o700
    target = _checkpoint_target(run, spec)
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


def _checkpoint_target(run: RunDir, spec: RunSpec) -> Path | None:
    return Path(spec.job.checkpoint_dir) / run.id if spec.job.checkpoint_dir else None


def remove(run: RunDir, spec: RunSpec) -> None:
    target = _checkpoint_target(run, spec)
    if target is not None:
        shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(run.path, ignore_errors=True)


def spec_text(spec: RunSpec) -> str:
    """What spec.toml says, which has no secrets."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(job_script.without_secrets(spec))))


def _without_none(value: Any) -> Any:
    """TOML has no null: a key that is absent means it."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return value
