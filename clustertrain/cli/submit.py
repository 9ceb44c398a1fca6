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
    from clustertrain.submit.request import Count, SubmitRequest

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


CONTEXT = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}


def job_options(command: F) -> F:
    for option in reversed((*_JOB_OPTIONS, *_OTHER_OPTIONS)):
        command = option(command)
    return command


def _pairs(option: str, given: tuple[str, ...], *, bare: bool = False) -> dict[str, str]:
    pairs = {}
    for text in given:
        key, sign, value = text.partition("=")
        if not key or not (sign or bare):
            raise UsageError(f"{option} {text!r}: not of the form KEY=VALUE")
        pairs[key] = value
    return pairs


def _profiled(text: str) -> str:
    """``steps=10:20`` as an assignment to the recipe's key, which checks the numbers."""
    what, _, steps = text.partition("=")
    if what != "steps" or not steps:
        raise UsageError(
            f"--profile {text!r}: not of the form steps=FIRST:END", fix="write it as --profile steps=10:20"
        )
    return f'train.profile="{steps}"'


def _look_behind(target: str | None, args: tuple[str, ...]) -> None:
    """All behind a script belongs to it. Who slips shall know, and `submit train.py --dry-run` must not submit, unless
    the script has such an option."""
    context = click.get_current_context()
    ours = {name for parameter in context.command.params for name in parameter.opts if name.startswith("--")}
    given = [arg.partition("=")[0] for arg in (args[: args.index("--")] if "--" in args else args)]
    behind = [name for name in dict.fromkeys(given) if name in ours]
    if "--dry-run" in behind and not _mentions(str(target), "dry.run"):
        raise UsageError(
            f"{context.info_name}: --dry-run stands behind {target}, and what stands there belongs to the script",
            fix=f"clustertrain {context.info_name} --dry-run … {target}",
        )
    if behind:
        verb = "goes" if len(behind) == 1 else "go"
        words = f"{' and '.join(behind)} {verb} to {target}, being behind it; {context.info_name}'s stand before it"
        click.echo(f"note: {words}", err=True)


def _mentions(script: str, pattern: str) -> bool:
    try:
        return re.search(pattern, reading.read_bytes(Path(script)).decode(errors="replace")) is not None
    except OSError:  # said where the script is looked for
        return True


def request_of(options: dict[str, Any], *, count: bool = False) -> SubmitRequest:
    """``count``: whether a model of the user's own is counted where the options do not say it."""
    from clustertrain.submit.code_snapshot import LIMIT_MIB
    from clustertrain.submit.request import SubmitRequest

    asked, trace = options.pop("count_model"), options.pop("trace_memory")
    if trace and asked is False:
        raise UsageError("--trace-memory traces the model that --no-count-model leaves alone", fix="choose one")
    wanted: Count = "trace" if trace else "yes" if (count if asked is None else asked) else "no"
    target, args = options.pop("target"), options.pop("args")
    _look_behind(target, args)
    profile = options.pop("profile")
    sbatch = _pairs("--sbatch", options.pop("sbatch"), bare=True)
    rest = {
        key: options.pop(key) for key in ("assignments", "env", "snapshot_limit_mib", "snapshot_include", "as_json")
    }
    job = {key: value for key, value in options.items() if value is not None}
    return SubmitRequest(
        target=target or "",
        args=args,
        job={**job, "sbatch": sbatch} if sbatch else job,
        assignments=(*rest["assignments"], *([_profiled(profile)] if profile else [])),
        env=_pairs("--env", rest["env"]),
        snapshot_limit_mib=rest["snapshot_limit_mib"] or LIMIT_MIB,
        snapshot_include=rest["snapshot_include"],
        count=wanted,
        argv=tuple(sys.argv),
    )


@click.command(cls=TargetCommand, context_settings=CONTEXT)
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
    request = request_of(options)
    if sweep:
        return submit_swept(request, sweep, at_once, as_json, dry_run=dry_run, wait=wait, option="--sweep")
    if dry_run:
        return _dry_run(request, as_json)
    from clustertrain.submit.transaction import submit as transaction

    done = transaction(request)
    for note in done.notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        shown = {"run": done.run.id, "job_id": done.job_id, "backend": done.backend, "state": done.state}
        print_json({**shown, "run_dir": str(done.run.path)})
    else:
        click.echo(f"run {done.run.id}  job {done.job_id}")
    if wait:
        from clustertrain.cli.jobs import wait_for

        return int(wait_for([done.run], done.run.id))
    if follow:
        from clustertrain.cli.follow import follow as follow_run

        return int(follow_run(done.run))
    return 0


def _dry_run(request: SubmitRequest, as_json: bool) -> int:
    from clustertrain.submit.transaction import dry_run

    made = dry_run(request)
    for line in (*_training(made.plan), *made.plan.reasons, *made.notes):
        click.echo(line, err=True)
    if as_json:
        print_json({"script": made.script, "plan": made.plan})
    else:
        click.echo(made.script, nl=False)
    return 0


def _training(plan: Plan) -> list[str]:
    return [f"{what}: {words}" for what, words in plan.training.items()]


def submit_swept(
    request: SubmitRequest,
    given: tuple[str, ...],
    at_once: int | None,
    as_json: bool,
    *,
    dry_run: bool,
    wait: bool,
    option: str,
) -> int:
    """``option`` is what ``given`` was given with, for errors; returns the exit code."""
    if dry_run:
        return _dry_sweep(request, given, at_once, as_json, option)
    from clustertrain.submit.sweep import submit_sweep, words

    done = submit_sweep(request, given, at_once, option)
    for note in done.notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        rows = [
            {"run": s.run.id, "job_id": s.job_id, "state": s.state, "run_dir": str(s.run.path), "set": values}
            for s, values in done.runs
        ]
        shown = {"sweep": done.folder.name, "job_id": done.job_id, "backend": done.backend}
        print_json({**shown, "sweep_dir": str(done.folder), "runs": rows})
    else:
        click.echo(f"sweep {done.folder.name}" + (f"  job {done.job_id}" if done.job_id else ""))
        for submitted, values in done.runs:
            click.echo(f"run {submitted.run.id}  job {submitted.job_id}  {words(values)}")
    if not wait:
        return 0
    from clustertrain.cli.jobs import wait_for

    return int(wait_for([submitted.run for submitted, _ in done.runs], done.folder.name))


def _dry_sweep(request: SubmitRequest, given: tuple[str, ...], at_once: int | None, as_json: bool, option: str) -> int:
    """As text the array's script and the first run's; as JSON those of all runs."""
    from clustertrain.submit.sweep import dry_sweep, words

    made = dry_sweep(request, given, at_once, option)
    if as_json:
        runs = [{"set": values, "script": run.script, "plan": run.plan} for run, values in made.runs]
        print_json({"script": made.script, "runs": runs})
        return 0
    first, _ = made.runs[0]
    lines = [f"run {n}: {words(values)}" for n, (_, values) in enumerate(made.runs)]
    for line in (*lines, *_training(first.plan), *first.plan.reasons, *made.notes):
        click.echo(line, err=True)
    click.echo(f"{made.script}\n# Run 0:\n\n{first.script}" if made.script else first.script, nl=False)
    return 0
