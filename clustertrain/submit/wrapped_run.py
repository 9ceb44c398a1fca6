"""The run of ``clustertrain wrap``: found by its job after a requeue, otherwise created.

``$CLUSTERTRAIN_HOME/wrapped/<cluster>-<job>/<k>.json`` names the k-th run that the job has created. Its writer is the
first task of the step that uses the run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from clustertrain import clock, fsio, reading, settings
from clustertrain.errors import ClusterTrainError, ConfigError, NotFound, UsageError
from clustertrain.plan.layout import pluralize
from clustertrain.run import attempts, endings, json_files, run_dir
from clustertrain.run.attempts import Attempt
from clustertrain.run.run_dir import RunDir, open_run
from clustertrain.scheduler.slurm import SlurmBackend
from clustertrain.scheduler.slurm_parse import JobFacts
from clustertrain.scheduler.slurm_step import StepTask
from clustertrain.submit import checks, transaction
from clustertrain.submit.launchers.replace import replace_launcher
from clustertrain.submit.prepare import prepare
from clustertrain.submit.request import SubmitRequest
from clustertrain.submit.resolve import count_gpus

# Slurm may use the ids of an erased job database again: an entry from before the first start belongs to another job.
CLOCK_SKEW_S = 300.0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a job."""

    number: int = 0
    run: str = ""
    """Id of the run."""
    command: str = ""
    """Hash of the command and its folder."""
    restart: int = 0
    """Requeues of the job before the newest start that has used the run."""
    t: float = 0.0


@dataclass(frozen=True)
class WrappedRun:
    """The run of a step."""

    run: RunDir
    notes: tuple[str, ...] = ()
    is_complete: bool = False


def make_job_folder(task: StepTask) -> Path:
    """Return the folder with the entries of a job, which the first process that needs it creates."""
    folder = run_dir.wrapped_folder() / re.sub(r"[^\w.-]", "_", f"{task.cluster}-{task.job_id}")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as e:
        raise ConfigError(
            f"{settings.home()} is not writable: {e.strerror or e}",
            fix=f"set {settings.HOME} to a folder that you can write, on a file system that all nodes see",
        ) from e
    return folder


def open_wrapped_run(request: SubmitRequest, task: StepTask, backend: SlurmBackend) -> WrappedRun:
    """Return the run of this step: that of an earlier start of the job, or a new one.

    Raises:
        UsageError, ConfigError: the command is refused; nothing was created.
    """
    # The script itself starts containers, and prepares the environment.
    request = replace(request, wrapped=True, job={**request.job, "container": "", "environment": "shared"})
    translation = replace_launcher(request)
    translated = translation.request
    _check_sizes(request, translated, task)
    identity = _hash_command(translated)
    entries = _load_entries(task, _find_start_time(task, backend))
    found, note = choose_entry(entries, identity, task, _load_last_attempt)
    if found is not None:
        run = open_run(run_dir.runs_folder() / found.run)
        last = _load_last_attempt(found)
        _store(task, msgspec.structs.replace(found, restart=task.restart))
        is_complete = last is not None and last.ending == endings.COMPLETED
        return WrappedRun(run, (note,) if note else (), is_complete)
    run, notes = _create(translated, task, backend)
    entry = Entry(run=run.id, command=identity, restart=task.restart, t=clock.now())
    _append(task, entry)
    return WrappedRun(run, (*translation.notes, *notes))


def choose_entry(
    entries: Sequence[Entry], command: str, task: StepTask, load_last_attempt: Callable[[Entry], Attempt | None]
) -> tuple[Entry | None, str]:
    """Return the entry of the run that a step continues, and a note; None if the step starts a new run.

    A script executes the same steps in the same order after each requeue, so the k-th step with a command continues the
    k-th run of that command. A step whose command differs in each start continues the only run that is left over.
    """
    own = [entry for entry in entries if entry.command == command]
    if unused := [entry for entry in own if entry.restart < task.restart]:
        return unused[0], ""
    for entry in reversed(own):  # a script may try a failed step again
        attempt = load_last_attempt(entry)
        if attempt is not None and attempt.ending not in (None, endings.COMPLETED):
            return entry, ""
    left_over = []
    for entry in (entry for entry in entries if entry.restart < task.restart and entry not in own):
        attempt = load_last_attempt(entry)
        if attempt is not None and attempt.ending != endings.COMPLETED:
            left_over.append(entry)
    if own or len(left_over) != 1:
        return None, ""
    return left_over[0], "the command differs from the one of the job's first start, which counts"


