"""``sweep --grid``: one ordinary run per combination of values, submitted as one job array: all of them or none."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from clustertrain import fsio
from clustertrain.config.checks import unused_keys
from clustertrain.config.parsing.documents import ENV_PREFIX, parse_assignment, parse_value
from clustertrain.errors import ClusterTrainError, ConfigError, UsageError
from clustertrain.run import run_dir
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.backend import ArraySubmission
from clustertrain.scheduler.registry import Purpose
from clustertrain.submit import checks, job_script, transaction
from clustertrain.submit.prepare import prepare
from clustertrain.submit.prepared_run import PreparedRun
from clustertrain.submit.recipe import is_integer_key
from clustertrain.submit.request import SubmitRequest
from clustertrain.submit.shipping.ship import EnvironmentPacker, OnProgress
from clustertrain.submit.transaction import DryRun, SubmittedRun

OPTION, LOG_PREFIX = "--grid", "log:"
MAX_RUNS = 1000  # Slurm's MaxArraySize is 1001 by default, and task numbers are below it


@dataclass(frozen=True)
class SweepTask:
    """A prepared run and its grid values."""

    prepared: PreparedRun
    values: Mapping[str, Any]


@dataclass(frozen=True)
class SubmittedSweep:
    """A sweep that the backend has accepted."""

    folder: Path
    job_id: str | None
    """Id of the array; None on a backend without arrays."""
    backend: str
    runs: tuple[tuple[SubmittedRun, Mapping[str, Any]], ...]
    """Runs and their grid values, in task order."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class SweepDryRun:
    """A sweep that was rendered but not submitted."""

    script: str | None
    """Job script of the array; None on a backend without arrays."""
    runs: tuple[tuple[DryRun, Mapping[str, Any]], ...]
    notes: tuple[str, ...]


def format_values(values: Mapping[str, Any]) -> str:
    """Return ``values`` as ``optim.lr=0.0001 seed=1``."""
    return " ".join(f"{key}={v if isinstance(v, str) else json.dumps(v, default=str)}" for key, v in values.items())


def expand_grid(grid_args: Sequence[str], assignments: Iterable[str]) -> list[dict[str, Any]]:
    """Return the values of every run, from the arguments of ``--grid``; the last key changes fastest.

    Raises:
        UsageError: a key has no value or an empty one, a value or key is repeated (also in ``--set``), or there are too
            many runs.
    """
    assigned_keys = {parse_assignment(text)[0] for text in assignments}
    axes: dict[str, list[Any]] = {}
    for grid_arg in grid_args:
        key, text = parse_assignment(grid_arg, OPTION)
        if key in assigned_keys or key in axes:
            raise UsageError(f"{OPTION} {grid_arg}: {key} is given twice", fix=f"give all its values in one {OPTION}")
        if key == "telemetry.alerts.webhook":
            raise UsageError(
                f"{OPTION} {key}: a webhook is a secret, and the values of a sweep are recorded", fix="use --set"
            )
        axes[key] = _parse_values(f"{OPTION} {grid_arg}", key, text.strip())
    sizes = [len(values) for values in axes.values()]
    if math.prod(sizes) > MAX_RUNS:
        raise UsageError(
            f"{OPTION}: {' x '.join(map(str, sizes))} = {math.prod(sizes)} runs, more than the {MAX_RUNS} tasks that "
            "an array may have",
            fix="split the values into several sweeps",
        )
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _parse_values(label: str, key: str, text: str) -> list[Any]:
    values: Any
    if text.startswith("["):
        values = parse_value(text)
        if not isinstance(values, list):
            raise UsageError(f"{label}: not a list in TOML", fix='write it as key=["a,b", "c"]')
    elif text.startswith(LOG_PREFIX):
        values = _parse_log_range(label, text)
        if is_integer_key(key):
            values = list(dict.fromkeys(map(round, values)))
    else:
        items = [item.strip() for item in text.split(",")]
        if "" in items:
            raise UsageError(f"{label}: an empty value", fix='write it as key=value,value or key=["", "value"]')
        values = [parse_value(item, key) for item in items]
    if not values:
        raise UsageError(f"{label}: no value", fix="write it as key=[value, value]")
    if key.startswith(ENV_PREFIX):
        values = [str(value) for value in values]
    for n, value in enumerate(values):
        if value in values[:n]:
            raise UsageError(f"{label}: {value!r} is given twice", fix="remove one of them")
    return list(values)


