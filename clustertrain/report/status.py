"""Text output of ``clustertrain status`` and ``list``."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from clustertrain import schema
from clustertrain.config.evaluation import VALIDATION_PREFIX
from clustertrain.plan.layout import Layout, pluralize
from clustertrain.printable import printable
from clustertrain.report.plan_vs_measured import Pair, PlanAccuracy
from clustertrain.report.tables import Column, fit_table
from clustertrain.report.terminal import Glyphs, format_duration, format_number, format_step_time, meter
from clustertrain.run import attempts, json_files
from clustertrain.run.attempts import Attempt
from clustertrain.run.run_spec import load_command
from clustertrain.run.usage.contract_status import ContractStatus, SliceStatus
from clustertrain.run.usage.goodput import TIME_CATEGORIES, Goodput

if TYPE_CHECKING:
    from clustertrain.run.run_dir import RunDir
    from clustertrain.scheduler.run_status import RunStatus

# Named colors of the terminal's palette, readable on dark and on light backgrounds.
STATE_STYLES = {
    "completed": "green",
    "running": "cyan",
    "pending": "yellow",
    "requeued": "yellow",
    "preempted": "yellow",
    "time_limit": "yellow",
    "signal": "yellow",
    "cancelled": "magenta",
}
GOODPUT_LABELS = {
    "queue_s": "queue",
    "startup_s": "start-up",
    "restore_s": "restore",
    "productive_s": "productive steps",
    "repeated_s": "repeated steps",
    "checkpoint_stall_s": "checkpoint stall",
    "evaluation_s": "evaluation",
    "other_s": "between steps",
    "shutdown_s": "shutdown",
    "lost_s": "lost",
}
NO_STEPS_REPORTED = "the program has reported no steps; see docs/guides/any-program.md"
METER_WIDTH = 30
RECIPE_HASH_DIGITS = 7  # `list --recipe` accepts a prefix of this length


def styled_state(state: str) -> Text:
    return Text(state, style=STATE_STYLES.get(state, "red"))


def format_local_time(t: float | None) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(t)) if t else "-"


def format_steps(status: RunStatus) -> str:
    if status.step is None:
        return "-"
    return f"{status.step}/{status.total_steps}" if status.total_steps else str(status.step)


def render(status: RunStatus, accuracy: PlanAccuracy, width: int, signs: Glyphs) -> RenderableType:
    """Render the status of one run for a terminal of ``width`` columns."""
    header = Table.grid(padding=(0, 2))
    header.add_row("run", Text(status.run.id, style="bold"))
    header.add_row("state", styled_state(status.state))
    header.add_row("job", f"{status.job_id or '-'} ({status.backend})")
    command = load_command(status.run)
    if command is not None:
        header.add_row("command", Text(printable(shlex.join(command.command))))
    else:
        header.add_row("layout", Text(_format_layout(status.run)))
    header.add_row(
        "step", NO_STEPS_REPORTED if status.step is None and status.goodput.ratio is None else format_steps(status)
    )
    if status.skipped_steps or status.roll_backs:
        anomalies = [pluralize(status.skipped_steps, "step"), "skipped,", pluralize(status.roll_backs, "roll-back")]
        header.add_row("problems", Text(" ".join(anomalies), style="yellow"))
    if status.view is not None and status.view.state == "PENDING":
        estimate = f", expected to start {format_local_time(status.view.start_time)}" if status.view.start_time else ""
        header.add_row("waiting for", f"{status.view.reason or 'the scheduler'}{estimate}")
    if status.scheduler_error:
        header.add_row("note", Text(f"the scheduler did not answer: {status.scheduler_error}", style="red"))
    if status.is_cancelling:
        header.add_row("note", Text("cancelled, but not ended yet", style="magenta"))
    if status.undecided_reason:
        header.add_row("stopped", Text(status.undecided_reason, style="red"))
    if status.continue_command:
        # A separate row without wrapping: a command that is broken into lines can't be copied.
        header.add_row("continue", Text(status.continue_command, style="bold", no_wrap=True, overflow="ignore"))
    for failure in attempts.list_read_errors(status.run, status.history):
        header.add_row("note", Text(failure, style="red"))
    stop_reason = status.history[-1].stopped if status.history else None
    if stop_reason:
        header.add_row("stopped", Text(stop_reason, style="red"))
    for title, failure in contract_rows(status.contract):
        header.add_row(title, Text(failure, overflow="fold"))
    header.add_row("folder", Text(str(status.run.path), overflow="fold"))
    parts = [
        header,
        _attempts_table(status, width),
        *plan_accuracy_table(accuracy, signs),
        goodput_table(status.goodput, signs),
    ]
    return Group(*[line for part in parts for line in (part, Text())][:-1])


def contract_rows(contract: ContractStatus | None) -> list[tuple[str, str]]:
    """Return (title, text) rows on the run's contract: task, metric, slices and budget."""
    if contract is None:
        return []
    rows = [("task", ", ".join(part for part in (contract.task, contract.target) if part))]
    if contract.value is not None:
        best = "no best yet" if contract.best is None else f"best {contract.best:.6g} at step {contract.best_step}"
        rows.append(("metric", f"{contract.metric}: {best}, last {contract.value:.6g} at step {contract.step}"))
    elif contract.metric.startswith(VALIDATION_PREFIX):
        rows.append(("metric", f"{contract.metric}, not evaluated yet"))
    rows.append(("slices", "; ".join(_format_slice(name, s) for name, s in contract.slices.items())))
    if contract.used is not None:
        limits = [
            f"{getattr(contract.used, name):.3g} {unit} used, {remaining:.3g} left"
            for name, unit in (("gpu_hours", "GPU-hours"), ("wall_hours", "hours"), ("cost", "cost"))
            if (remaining := contract.remaining.get(name)) is not None
        ]
        rows.append(("budget", "; ".join(limits)))
    return [row for row in rows if row[1]]


