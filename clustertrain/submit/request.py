"""What was asked -> RunSpec: profile < recipe < ``--set`` < options, merged and checked before anything is made."""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from clustertrain import settings
from clustertrain.config import cluster, image_checks, presets, storage_paths, unused_keys
from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.cross_checks import check_contract
from clustertrain.config.dotted_keys import parts_of, type_at
from clustertrain.config.job import Device, JobSpec, RunSpec, ScriptSpec
from clustertrain.config.parsing import assigned, build, read_toml, set_dotted, value_of
from clustertrain.config.recipe import Recipe, RehearsalSpec
from clustertrain.config.script_keys import of_trainer
from clustertrain.config.unused_keys import Only
from clustertrain.errors import ConfigError, UsageError
from clustertrain.plan import checks
from clustertrain.plan import script_checks as scripts
from clustertrain.plan.planner import Plan, plan
from clustertrain.scheduler import registry
from clustertrain.scheduler.backend import Backend
from clustertrain.submit import job_script, python_path
from clustertrain.submit.code_snapshot import LIMIT_MIB
from clustertrain.submit.preflight import model_stats, script_file

Count = Literal["no", "yes", "trace"]
_FROM_PROFILE = ("partition", "account", "qos", "time", "mem", "gpu_type", "cpus_per_gpu")


@dataclass(frozen=True)
class SubmitRequest:
    """``target`` is a recipe (``*.toml``), a script, or empty for the default preset. ``job`` holds the options that
    were given, by their names in JobSpec; ``assignments`` those of ``--set``; ``swept`` this run's values of
    ``--sweep``; ``count`` whether a model of the user's own is counted first."""

    target: str = ""
    args: tuple[str, ...] = ()
    job: Mapping[str, Any] = field(default_factory=dict)
    assignments: tuple[str, ...] = ()
    swept: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    snapshot_limit_mib: int = LIMIT_MIB
    snapshot_include: tuple[str, ...] = ()
    count: Count = "no"
    argv: tuple[str, ...] = ()
    cwd: Path = field(default_factory=Path.cwd)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)


@dataclass(frozen=True)
class Prepared:
    """A request that is complete and checked. Until the snapshot is taken, ``spec.script.path`` is the user's path.
    ``code`` is what of the user's code it runs, the script or the package of an entry, and None if nothing;
    ``searched`` is where entries were looked for, ``unread`` what was typed and the run does not go by."""

    spec: RunSpec
    profile: ClusterProfile
    plan: Plan
    backend: Backend
    python: str
    code: Path | None = None
    searched: tuple[Path, ...] = ()
    unread: tuple[str, ...] = ()


class _RecipeFile(Recipe, frozen=True, forbid_unknown_fields=True, kw_only=True):
    job: JobSpec = JobSpec()
    env: dict[str, str] = {}  # noqa: RUF012 - msgspec copies an empty default


def counts(key: str) -> bool:
    """Whether a recipe has whole numbers at ``key``."""
    return type_at(_RecipeFile, parts_of(key)) in (int, int | str)


def prepare(request: SubmitRequest, known: Backend | None = None, purpose: registry.Purpose = "submit") -> Prepared:
    """Merge, check and plan. ``known`` is a backend that was chosen before, so that it need not be looked for again.

    Raises:
        UsageError: the target does not exist; a value is not UTF-8.
        ConfigError: a bad recipe, profile, option or environment name; numbers that do not divide; a key that a script
            or the run does not read; a model of the user's own that cannot be built, where it is counted.
    """
    _refuse_other_words(request)
    file, script, name = read_target(request)
    typed: dict[str, Any] = {}
    document = copy.deepcopy(file)
    for path, value in _typed(request):
        set_dotted(document, path, value)
        set_dotted(typed, path, copy.deepcopy(value))
    source = request.target if not script and request.target else "--set"
    if script is not None:
        _refuse_what_no_script_reads(document, Path(script.path).name)
    asked = build(presets.filled(document), _RecipeFile, source)
    unread = unused_keys.unread(document, asked)
    _refuse_unread(request, unread, file, typed, asked)
    recipe_job = document.get("job", {})
    profile = cluster.load(request.job.get("cluster") or asked.job.cluster, request.environ)
    job = _merge_job(profile, recipe_job, request.job)
    job = msgspec.structs.replace(
        job,
        name=job.name or name,
        checkpoint_dir=_checkpoint_dir(request.cwd, job.checkpoint_dir),
    )
    backend = known if known is not None and job.backend in ("auto", known.name) else registry.backend(job, purpose)
    asked_device = job.device if job.device != "auto" else profile.device
    device = resolve_device(asked_device, backend.name, job.gpu_type if purpose != "here" else "")
    checks.of_fp16(asked.train.precision, device, job.device)
    job = msgspec.structs.replace(job, backend=backend.name, device=device)
    recipe = _with_absolute_data(Recipe(**{f: getattr(asked, f) for f in Recipe.__struct_fields__}), request.cwd)
    if script is None:
        check_contract(recipe, source)
        image_checks.check_built_in(recipe)
    if recipe.checkpoint.remote:
        storage_paths.check_protocol(recipe.checkpoint.remote)
    spec = RunSpec(
        job=job,
        recipe=recipe,
        script=script,
        env={**profile.env, **asked.env, **request.env},
        secret_env=tuple(sorted(request.env)),
    )
    _refuse_other_encodings(spec)
    job_script.check_environment(spec.env)
    _refuse_late_profile(spec)
    notes = [*unused_keys.notes(unread, recipe), *_rehearsed(spec)]
    searched = _searched(request, recipe)
    prepared = Prepared(
        spec=spec,
        profile=profile,
        plan=plan(spec, profile, device, taken=request.environ.keys()),
        backend=backend,
        python=profile.python or sys.executable,
        code=Path(script.path) if script is not None else python_path.of_entries(_entries(recipe), searched),
        searched=searched,
        unread=tuple(key for key, _ in unused_keys.written(typed) if key in unread),
    )
    return _noted(_count(request, prepared), notes)


