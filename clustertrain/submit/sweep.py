"""``sweep --grid`` and ``submit --sweep``: the product of the values as ordinary runs, handed over as one job array.
All, or none."""

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
from clustertrain.config import unused_keys
from clustertrain.config.parsing import ENVIRONMENT, assigned, value_of
from clustertrain.errors import ClusterTrainError, ConfigError, UsageError
from clustertrain.run import run_dir
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.backend import ArraySubmission
from clustertrain.scheduler.registry import Purpose
from clustertrain.submit import job_script, transaction
from clustertrain.submit.request import Prepared, SubmitRequest, counts, prepare
from clustertrain.submit.transaction import DryRun, Submitted

OPTION, LOG = "--sweep", "log:"
MOST_RUNS = 1000  # Slurm's MaxArraySize is 1001 unless a site changes it, and the number of a task is below it


@dataclass(frozen=True)
class Task:
    """One run to be, and its values of the grid."""

    prepared: Prepared
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Swept:
    """``job_id`` is the array's; None on a backend without arrays. ``runs`` are in the order of the tasks."""

    folder: Path
    job_id: str | None
    backend: str
    runs: tuple[tuple[Submitted, Mapping[str, Any]], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class DrySweep:
    """``script`` is the array's; None on a backend without arrays."""

    script: str | None
    runs: tuple[tuple[DryRun, Mapping[str, Any]], ...]
    notes: tuple[str, ...]


def words(values: Mapping[str, Any]) -> str:
    """``optim.lr=0.0001 seed=1``"""
    return " ".join(f"{key}={v if isinstance(v, str) else json.dumps(v, default=str)}" for key, v in values.items())


def product(given: Sequence[str], assignments: Iterable[str], option: str = OPTION) -> list[dict[str, Any]]:
    """The values of every run, from the texts of ``option`` and ``--set``; the last one given changes fastest.

    Raises:
        UsageError: no value, an empty one, one that is given twice; a key that is given twice; too many runs.
    """
    taken = {assigned(text)[0] for text in assignments}
    axes: dict[str, list[Any]] = {}
    for one in given:
        key, text = assigned(one, option)
        if key in taken or key in axes:
            raise UsageError(f"{option} {one}: {key} is given twice", fix=f"give all its values in one {option}")
        if key == "telemetry.alerts.webhook":
            raise UsageError(
                f"{option} {key}: a webhook is a secret, and the values of a sweep are recorded", fix="use --set"
            )
        axes[key] = _values(f"{option} {one}", key, text.strip())
    sizes = [len(values) for values in axes.values()]
    if math.prod(sizes) > MOST_RUNS:
        raise UsageError(
            f"{option}: {' x '.join(map(str, sizes))} = {math.prod(sizes)} runs, more than the {MOST_RUNS} tasks that "
            "an array may have",
            fix="submit a part of the values at a time",
        )
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _values(given: str, key: str, text: str) -> list[Any]:
    values: Any
    if text.startswith("["):
        values = value_of(text)
        if not isinstance(values, list):
            raise UsageError(f"{given}: not a list in TOML", fix='write it as key=["a,b", "c"]')
    elif text.startswith(LOG):
        values = _log_spaced(given, text)
        if counts(key):
            values = list(dict.fromkeys(map(round, values)))
    else:
        items = [item.strip() for item in text.split(",")]
        if "" in items:
            raise UsageError(f"{given}: an empty value", fix='write it as key=value,value or key=["", "value"]')
        values = [value_of(item, key) for item in items]
    if not values:
        raise UsageError(f"{given}: no value")
    if key.startswith(ENVIRONMENT):
        values = [str(value) for value in values]
    for n, value in enumerate(values):
        if value in values[:n]:
            raise UsageError(f"{given}: {value!r} is given twice", fix="leave one of them out")
    return list(values)


def _log_spaced(given: str, text: str) -> list[float]:
    """``log:1e-5:1e-2:7``: seven values from the one to the other, each the same multiple of the one before, to four
    digits; the ends are exact."""
    found = re.fullmatch(rf"{LOG}([^:]+):([^:]+):(\d+)", text)
    try:
        first, last, count = (float(found[1]), float(found[2]), int(found[3])) if found else (0.0, 0.0, 0)
    except ValueError:
        first, last, count = 0.0, 0.0, 0
    if not (0 < first < math.inf and 0 < last < math.inf and 2 <= count <= MOST_RUNS):
        raise UsageError(
            f"{given}: not of the form log:FIRST:LAST:COUNT with two numbers above 0 and a count from 2 to {MOST_RUNS}",
            fix="write it as key=log:1e-5:1e-2:7",
        )
    inner = (first * (last / first) ** (i / (count - 1)) for i in range(1, count - 1))
    return [first, *(float(f"{value:.4g}") for value in inner), last]


def submit_sweep(request: SubmitRequest, given: Sequence[str], at_once: int | None, option: str = OPTION) -> Swept:
    """Check and plan every run, write them all and hand them to the backend.

    Raises:
        UsageError, ConfigError: before anything is made.
        SchedulerRefused: with Slurm's words; all folders are gone again.
    """
    tasks, notes = _prepare(request, given, option)
    first = tasks[0].prepared
    job = first.spec.job
    sweep = run_dir.create_sweep(job.name, share=job.share)
    made: list[tuple[RunDir, Task]] = []
    try:
        # One snapshot, to which every run has a link: the same code for all, however many they are.
        with fsio.as_open_as(sweep):
            taken = transaction.take_code(request, first, sweep / "code")
        made_from = transaction.collect(request, taken)
        for n, task in enumerate(tasks):
            run = run_dir.create(task.prepared.spec.job.name, share=job.share)
            made.append((run, task))
            if taken is not None:
                run.code.symlink_to(Path("../../sweeps", sweep.name, "code"))
            with fsio.as_open_as(run.path):
                transaction.write(
                    task.prepared, run, taken, {**made_from, "sweep": {"id": sweep.name, "set": task.values}}
                )
            (sweep / str(n)).symlink_to(Path("../../runs", run.id))
        script = _array_script(tasks, sweep.name, at_once)
        if script is not None:
            with fsio.as_open_as(sweep):
                fsio.write_text(sweep / "job.sh", script, mode=0o740 if job.share else 0o700)
    except BaseException:
        _remove(sweep, made)
        raise
    array = ArraySubmission(sweep, [run for run, _ in made], at_once, request.environ)
    try:
        with fsio.as_open_as(sweep):
            job_ids = first.backend.submit_array(array)
    except ClusterTrainError:
        _remove(sweep, made)  # and not after a Ctrl-C: see submit
        raise
    name = first.backend.name
    runs = [(transaction.announce(run, id_, name), task.values) for (run, task), id_ in zip(made, job_ids, strict=True)]
    notes += transaction.outside_notes(taken)
    return Swept(sweep, job_ids[0].rpartition("_")[0] or None, name, tuple(runs), tuple(notes))


def dry_sweep(request: SubmitRequest, given: Sequence[str], at_once: int | None, option: str = OPTION) -> DrySweep:
    """The scripts as they would be submitted but for the ends of the names. Makes nothing."""
    tasks, notes = _prepare(request, given, option, "dry-run")
    name = f"{run_dir.slug(tasks[0].prepared.spec.job.name)}-xxxxxx"
    runs = [(DryRun(t.prepared.plan, transaction.script_without_a_run(t.prepared), ()), t.values) for t in tasks]
    return DrySweep(_array_script(tasks, name, at_once), tuple(runs), tuple(notes))


def _prepare(
    request: SubmitRequest, given: Sequence[str], option: str, purpose: Purpose = "submit"
) -> tuple[list[Task], list[str]]:
    """All runs, checked one by one and against each other; and warnings."""
    tasks: list[Task] = []
    notes: list[str] = []
    for values in product(given, request.assignments, option):
        try:
            prepared = prepare(replace(request, swept=values), tasks[0].prepared.backend if tasks else None, purpose)
            notes += [*prepared.plan.warnings, *transaction.check(prepared)]
        except ClusterTrainError as e:
            if _fails_alike(request, e, purpose):
                raise
            raise type(e)(f"with {words(values)}: {e.message}", fix=e.fix) from e
        tasks.append(Task(prepared, values))
    first = tasks[0].prepared
    _refuse_unread(tasks)
    _refuse_equal(tasks, option)
    _refuse_other_resources(tasks, option)
    return tasks, [*dict.fromkeys(notes), *transaction.advice(first)]


def _fails_alike(request: SubmitRequest, error: ClusterTrainError, purpose: Purpose) -> bool:
    """Whether the request fails so without any values of the grid: then they are not at fault."""
    try:
        transaction.check(prepare(request, purpose=purpose))
    except ClusterTrainError as e:
        return e.message == error.message
    return False


def _refuse_unread(tasks: Sequence[Task]) -> None:
    """Values that were typed and that no run goes by."""
    first = tasks[0].prepared.spec
    typed = {key for task in tasks for key in task.prepared.unread}
    idle = sorted(key for key in typed if not any(unused_keys.in_use(task.prepared.spec, key) for task in tasks))
    found = {key: only for key in idle if (only := unused_keys.why_not(first.recipe, key)) is not None}
    unused_keys.refuse(found, first.recipe, "in every run of the sweep")


def _refuse_equal(tasks: Sequence[Task], option: str) -> None:
    seen: dict[bytes, Task] = {}
    for task in tasks:
        other = seen.setdefault(msgspec.json.encode(task.prepared.spec), task)
        if other is not task:
            raise UsageError(
                f"{option}: {words(other.values)} and {words(task.values)} give the same run",
                fix=f"leave out the option that sets the same thing, which wins over {option}",
            )


def _refuse_other_resources(tasks: Sequence[Task], option: str) -> None:
    """All tasks of an array are submitted with one set of directives."""

    first = _directives(tasks[0].prepared)
    for task in tasks[1:]:
        other = _directives(task.prepared)
        for key in {**first, **other}:
            a, b = (asked.get(key, "absent") or "present" for asked in (first, other))
            if a != b and key != "job-name":
                raise ConfigError(
                    f"{option}: {words(tasks[0].values)} and {words(task.values)} differ in --{key} ({a} and {b}), and "
                    "the tasks of an array share their resources",
                    fix="submit one sweep for each",
                )


def _directives(prepared: Prepared) -> dict[str, str]:
    name = prepared.backend.name
    pairs = job_script.directives(transaction.script_input(prepared)) if name == "slurm" else []
    return {"backend": name, **dict(pairs)}


def _array_script(tasks: Sequence[Task], sweep_id: str, at_once: int | None) -> str | None:
    first = tasks[0].prepared
    if first.backend.name != "slurm":
        return None
    return job_script.array_script(transaction.script_input(first), sweep_id, len(tasks), at_once)


def _remove(sweep: Path, made: Iterable[tuple[RunDir, Task]]) -> None:
    for run, task in made:
        transaction.remove(run, task.prepared.spec)
    shutil.rmtree(sweep, ignore_errors=True)
