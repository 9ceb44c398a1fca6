"""``submit``, and the options that ``plan`` has too: options -> SubmitRequest. Thin: what they mean is decided in
launch/."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clustertrain import reading
from clustertrain.cli.common import json_option, print_json
from clustertrain.errors import UsageError

if TYPE_CHECKING:
    from clustertrain.plan.planner import Plan
    from clustertrain.submit.request import CountMode, SubmitRequest

F = TypeVar("F", bound=Callable[..., Any])
_POSITIVE = click.IntRange(min=1)
_LAYOUTS = ["auto", "ddp", "zero1", "fsdp", "fsdp-grad-op", "hybrid-shard"]

# Options of the job by their names in JobSpec. Only what was given reaches the request: profile and recipe hold else.
_JOB_OPTIONS = (
    click.option("--nodes", type=_POSITIVE, metavar="N", help="Nodes."),
    click.option("--gpus", type=_POSITIVE, metavar="G", help="GPUs a node; on device cpu the ranks a node."),
    click.option("--layout", type=click.Choice(_LAYOUTS), help="What the data-parallel ranks share."),
    click.option("--tp", type=_POSITIVE, metavar="N", help="Tensor parallel: ranks that share each layer."),
    click.option("--pp", type=_POSITIVE, metavar="N", help="Pipeline: ranks that each have some of the layers."),
    click.option("--cp", type=_POSITIVE, metavar="N", help="Context parallel: ranks that share each sequence."),
    click.option("--dp-replicate", type=_POSITIVE, metavar="N", help="Replicas; default: what the others leave."),
    click.option("--dp-shard", type=_POSITIVE, metavar="N", help="Ranks that share a replica; default as above."),
    click.option(
        "--backend",
        type=click.Choice(["auto", "slurm", "local"]),
        help="auto: Slurm, or without it this machine.",
    ),
    click.option("--cluster", metavar="PROFILE", help="Cluster profile; default $CLUSTERTRAIN_CLUSTER."),
    click.option(
        "--device", type=click.Choice(["auto", "cuda", "cpu"]), help="auto: what is there, or --gpu-type names."
    ),
    click.option("--gpu-type", metavar="TYPE", help="Type as Slurm names it, for example h100."),
    click.option("--cpus-per-gpu", type=_POSITIVE, metavar="N", help="Cores for each GPU (rank)."),
    click.option("--partition", metavar="NAME"),
    click.option("--account", metavar="NAME"),
    click.option("--qos", metavar="NAME"),
    click.option("--time", metavar="LIMIT", help="As sbatch takes it: minutes, H:M:S, D-H:M:S."),
    click.option("--mem", metavar="SIZE"),
    click.option("--constraint", metavar="LIST"),
    click.option("--exclude", metavar="NODES"),
    click.option("--nodelist", metavar="NODES"),
    click.option("--reservation", metavar="NAME"),
    click.option("--dependency", metavar="LIST"),
    click.option("--name", metavar="NAME", help="First part of the run id; default: the recipe's or script's name."),
    click.option("--checkpoint-dir", metavar="DIR", help="Checkpoints go to DIR/<run-id>."),
    click.option("--max-requeues", type=click.IntRange(min=0), metavar="N", help="Default 50; 0: never."),
    click.option("--share", is_flag=True, default=None, help="The group may read the run (0750 instead of 0700)."),
)
_OTHER_OPTIONS = (
    click.option("--sbatch", multiple=True, metavar="KEY=VALUE", help="Any other option of sbatch, passed through."),
    click.option("--set", "assignments", multiple=True, metavar="KEY.PATH=VALUE", help="Change a value."),
    click.option(
        "--profile",
        metavar="steps=FIRST:END",
        help="Profile the steps FIRST to END - 1: a trace and the costliest operations, in profiles/ of the run.",
    ),
    click.option(
        "--env",
        multiple=True,
        metavar="K=V",
        help="Export to the job; the value is kept out of its files and the record.",
    ),
    click.option("--snapshot-limit-mib", type=_POSITIVE, metavar="MIB", help="Largest code snapshot; default 100."),
    click.option(
        "--snapshot-include",
        multiple=True,
        metavar="PATTERN",
        help="Copy these files too, although they look like secrets or are links out of the repository.",
    ),
    click.option("--count-model/--no-count-model", default=None, help="Build model.entry first; default: plan only."),
    click.option("--trace-memory", is_flag=True, help="Also trace a step of it, for the activations."),
    json_option,
    click.argument("target", required=False, metavar="[RECIPE.toml | SCRIPT.py ARGS…]"),
    click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar=""),
)


class TargetCommand(click.Command):
    """Options may stand on either side of a recipe; all after a script belongs to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        target = self.make_parser(ctx).parse_args(list(args))[0].get("target")
        ctx.allow_interspersed_args = isinstance(target, str) and target.endswith(".toml")
        return super().parse_args(ctx, args)