def _format_slice(name: str, slice_status: SliceStatus) -> str:
    if slice_status.value is None or slice_status.best is None:
        return f"{name} unknown"
    worse = (
        f", {slice_status.regression:.3g} worse than its best {slice_status.best:.6g}"
        if slice_status.regression
        else ""
    )
    return f"{name} {slice_status.value:.6g}{worse}"


def _format_layout(run: RunDir) -> str:
    try:
        return schema.convert(json_files.load_document(run.plan).value.get("layout"), Layout).describe()
    except msgspec.ValidationError:  # from another version
        return "-"


def _format_step_range(attempt: Attempt) -> str:
    first, last = ("-" if step is None else str(step) for step in (attempt.first_step, attempt.last_step))
    return "-" if first == last == "-" else f"{first} to {last}"


def _attempts_table(status: RunStatus, width: int) -> RenderableType:
    if not status.history:
        return Text("no attempt has started yet")
    now, history = time.time(), status.history
    columns = [
        Column("attempt", [str(a.n) for a in history]),
        Column("job", [a.job_id for a in history]),
        Column(
            "nodes", [f"{a.nodes[0]} +{len(a.nodes) - 1}" if len(a.nodes) > 1 else "".join(a.nodes) for a in history]
        ),
        Column("started", [format_local_time(a.start) for a in history]),
        Column(
            "ran", [format_duration((a.end or now) - a.start) if a.start else "-" for a in history], right_aligned=True
        ),
        Column("steps", [_format_step_range(a) for a in history], right_aligned=True),
        Column("state", [styled_state(status.attempt_state(a)) for a in history]),
    ]
    columns = [c for c in columns if any(str(cell) not in ("", "-") for cell in c.cells)]
    table = fit_table(columns, width, drop_order=("ran", "nodes", "started"))
    # Reasons can be sentences, which a narrow column would wrap into many lines; they go below the table.
    reasons = [Text(f"{a.n}: {a.reason}") for a in status.history if a.reason]
    return Group(table, *([Text(), *reasons] if reasons else []))