def _parse_log_range(label: str, text: str) -> list[float]:
    """Return the values of ``log:1e-5:1e-2:7``: seven in geometric progression, to four digits; the ends are exact."""
    match = re.fullmatch(rf"{LOG_PREFIX}([^:]+):([^:]+):(\d+)", text)
    try:
        first, last, count = (float(match[1]), float(match[2]), int(match[3])) if match else (0.0, 0.0, 0)
    except ValueError:
        first, last, count = 0.0, 0.0, 0
    if not (0 < first < math.inf and 0 < last < math.inf and 2 <= count <= MAX_RUNS):
        raise UsageError(
            f"{label}: not of the form log:FIRST:LAST:COUNT with two numbers above 0 and a count from 2 to {MAX_RUNS}",
            fix="write it as key=log:1e-5:1e-2:7",
        )
    interior = (first * (last / first) ** (i / (count - 1)) for i in range(1, count - 1))
    return [first, *(float(f"{value:.4g}") for value in interior), last]


def submit_sweep(
    request: SubmitRequest,
    grid_args: Sequence[str],
    max_concurrent: int | None,
    on_progress: OnProgress | None = None,
) -> SubmittedSweep:
    """Check and plan every run, write them all and hand them to the backend.

    Args:
        on_progress: called with the bytes done and the total while the environment is packed.

    Raises:
        UsageError, ConfigError: a run is refused; nothing was created.
        SchedulerError: Slurm refused the array (with its message); all folders were removed.
    """
    tasks, notes = _prepare_tasks(request, grid_args)
    first = tasks[0].prepared
    job = first.spec.job
    packer = EnvironmentPacker(on_progress)
    packer.pack(first)  # the slowest step, so it comes before anything is created
    sweep = run_dir.create_sweep(job.name, share=job.share)
    created: list[tuple[RunDir, SweepTask]] = []
    try:
        # One snapshot that every run links to.
        with fsio.group_umask(sweep):
            snapshot = transaction.snapshot_code(request, first, sweep / "code")
        record = transaction.collect_record(request, snapshot)
        for n, task in enumerate(tasks):
            run = run_dir.create_run(task.prepared.spec.job.name, share=job.share)
            created.append((run, task))
            if snapshot is not None:
                run.code.symlink_to(Path("../../sweeps", sweep.name, "code"))
            with fsio.group_umask(run.path):
                values = {"sweep": {"id": sweep.name, "values": task.values}}
                transaction.write(task.prepared, run, snapshot, {**record, **values}, packer.pack(task.prepared))
            (sweep / str(n)).symlink_to(Path("../../runs", run.id))
        script = _render_array_script(tasks, sweep.name, max_concurrent)
        if script is not None:
            with fsio.group_umask(sweep):
                fsio.write_text(sweep / "job.sh", script, mode=0o740 if job.share else 0o700)
    except BaseException:
        _remove_sweep(sweep, created)
        raise
    array = ArraySubmission(sweep, [run for run, _ in created], max_concurrent, request.environ)
    try:
        with fsio.group_umask(sweep):
            job_ids = first.backend.submit_array(array)
    except ClusterTrainError:
        _remove_sweep(sweep, created)  # not after Ctrl-C: see transaction.submit
        raise
    name = first.backend.name
    runs = [
        (transaction.record_submission(run, job_id, name), task.values)
        for (run, task), job_id in zip(created, job_ids, strict=True)
    ]
    notes += [*packer.notes, *transaction.snapshot_notes(snapshot)]
    return SubmittedSweep(sweep, job_ids[0].rpartition("_")[0] or None, name, tuple(runs), tuple(notes))


def dry_run_sweep(request: SubmitRequest, grid_args: Sequence[str], max_concurrent: int | None) -> SweepDryRun:
    """Return the scripts as they would be submitted, except for the random ends of the ids. Create nothing."""
    tasks, notes = _prepare_tasks(request, grid_args, "dry-run")
    name = f"{run_dir.slugify(tasks[0].prepared.spec.job.name)}-xxxxxx"
    runs = [(DryRun(t.prepared.plan, job_script.render_dry_run_script(t.prepared), ()), t.values) for t in tasks]
    return SweepDryRun(_render_array_script(tasks, name, max_concurrent), tuple(runs), tuple(notes))


