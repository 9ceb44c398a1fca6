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
from clustertrain.documentation import page_url
from clustertrain.durations import format_duration, format_step_time
from clustertrain.plan.layout import Layout, format_number, pluralize
from clustertrain.printable import printable
from clustertrain.report.plan_vs_measured import Pair, PlanAccuracy
from clustertrain.report.progress import Failure, Progress, format_share
from clustertrain.report.tables import Column, fit_table
from clustertrain.report.terminal import Glyphs, meter
from clustertrain.run import attempts, events, json_files, state
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
    "cancelling": "magenta",
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
NO_STEPS_REPORTED = "the program has reported no steps"
COMMAND_WITHOUT_STEPS_YET = "none yet; a program without torch.optim reports none"
WATCHED_STEPS = "not recorded: the job was started without clustertrain, so its steps, loss and tokens are unknown"
METER_WIDTH = 30
MAX_ALERTS = 3
_ALERT_STYLES = {"critical": "red", "warning": "yellow"}
LEDGER_WIDTH = 40  # of the time ledger without its bars, at most
RECIPE_HASH_DIGITS = 7  # `list --recipe` accepts a prefix of this length


def styled_state(state: str) -> Text:
    return Text(state, style=STATE_STYLES.get(state, "red"))


def format_local_time(t: float | None) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(t)) if t else "-"


def format_steps(status: RunStatus) -> str:
    if status.step is None:
        return "-"
    return f"{status.step}/{status.total_steps}" if status.total_steps else str(status.step)


def _format_progress(status: RunStatus, progress: Progress) -> str:
    """Format the step, its share, the rate and the time left: ``320/600 (53%), 0.36 s per step, 1m41s left``."""
    if status.step is None:
        if status.run.watched.exists():
            return WATCHED_STEPS
        if status.goodput.ratio is not None:
            return "none" if status.is_final else "none yet"
        if status.state == state.RUNNING:
            return COMMAND_WITHOUT_STEPS_YET if load_command(status.run) else "none yet"
        if any(events.find_last(events.for_attempt(a), "session_started") for a in status.run.attempts()):
            return "none"  # the program has a session, which ended before its first step
        return f"{NO_STEPS_REPORTED}; see {page_url('guides/any-program')}"
    share = f" ({format_share(status.step, status.total_steps)})" if status.total_steps else ""
    parts = [f"{format_steps(status)}{share}"]
    if progress.step_s is not None:
        parts.append(f"{format_step_time(progress.step_s)} per step")
    if progress.eta_s is not None:
        parts.append(f"{format_duration(progress.eta_s)} left")
    return ", ".join(parts)


def _format_loss(progress: Progress) -> str:
    """Format the newest loss and the speed; empty if the run logs no loss."""
    if progress.loss is None:
        return ""
    speed = f", {progress.tokens_per_s:,.0f} tokens/s" if progress.tokens_per_s else ""
    return f"{format_loss(progress.loss)}{speed}"


def format_loss(loss: float) -> str:
    """Format a loss with four digits."""
    return f"{loss:.4g}"


def _format_checkpoint(progress: Progress, now: float) -> str:
    """Format the newest checkpoint and its age: ``step 300, 2m05s ago``; empty if there is none."""
    parts = [f"step {progress.checkpoint_step}"] if progress.checkpoint_step is not None else []
    parts += [f"{_format_age(progress.checkpoint_t, now)} ago"] if progress.checkpoint_t else []
    return ", ".join(parts)


def render(
    status: RunStatus, progress: Progress, accuracy: PlanAccuracy, width: int, signs: Glyphs, now: float
) -> RenderableType:
    """Render the status of one run for a terminal of ``width`` columns at ``now``, UTC epoch s."""
    header = Table.grid(padding=(0, 2))
    problems = [*_alert_rows(status, progress), *_problem_rows(status)]
    rows = [*_progress_rows(status, progress, now), *problems, *contract_rows(status.contract)]
    for title, text in [*rows, ("folder", str(status.run.path))]:
        header.add_row(title, Text(text, overflow="fold") if isinstance(text, str) else text)
    parts = [
        header,
        _attempts_table(status, width),
        *([_failure_lines(progress.failure)] if progress.failure is not None else []),
        *plan_accuracy_table(accuracy, signs),
        *([goodput_table(status.goodput, signs, width)] if status.history and not status.run.watched.exists() else []),
    ]
    return Group(*[line for part in parts for line in (part, Text())][:-1])