def _load_last_attempt(entry: Entry) -> Attempt | None:
    history = attempts.load_attempts(RunDir(run_dir.runs_folder() / entry.run))
    return history[-1] if history else None


def _hash_command(request: SubmitRequest) -> str:
    text = json.dumps([list(request.command), str(request.cwd)])
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def _find_start_time(task: StepTask, backend: SlurmBackend) -> float | None:
    """Return the time of the job's first start, if this is the first start and Slurm answers."""
    if task.restart:
        return None
    try:
        view = backend.query_jobs([task.job_id]).get(task.job_id)
    except ClusterTrainError:
        return None
    return view.start_time if view is not None else None


def _load_entries(task: StepTask, start_time: float | None) -> list[Entry]:
    paths = [path for path in make_job_folder(task).iterdir() if reading.is_unsigned_int(path.stem)]
    entries = []
    for path in sorted(paths, key=lambda p: int(p.stem)):
        entry = json_files.convert_leniently(fsio.read_json(path), Entry)
        if entry is None or not entry.run or entry.t < (start_time or 0.0) - CLOCK_SKEW_S:
            continue
        try:
            open_run(run_dir.runs_folder() / entry.run)
        except NotFound:  # its owner has removed the run
            continue
        entries.append(msgspec.structs.replace(entry, number=int(path.stem)))
    return entries


def _store(task: StepTask, entry: Entry) -> None:
    fsio.write_json(make_job_folder(task) / f"{entry.number}.json", msgspec.to_builtins(entry))


def _append(task: StepTask, entry: Entry) -> None:
    folder = make_job_folder(task)
    number = 1
    while not fsio.create_json(folder / f"{number}.json", msgspec.to_builtins(entry)):
        number += 1


def _check_sizes(request: SubmitRequest, translated: SubmitRequest, task: StepTask) -> None:
    """Refuse a launcher whose sizes contradict those of the step."""
    nodes = translated.job.get("nodes")
    if nodes is not None and nodes != len(task.nodes):
        raise UsageError(
            f"the launcher was given {pluralize(nodes, 'node')}, and the step has {len(task.nodes)}",
            fix="remove the number from the launcher, or change that of srun or of the job",
        )
    ranks = translated.job.get("gpus")
    if task.tasks_per_node > 1 and ranks is not None and ranks != task.tasks_per_node:
        source = "--gpus" if "gpus" in request.job else "the launcher"
        raise UsageError(
            f"{source} asks for {ranks} ranks per node, and srun starts {task.tasks_per_node} tasks per node",
            fix="start one task per node: srun --ntasks-per-node=1 clustertrain wrap -- COMMAND",
        )


def complete_request(request: SubmitRequest, task: StepTask, facts: JobFacts) -> SubmitRequest:
    """Return ``request`` with the sizes and limits of the allocation."""
    gpus = count_gpus() if task.num_gpus is None else task.num_gpus
    ranks = request.job.get("gpus") or (task.tasks_per_node if task.tasks_per_node > 1 else max(1, gpus))
    environ = request.environ
    limits = {
        "partition": environ.get("SLURM_JOB_PARTITION", ""),
        "account": environ.get("SLURM_JOB_ACCOUNT", ""),
        "qos": environ.get("SLURM_JOB_QOS", ""),
        "time": facts.time_limit,
    }
    sizes: dict[str, Any] = {"nodes": len(task.nodes), "gpus": ranks, "device": "cuda" if gpus else "cpu"}
    cores = environ.get(settings.SLURM_CPUS_ON_NODE, "")
    if task.tasks_per_node > 1 and reading.is_unsigned_int(cores):
        # As many threads as a task of srun has; with one task per node, those that torchrun chooses.
        sizes["cpus_per_gpu"] = max(1, int(cores) // ranks)
    given = {name: value for name, value in limits.items() if value}
    return replace(request, wrapped=True, job={**request.job, **sizes, **given, "backend": "slurm"})


def _create(request: SubmitRequest, task: StepTask, backend: SlurmBackend) -> tuple[RunDir, list[str]]:
    facts = backend.read_job_facts(task.job_id)
    request = complete_request(request, task, facts)
    prepared = prepare(request, existing_backend=backend)
    notes = [*prepared.plan.warnings, *checks.check_plan(prepared), *transaction.get_backend_advice(prepared)]
    run, snapshot = transaction.create(request, prepared)
    transaction.record_submission(run, task.job_id, backend.name)
    output = Path(facts.output)
    if facts.output and output.is_file():
        run.job_log.symlink_to(output)
    return run, [*notes, *transaction.snapshot_notes(snapshot)]
