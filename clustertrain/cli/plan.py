"""``clustertrain plan``: show what submit would choose and why."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clustertrain.cli.common import print_json
from clustertrain.cli.job_options import CONTEXT_SETTINGS, TargetCommand, build_request, job_options
from clustertrain.documentation import page_url
from clustertrain.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clustertrain.plan.cost.memory import MemoryEstimate
    from clustertrain.plan.planner import Plan
    from clustertrain.report.documents.plans import PlanOfSize
    from clustertrain.scheduler.registry import Purpose
    from clustertrain.submit.prepared_run import PreparedRun
    from clustertrain.submit.request import SubmitRequest

MAX_LEFT_SHARE = 0.6  # maximum share of the width for the left column
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(cls=TargetCommand, context_settings=CONTEXT_SETTINGS)
@click.option(
    "--why", is_flag=True, help="Also show the training settings, the reasons, the runners-up and the environment."
)
@click.option("--find-micro-batch", is_flag=True, help="Find the largest micro-batch by training a few steps here.")
@click.option("--gpus-range", metavar="LOW-HIGH", help="Plan for several numbers of GPUs with the same global batch.")
@click.option("--table", type=_FILE, metavar="IN.csv", help="Predict each row of a table of configurations.")
@click.option(
    "-o",
    "--output",
    "out",
    type=click.Path(path_type=Path),
    metavar="OUT.csv",
    help="Output file of --table (default: stdout).",
)
@click.option("--calibrate", is_flag=True, help="With --table, calibrate each source by its middle measured row.")
@job_options
def plan(
    why: bool,
    find_micro_batch: bool,
    gpus_range: str | None,
    table: Path | None,
    out: Path | None,
    calibrate: bool,
    **options: Any,
) -> int:
    """Show what submit would choose; submit nothing. --why explains the choices.

    \b
    clustertrain plan recipe.toml --nodes 4 --gpus 8 --gpu-type h100
    clustertrain plan recipe.toml --gpus 8 --gpu-type h100 --gpus-range 8-64
    """
    as_json = options["as_json"]
    if table is not None and (gpus_range is not None or find_micro_batch):
        other = "--gpus-range" if gpus_range is not None else "--find-micro-batch"
        raise UsageError(f"--table is for a file and {other} for a recipe", fix="use one of them")
    if table is not None:
        return write_predictions(table, out, calibrate=calibrate, as_json=as_json)
    if out is not None or calibrate:
        raise UsageError("--output and --calibrate need --table", fix="add --table IN.csv")
    if gpus_range is not None:
        return _show_range(build_request(options), gpus_range, as_json=as_json)
    from clustertrain.submit.checks import check_script_layout
    from clustertrain.submit.prepare import prepare

    purpose: Purpose = "here" if find_micro_batch else "plan"
    prepared = prepare(build_request(options, count=not find_micro_batch), purpose=purpose)
    for note in check_script_layout(prepared) or ():
        click.echo(f"note: {note}", err=True)
    if find_micro_batch:
        from clustertrain.cli.find_micro_batch import report_micro_batch_search

        return report_micro_batch_search(prepared, as_json=as_json)
    if as_json:
        print_json("plan", prepared.plan)
        return 0
    script = prepared.spec.script
    command = script.name if script is not None and script.command else ""
    _show(prepared.plan, command, format_verdict(prepared), why=why)
    return 0


def _show(chosen: Plan, command: str, verdict: str, *, why: bool) -> None:
    """Print the plan.

    Args:
        command: name of the program whose layout is not known; empty for other runs.
        verdict: the first line; empty if there is none.
        why: print all of it, not only what to check before the job is submitted.
    """
    from rich.text import Text

    from clustertrain.report.terminal import emit, make_console

    console = make_console()
    parts: list[RenderableType] = [Text(verdict, style="bold")] if verdict else []
    parts.append(_format_rows(_summary(chosen, command), console.width))
    sections: list[tuple[str, list[tuple[str, str]]]] = [
        ("What would fit", [("", chosen.suggested_changes)] if chosen.suggested_changes else []),
        ("Warnings", [("", warning) for warning in chosen.warnings]),
        ("Command", list(chosen.training.items()) if command else []),
    ]
    for title, rows in [*sections, *(_reasons(chosen, command) if why else [])]:
        if rows:
            parts += [Text(f"\n{title}", style="bold"), _format_rows(rows, console.width)]
    hint = "\n--why also shows the training settings, the reasons, the runners-up and the environment."
    emit(console, *parts, *([] if why else [hint]))


def format_verdict(prepared: PreparedRun) -> str:
    """Return the plan in one line: layout, speed, memory, and the time of the whole run; empty for a script.

    For example ``fsdp on 32 x h100: 4.88 s per step, MFU 39%, 48.8 of 80 GiB; 200 steps in 16m16s, 8.7 GPU-hours``, or
    ``fsdp on 4 CPU ranks: 15.8 MiB per rank; 120 steps, speed not predicted on a CPU``.
    """
    from clustertrain.durations import format_duration
    from clustertrain.plan.layout import format_number, pluralize
    from clustertrain.plan.request import PlanRequest

    if prepared.spec.script is not None:
        return ""
    chosen, gpu_type = prepared.plan, prepared.spec.job.gpu_type
    step_s, total_steps = chosen.time.step_s, prepared.spec.recipe.train.steps
    request = PlanRequest(prepared.spec, chosen.device, prepared.profile)
    gpu = request.gpu
    if gpu is not None:
        ranks, reason = f"{chosen.world_size} x {gpu.name}", "for this model"
    elif chosen.device == "cpu":
        ranks, reason = pluralize(chosen.world_size, "CPU rank"), "on a CPU"
    elif gpu_type:
        ranks, reason = f"{chosen.world_size} x {gpu_type}", "for an unknown GPU type"
    else:
        ranks, reason = pluralize(chosen.world_size, "GPU"), "without --gpu-type"
    if not prepared.spec.recipe.model.is_decoder:
        reason = "for this model"
    parts = [] if step_s is None else [f"{format_number(step_s)} s per step"]
    if chosen.time.mfu is not None:
        parts.append(f"MFU {chosen.time.mfu:.0%}")
    parts += _format_peak(chosen.memory)
    if request.may_not_fit(chosen.memory.peak_gib):
        parts.append("may not fit")
    whole = f"{total_steps:,} steps, speed not predicted {reason}"
    if step_s is not None:
        gpu_hours = total_steps * step_s * chosen.world_size / 3600
        whole = (
            f"{total_steps:,} steps in {format_duration(total_steps * step_s)}, {format_number(gpu_hours)} GPU-hours"
        )
    elif gpu is not None and not chosen.memory.fits:
        whole = ""
    shown = "; ".join(filter(None, (", ".join(parts), whole)))
    return f"{chosen.layout.describe()} on {ranks}: {shown}"


def _format_peak(memory: MemoryEstimate) -> list[str]:
    """Return the memory of a rank, or as much of it as is known."""
    from clustertrain.plan.layout import format_gib, format_number

    if memory.peak_gib is not None and memory.capacity_gib is not None:
        fit = "" if memory.fits else ", DOES NOT FIT"
        return [f"{format_number(memory.peak_gib)} of {memory.capacity_gib:g} GiB{fit}"]
    if memory.peak_gib is not None:
        return [f"{format_gib(memory.peak_gib)} per rank"]
    known = [gib for gib in (memory.params_gib, memory.grads_gib, memory.optimizer_gib) if gib is not None]
    return [f"{format_gib(sum(known))} per rank without activations"] if known else []


def _reasons(chosen: Plan, command: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the sections of ``--why``."""
    return [
        ("Training", [] if command else list(chosen.training.items())),
        ("Why", [("", reason) for reason in chosen.reasons if reason not in chosen.warnings]),
        (
            "Runners-up",
            [(r.layout, _format_rates(r.step_s, r.tokens_per_s_per_gpu, r.peak_gib)) for r in chosen.runners_up],
        ),
        ("Not chosen", [(r.strategy, r.reason) for r in chosen.rejected]),
        ("Environment", [(f"{n}={s.value}", s.reason) for n, s in {**chosen.nccl, **chosen.env}.items()]),
    ]


