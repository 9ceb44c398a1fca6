"""The checks of a submission, in order.

A check is a function that refuses a submission by raising, and returns notes for the user. The first line of its
docstring says what it refuses. The four lists below run in this order, each after the phase that it checks; nothing is
created before the last one has passed. ``docs/reference/submission-checks.md`` has the same list as a table, which a
test compares with this file.

Four phases refuse too. :func:`command.build_script_spec` and :func:`launchers.replace_launcher` refuse a program that
does not exist and a launcher's option that cannot be honored; :func:`resolve.resolve_run` an unknown cluster profile,
options that contradict each other and a backend that does not answer; :func:`planner.plan` layouts and batches that do
not divide and devices that lack what they need (``plan/checks.py``); :mod:`transaction` a snapshot that is too large,
and removes what it has written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from clustertrain.config.checks import epochs, image_checks, storage_paths, unused_keys
from clustertrain.config.checks.cross_checks import check_contract
from clustertrain.config.checks.script_keys import is_trainer_key
from clustertrain.config.parsing import time_limits
from clustertrain.config.recipe import PreemptionTestSpec
from clustertrain.errors import ConfigError, UnsuitableEnvironment, UsageError
from clustertrain.plan import script_checks
from clustertrain.plan.checks import check_fp16
from clustertrain.plan.planner import check_fits
from clustertrain.submit import job_script
from clustertrain.submit.preflight import (
    alerts,
    command_options,
    commands,
    container,
    data,
    entry_points,
    machine,
    packages,
    script_file,
    trackers,
)
from clustertrain.submit.prepared_run import PreparedRun, ResolvedRun
from clustertrain.submit.recipe import ParsedRecipe, is_recipe_path
from clustertrain.submit.request import SubmitRequest
from clustertrain.submit.shipping import ship

Notes = list[str] | None
_T = TypeVar("_T")


def run_checks(checks: Sequence[Callable[[_T], Notes]], subject: _T) -> list[str]:
    """Run ``checks`` in order and return their notes; raise the first refusal."""
    return [note for check in checks for note in check(subject) or ()]


def check_plan(prepared: PreparedRun) -> list[str]:
    """Run the checks that need the plan and return their notes."""
    return run_checks(PLAN_CHECKS, prepared)


# -- the request


def check_utf8_arguments(request: SubmitRequest) -> None:
    """Refuse arguments that are not UTF-8."""
    # They arrive as lone surrogates (PEP 383), which msgspec cannot encode.
    for argument in (*request.assignments, *map(str, request.sweep_values.values())):
        try:
            argument.encode()
        except UnicodeEncodeError as e:
            raise _not_utf8(e) from e


def check_target(request: SubmitRequest) -> None:
    """Refuse a target that is neither a recipe nor a Python script, and arguments that it cannot take."""
    if not request.target:
        return
    path = request.cwd / request.target
    try:
        problem = _find_target_problem(path)
    except OSError as e:  # for example a name that is too long, or a folder without search permission
        problem = str(e.strerror)
    if problem:
        fix = commands.find_command_fix(request) if problem == "no such file" else ""
        raise UsageError(f"{request.target}: {problem}", fix=fix or "name a recipe (*.toml) or a script (*.py)")
    if is_recipe_path(path):
        if request.args:
            raise UsageError(f"{' '.join(request.args)}: a recipe takes no arguments", fix="put options before it")
        return
    script_file.check_script_file(request.target, path)
    if "\0" in "".join(request.args):
        raise UsageError("an argument of the script contains a NUL character", fix="remove it")


def _find_target_problem(path: Path) -> str:
    if path.is_file():
        return ""
    if path.is_dir():
        return "it is a folder"
    return "it is not a regular file" if path.exists() else "no such file"


# -- the recipe


def check_script_keys(parsed: ParsedRecipe) -> None:
    """Refuse recipe keys of the built-in trainer that are set for a script, which would not read them."""
    if parsed.script is not None:
        _check_script_keys(parsed.document, parsed.script.name)


def _check_script_keys(document: Mapping[str, Any], script: str, prefix: str = "") -> None:
    for name, value in document.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            _check_script_keys(value, script, f"{key}.")
        elif is_trainer_key(key):
            raise ConfigError(
                f"{key} has no effect on {script}, which has its own model, data, optimizer and loop",
                fix=(
                    f"pass the value to the script: as an argument after {script}, or with --env NAME=VALUE (in a "
                    "sweep --grid env.NAME=VALUE,VALUE)"
                ),
            )


def check_schema(parsed: ParsedRecipe) -> None:
    """Refuse unknown keys, wrong types, values out of range and tables that contradict each other."""
    parsed.values  # noqa: B018 - typed on first access


def check_epoch_keys(parsed: ParsedRecipe) -> None:
    """Refuse the same quantity in epochs and in steps."""
    epochs.check_alternatives(parsed.document, parsed.source)


def check_unused_keys(parsed: ParsedRecipe) -> Notes:
    """Refuse keys that have no effect on the recipe; note those of the file that an override disables."""
    unused = parsed.unused
    # An override may disable keys of the file on purpose. Another run of a sweep may use a key that this one does not.
    if (file_values := parsed.file_values) is not None:
        unused_keys.check_unused_keys(
            {
                key: condition
                for key, condition in unused.items()
                if key not in parsed.override_keys and unused_keys.unused_reason(file_values, key)
            },
            parsed.values,
            parsed.request.target,
        )
    if not parsed.request.sweep_values:
        unused_keys.check_unused_keys(
            {key: condition for key, condition in unused.items() if key in parsed.override_keys}, parsed.values, "--set"
        )
    return unused_keys.format_notes(unused, parsed.recipe)


def check_contract_metric(parsed: ParsedRecipe) -> None:
    """Refuse a contract whose metric the evaluation does not compute."""
    if parsed.script is None:
        check_contract(parsed.recipe, parsed.source)


def check_built_in_images(parsed: ParsedRecipe) -> None:
    """Refuse a model that does not match the images of a built-in dataset."""
    if parsed.script is None:
        image_checks.check_built_in_images(parsed.recipe)


def check_remote_protocol(parsed: ParsedRecipe) -> None:
    """Refuse a checkpoint.remote whose protocol is not known."""
    if parsed.values.checkpoint.remote:
        storage_paths.check_protocol(parsed.values.checkpoint.remote)


def check_traceable(parsed: ParsedRecipe) -> None:
    """Refuse --trace-memory for a script and for the built-in decoder."""
    if parsed.request.count_mode == "trace" and (parsed.script is not None or parsed.values.model.is_decoder):
        reason = (
            "the model of a script is not known before it runs"
            if parsed.script
            else "the memory of the built-in decoder is estimated without a trace"
        )
        raise UsageError(f"--trace-memory: {reason}", fix="omit it; it is for model.entry and the other kinds")


# -- the resolved run


def check_cpu_fp16(run: ResolvedRun) -> None:
    """Refuse fp16 on a CPU that was not asked for."""
    check_fp16(run.spec.recipe.train.precision, run.spec.job.device, run.requested_device)


def note_unused_gpu_type(run: ResolvedRun) -> Notes:
    """Note a --gpu-type that the plan does not use, because the device is the CPU; refuse nothing."""
    options = run.parsed.request.job
    gpu_type = options.get("gpu_type")
    if not gpu_type or run.spec.job.device != "cpu" or "device" in options:
        return []
    return [f'--gpu-type {gpu_type} is not used: the recipe or the profile says device = "cpu"; add --device cuda']


def check_utf8_spec(run: ResolvedRun) -> None:
    """Refuse folders and environment variables that are not UTF-8, as the files of a run are."""
    try:
        msgspec.json.encode(run.spec)
    except UnicodeEncodeError as e:
        raise _not_utf8(e) from e


def check_environment(run: ResolvedRun) -> None:
    """Refuse environment names that a shell cannot export or that clustertrain sets itself."""
    job_script.check_environment(run.spec.env)


def check_time_limit(run: ResolvedRun) -> None:
    """Refuse a time limit that sbatch does not take."""
    time_limits.parse_time_limit_s(run.spec.job.time)


def check_profiled_steps(run: ResolvedRun) -> None:
    """Refuse profiled steps after the last step of the run."""
    train, profiled = run.spec.recipe.train, run.spec.recipe.profiled_steps
    if run.spec.script is None and profiled and profiled[-1] >= train.steps:
        verb = "starts" if profiled[0] >= train.steps else "ends"
        raise ConfigError(
            f"train.profile = {train.profile!r} {verb} after the last step (train.steps = {train.steps})",
            fix=f"profile steps up to {train.steps}, as --profile steps={max(0, train.steps - 10)}:{train.steps}",
        )


def check_preemption_test(run: ResolvedRun) -> Notes:
    """Refuse a preemption test whose preemptions would never happen: on Slurm, or after the last step."""
    test, steps = run.spec.recipe.preemption_test, run.spec.recipe.train.steps
    if run.spec.job.backend != "local":
        if test.preempt_at_steps:
            raise ConfigError(
                "preemption_test.preempt_at_steps: only the local backend runs a preemption test",
                fix="use --backend local, or remove the table",
            )
        is_changed = test.grace_s != PreemptionTestSpec().grace_s
        note = "preemption_test.grace_s has no effect on Slurm, where the grace time of the cluster applies"
        return [note] if is_changed else []
    late_steps = [step for step in test.preempt_at_steps if step >= steps]
    if late_steps and run.spec.script is None:
        raise ConfigError(
            f"preemption_test.preempt_at_steps: step {late_steps[0]} is never reached (train.steps = {steps})",
            fix="name earlier steps",
        )
    return []


# -- the plan


def check_memory(prepared: PreparedRun) -> None:
    """Refuse a plan that is known not to fit into the GPUs' memory."""
    check_fits(prepared.plan)


