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
from clustertrain.config import cluster
from clustertrain.config.checks import image_checks, storage_paths, unused_keys
from clustertrain.config.checks.cross_checks import check_contract
from clustertrain.config.checks.script_keys import is_trainer_key
from clustertrain.config.checks.unused_keys import KeyCondition
from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import Device, JobSpec, RunSpec, ScriptSpec
from clustertrain.config.parsing import presets
from clustertrain.config.parsing.documents import build, load_toml, parse_assignment, parse_value, set_value_at
from clustertrain.config.parsing.dotted_keys import split_key, type_at
from clustertrain.config.recipe import Recipe
from clustertrain.config.rehearsal import RehearsalSpec
from clustertrain.errors import ConfigError, UsageError
from clustertrain.plan import checks
from clustertrain.plan import script_checks as scripts
from clustertrain.plan.planner import Plan, plan
from clustertrain.scheduler import registry
from clustertrain.scheduler.backend import Backend
from clustertrain.submit import job_script, python_path
from clustertrain.submit.code_snapshot import DEFAULT_LIMIT_MIB
from clustertrain.submit.preflight import model_stats, script_file

CountMode = Literal["no", "yes", "trace"]
_PROFILE_KEYS = ("partition", "account", "qos", "time", "mem", "gpu_type", "cpus_per_gpu")


@dataclass(frozen=True)
class SubmitRequest:
    """``target`` is a recipe (``*.toml``), a script, or empty for the default preset. ``job`` holds the options that
    were given, by their names in JobSpec; ``assignments`` those of ``--set``; ``sweep_values`` this run's values of
    ``--sweep``; ``count_mode`` whether a model of the user's own is counted first."""

    target: str = ""
    args: tuple[str, ...] = ()
    job: Mapping[str, Any] = field(default_factory=dict)
    assignments: tuple[str, ...] = ()
    sweep_values: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    snapshot_limit_mib: int = DEFAULT_LIMIT_MIB
    snapshot_include: tuple[str, ...] = ()
    count_mode: CountMode = "no"
    argv: tuple[str, ...] = ()
    cwd: Path = field(default_factory=Path.cwd)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)


@dataclass(frozen=True)
class PreparedRun:
    """A request that is complete and checked. Until the snapshot is taken, ``spec.script.path`` is the user's path.
    ``code`` is what of the user's code it runs, the script or the package of an entry, and None if nothing;
    ``search_path`` is where entries were looked for, ``unused`` what was typed and the run does not go by."""

    spec: RunSpec
    profile: ClusterProfile
    plan: Plan
    backend: Backend
    python: str
    code: Path | None = None
    search_path: tuple[Path, ...] = ()
    unused: tuple[str, ...] = ()


class _RecipeFile(Recipe, frozen=True, forbid_unknown_fields=True, kw_only=True):
    job: JobSpec = JobSpec()
    env: dict[str, str] = {}  # noqa: RUF012 - msgspec copies an empty default


def is_integer_key(key: str) -> bool:
    """Whether a recipe has whole numbers at ``key``."""
    return type_at(_RecipeFile, split_key(key)) in (int, int | str)