def _format_rows(rows: list[tuple[str, str]], width: int) -> RenderableType:
    from rich.padding import Padding
    from rich.table import Table

    # NAME=value must not be wrapped, or it cannot be copied.
    no_wrap = 0 < max(len(left) for left, _ in rows) <= MAX_LEFT_SHARE * width
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold", no_wrap=no_wrap)
    table.add_column(overflow="fold")
    for left, right in rows:
        table.add_row(left, right) if left else table.add_row(right)
    return Padding(table, (0, 0, 0, 2))


def _format_rates(step_s: float, tokens_per_s: float, peak_gib: float) -> str:
    from clustertrain.plan.layout import format_gib, format_number

    return f"{format_number(step_s)} s per step, {tokens_per_s:,.0f} tokens/s per GPU, {format_gib(peak_gib)} per rank"


def _layout_details(chosen: Plan) -> str:
    """Return the details of the layout that its name does not say."""
    layout = chosen.layout
    details = {
        f"activation checkpointing {layout.activation_checkpointing}": layout.activation_checkpointing != "none",
        "gradients reduced in each micro-batch": not layout.defer_reduction and chosen.batch.grad_accum > 1,
        "offload": layout.offload,
        f"{layout.virtual_stages} stages per rank": layout.virtual_stages > 1,
    }
    return ", ".join(text for text, applies in details.items() if applies)