def check_directives(prepared: PreparedRun) -> None:
    """Refuse --sbatch options that clustertrain sets itself, and control characters in job.sh."""
    if prepared.backend.name == "slurm":
        job_script.build_directives(job_script.script_input(prepared))


def check_data(prepared: PreparedRun) -> Notes:
    """Refuse data that is empty, too short, of another kind or not there; note data that only the nodes may see."""
    return _present(data.check_data(prepared))


def check_pretrained(prepared: PreparedRun) -> Notes:
    """Refuse weights in model.init or init_parts that are missing, damaged or another model's; note what they are."""
    if not prepared.spec.recipe.model.weight_files:
        return None
    from clustertrain.submit.preflight import pretrained  # not at the top: most runs start from random weights

    return _present(pretrained.check_pretrained(prepared))


def check_adapter(prepared: PreparedRun) -> Notes:
    """Refuse dropout of adapters with tensor parallelism, and a wrong adapter.init; note what it is."""
    if not prepared.spec.recipe.adapter.is_enabled:
        return None
    from clustertrain.submit.preflight import adapter  # not at the top: most runs have none

    return _present(adapter.check_adapter(prepared))


def check_epoch_size(prepared: PreparedRun) -> Notes:
    """Note a global batch that is larger than the dataset; refuse nothing."""
    return _present(data.check_epoch_size(prepared))