def plan_accuracy_table(accuracy: PlanAccuracy, signs: Glyphs) -> list[RenderableType]:
    """Return a table of predicted and measured values, or nothing if there are none."""
    rows: list[tuple[str, Pair, Callable[[float], str]]] = [
        ("step", accuracy.step_s, format_step_time),
        ("tokens/s per rank", accuracy.tokens_per_s_per_gpu, lambda v: f"{v:,.0f}"),
        ("GPU memory in use", accuracy.peak_gib, lambda v: f"{v:.1f} GiB"),
        ("torch allocations", accuracy.allocated_gib, lambda v: f"{v:.1f} GiB"),
    ]
    rows = [row for row in rows if row[1].predicted is not None or row[1].measured is not None]
    if not rows:
        return []
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for name in ("predicted", "measured", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, pair, format_cell in rows:
        values = [signs.dash if v is None else format_cell(v) for v in (pair.predicted, pair.measured)]
        table.add_row(name, *values, format_number(pair.ratio, signs, 2))
    steps = f" (median of {pluralize(accuracy.steps, 'step')})" if accuracy.steps else ""
    parts: list[RenderableType] = [Text(f"Plan and run{steps}", style="bold"), table]
    if accuracy.other_attempts:
        attempts_text = (
            f"attempt{'s' * (len(accuracy.other_attempts) > 1)} {', '.join(map(str, accuracy.other_attempts))}"
        )
        parts.append(Text(f"not counted: {attempts_text}, whose number of ranks is not the plan's"))
    return [Group(*parts)]


def goodput_table(ledger: Goodput, signs: Glyphs) -> RenderableType:
    """Return the time ledger as a table; times and shares add up to the last row."""
    seconds = [getattr(ledger, name) for name in TIME_CATEGORIES]
    wall_s = round(ledger.wall_s)
    times, shares = apportion(seconds, wall_s), apportion(seconds, 100)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column("part")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    table.add_column("meter", no_wrap=True)
    for name, exact_s, shown_s, share in zip(TIME_CATEGORIES, seconds, times, shares, strict=True):
        if exact_s <= 0:
            continue
        style = "green" if name == "productive_s" else "red" if name in ("lost_s", "repeated_s") else "blue"
        bar = meter(exact_s / ledger.wall_s, METER_WIDTH, style, signs)
        label = "in the script" if name == "other_s" and ledger.ratio is None else GOODPUT_LABELS[name]
        table.add_row(label, format_exact_duration(shown_s), f"{share}%", bar)
    table.add_row("wall time", format_exact_duration(wall_s), "", "")
    lines: list[RenderableType] = [
        Text(f"Where the time went ({_format_goodput(ledger, shares)})", style="bold"),
        table,
    ]
    steps_s = ledger.productive_s + ledger.repeated_s
    if ledger.data_wait_s > 0 and steps_s > 0:
        wait = f"{format_step_time(ledger.data_wait_s)}, {ledger.data_wait_s / steps_s:.1%} of the step time"
        lines.append(Text(f"within steps, rank 0 waited for data: {wait}"))
    return Group(*lines)


def _format_goodput(ledger: Goodput, shares: Sequence[int]) -> str:
    if ledger.effective_ratio is None:
        return f"goodput unknown: {NO_STEPS_REPORTED}"
    share = shares[TIME_CATEGORIES.index("productive_s")]
    return f"goodput {share}%; {ledger.effective_ratio:.0%} of the allocated time"


def apportion(values: Sequence[float], total: int) -> list[int]:
    """Return integers in proportion to ``values`` that sum to ``total``, by the largest-remainder method.

    All are zero if the sum of ``values`` is not positive.
    """
    value_sum = math.fsum(values)
    if value_sum <= 0:
        return [0] * len(values)
    exact = [v / value_sum * total for v in values]
    result = [math.floor(v) for v in exact]
    by_remainder = sorted(range(len(values)), key=lambda i: result[i] - exact[i])
    for i in by_remainder[: total - sum(result)]:
        result[i] += 1
    return result


def format_exact_duration(seconds: int) -> str:
    """Format a duration to the second, so that durations add up: ``45s``, ``12m05s``, ``3h07m12s``, ``2d04h00m05s``."""
    minutes, s = divmod(seconds, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02d}h{m:02d}m{s:02d}s"
    if hours:
        return f"{h}h{m:02d}m{s:02d}s"
    return f"{m}m{s:02d}s" if minutes else f"{s}s"


def format_remarks(statuses: Sequence[RunStatus]) -> list[Text]:
    """Return the lines below the table of runs: scheduler errors, and runs that the user must continue."""
    scheduler_errors = dict.fromkeys(x.scheduler_error for x in statuses if x.scheduler_error)
    lines = [f"states come from the run directories, without the scheduler: {error}" for error in scheduler_errors]
    remark_lines = [Text(line, style="red") for line in lines]
    for status in statuses:
        reason = status.undecided_reason or (
            f"Slurm holds its job ({status.view.reason})" if status.is_held and status.view is not None else ""
        )
        if reason:
            remark_lines.append(Text(f"{status.run.id}: {reason}; to continue:", style="red"))
            remark_lines.append(Text(f"  {status.continue_command}", style="bold", no_wrap=True, overflow="ignore"))
    return remark_lines


def runs_table(statuses: Sequence[RunStatus], width: int) -> RenderableType:
    """Return a table with one row per run."""
    if not statuses:
        return Text("no runs yet: start one with `clustertrain submit`")
    started = [next((a.start for a in x.history if a.start), None) for x in statuses]
    columns = [
        Column("run", [x.run.id for x in statuses]),
        Column("state", [styled_state(x.state) for x in statuses]),
        Column("job", [x.job_id or "-" for x in statuses]),
        Column("step", [format_steps(x) for x in statuses], right_aligned=True),
        Column("attempts", [str(len(x.history)) for x in statuses], right_aligned=True),
        Column("started", [format_local_time(t) for t in started]),
        Column("recipe", [x.recipe_hash[:RECIPE_HASH_DIGITS] for x in statuses]),
    ]
    return fit_table(columns, width, drop_order=("attempts", "started", "job", "step"))
