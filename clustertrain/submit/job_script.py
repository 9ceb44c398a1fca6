"""Render job.sh from a RunSpec and a Plan. The template is the only file that is read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from clustertrain import settings
from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import JobSpec, RunSpec
from clustertrain.config.parsing.time_limits import parse_time_limit_s
from clustertrain.errors import ConfigError
from clustertrain.plan.planner import Plan
from clustertrain.run import run_dir
from clustertrain.run.run_dir import RunDir
from clustertrain.submit import templates
from clustertrain.submit.prepared_run import PreparedRun
from clustertrain.submit.snapshot import python_path

# clustertrain sets these: another value would contradict the plan or break the batch process and the agents.
_MANAGED_OPTIONS = {
    "nodes": "--nodes", "ntasks": "--nodes", "ntasks-per-node": "--nodes", "gpus": "--gpus", "gpus-per-node": "--gpus",
    "gpus-per-task": "--gpus", "cpus-per-task": "--cpus-per-gpu", "job-name": "--name", "time": "--time",
    "array": "", "chdir": "", "output": "", "open-mode": "", "requeue": "", "no-requeue": "--max-requeues 0",
    "signal": "signal_lead_s in the cluster profile", "wrap": "", "parsable": "", "test-only": "--dry-run",
    "wait": "--wait",
}  # fmt: skip
_READONLY = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})


@dataclass(frozen=True)
class ScriptInput:
    """Everything that job.sh depends on."""

    run: RunDir
    spec: RunSpec
    profile: ClusterProfile
    plan: Plan
    python: str
    """Interpreter of the batch process and the agents."""
    home: Path
    code_paths: Sequence[Path] = field(default=())
    """Folders of the snapshot that go to the front of PYTHONPATH."""


def script_input(
    prepared: PreparedRun, run: RunDir | None = None, spec: RunSpec | None = None, code_paths: Sequence[Path] = ()
) -> ScriptInput:
    """Return the input of job.sh. Without ``run``, only the directives except the job's name are correct."""
    return ScriptInput(
        run=run or RunDir(run_dir.runs_folder() / "unnamed"),
        spec=spec or prepared.spec,
        profile=prepared.profile,
        plan=prepared.plan,
        python=prepared.python.agents.path,
        home=settings.home(),
        code_paths=code_paths,
    )


def render_dry_run_script(prepared: PreparedRun) -> str:
    """Return job.sh as it would be submitted, except for the random end of the run id."""
    run = RunDir(run_dir.runs_folder() / f"{run_dir.slugify(prepared.spec.job.name)}-xxxxxx")
    paths: list[Path] = []
    if prepared.code is not None:
        root, package = python_path.locate_in_snapshot(prepared.code)
        script = prepared.spec.script
        paths = python_path.build_python_path(run.code, root, package if script is None or script.is_package else None)
    return render_job_script(script_input(prepared, run, prepared.spec, paths))


def render_job_script(inputs: ScriptInput) -> str:
    """Return the text of job.sh.

    Raises:
        ConfigError: a value contains control characters, clustertrain sets an option itself, or an environment name is
            invalid.
    """
    spec, plan = inputs.spec, inputs.plan
    check_environment(spec.env)
    for label, value in (("the run folder", str(inputs.run.path)), ("the interpreter", inputs.python)):
        _check_control_characters(label, value)
    slurm = spec.job.backend == "slurm" and not spec.wrapped
    return templates.render_template(
        "job.sh.j2",
        {
            "directives": build_directives(inputs) if slurm else [],
            "setup": () if spec.wrapped else inputs.profile.setup,  # the user's batch script has its own
            "python": inputs.python,
            "home": str(inputs.home),
            "run_dir": str(inputs.run.path),
            "user_env": sorted((name, value) for name, value in spec.env.items() if name not in spec.secret_env),
            "secret_env": secret_names(spec),
            "plan_env": sorted((name, setting.value) for name, setting in {**plan.nccl, **plan.env}.items()),
            "python_path": ":".join(str(p) for p in inputs.code_paths),
            "starts": "agent" if spec.wrapped else spec.job.backend,
            "step_options": _srun_options(inputs) if slurm else _local_options(spec.job),
        },
    )


def secret_names(spec: RunSpec) -> list[str]:
    """Return the names of the variables that hold secrets of the run."""
    return [*spec.secret_env, *([settings.WEBHOOK] if spec.recipe.telemetry.alerts.webhook else [])]


def format_secrets(spec: RunSpec) -> str:
    """Return the text of secrets.sh, which job.sh sources; empty if there are no secrets."""
    values = {**spec.env, settings.WEBHOOK: spec.recipe.telemetry.alerts.webhook}
    return "".join(f"export {name}={shlex.quote(values[name])}\n" for name in secret_names(spec))


def redact_secrets(spec: RunSpec) -> RunSpec:
    """Return ``spec`` as it is stored, without the values of secret variables."""
    env = {name: value for name, value in spec.env.items() if name not in spec.secret_env}
    alerts = spec.recipe.telemetry.alerts
    if alerts.webhook:
        alerts = msgspec.structs.replace(alerts, webhook="", webhook_env=settings.WEBHOOK)
    telemetry = msgspec.structs.replace(spec.recipe.telemetry, alerts=alerts)
    recipe = msgspec.structs.replace(spec.recipe, telemetry=telemetry)
    return msgspec.structs.replace(spec, env=env, recipe=recipe)


