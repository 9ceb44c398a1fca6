"""The options that ``submit``, ``plan`` and ``sweep`` share, and the request that they make."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clustertrain import reading
from clustertrain.cli.common import json_option
from clustertrain.cli.completion import complete_gpu_types, complete_keys, complete_profiles
from clustertrain.errors import UsageError

if TYPE_CHECKING:
    from clustertrain.submit.request import CountMode, SubmitRequest

    _Choice = click.Choice[str]
else:
    _Choice = click.Choice  # not generic before click 8.2

F = TypeVar("F", bound=Callable[..., Any])
CONTEXT_SETTINGS = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
COMMAND = "clustertrain.command"
"""Key in the context's ``meta`` of the command after ``--``."""
POSITIVE = click.IntRange(min=1)
_LAYOUTS = ["auto", "ddp", "zero1", "fsdp", "fsdp-grad-op", "hybrid-shard"]


class GroupedOption(click.Option):
    """An option with the title of the section of ``--help`` that lists it."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class TargetCommand(click.Command):
    """A command with a target. Options may precede or follow a recipe; arguments after a script are the script's.

    Instead of a target, ``-- COMMAND ARGS`` or ``-m MODULE ARGS`` name any program, which goes to :data:`COMMAND`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args, ctx.meta[COMMAND] = self._split_command(ctx, args)
        target = self.make_parser(ctx).parse_args(list(args))[0].get("target")
        ctx.allow_interspersed_args = isinstance(target, str) and target.endswith(".toml")
        return super().parse_args(ctx, args)

    def _split_command(self, ctx: click.Context, args: list[str]) -> tuple[list[str], tuple[str, ...]]:
        """Return the arguments before the command, and the command; without one, ``args`` and nothing."""
        flags = {
            name for p in self.get_params(ctx) if isinstance(p, click.Option) and (p.is_flag or p.count)
            for name in (*p.opts, *p.secondary_opts)
        }  # fmt: skip
        index = 0
        while index < len(args) and args[index].startswith("-"):
            if args[index] == "--":
                if index + 1 == len(args):
                    raise UsageError("--: no command after it", fix="name a program: -- COMMAND ARGS")
                return args[:index], tuple(args[index + 1 :])
            if args[index] == "-m":
                if index + 1 == len(args):
                    raise UsageError("-m: no module after it", fix="name a module: -m PACKAGE.MODULE ARGS")
                return args[:index], ("python", *args[index:])
            index += 1 if args[index] in flags or "=" in args[index] else 2
        return args, ()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for option in (p for p in self.get_params(ctx) if isinstance(p, click.Option)):
            record = option.get_help_record(ctx)
            if record is not None:
                group = option.group if isinstance(option, GroupedOption) else "Options"
                sections.setdefault(group, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class _LayoutChoice(_Choice):
    """A layout. DeepSpeed's names for sharded layouts are accepted."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert({"zero2": "fsdp-grad-op", "zero3": "fsdp"}.get(value, value), param, ctx)


class _RuntimeChoice(_Choice):
    """A container runtime. What users of related programs write for one is accepted, or refused with the runtime."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "pyxis":
            raise UsageError(
                "--container-runtime pyxis: not needed, since Enroot starts the image",
                fix="--container-runtime enroot, with the image that `enroot import docker://NAME` writes",
            )
        if value == "docker":
            raise UsageError(
                "--container-runtime docker: its daemon would start the ranks outside of the job",
                fix="--container-runtime podman, which takes the same images",
            )
        return super().convert("apptainer" if value == "singularity" else value, param, ctx)


def _option(group: str, *names: str, **settings: Any) -> Callable[[F], F]:
    return click.option(*names, cls=GroupedOption, group=group, **settings)


# Named as in JobSpec. An option that is absent stays out of the request, so that the profile and the recipe decide.
_COMMAND_OPTIONS = (
    _option(
        "Run",
        "--no-hooks",
        "hooks",
        flag_value=False,
        default=None,
        help="Don't inject the hooks that track steps and resume the program.",
    ),
    _option(
        "Run",
        "--stop-signal",
        metavar="NAME[:all]",
        help="Signal that asks a command to stop: TERM (default), USR1, USR2, INT, HUP or none; with :all to all "
        "processes of a rank.",
    ),
    _option(
        "Run",
        "--resume-args",
        multiple=True,
        metavar="ARGS",
        help="Extra arguments of a command from the second attempt on; {checkpoint}, {run_dir} and {attempt} are "
        "replaced.",
    ),
    _option(
        "Run",
        "--checkpoints",
        metavar="PATTERN",
        help="Checkpoints that a command saves, such as 'out/*.pt': the latest complete one resumes it and counts "
        "as progress.",
    ),
)
_JOB_OPTIONS = (
    _option("Resources", "--nodes", type=POSITIVE, metavar="N", help="Number of nodes."),
    _option(
        "Resources",
        "--gpus",
        "--gpus-per-node",
        type=POSITIVE,
        metavar="G",
        help="GPUs per node (ranks per node with --device cpu).",
    ),
    _option(
        "Resources",
        "--gpu-type",
        metavar="TYPE",
        shell_complete=complete_gpu_types,
        help="GPU type as Slurm names it, for example h100.",
    ),
    _option("Resources", "--cpus-per-gpu", type=POSITIVE, metavar="N", help="CPU cores per GPU (per rank on a CPU)."),
    _option("Resources", "--mem", metavar="SIZE", help="Memory per node, as sbatch takes it."),
    _option("Resources", "--time", metavar="LIMIT", help="Time limit: minutes, H:M:S or D-H:M:S."),
    _option(
        "Resources",
        "--device",
        type=click.Choice(["auto", "cuda", "cpu"]),
        help="auto: cuda on Slurm, with --gpu-type or if this machine has a GPU, otherwise cpu.",
    ),
    _option(
        "Parallelism",
        "--layout",
        type=_LayoutChoice(_LAYOUTS),
        help="Data-parallel strategy. zero2 is fsdp-grad-op, and zero3 is fsdp.",
    ),
    _option("Parallelism", "--tp", type=POSITIVE, metavar="N", help="Tensor-parallel degree."),
    _option("Parallelism", "--pp", type=POSITIVE, metavar="N", help="Pipeline-parallel degree."),
    _option("Parallelism", "--cp", type=POSITIVE, metavar="N", help="Context-parallel degree."),
    _option(
        "Parallelism", "--dp-replicate", type=POSITIVE, metavar="N", help="Number of replicas (default: inferred)."
    ),
    _option("Parallelism", "--dp-shard", type=POSITIVE, metavar="N", help="FSDP shard-group size (default: inferred)."),
    _option(
        "Scheduler",
        "--backend",
        type=click.Choice(["auto", "slurm", "local"]),
        help="auto: Slurm if it is installed, otherwise this machine unless the job needs a cluster.",
    ),
    _option(
        "Scheduler",
        "--cluster",
        metavar="PROFILE",
        shell_complete=complete_profiles,
        help="Cluster profile (default: $CLUSTERTRAIN_CLUSTER).",
    ),
    _option("Scheduler", "--partition", metavar="NAME", help="Slurm partition."),
    _option("Scheduler", "--account", metavar="NAME", help="Slurm account to charge."),
    _option("Scheduler", "--qos", metavar="NAME", help="Slurm quality of service."),
    _option("Scheduler", "--constraint", metavar="LIST", help="Node features that the job needs."),
    _option("Scheduler", "--exclude", metavar="NODES", help="Nodes to avoid."),
    _option("Scheduler", "--nodelist", metavar="NODES", help="Nodes to use."),
    _option("Scheduler", "--reservation", metavar="NAME", help="Slurm reservation."),
    _option("Scheduler", "--dependency", metavar="LIST", help="Jobs to wait for, for example afterok:123."),
    _option(
        "Run",
        "--python",
        metavar="PATH",
        help="Python of the ranks: a path, or a name in your PATH (default: the profile's; otherwise submit's own, or "
        "for a script without a session the python in your PATH).",
    ),
    _option(
        "Run",
        "--ship-env/--no-ship-env",
        "environment",
        default=None,
        callback=lambda context, parameter, value: {True: "ship", False: "shared"}.get(value),
        help="Run the ranks' Python from a copy on each node's local disk.",
    ),
    _option("Run", "--name", metavar="NAME", help="First part of the run id (default: the recipe's or script's name)."),
    _option("Run", "--checkpoint-dir", metavar="DIR", help="Write checkpoints to DIR/<run-id>."),
    _option(
        "Run",
        "--max-requeues",
        type=click.IntRange(min=0),
        metavar="N",
        help="Maximum number of requeues; 0 disables them (default: 50).",
    ),
    *_COMMAND_OPTIONS,
    _option(
        "Run",
        "--container",
        metavar="IMAGE",
        help="Run the ranks in this image: a .sif or .sqsh file, an OCI bundle, a folder, or docker://NAME.",
    ),
    _option(
        "Run",
        "--container-runtime",
        type=_RuntimeChoice(["auto", "apptainer", "charliecloud", "crun", "enroot", "podman", "runc"]),
        help="auto: the first one that is installed and takes the image; singularity means apptainer.",
    ),
    _option("Run", "--share", is_flag=True, default=None, help="Let the group read the run (mode 0750, not 0700)."),
)
_OTHER_OPTIONS = (
    _option(
        "Run",
        "--container-mount",
        "container_mounts",
        multiple=True,
        metavar="SRC[:DST[:ro|rw]]",
        help="Mount a host path into the containers (repeatable); ro: read-only, rw: writable (default).",
    ),
    _option("Scheduler", "--sbatch", multiple=True, metavar="KEY=VALUE", help="Pass another option to sbatch."),
    _option(
        "Run",
        "--set",
        "assignments",
        multiple=True,
        metavar="KEY.PATH=VALUE",
        shell_complete=complete_keys,
        help="Set a recipe key.",
    ),
    _option(
        "Run",
        "--profile",
        metavar="steps=FIRST:END",
        help="Profile steps FIRST to END - 1. The trace and the most expensive operations go to profiles/ in the run.",
    ),
    _option(
        "Run",
        "--env",
        multiple=True,
        metavar="K=V",
        help="Set an environment variable in the job. The value stays out of the job script and the record.",
    ),
    _option(
        "Code snapshot",
        "--snapshot-limit-mib",
        type=POSITIVE,
        metavar="MIB",
        help="Maximum size of the code snapshot (default: 100).",
    ),
    _option(
        "Code snapshot",
        "--snapshot-include",
        multiple=True,
        metavar="PATTERN",
        help="Also copy matching files that look like secrets or are links out of the repository.",
    ),
    _option(
        "Model counting",
        "--count-model/--no-count-model",
        default=None,
        help="Instantiate model.entry to count its parameters (default: only for `plan`).",
    ),
    _option("Model counting", "--trace-memory", is_flag=True, help="Also trace one step of it to measure activations."),
    json_option,
    click.argument("target", required=False, metavar="[RECIPE.toml | SCRIPT.py ARGS…]"),
    click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar=""),
)