def _summary(chosen: Plan, command: str = "") -> list[tuple[str, str]]:
    from clustertrain.plan.layout import format_gib, format_number, pluralize

    layout, batch, memory = chosen.layout, chosen.batch, chosen.memory
    ranks = f"{pluralize(chosen.world_size, 'rank')} = {pluralize(chosen.nodes, 'node')} x {chosen.gpus_per_node}"
    if command:
        return [("command", f"{command} on {ranks}, device {chosen.device}")]
    rows = [("layout", f"{layout.describe()} on {ranks}, device {chosen.device}, precision {chosen.precision}")]
    if details := _layout_details(chosen):
        rows.append(("with", details))
    if layout.is_model_parallel or layout.strategy == "hybrid-shard":
        rows.append(("mesh", f"{layout.format_degrees()}, adjacent ranks last"))
    if batch.global_batch:
        split = f"{batch.micro_batch} x {batch.grad_accum} x {layout.data_parallel}"
        rows.append(("batch", f"{batch.global_batch:,} = {split} (micro_batch x grad_accum x data parallel)"))
    if memory.peak_gib is not None:
        capacity = "unknown" if memory.capacity_gib is None else f"{memory.capacity_gib:g} GiB"
        fits = {True: ", fits", False: ", DOES NOT FIT", None: ""}[memory.fits]
        rows.append(("memory", f"{format_gib(memory.peak_gib)} per rank, capacity {capacity}{fits}"))
    elif memory.params_gib is not None:
        sizes = {"parameters": memory.params_gib, "gradients": memory.grads_gib, "optimizer": memory.optimizer_gib}
        states = ", ".join(f"{name} {format_gib(size)}" for name, size in sizes.items() if size is not None)
        unknown = "activations" if memory.optimizer_gib is not None else "optimizer and activations"
        rows.append(("memory", f"{states} per rank; {unknown} unknown"))
    time = chosen.time
    if time.step_s is not None and time.tokens_per_s_per_gpu is not None and time.tflops_per_gpu is not None:
        mfu = f", MFU {time.mfu:.1%}" if time.mfu is not None else ""
        rows.append(("speed",
                     f"{format_number(time.step_s)} s per step, {time.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, "
                              f"{format_number(time.tflops_per_gpu)} TFLOP/s per GPU{mfu}, predicted"))  # fmt: skip
    if chosen.time.bubble_fraction is not None:
        rows.append(("bubble", f"{chosen.time.bubble_fraction:.0%} of a step, during which a pipeline rank waits"))
    return rows


def _show_range(request: SubmitRequest, text: str, *, as_json: bool) -> int:
    """Show a row per number of GPUs: the plan, its speed, and the scaling efficiency relative to the smallest.

    All sizes use the recipe's global batch or, without one, that of the largest size.
    """
    from clustertrain.report.plan_range import print_table
    from clustertrain.submit.prepare import prepare

    first_prepared = prepare(request, purpose="plan")
    gpus_per_node = first_prepared.spec.job.gpus
    batch = first_prepared.spec.recipe.train.global_batch
    sizes = parse_gpu_counts(text, gpus_per_node)
    if not batch:
        batch = prepare(_with_gpus(request, sizes[-1], gpus_per_node, 0), purpose="plan").plan.batch.global_batch
    rows: list[tuple[int, Plan | None, str]] = []
    backend = None  # the largest size decides: a part of one node must not be planned for this machine and its CPU
    for size in reversed(sizes):
        try:
            prepared = prepare(_with_gpus(request, size, gpus_per_node, batch), backend, "plan")
            backend = prepared.backend
            rows.insert(0, (size, prepared.plan, ""))
        except ConfigError as e:
            rows.insert(0, (size, None, str(e)))
    predicted = [(n, plan) for n, plan, _ in rows if plan is not None and plan.time.tokens_per_s_per_gpu]
    base_rate = predicted[0][1].time.tokens_per_s_per_gpu if predicted else None
    entries = [_build_entry(n, plan, reason, base_rate) for n, plan, reason in rows]
    if as_json:
        from clustertrain.report.documents.plans import PlansBySize

        print_json("plan-gpus-range", PlansBySize(global_batch=batch, sizes=tuple(entries)))
    else:
        print_table(entries, batch, gpus_per_node)
    return 0