CONTEXT_SETTINGS = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}


def job_options(command: F) -> F:
    for option in reversed((*_JOB_OPTIONS, *_OTHER_OPTIONS)):
        command = option(command)
    return command


def _parse_pairs(option: str, texts: tuple[str, ...], *, bare: bool = False) -> dict[str, str]:
    pairs = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not key or not (separator or bare):
            raise UsageError(f"{option} {text!r}: not of the form KEY=VALUE")
        pairs[key] = value
    return pairs


def _profile_assignment(text: str) -> str:
    """``steps=10:20`` as an assignment to the recipe's key, which checks the numbers."""
    key, _, steps = text.partition("=")
    if key != "steps" or not steps:
        raise UsageError(
            f"--profile {text!r}: not of the form steps=FIRST:END", fix="write it as --profile steps=10:20"
        )
    return f'train.profile="{steps}"'


def _warn_misplaced_options(target: str | None, args: tuple[str, ...]) -> None:
    """All behind a script belongs to it. Who slips shall know, and `submit train.py --dry-run` must not submit, unless
    the script has such an option."""
    context = click.get_current_context()
    own_options = {name for parameter in context.command.params for name in parameter.opts if name.startswith("--")}
    arg_names = [arg.partition("=")[0] for arg in (args[: args.index("--")] if "--" in args else args)]
    misplaced = [name for name in dict.fromkeys(arg_names) if name in own_options]
    if "--dry-run" in misplaced and not _script_contains(str(target), "dry.run"):
        raise UsageError(
            f"{context.info_name}: --dry-run stands behind {target}, and what stands there belongs to the script",
            fix=f"clustertrain {context.info_name} --dry-run … {target}",
        )
    if misplaced:
        verb = "goes" if len(misplaced) == 1 else "go"
        message = (
            f"{' and '.join(misplaced)} {verb} to {target}, being behind it; {context.info_name}'s stand before it"
        )
        click.echo(f"note: {message}", err=True)


def _script_contains(script: str, pattern: str) -> bool:
    try:
        return re.search(pattern, reading.read_bytes(Path(script)).decode(errors="replace")) is not None
    except OSError:  # said where the script is looked for
        return True


def build_request(options: dict[str, Any], *, count: bool = False) -> SubmitRequest:
    """``count``: whether a model of the user's own is counted where the options do not say it."""
    from clustertrain.submit.code_snapshot import DEFAULT_LIMIT_MIB
    from clustertrain.submit.request import SubmitRequest

    count_model, trace = options.pop("count_model"), options.pop("trace_memory")
    if trace and count_model is False:
        raise UsageError("--trace-memory traces the model that --no-count-model leaves alone", fix="choose one")
    count_mode: CountMode = "trace" if trace else "yes" if (count if count_model is None else count_model) else "no"
    target, args = options.pop("target"), options.pop("args")
    _warn_misplaced_options(target, args)
    profile = options.pop("profile")
    sbatch = _parse_pairs("--sbatch", options.pop("sbatch"), bare=True)
    other_options = {
        key: options.pop(key) for key in ("assignments", "env", "snapshot_limit_mib", "snapshot_include", "as_json")
    }
    job = {key: value for key, value in options.items() if value is not None}
    return SubmitRequest(
        target=target or "",
        args=args,
        job={**job, "sbatch": sbatch} if sbatch else job,
        assignments=(*other_options["assignments"], *([_profile_assignment(profile)] if profile else [])),
        env=_parse_pairs("--env", other_options["env"]),
        snapshot_limit_mib=other_options["snapshot_limit_mib"] or DEFAULT_LIMIT_MIB,
        snapshot_include=other_options["snapshot_include"],
        count_mode=count_mode,
        argv=tuple(sys.argv),
    )