def job_options(command: F) -> F:
    """Add the shared options and the target to a command."""
    for option in reversed((*_JOB_OPTIONS, *_OTHER_OPTIONS)):
        command = option(command)
    return command


def command_options(command: F) -> F:
    """Add the options on how a command stops and resumes."""
    for option in reversed(_COMMAND_OPTIONS):
        command = option(command)
    return command


def build_request(options: dict[str, Any], *, count: bool = False) -> SubmitRequest:
    """Build the request from the values of :func:`job_options`.

    Args:
        options: values by parameter name; the shared ones are removed.
        count: whether to count a user's model if the options do not say.

    Raises:
        UsageError: the options contradict each other, or one is malformed.
    """
    from clustertrain.submit.request import SubmitRequest
    from clustertrain.submit.snapshot.code_snapshot import DEFAULT_LIMIT_MIB

    count_model, trace = options.pop("count_model"), options.pop("trace_memory")
    if trace and count_model is False:
        raise UsageError("--trace-memory needs the model that --no-count-model skips", fix="use one of them")
    count_mode: CountMode = "trace" if trace else "yes" if (count if count_model is None else count_model) else "no"
    target, args = options.pop("target"), options.pop("args")
    _warn_misplaced_options(target, args)
    profile = options.pop("profile")
    sbatch = _parse_pairs("--sbatch", options.pop("sbatch"), bare=True)
    other_options = {
        key: options.pop(key) for key in ("assignments", "env", "snapshot_limit_mib", "snapshot_include", "as_json")
    }
    mounts = options.pop("container_mounts")
    job = build_job(options)
    job |= {"container_mounts": mounts} if mounts else {}
    return SubmitRequest(
        target=target or "",
        args=args,
        command=click.get_current_context().meta.get(COMMAND, ()),
        job={**job, "sbatch": sbatch} if sbatch else job,
        assignments=(*other_options["assignments"], *([_profile_assignment(profile)] if profile else [])),
        env=_parse_pairs("--env", other_options["env"]),
        snapshot_limit_mib=other_options["snapshot_limit_mib"] or DEFAULT_LIMIT_MIB,
        snapshot_include=other_options["snapshot_include"],
        count_mode=count_mode,
        argv=tuple(sys.argv),
    )