def prepare(
    request: SubmitRequest, existing_backend: Backend | None = None, purpose: registry.Purpose = "submit"
) -> PreparedRun:
    """Merge, check and plan. ``existing_backend`` is a backend that was chosen before, so that it need not be looked
    for again.

    Raises:
        UsageError: the target does not exist; a value is not UTF-8.
        ConfigError: a bad recipe, profile, option or environment name; numbers that do not divide; a key that a script
            or the run does not read; a model of the user's own that cannot be built, where it is counted.
    """
    _check_utf8_arguments(request)
    file_document, script, name = load_target(request)
    overrides: dict[str, Any] = {}
    document = copy.deepcopy(file_document)
    for path, value in _list_overrides(request):
        set_value_at(document, path, value)
        set_value_at(overrides, path, copy.deepcopy(value))
    source = request.target if not script and request.target else "--set"
    if script is not None:
        _check_script_keys(document, Path(script.path).name)
    merged = build(presets.apply_preset(document), _RecipeFile, source)
    unused = unused_keys.find_unused_keys(document, merged)
    _check_unused(request, unused, file_document, overrides, merged)
    recipe_job = document.get("job", {})
    profile = cluster.load_profile(request.job.get("cluster") or merged.job.cluster, request.environ)
    job = _merge_job(profile, recipe_job, request.job)
    job = msgspec.structs.replace(
        job,
        name=job.name or name,
        checkpoint_dir=_resolve_checkpoint_dir(request.cwd, job.checkpoint_dir),
    )
    backend = (
        existing_backend
        if existing_backend is not None and job.backend in ("auto", existing_backend.name)
        else registry.select_backend(job, purpose)
    )
    requested_device = job.device if job.device != "auto" else profile.device
    device = resolve_device(requested_device, backend.name, job.gpu_type if purpose != "here" else "")
    checks.check_fp16(merged.train.precision, device, job.device)
    job = msgspec.structs.replace(job, backend=backend.name, device=device)
    recipe = _resolve_data_paths(Recipe(**{f: getattr(merged, f) for f in Recipe.__struct_fields__}), request.cwd)
    if script is None:
        check_contract(recipe, source)
        image_checks.check_built_in_images(recipe)
    if recipe.checkpoint.remote:
        storage_paths.check_protocol(recipe.checkpoint.remote)
    spec = RunSpec(
        job=job,
        recipe=recipe,
        script=script,
        env={**profile.env, **merged.env, **request.env},
        secret_env=tuple(sorted(request.env)),
    )
    _check_utf8_spec(spec)
    job_script.check_environment(spec.env)
    _check_profiled_steps(spec)
    notes = [*unused_keys.format_notes(unused, recipe), *_check_rehearsal(spec)]
    search_path = _build_search_path(request, recipe)
    prepared = PreparedRun(
        spec=spec,
        profile=profile,
        plan=plan(spec, profile, device, inherited_env=request.environ.keys()),
        backend=backend,
        python=profile.python or sys.executable,
        code=(
            Path(script.path)
            if script is not None
            else python_path.find_shared_entry(_get_entries(recipe), search_path)
        ),
        search_path=search_path,
        unused=tuple(key for key, _ in unused_keys.iter_keys(overrides) if key in unused),
    )
    return _add_notes(_count_model(request, prepared), notes)


def _resolve_checkpoint_dir(cwd: Path, folder: str) -> str:
    return str(cwd / settings.expand_user_path(folder, "job.checkpoint_dir")) if folder else ""


def _list_overrides(request: SubmitRequest) -> list[tuple[str, Any]]:
    """What stands on the command line, by its path."""
    return [
        *((path, parse_value(text, path)) for path, text in map(parse_assignment, request.assignments)),
        *request.sweep_values.items(),
    ]


def _check_unused(
    request: SubmitRequest,
    unused: Mapping[str, KeyCondition],
    file_document: dict[str, Any],
    overrides: Mapping[str, Any],
    merged: Recipe,
) -> None:
    """Who types a value may make keys of the file idle on purpose. Of a sweep's runs another one may go by the key.

    Raises:
        ConfigError: the file does not go by a key of its own, or a single run not by one that was typed.
    """
    override_keys = dict(unused_keys.iter_keys(overrides))
    unused_in_file = {key: only for key, only in unused.items() if key not in override_keys}
    file_recipe = _build_file_recipe(file_document, request.target) if override_keys else merged
    if file_recipe is not None:
        unused_keys.check_unused_keys(
            {k: only for k, only in unused_in_file.items() if unused_keys.unused_reason(file_recipe, k)},
            merged,
            request.target,
        )
    if not request.sweep_values:
        unused_keys.check_unused_keys(
            {key: only for key, only in unused.items() if key in override_keys}, merged, "--set"
        )


def _build_file_recipe(document: dict[str, Any], source: str) -> Recipe | None:
    """The file's own recipe; None where it is none without what is typed."""
    try:
        return build(presets.apply_preset(document), _RecipeFile, source)
    except ConfigError:
        return None