def _progress_rows(status: RunStatus, progress: Progress, now: float) -> list[tuple[str, str | Text]]:
    """Return (title, text) rows: what runs, how far it has come, and what it waits for."""
    command = load_command(status.run)
    watched = next((a for a in reversed(status.history) if a.checkpoint_times), None)
    rows: list[tuple[str, str | Text]] = [
        ("run", Text(status.run.id, style="bold")),
        ("state", styled_state(status.shown_state)),
        ("step", _format_progress(status, progress)),
        ("loss", _format_loss(progress)),
        ("checkpoint", _format_checkpoint(progress, now)),
        ("job", f"{status.job_id or '-'} ({status.backend})"),
        ("command", printable(shlex.join(command.command)) if command is not None else ""),
        ("layout", _format_layout(status.run) if command is None else ""),
        ("code", _format_code(status.run)),
        # A command whose checkpoints are named.
        ("saved", printable(watched.newest_checkpoint or "none yet") if watched is not None else ""),
    ]
    rows.append(("waiting for", format_wait(status)))
    return [row for row in rows if row[1]]


def format_wait(status: RunStatus) -> str:
    """Return what a job in the queue waits for and, if the scheduler knows, until when; empty for another run."""
    if status.view is None or status.view.state != "PENDING":
        return ""
    estimate = f", expected to start {format_local_time(status.view.start_time)}" if status.view.start_time else ""
    return f"{status.view.reason or 'the scheduler'}{estimate}"


def _alert_rows(status: RunStatus, progress: Progress) -> list[tuple[str, Text]]:
    """Return (title, text) rows on the alerts of a running run; of many, the most severe."""
    rows = [
        ("alert", Text(f"{a.severity}: {printable(a.text)}", style=_ALERT_STYLES.get(a.severity, "")))
        for a in progress.alerts[:MAX_ALERTS]
    ]
    if len(progress.alerts) > MAX_ALERTS:
        more = len(progress.alerts) - MAX_ALERTS
        rows.append(("", Text(f"and {more} more: clustertrain top {status.run.id}")))
    return rows


def _problem_rows(status: RunStatus) -> list[tuple[str, Text]]:
    """Return (title, text) rows on what went wrong, and on how to continue."""
    rows: list[tuple[str, Text]] = []
    if status.skipped_steps or status.roll_backs:
        anomalies = [pluralize(status.skipped_steps, "step"), "skipped,", pluralize(status.roll_backs, "roll-back")]
        rows.append(("problems", Text(" ".join(anomalies), style="yellow")))
    if status.scheduler_error:
        rows.append(("note", Text(f"the scheduler did not answer: {status.scheduler_error}", style="red")))
    if status.undecided_reason:
        rows.append(("stopped", Text(status.undecided_reason, style="red")))
    if status.continue_command:
        # A separate row without wrapping: a command that is broken into lines can't be copied.
        rows.append(("continue", Text(status.continue_command, style="bold", no_wrap=True, overflow="ignore")))
    rows += [("note", Text(failure, style="red")) for failure in attempts.list_read_errors(status.run, status.history)]
    stop_reason = status.history[-1].stopped if status.history else None
    if stop_reason:
        rows.append(("stopped", Text(stop_reason, style="red")))
    return rows


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
            f"{format_number(getattr(contract.used, name))} {unit} used, {format_number(remaining)} left"
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
        return ""