def _prepare_tasks(
    request: SubmitRequest, grid_args: Sequence[str], purpose: Purpose = "submit"
) -> tuple[list[SweepTask], list[str]]:
    """Return all runs, checked one by one and against each other, and notes for the user."""
    tasks: list[SweepTask] = []
    notes: list[str] = []
    for values in expand_grid(grid_args, request.assignments):
        try:
            prepared = prepare(
                replace(request, sweep_values=values), tasks[0].prepared.backend if tasks else None, purpose
            )
            notes += [*prepared.plan.warnings, *checks.check_plan(prepared)]
        except ClusterTrainError as e:
            if _fails_without_grid(request, e, purpose):
                raise
            raise type(e)(f"with {format_values(values)}: {e.message}", fix=e.fix) from e
        tasks.append(SweepTask(prepared, values))
    first = tasks[0].prepared
    _check_unused(tasks)
    _check_duplicates(tasks)
    _check_resources(tasks)
    _check_checkpoints(tasks)
    return tasks, [*dict.fromkeys(notes), *transaction.get_backend_advice(first)]


def _fails_without_grid(request: SubmitRequest, error: ClusterTrainError, purpose: Purpose) -> bool:
    """Return whether the request fails in the same way without the grid, so that its values are not the cause."""
    try:
        checks.check_plan(prepare(request, purpose=purpose))
    except ClusterTrainError as e:
        return e.message == error.message
    return False


def _check_unused(tasks: Sequence[SweepTask]) -> None:
    """Raise ConfigError for values of ``--set`` and ``--grid`` that no run uses."""
    first = tasks[0].prepared.spec
    override_keys = {key for task in tasks for key in task.prepared.unused}
    unused_in_all = sorted(
        key for key in override_keys if not any(unused_keys.is_key_used(task.prepared.spec, key) for task in tasks)
    )
    unused = {key: only for key in unused_in_all if (only := unused_keys.unused_reason(first.recipe, key)) is not None}
    unused_keys.check_unused_keys(unused, first.recipe, "in every run of the sweep")


def _check_duplicates(tasks: Sequence[SweepTask]) -> None:
    tasks_by_spec: dict[bytes, SweepTask] = {}
    for task in tasks:
        other = tasks_by_spec.setdefault(msgspec.json.encode(task.prepared.spec), task)
        if other is not task:
            raise UsageError(
                f"{OPTION}: {format_values(other.values)} and {format_values(task.values)} give the same run",
                fix=f"remove the option that overrides {OPTION}",
            )


def _check_checkpoints(tasks: Sequence[SweepTask]) -> None:
    """Raise ConfigError if a run could take the checkpoints of another one for its own."""
    patterns = [pattern for task in tasks if (pattern := task.prepared.spec.job.checkpoints)]
    shared = next((p for p in patterns if patterns.count(p) > 1 and "{run_dir}" not in p), None)
    if shared is not None:
        raise ConfigError(
            f"--checkpoints {shared}: the runs of a sweep would resume from one another's checkpoints",
            fix="let the program save into $CLUSTERTRAIN_RUN_DIR, and start the pattern with {run_dir}",
        )


def _check_resources(tasks: Sequence[SweepTask]) -> None:
    """Raise ConfigError if the runs differ in resources: the tasks of an array share one set of directives."""
    first = _get_directives(tasks[0].prepared)
    for task in tasks[1:]:
        other = _get_directives(task.prepared)
        for key in {**first, **other}:
            a, b = (directives.get(key, "absent") or "present" for directives in (first, other))
            if a != b and key != "job-name":
                raise ConfigError(
                    f"{OPTION}: {format_values(tasks[0].values)} and {format_values(task.values)} differ in --{key}"
                    f" ({a} and {b}), and the tasks of an array share one set of resources",
                    fix="submit one sweep per value",
                )


def _get_directives(prepared: PreparedRun) -> dict[str, str]:
    name = prepared.backend.name
    pairs = job_script.build_directives(job_script.script_input(prepared)) if name == "slurm" else []
    return {"backend": name, **dict(pairs)}


def _render_array_script(tasks: Sequence[SweepTask], sweep_id: str, max_concurrent: int | None) -> str | None:
    first = tasks[0].prepared
    if first.backend.name != "slurm":
        return None
    return job_script.render_array_script(job_script.script_input(first), sweep_id, len(tasks), max_concurrent)


def _remove_sweep(sweep: Path, created: Iterable[tuple[RunDir, SweepTask]]) -> None:
    for run, task in created:
        transaction.remove_run(run, task.prepared.spec)
    shutil.rmtree(sweep, ignore_errors=True)