def _checkpoint_dir(cwd: Path, folder: str) -> str:
    return str(cwd / settings.user_path(folder, "job.checkpoint_dir")) if folder else ""


def _typed(request: SubmitRequest) -> list[tuple[str, Any]]:
    """What stands on the command line, by its path."""
    return [
        *((path, value_of(text, path)) for path, text in map(assigned, request.assignments)),
        *request.swept.items(),
    ]


def _refuse_unread(
    request: SubmitRequest, unread: Mapping[str, Only], file: dict[str, Any], typed: Mapping[str, Any], asked: Recipe
) -> None:
    """Who types a value may make keys of the file idle on purpose. Of a sweep's runs another one may go by the key.

    Raises:
        ConfigError: the file does not go by a key of its own, or a single run not by one that was typed.
    """
    by_hand = dict(unused_keys.written(typed))
    wrong = {key: only for key, only in unread.items() if key not in by_hand}
    alone = _alone(file, request.target) if by_hand else asked
    if alone is not None:
        unused_keys.refuse(
            {k: only for k, only in wrong.items() if unused_keys.why_not(alone, k)}, asked, request.target
        )
    if not request.swept:
        unused_keys.refuse({key: only for key, only in unread.items() if key in by_hand}, asked, "--set")


def _alone(file: dict[str, Any], source: str) -> Recipe | None:
    """The file's own recipe; None where it is none without what is typed."""
    try:
        return build(presets.filled(file), _RecipeFile, source)
    except ConfigError:
        return None


def _noted(prepared: Prepared, notes: Sequence[str]) -> Prepared:
    """With ``notes`` among the warnings of its plan."""
    made = prepared.plan
    chosen = msgspec.structs.replace(made, reasons=(*made.reasons, *notes), warnings=(*made.warnings, *notes))
    return dataclasses.replace(prepared, plan=chosen)


def _count(request: SubmitRequest, prepared: Prepared) -> Prepared:
    """With the plan made anew, now that the model is known; where it cannot be counted here, with a warning."""
    spec, chosen = prepared.spec, prepared.plan
    trace = request.count == "trace"
    if trace and (spec.script is not None or spec.recipe.model.is_decoder):
        what = "the model of a script is not known before it runs" if spec.script else "the decoder's is estimated"
        raise UsageError(f"--trace-memory: {what}", fix="leave it out; it is for model.entry and the other kinds")
    if not trace and (request.count == "no" or spec.script is not None or not spec.recipe.model.entry):
        return prepared
    try:
        found = model_stats.count(spec, chosen, prepared.python, prepared.code, request.environ, trace=trace)
    except model_stats.NotCounted as e:
        return _noted(prepared, [f"the model could not be counted here: {e.message}"])
    chosen = plan(spec, prepared.profile, chosen.device, taken=request.environ.keys(), counted=found)
    return dataclasses.replace(prepared, plan=chosen)


def _refuse_what_no_script_reads(document: Mapping[str, Any], script: str, above: str = "") -> None:
    """Such a value would be written down and compared, and change nothing."""
    for name, value in document.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping):
            _refuse_what_no_script_reads(value, script, f"{key}.")
        elif of_trainer(key):
            raise ConfigError(
                f"{key} has no effect on {script}, which has its own model, data, optimizer and loop",
                fix=f"hand the value to the script: as an argument behind {script}, or with --env NAME=VALUE (in a "
                "sweep --grid env.NAME=VALUE,VALUE)",
            )


def _with_absolute_data(recipe: Recipe, cwd: Path) -> Recipe:
    """The ranks run in another folder than the one where the path was typed."""
    paths = {"path": recipe.data_path, "validation_path": recipe.validation_path}
    absolute = {key: str(cwd / path) for key, path in paths.items() if path is not None}
    return msgspec.structs.replace(recipe, data=msgspec.structs.replace(recipe.data, **absolute))


def _refuse_other_words(request: SubmitRequest) -> None:
    """Bytes of the command line that are not UTF-8 arrive as lone surrogates (PEP 383), on which msgspec stumbles."""
    for word in (*request.assignments, *map(str, request.swept.values())):
        try:
            word.encode()
        except UnicodeEncodeError as e:
            raise _not_utf8(e) from e