def _parse_pairs(option: str, texts: tuple[str, ...], *, bare: bool = False) -> dict[str, str]:
    pairs = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not key or not (separator or bare):
            raise UsageError(f"{option} {text!r} is not KEY=VALUE", fix=f"for example {option} NAME=value")
        pairs[key] = value
    return pairs


def _profile_assignment(text: str) -> str:
    """Turn ``steps=10:20`` into an assignment to the recipe key, which checks the numbers."""
    key, _, steps = text.partition("=")
    if key != "steps" or not steps:
        raise UsageError(f"--profile {text!r} is not steps=FIRST:END", fix="for example --profile steps=10:20")
    return f'train.profile="{steps}"'


def build_job(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job keys that the options have set, by their names in JobSpec."""
    given = {**options, "resume_args": " ".join(options["resume_args"]) or None}
    return {key: value for key, value in given.items() if value is not None}


def _warn_misplaced_options(target: str | None, args: tuple[str, ...]) -> None:
    """Warn about clustertrain's options after a script, which go to the script.

    ``submit train.py --dry-run`` must not submit a job, so it is an error unless the script has such an option itself.
    """
    context = click.get_current_context()
    own_options = {name for parameter in context.command.params for name in parameter.opts if name.startswith("--")}
    arg_names = [arg.partition("=")[0] for arg in (args[: args.index("--")] if "--" in args else args)]
    misplaced = [name for name in dict.fromkeys(arg_names) if name in own_options]
    if "--dry-run" in misplaced and not _script_contains(str(target), "dry.run"):
        raise UsageError(
            f"{context.info_name}: --dry-run after {target} would be passed to the script",
            fix=f"put it before: clustertrain {context.info_name} --dry-run … {target}",
        )
    if misplaced:
        verb = "was" if len(misplaced) == 1 else "were"
        message = f"{' and '.join(misplaced)} {verb} passed to {target}; put {context.info_name}'s options before it"
        click.echo(f"note: {message}", err=True)


def _script_contains(script: str, pattern: str) -> bool:
    try:
        return re.search(pattern, reading.read_bytes(Path(script)).decode(errors="replace")) is not None
    except OSError:  # a later check reports it
        return True