def check_script_layout(prepared: PreparedRun) -> Notes:
    """Refuse a layout that needs session.train_step for a script that does not call it."""
    script = prepared.spec.script
    if script is None or script.command:
        return None
    source = Path(script.path).read_text(encoding="utf-8", errors="replace")
    plan = prepared.plan
    return _present(script_checks.check_script(plan.layout, plan.precision, source, Path(script.path).name))


def check_alerts(prepared: PreparedRun) -> Notes:
    """Note alert targets that may not work from the compute nodes; refuse nothing."""
    return alerts.check_run_alerts(prepared.spec)


def check_job_python(prepared: PreparedRun) -> Notes:
    """Refuse a recipe or a script with a session if the ranks' Python lacks clustertrain or a suitable torch."""
    script = prepared.spec.script
    if script is not None and script.command:
        return None
    problem = prepared.python.ranks.find_trainer_problem()
    if problem is None:
        return None
    needed_by = f"the built-in trainer ({prepared.parsed.source})" if script is None else script.name
    if prepared.profile.setup:
        return [f"{needed_by}: {problem.message}, without the set-up of the profile"]
    raise UnsuitableEnvironment(f"{needed_by}: {problem.message}", fix=problem.fix)


def check_packages(prepared: PreparedRun) -> None:
    """Refuse a recipe whose optional packages are not installed."""
    packages.check_agent_packages(prepared.spec.recipe, prepared.python.agents)
    if prepared.spec.script is None:
        packages.check_packages(prepared.spec.recipe, prepared.python.ranks)


def check_entries(prepared: PreparedRun) -> Notes:
    """Refuse entries whose module or function does not exist, or which the snapshot would lack."""
    return entry_points.check_entries(prepared) if prepared.spec.script is None else None


def check_trackers(prepared: PreparedRun) -> Notes:
    """Refuse trackers whose packages are not installed, and log_model = "best" without a best checkpoint."""
    return trackers.check_run_trackers(prepared.spec, prepared.python.agents)


def _present(note: str | None) -> list[str]:
    return [note] if note else []


def _not_utf8(e: UnicodeEncodeError) -> UsageError:
    return UsageError(f"{e.object!r} is not UTF-8", fix="use UTF-8; check the locale of the terminal")


REQUEST_CHECKS: tuple[Callable[[SubmitRequest], Notes], ...] = (check_utf8_arguments, check_target)
RECIPE_CHECKS: tuple[Callable[[ParsedRecipe], Notes], ...] = (
    check_script_keys,
    check_schema,
    check_epoch_keys,
    check_unused_keys,
    check_contract_metric,
    check_built_in_images,
    check_remote_protocol,
    check_traceable,
)
RUN_CHECKS: tuple[Callable[[ResolvedRun], Notes], ...] = (
    command_options.check_command_layout,
    command_options.check_command_options,
    commands.note_missing_snapshot,
    check_cpu_fp16,
    note_unused_gpu_type,
    check_utf8_spec,
    check_environment,
    check_time_limit,
    check_profiled_steps,
    check_preemption_test,
)
PLAN_CHECKS: tuple[Callable[[PreparedRun], Notes], ...] = (
    check_memory,
    machine.check_gpu,
    machine.check_size,
    machine.check_home_path,
    machine.check_home_folder,
    machine.check_checkpoint_dir,
    machine.check_checkpoint_storage,
    machine.check_python,
    container.check_container,
    check_job_python,
    ship.check_environment,
    check_directives,
    check_data,
    check_pretrained,
    check_adapter,
    check_epoch_size,
    machine.note_local_backend,
    check_script_layout,
    check_alerts,
    check_packages,
    check_entries,
    check_trackers,
)