def render_array_script(inputs: ScriptInput, sweep_id: str, tasks: int, max_concurrent: int | None) -> str:
    """Return the text of a sweep's job.sh, in which every task executes the job.sh of its run.

    ``inputs`` may be those of any of its runs, which all have the same directives.
    """
    # %a is the task number; the sweep's folder has a link of that name to the run.
    overrides = {"job-name": sweep_id, "output": "%a/job.log"}
    pairs = [("array", f"0-{tasks - 1}" + (f"%{max_concurrent}" if max_concurrent else ""))]
    pairs += [(key, overrides.get(key, value)) for key, value in build_directives(inputs)]
    return templates.render_template("array.sh.j2", {"directives": pairs})


def build_directives(inputs: ScriptInput) -> list[tuple[str, str]]:
    """Return the ``#SBATCH`` options in order; an empty value stands for a flag.

    User options come last, because sbatch uses the last value of an option.
    """
    job = inputs.spec.job
    pairs = [("job-name", inputs.run.id), ("nodes", str(job.nodes)), ("ntasks-per-node", "1")]
    pairs += _resource_options(inputs)
    for key in ("mem", "time", "partition", "account", "qos", "constraint", "exclude", "nodelist", "reservation",
                "dependency"):  # fmt: skip
        pairs.append((key, getattr(job, key)))
    if parse_time_limit_s(job.time) is not None:
        # Without `B:`, Slurm signals the job steps, that is, the agents, and not the batch shell.
        pairs.append(("signal", f"USR2@{inputs.plan.signal_lead_s}"))
    pairs = [(key, value) for key, value in pairs if value]
    # Relative to --chdir, which is an argument of sbatch: the run folder is the job's WorkDir.
    requeue = "requeue" if job.max_requeues else "no-requeue"
    pairs += [(requeue, ""), ("open-mode", "append"), ("output", "job.log")]
    values = dict(pairs)
    for key, value in job.sbatch.items():
        name = _check_option(key, value)
        # sbatch uses only the last --gres, which must therefore include the GPUs.
        pairs.append((name, f"{values['gres']},{value}" if name == "gres" and name in values else value))
    for key, value in pairs:
        _check_control_characters(f"--{key}", value)
    return pairs


def _resource_options(inputs: ScriptInput) -> list[tuple[str, str]]:
    """Return the options for GPUs and cores per node, which sbatch and srun share."""
    job = inputs.spec.job
    pairs = []
    # On the CPU `gpus` counts ranks. A named GPU type still requests devices, to test a GPU job without GPUs.
    if inputs.plan.device == "cuda" or job.gpu_type:
        type_prefix = f"{job.gpu_type}:" if job.gpu_type else ""
        flag = inputs.profile.gpus_flag
        pairs.append((flag, f"gpu:{type_prefix}{job.gpus}" if flag == "gres" else f"{type_prefix}{job.gpus}"))
    cores = job.cpus_per_gpu * job.gpus or (job.gpus if inputs.plan.device == "cpu" else 0)
    if cores:
        pairs.append(("cpus-per-task", str(cores)))
    return pairs


def _srun_options(inputs: ScriptInput) -> list[str]:
    options = [
        f"--nodes={inputs.spec.job.nodes}",
        "--ntasks-per-node=1",
        # A node that exits must not make Slurm kill the others during a checkpoint: the batch process decides.
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--export=ALL",
        f"--task-epilog={inputs.run.agent_end_script}",
        "--cpu-bind=none",  # the ranks share the cores; a mask inherited from the batch step would pin them
    ]
    # srun since 22.05 does not inherit --cpus-per-task from sbatch.
    options += [f"--{key}={value}" for key, value in _resource_options(inputs)]
    return [shlex.quote(option) for option in options]


def _local_options(job: JobSpec) -> list[str]:
    return [f"--nodes {job.nodes}", f"--gpus {job.gpus}"]


def _check_option(key: str, value: str) -> str:
    name = key.lstrip("-").replace("_", "-")
    if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
        raise ConfigError(f"--sbatch {key!r}: not the name of an sbatch option", fix="use the long name")
    # sbatch accepts abbreviated names; no other option is a prefix of one of these.
    managed = next((option for option in _MANAGED_OPTIONS if option.startswith(name)), None)
    if managed is not None:
        alternative = _MANAGED_OPTIONS[managed]
        raise ConfigError(
            f"--sbatch {name}={value}: clustertrain sets --{managed} itself",
            fix=f"use {alternative}" if alternative else "omit it",
        )
    if name == "gres" and re.search(r"(^|,)gpu\b", value):
        raise ConfigError(
            f"--sbatch {name}={value}: clustertrain requests the GPUs",
            fix="use --gpus and --gpu-type; set gpus_flag in the cluster profile if the site requests GPUs as a GRES",
        )
    return name


def _check_control_characters(label: str, value: str) -> None:
    if any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise ConfigError(
            f"{label} = {value!r}: control characters such as line breaks are not allowed", fix="remove them"
        )


def check_environment(env: dict[str, str]) -> None:
    """Raise ConfigError for a name that a shell cannot export or that clustertrain sets itself."""
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(
                f"env {name!r}: not a valid name of an environment variable",
                fix="use letters, digits and underscores, and do not start with a digit",
            )
        if name in _READONLY or name.startswith("CLUSTERTRAIN_"):
            owner = "bash" if name in _READONLY else "clustertrain"
            raise ConfigError(f"env {name}: is set by {owner} and cannot be changed here", fix="omit it")
        if "\0" in value:
            raise ConfigError(f"env {name}: the value contains a NUL character", fix="remove it")