@click.command(cls=TargetCommand, context_settings=CONTEXT_SETTINGS)
@click.option("--dry-run", is_flag=True, help="Print job.sh as it would be submitted; make nothing.")
@click.option("--wait", "wait", is_flag=True, help="Wait for the run's end; exit 0 only if it completed.")
@click.option("--follow", is_flag=True, help="Show progress until the run ends.")
@click.option(
    "--sweep",
    multiple=True,
    metavar="KEY.PATH=V,V,…",
    help="As `sweep --grid`: a run for each value; of several keys for each combination.",
)
@click.option("--at-once", type=_POSITIVE, metavar="K", help="Runs of a sweep at a time; default: all, locally one.")
@job_options
def submit(dry_run: bool, wait: bool, follow: bool, sweep: tuple[str, ...], at_once: int | None, **options: Any) -> int:
    """Plan, render and submit a training run.

    RECIPE.toml trains the built-in model; SCRIPT.py is a script of yours, and all after it belongs to it; with neither,
    the built-in trainer runs its default preset.
    """
    as_json = options["as_json"]
    if wait and follow:
        raise UsageError("--wait and --follow: choose one, --follow waits too")
    if at_once is not None and not sweep:
        raise UsageError("--at-once: only a sweep has several runs", fix="give --sweep too, or leave it out")
    if follow and sweep:
        raise UsageError("--follow shows one run, --sweep submits several", fix="use --wait")
    request = build_request(options)
    if sweep:
        return run_sweep(request, sweep, at_once, as_json, dry_run=dry_run, wait=wait, option="--sweep")
    if dry_run:
        return _dry_run(request, as_json)
    from clustertrain.submit.transaction import submit as transaction

    submitted = transaction(request)
    for note in submitted.notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        document = {
            "run": submitted.run.id,
            "job_id": submitted.job_id,
            "backend": submitted.backend,
            "state": submitted.state,
        }
        print_json({**document, "run_dir": str(submitted.run.path)})
    else:
        click.echo(f"run {submitted.run.id}  job {submitted.job_id}")
    if wait:
        from clustertrain.cli.jobs import wait_for

        return int(wait_for([submitted.run], submitted.run.id))
    if follow:
        from clustertrain.cli.follow import follow as follow_run

        return int(follow_run(submitted.run))
    return 0


def _dry_run(request: SubmitRequest, as_json: bool) -> int:
    from clustertrain.submit.transaction import dry_run

    preview = dry_run(request)
    for line in (*_format_training(preview.plan), *preview.plan.reasons, *preview.notes):
        click.echo(line, err=True)
    if as_json:
        print_json({"script": preview.script, "plan": preview.plan})
    else:
        click.echo(preview.script, nl=False)
    return 0


def _format_training(plan: Plan) -> list[str]:
    return [f"{name}: {text}" for name, text in plan.training.items()]


def run_sweep(
    request: SubmitRequest,
    grid: tuple[str, ...],
    at_once: int | None,
    as_json: bool,
    *,
    dry_run: bool,
    wait: bool,
    option: str,
) -> int:
    """``option`` is what ``grid`` was given with, for errors; returns the exit code."""
    if dry_run:
        return _dry_sweep(request, grid, at_once, as_json, option)
    from clustertrain.submit.sweep import format_values, submit_sweep

    result = submit_sweep(request, grid, at_once, option)
    for note in result.notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        rows = [
            {"run": s.run.id, "job_id": s.job_id, "state": s.state, "run_dir": str(s.run.path), "set": values}
            for s, values in result.runs
        ]
        document = {"sweep": result.folder.name, "job_id": result.job_id, "backend": result.backend}
        print_json({**document, "sweep_dir": str(result.folder), "runs": rows})
    else:
        click.echo(f"sweep {result.folder.name}" + (f"  job {result.job_id}" if result.job_id else ""))
        for submitted, values in result.runs:
            click.echo(f"run {submitted.run.id}  job {submitted.job_id}  {format_values(values)}")
    if not wait:
        return 0
    from clustertrain.cli.jobs import wait_for

    return int(wait_for([submitted.run for submitted, _ in result.runs], result.folder.name))


def _dry_sweep(request: SubmitRequest, grid: tuple[str, ...], at_once: int | None, as_json: bool, option: str) -> int:
    """As text the array's script and the first run's; as JSON those of all runs."""
    from clustertrain.submit.sweep import dry_run_sweep, format_values

    preview = dry_run_sweep(request, grid, at_once, option)
    if as_json:
        runs = [{"set": values, "script": run.script, "plan": run.plan} for run, values in preview.runs]
        print_json({"script": preview.script, "runs": runs})
        return 0
    first, _ = preview.runs[0]
    lines = [f"run {n}: {format_values(values)}" for n, (_, values) in enumerate(preview.runs)]
    for line in (*lines, *_format_training(first.plan), *first.plan.reasons, *preview.notes):
        click.echo(line, err=True)
    click.echo(f"{preview.script}\n# Run 0:\n\n{first.script}" if preview.script else first.script, nl=False)
    return 0