def _refuse_other_encodings(spec: RunSpec) -> None:
    """The files of a run are UTF-8; the folder where submit is called, and environment variables, need not be."""
    try:
        msgspec.json.encode(spec)
    except UnicodeEncodeError as e:
        raise _not_utf8(e) from e


def _not_utf8(e: UnicodeEncodeError) -> UsageError:
    return UsageError(f"{e.object!r} is not UTF-8", fix="write it in UTF-8: is the terminal set to that?")


def _refuse_late_profile(spec: RunSpec) -> None:
    """What its last step would tell, where the time of a step goes, would be missing. A script has steps of its own."""
    steps, profiled = spec.recipe.train.steps, spec.recipe.profiled_steps
    if spec.script is None and profiled and profiled[-1] >= steps:
        which = "begins" if profiled[0] >= steps else "ends"
        raise ConfigError(
            f"train.profile = {spec.recipe.train.profile!r} {which} behind the last of train.steps = {steps}",
            fix=f"name steps up to {steps}, as --profile steps={max(0, steps - 10)}:{steps}",
        )


def _rehearsed(spec: RunSpec) -> list[str]:
    """Notes on what of ``[rehearsal]`` has no effect.

    Raises:
        ConfigError: preemptions that would never come.
    """
    asked, steps = spec.recipe.rehearsal, spec.recipe.train.steps
    if spec.job.backend != "local":
        if asked.preempt_at_steps:
            raise ConfigError(
                "rehearsal.preempt_at_steps: only the local backend delivers preemptions on purpose",
                fix="use --backend local, or leave the table out",
            )
        changed = asked.grace_s != RehearsalSpec().grace_s
        said = "rehearsal.grace_s has no effect: it is the local backend's, and the cluster's own counts here"
        return [said] if changed else []
    late = [step for step in asked.preempt_at_steps if step >= steps]
    if late and spec.script is None:
        raise ConfigError(
            f"rehearsal.preempt_at_steps: step {late[0]} is not before train.steps = {steps}, so that it would never "
            "be preempted there",
            fix="name earlier steps",
        )
    return []


def _entries(recipe: Recipe) -> dict[str, str]:
    return {"model.entry": recipe.model.entry, "data.entry": recipe.data.entry}


def _searched(request: SubmitRequest, recipe: Recipe) -> tuple[Path, ...]:
    """Where the user's code is, if the recipe names any."""
    if not any(_entries(recipe).values()):
        return ()
    beside = [(request.cwd / request.target).parent] if request.target else []
    return tuple(python_path.around([*beside, request.cwd]))


def script_note(prepared: Prepared) -> str | None:
    """What should be known of the user's script under its plan.

    Raises:
        ConfigError: it cannot drive the plan.
    """
    script = prepared.spec.script
    if script is None:
        return None
    source = Path(script.path).read_text(encoding="utf-8", errors="replace")
    return scripts.check(prepared.plan.layout, prepared.plan.precision, source, Path(script.path).name)


def read_target(request: SubmitRequest) -> tuple[dict[str, Any], ScriptSpec | None, str]:
    """The recipe's document, the script if it is one, and a name for the run.

    Raises:
        UsageError: there is no such file, or it takes no arguments.
        ConfigError: the recipe is not TOML.
    """
    if not request.target:
        return {}, None, "default"
    path = request.cwd / request.target
    try:
        kind = "" if path.is_file() else "it is a folder" if path.is_dir() else "no such file"
    except OSError as e:  # a name that is too long, a folder that cannot be looked into
        kind = str(e.strerror)
    if kind:
        raise UsageError(f"{request.target}: {kind}", fix="name a recipe (*.toml) or a script (*.py)")
    if path.suffix == ".toml":
        if request.args:
            raise UsageError(f"{' '.join(request.args)}: a recipe takes no arguments", fix="put options before it")
        return read_toml(path), None, path.stem
    script_file.check(request.target, path)
    if "\0" in "".join(request.args):
        raise UsageError("an argument of the script contains a NUL character")
    return {}, ScriptSpec(path=str(path), args=request.args, cwd=str(request.cwd)), path.stem


def _merge_job(profile: ClusterProfile, recipe: Mapping[str, Any], options: Mapping[str, Any]) -> JobSpec:
    values = {key: getattr(profile, key) for key in _FROM_PROFILE}
    values |= {**recipe, **options}
    values["sbatch"] = {**profile.sbatch, **recipe.get("sbatch", {}), **options.get("sbatch", {})}
    return build(values, JobSpec, "job", at="job.")


def resolve_device(asked: Device, backend: str, gpu_type: str = "") -> Device:
    """``auto``: GPUs on Slurm, which allocates them, and where their type is named; else what this machine has."""
    if asked != "auto":
        return asked
    if backend == "slurm" or gpu_type:
        return "cuda"
    return "cuda" if any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"


def has_gpu() -> bool:
    """Whether this machine may have one that torch can use: NVIDIA's, AMD's, or that of a Windows host."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists() or Path("/dev/dxg").exists()