def _add_notes(prepared: PreparedRun, notes: Sequence[str]) -> PreparedRun:
    """With ``notes`` among the warnings of its plan."""
    original = prepared.plan
    chosen = msgspec.structs.replace(
        original, reasons=(*original.reasons, *notes), warnings=(*original.warnings, *notes)
    )
    return dataclasses.replace(prepared, plan=chosen)


def _count_model(request: SubmitRequest, prepared: PreparedRun) -> PreparedRun:
    """With the plan made anew, now that the model is known; where it cannot be counted here, with a warning."""
    spec, chosen = prepared.spec, prepared.plan
    trace = request.count_mode == "trace"
    if trace and (spec.script is not None or spec.recipe.model.is_decoder):
        reason = "the model of a script is not known before it runs" if spec.script else "the decoder's is estimated"
        raise UsageError(f"--trace-memory: {reason}", fix="leave it out; it is for model.entry and the other kinds")
    if not trace and (request.count_mode == "no" or spec.script is not None or not spec.recipe.model.entry):
        return prepared
    try:
        stats = model_stats.count_model(spec, chosen, prepared.python, prepared.code, request.environ, trace=trace)
    except model_stats.ModelCountError as e:
        return _add_notes(prepared, [f"the model could not be counted here: {e.message}"])
    chosen = plan(spec, prepared.profile, chosen.device, inherited_env=request.environ.keys(), model_stats=stats)
    return dataclasses.replace(prepared, plan=chosen)


def _check_script_keys(document: Mapping[str, Any], script: str, prefix: str = "") -> None:
    """Such a value would be written down and compared, and change nothing."""
    for name, value in document.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            _check_script_keys(value, script, f"{key}.")
        elif is_trainer_key(key):
            raise ConfigError(
                f"{key} has no effect on {script}, which has its own model, data, optimizer and loop",
                fix=(
                    f"hand the value to the script: as an argument behind {script}, or with --env NAME=VALUE (in a "
                    "sweep --grid env.NAME=VALUE,VALUE)"
                ),
            )


def _resolve_data_paths(recipe: Recipe, cwd: Path) -> Recipe:
    """The ranks run in another folder than the one where the path was typed."""
    paths = {"path": recipe.data_path, "validation_path": recipe.validation_path}
    absolute = {key: str(cwd / path) for key, path in paths.items() if path is not None}
    return msgspec.structs.replace(recipe, data=msgspec.structs.replace(recipe.data, **absolute))


def _check_utf8_arguments(request: SubmitRequest) -> None:
    """Bytes of the command line that are not UTF-8 arrive as lone surrogates (PEP 383), on which msgspec stumbles."""
    for argument in (*request.assignments, *map(str, request.sweep_values.values())):
        try:
            argument.encode()
        except UnicodeEncodeError as e:
            raise _not_utf8(e) from e


def _check_utf8_spec(spec: RunSpec) -> None:
    """The files of a run are UTF-8; the folder where submit is called, and environment variables, need not be."""
    try:
        msgspec.json.encode(spec)
    except UnicodeEncodeError as e:
        raise _not_utf8(e) from e


def _not_utf8(e: UnicodeEncodeError) -> UsageError:
    return UsageError(f"{e.object!r} is not UTF-8", fix="write it in UTF-8: is the terminal set to that?")


def _check_profiled_steps(spec: RunSpec) -> None:
    """What its last step would tell, where the time of a step goes, would be missing. A script has steps of its own."""
    steps, profiled = spec.recipe.train.steps, spec.recipe.profiled_steps
    if spec.script is None and profiled and profiled[-1] >= steps:
        verb = "begins" if profiled[0] >= steps else "ends"
        raise ConfigError(
            f"train.profile = {spec.recipe.train.profile!r} {verb} behind the last of train.steps = {steps}",
            fix=f"name steps up to {steps}, as --profile steps={max(0, steps - 10)}:{steps}",
        )


