"""``plan``: what submit would choose, and why, as text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clustertrain.cli.common import print_json
from clustertrain.cli.submit import CONTEXT_SETTINGS, TargetCommand, build_request, job_options
from clustertrain.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clustertrain.plan.planner import Plan
    from clustertrain.scheduler.registry import Purpose

MAX_LEFT_SHARE = 0.6  # of the width, that the left column may take
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(cls=TargetCommand, context_settings=CONTEXT_SETTINGS)
@click.option("--find-micro-batch", is_flag=True, help="Train a few steps here with growing micro-batches.")
@click.option("--gpus-range", metavar="LOW-HIGH", help="Plan for several numbers of GPUs, with the same global batch.")
@click.option("--table", type=_FILE, metavar="IN.csv", help="Predict each row of a table of configurations.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="OUT.csv", help="Where --table writes; default: stdout."
)
@click.option("--calibrate", is_flag=True, help="With --table: the middle measured row of each source sets a factor.")
@job_options
def plan(
    find_micro_batch: bool,
    gpus_range: str | None,
    table: Path | None,
    out: Path | None,
    calibrate: bool,
    **options: Any,
) -> int:
    """Show what submit would choose and why; submit nothing."""
    as_json = options["as_json"]
    if table is not None and (gpus_range is not None or find_micro_batch):
        other = "--gpus-range" if gpus_range is not None else "--find-micro-batch"
        raise UsageError(f"--table predicts the rows of a file, {other} is for a recipe", fix="give one of them")
    if table is not None:
        from clustertrain.cli.plan_table import write_predictions

        return write_predictions(table, out, calibrate=calibrate, as_json=as_json)
    if out is not None or calibrate:
        raise UsageError("--out and --calibrate belong to --table", fix="give --table IN.csv too")
    if gpus_range is not None:
        from clustertrain.cli.plan_range import show_range

        return show_range(build_request(options), gpus_range, as_json=as_json)
    from clustertrain.submit.checks import check_script_layout
    from clustertrain.submit.prepare import prepare

    purpose: Purpose = "here" if find_micro_batch else "plan"
    prepared = prepare(build_request(options, count=not find_micro_batch), purpose=purpose)
    for note in check_script_layout(prepared) or ():
        click.echo(f"note: {note}", err=True)
    if find_micro_batch:
        from clustertrain.cli.find_micro_batch import find_micro_batch as run_search

        return run_search(prepared, as_json=as_json)
    if as_json:
        print_json(prepared.plan)
        return 0
    _show(prepared.plan)
    return 0


def _show(chosen: Plan) -> None:
    from clustertrain.report.terminal import emit, make_console

    console = make_console()
    parts: list[RenderableType] = [_format_rows(_summary(chosen), console.width)]
    for title, rows in (
        ("What would fit", [("", chosen.way_out)] if chosen.way_out else []),
        ("Warnings", [("", warning) for warning in chosen.warnings]),
        ("Training", list(chosen.training.items())),
        ("Why", [("", reason) for reason in chosen.reasons if reason not in chosen.warnings]),
        (
            "Runners-up",
            [(r.layout, _format_rates(r.step_s, r.tokens_per_s_per_gpu, r.peak_gib)) for r in chosen.runners_up],
        ),
        ("Not chosen", [(r.strategy, r.why) for r in chosen.rejected]),
        ("Environment", [(f"{n}={s.value}", s.reason) for n, s in {**chosen.nccl, **chosen.env}.items()]),
    ):
        if rows:
            parts += [f"\n{title}", _format_rows(rows, console.width)]
    emit(console, *parts)


def _format_rows(rows: list[tuple[str, str]], width: int) -> RenderableType:
    from rich.padding import Padding
    from rich.table import Table

    # A word that is torn, NAME=value say, cannot be copied.
    no_wrap = 0 < max(len(left) for left, _ in rows) <= MAX_LEFT_SHARE * width
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold", no_wrap=no_wrap)
    table.add_column(overflow="fold")
    for left, right in rows:
        table.add_row(left, right) if left else table.add_row(right)
    return Padding(table, (0, 0, 0, 2))


def _format_rates(step_s: float, tokens_per_s: float, peak_gib: float) -> str:
    from clustertrain.plan.layout import format_gib, format_number

    return f"{format_number(step_s)} s a step, {tokens_per_s:,.0f} tokens/s a GPU, {format_gib(peak_gib)} a rank"


def _layout_details(chosen: Plan) -> str:
    """What of the layout its name does not say."""
    layout = chosen.layout
    details = {
        f"activation checkpointing {layout.activation_checkpointing}": layout.activation_checkpointing != "none",
        "gradients reduced in each micro-batch": not layout.defer_reduction and chosen.batch.grad_accum > 1,
        "offload": layout.offload,
        f"{layout.virtual_stages} stages a rank": layout.virtual_stages > 1,
    }
    return ", ".join(text for text, applies in details.items() if applies)


def _summary(chosen: Plan) -> list[tuple[str, str]]:
    from clustertrain.plan.layout import format_gib, format_number, pluralize

    layout, batch, memory = chosen.layout, chosen.batch, chosen.memory
    ranks = f"{pluralize(chosen.world_size, 'rank')} = {pluralize(chosen.nodes, 'node')} x {chosen.gpus_per_node}"
    rows = [("layout", f"{layout.describe()} on {ranks}, device {chosen.device}, precision {chosen.precision}")]
    if details := _layout_details(chosen):
        rows.append(("with", details))
    if layout.is_model_parallel or layout.strategy == "hybrid-shard":
        rows.append(("mesh", f"{layout.format_degrees()}, neighbours last"))
    if batch.global_batch:
        split = f"{batch.micro_batch} x {batch.grad_accum} x {layout.data_parallel}"
        rows.append(("batch", f"{batch.global_batch} = {split} (micro_batch x grad_accum x data parallel)"))
    if memory.peak_gib is not None:
        capacity = "unknown" if memory.capacity_gib is None else f"{memory.capacity_gib:g} GiB"
        fits = {True: ", fits", False: ", DOES NOT FIT", None: ""}[memory.fits]
        rows.append(("memory", f"{format_gib(memory.peak_gib)} a rank, capacity {capacity}{fits}"))
    elif memory.params_gib is not None:
        sizes = {"parameters": memory.params_gib, "gradients": memory.grads_gib, "optimizer": memory.optimizer_gib}
        states = ", ".join(f"{name} {format_gib(size)}" for name, size in sizes.items() if size is not None)
        unknown = "activations" if memory.optimizer_gib is not None else "optimizer and activations"
        rows.append(("memory", f"{states} a rank; {unknown} not known"))
    time = chosen.time
    if time.step_s is not None and time.tokens_per_s_per_gpu is not None and time.tflops_per_gpu is not None:
        mfu = f", MFU {time.mfu:.1%}" if time.mfu is not None else ""
        rows.append(("speed",
                     f"{format_number(time.step_s)} s a step, {time.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, "
                              f"{format_number(time.tflops_per_gpu)} TFLOP/s a GPU{mfu}, predicted"))  # fmt: skip
    if chosen.time.bubble_fraction is not None:
        rows.append(("bubble", f"{chosen.time.bubble_fraction:.0%} of a step, in which a rank of the pipeline waits"))
    return rows