def parse_gpu_counts(text: str, gpus_per_node: int) -> list[int]:
    """Parse ``8-64`` as 8, 16, 32, 64 and ``8,24,64`` as itself.

    Raises:
        UsageError: the form is wrong, or a number is neither a multiple nor a divisor of ``gpus_per_node``.
    """
    match = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", text)
    if match:
        low, high = int(match[1]), int(match[2])
        sizes = [low << n for n in range(64) if low and low << n <= high]
    else:
        sizes = [int(part) for part in text.split(",") if re.fullmatch(r"\s*[0-9]{1,9}\s*", part)]
        if len(sizes) != text.count(",") + 1:
            sizes = []
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--gpus-range {text!r} is not LOW-HIGH or N,N,N", fix="for example --gpus-range 8-64")
    invalid = [n for n in sizes if n % gpus_per_node and (n > gpus_per_node or gpus_per_node % n)]
    if invalid:
        raise UsageError(
            f"--gpus-range {text!r}: {invalid[0]} is not a multiple of {gpus_per_node} GPUs per node",
            fix="use multiples, or change --gpus",
        )
    return sorted(set(sizes))


def _with_gpus(request: SubmitRequest, size: int, gpus_per_node: int, batch: int) -> SubmitRequest:
    nodes, gpus = (size // gpus_per_node, gpus_per_node) if size >= gpus_per_node else (1, size)
    extra = (f"train.global_batch={batch}",) if batch else ()
    return replace(
        request, job={**request.job, "nodes": nodes, "gpus": gpus}, assignments=(*request.assignments, *extra)
    )


def _build_entry(size: int, plan: Plan | None, reason: str, base_rate: float | None) -> PlanOfSize:
    from clustertrain.report.documents.plans import PlanOfSize

    if plan is None:
        return PlanOfSize(gpus=size, reason=reason)
    rate = plan.time.tokens_per_s_per_gpu
    return PlanOfSize(
        gpus=size,
        layout=plan.layout.describe(),
        step_s=plan.time.step_s,
        tokens_per_s=rate * size if rate else None,
        efficiency=rate / base_rate if rate and base_rate else None,
        peak_gib=plan.memory.peak_gib,
        fits=plan.memory.fits,
        reason=plan.suggested_changes,
    )


def write_predictions(source: Path, out: Path | None, *, calibrate: bool, as_json: bool) -> int:
    """Write the columns of ``source``, followed by those of ``predict.COLUMNS``.

    Raises:
        ConfigError: the file is not a CSV table with the required columns, or ``out`` cannot be written.
    """
    from clustertrain import fsio, schema
    from clustertrain.plan.table import predict

    if out is not None and out.exists() and not out.is_file():
        raise ConfigError(f"{out} is not a regular file and would be replaced", fix="set --output to a file name")
    columns, rows = _read_table(source)
    predictions = predict.predict(rows, calibrate=calibrate)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    input_columns = [name for name in columns if name not in predict.COLUMNS]
    writer.writerow([*input_columns, *predict.COLUMNS])
    for row, prediction in zip(rows, predictions, strict=True):
        writer.writerow([*(row[name] for name in input_columns), *prediction.cells()])
    if out is not None:
        try:
            fsio.write_text(out, text.getvalue())
        except OSError as e:
            raise ConfigError(f"{out} cannot be written: {e.strerror}", fix="set --output to a writable path") from e
    elif not as_json:
        click.echo(text.getvalue(), nl=False)
    not_predicted = [number for number, p in enumerate(predictions, start=1) if p.tokens_per_s_per_gpu is None]
    if as_json:
        from clustertrain.report.documents.plans import PredictedRow, PredictedTable

        cells = tuple(
            schema.convert(dict(zip(predict.COLUMNS, p.values(), strict=True)), PredictedRow) for p in predictions
        )
        n = len(predictions) - len(not_predicted)
        print_json("plan-table", PredictedTable(rows=cells, predicted=n, not_predicted=tuple(not_predicted)))
    elif out is not None:
        skipped = (
            f"; not predicted: rows {', '.join(map(str, not_predicted[:10]))}{' …' if len(not_predicted) > 10 else ''}"
            if not_predicted
            else ""
        )
        click.echo(
            f"{len(predictions) - len(not_predicted)} of {len(predictions)} rows predicted, written to {out}{skipped}"
        )
    return 0


def _read_table(source: Path) -> tuple[list[str], list[dict[str, str]]]:
    from clustertrain import reading
    from clustertrain.plan.table import predict

    try:
        text = reading.read_bytes(source, allow_fifo=True).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=None), restval="")
        rows = [{name: value or "" for name, value in row.items() if name is not None} for row in reader]
    except reading.UnusableFile as e:
        raise ConfigError(e.message, fix="name a CSV file") from e
    except (UnicodeDecodeError, csv.Error) as e:
        raise ConfigError(f"{source} is not a CSV table: {e}") from None
    columns = list(reader.fieldnames or [])
    missing = [name for name in predict.REQUIRED_COLUMNS if name not in columns]
    if missing:
        raise ConfigError(
            f"{source} lacks the columns {', '.join(missing)}",
            fix=f"name the columns in the first line; {page_url('explanation/planner')} lists them",
        )
    return columns, rows