def _check_rehearsal(spec: RunSpec) -> list[str]:
    """Notes on what of ``[rehearsal]`` has no effect.

    Raises:
        ConfigError: preemptions that would never come.
    """
    rehearsal, steps = spec.recipe.rehearsal, spec.recipe.train.steps
    if spec.job.backend != "local":
        if rehearsal.preempt_at_steps:
            raise ConfigError(
                "rehearsal.preempt_at_steps: only the local backend delivers preemptions on purpose",
                fix="use --backend local, or leave the table out",
            )
        is_changed = rehearsal.grace_s != RehearsalSpec().grace_s
        note = "rehearsal.grace_s has no effect: it is the local backend's, and the cluster's own counts here"
        return [note] if is_changed else []
    late_steps = [step for step in rehearsal.preempt_at_steps if step >= steps]
    if late_steps and spec.script is None:
        raise ConfigError(
            f"rehearsal.preempt_at_steps: step {late_steps[0]} is not before train.steps = {steps}, so that it would"
            " never be preempted there",
            fix="name earlier steps",
        )
    return []


def _get_entries(recipe: Recipe) -> dict[str, str]:
    return {"model.entry": recipe.model.entry, "data.entry": recipe.data.entry}


def _build_search_path(request: SubmitRequest, recipe: Recipe) -> tuple[Path, ...]:
    """Where the user's code is, if the recipe names any."""
    if not any(_get_entries(recipe).values()):
        return ()
    recipe_folder = [(request.cwd / request.target).parent] if request.target else []
    return tuple(python_path.list_search_folders([*recipe_folder, request.cwd]))


def check_script_layout(prepared: PreparedRun) -> str | None:
    """What should be known of the user's script under its plan.

    Raises:
        ConfigError: it cannot drive the plan.
    """
    script = prepared.spec.script
    if script is None:
        return None
    source = Path(script.path).read_text(encoding="utf-8", errors="replace")
    return scripts.check_script(prepared.plan.layout, prepared.plan.precision, source, Path(script.path).name)


def load_target(request: SubmitRequest) -> tuple[dict[str, Any], ScriptSpec | None, str]:
    """The recipe's document, the script if it is one, and a name for the run.

    Raises:
        UsageError: there is no such file, or it takes no arguments.
        ConfigError: the recipe is not TOML.
    """
    if not request.target:
        return {}, None, "default"
    path = request.cwd / request.target
    try:
        problem = "" if path.is_file() else "it is a folder" if path.is_dir() else "no such file"
    except OSError as e:  # a name that is too long, a folder that cannot be looked into
        problem = str(e.strerror)
    if problem:
        raise UsageError(f"{request.target}: {problem}", fix="name a recipe (*.toml) or a script (*.py)")
    if path.suffix == ".toml":
        if request.args:
            raise UsageError(f"{' '.join(request.args)}: a recipe takes no arguments", fix="put options before it")
        return load_toml(path), None, path.stem
    script_file.check_script_file(request.target, path)
    if "\0" in "".join(request.args):
        raise UsageError("an argument of the script contains a NUL character")
    return {}, ScriptSpec(path=str(path), args=request.args, cwd=str(request.cwd)), path.stem


def _merge_job(profile: ClusterProfile, recipe: Mapping[str, Any], options: Mapping[str, Any]) -> JobSpec:
    values = {key: getattr(profile, key) for key in _PROFILE_KEYS}
    values |= {**recipe, **options}
    values["sbatch"] = {**profile.sbatch, **recipe.get("sbatch", {}), **options.get("sbatch", {})}
    return build(values, JobSpec, "job", prefix="job.")


def resolve_device(requested: Device, backend: str, gpu_type: str = "") -> Device:
    """``auto``: GPUs on Slurm, which allocates them, and where their type is named; else what this machine has."""
    if requested != "auto":
        return requested
    if backend == "slurm" or gpu_type:
        return "cuda"
    return "cuda" if any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"


def has_gpu() -> bool:
    """Whether this machine may have one that torch can use: NVIDIA's, AMD's, or that of a Windows host."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists() or Path("/dev/dxg").exists()