def _format_code(run: RunDir) -> str:
    """Return the commit of the submitted code; empty if it is in no git repository."""
    git = json_files.load_document(run.record).value.get("git")
    if not isinstance(git, dict) or not isinstance(git.get("commit"), str):
        return ""
    branch = f" on {git['branch']}" if isinstance(git.get("branch"), str) and git["branch"] else ""
    changes = ", with uncommitted changes" if git.get("dirty") else ""
    return printable(f"commit {git['commit'][:10]}{branch}{changes}")


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
    # The header has the reason why the run will not be continued.
    reasons = [Text(f"{a.n}: {a.reason}") for a in status.history if a.reason and a.reason != a.stopped]
    return Group(table, *([Text(), *reasons] if reasons else []))


def _failure_lines(failure: Failure) -> RenderableType:
    """Return the last lines of the rank that failed, and where the rest is."""
    lines = [Text(f"  {printable(line)}", overflow="fold") for line in failure.lines]
    return Group(
        Text(f"Last lines of {failure.who}", style="bold"),
        *(lines or [Text("  it printed nothing")]),
        Text(f"full log: {failure.log}", overflow="fold"),
    )


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
    columns = [
        ("predicted", [None if pair.predicted is None else f(pair.predicted) for _, pair, f in rows]),
        ("measured", [None if pair.measured is None else f(pair.measured) for _, pair, f in rows]),
        ("ratio", [None if pair.ratio is None else f"{pair.ratio:.2f}" for _, pair, _ in rows]),
    ]
    columns = [(title, cells) for title, cells in columns if any(cells)]
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for i, (name, _, _) in enumerate(rows):
        table.add_row(name, *(cells[i] or signs.dash for _, cells in columns))
    steps = f" (median of {pluralize(accuracy.steps, 'step')})" if accuracy.steps else ""
    parts: list[RenderableType] = [Text(f"Plan and run{steps}", style="bold"), table]
    if accuracy.other_attempts:
        attempts_text = (
            f"attempt{'s' * (len(accuracy.other_attempts) > 1)} {', '.join(map(str, accuracy.other_attempts))}"
        )
        parts.append(Text(f"not counted: {attempts_text}, whose number of ranks is not the plan's"))
    return [Group(*parts)]


def goodput_table(ledger: Goodput, signs: Glyphs, width: int) -> RenderableType:
    """Return the time ledger as a table of at most ``width`` columns; times and shares add up to the last row."""
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
        bar = meter(exact_s / ledger.wall_s, max(0, min(METER_WIDTH, width - LEDGER_WIDTH)), style, signs)
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


def _format_age(t: float | None, now: float) -> str:
    return "-" if t is None else format_duration(max(0.0, now - t))


def runs_table(runs: Sequence[tuple[RunStatus, Progress]], width: int, now: float) -> RenderableType:
    """Return a table with one row per run at ``now``, UTC epoch s. The age of a run counts from its submission.

    The owners are shown if there are several, as in a home that a group shares.
    """
    if not runs:
        return Text("no runs yet: start one with `clustertrain submit`")
    owners = [x.run.find_owner() for x, _ in runs]
    columns = [
        Column("run", [x.run.id for x, _ in runs]),
        *([Column("user", [printable(owner) for owner in owners])] if len(set(owners)) > 1 else []),
        Column("state", [styled_state(x.shown_state) for x, _ in runs]),
        Column("age", [_format_age(p.submitted, now) for _, p in runs], right_aligned=True),
        Column("step", [format_steps(x) for x, _ in runs], right_aligned=True),
        Column("left", ["-" if p.eta_s is None else format_duration(p.eta_s) for _, p in runs], right_aligned=True),
        Column("loss", ["-" if p.loss is None else format_loss(p.loss) for _, p in runs], right_aligned=True),
        Column("gpus", [f"{p.nodes} x {p.gpus_per_node}" for _, p in runs], right_aligned=True),
        Column("attempts", [str(len(x.history)) for x, _ in runs], right_aligned=True),
        Column("job", [x.job_id or "-" for x, _ in runs]),
        Column("recipe", [x.recipe_hash[:RECIPE_HASH_DIGITS] for x, _ in runs]),
    ]
    return fit_table(columns, width, drop_order=("recipe", "attempts", "job", "gpus", "user", "loss", "age", "left"))
