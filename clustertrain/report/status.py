"""``clustertrain status`` and ``list`` as text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from clustertrain import schema
from clustertrain.config.evaluation import PREFIX
from clustertrain.plan.layout import Layout, counted
from clustertrain.report.plan_vs_measured import Pair, Prediction
from clustertrain.report.tables import Column, fitted
from clustertrain.report.terminal import Glyphs, brief_time, duration, meter, number
from clustertrain.run import attempts, json_files
from clustertrain.run.attempts import Attempt
from clustertrain.run.contract_status import Slice, Standing
from clustertrain.run.goodput import PARTS, Goodput

if TYPE_CHECKING:
    from clustertrain.run.run_dir import RunDir
    from clustertrain.scheduler.run_status import Look

# Colours of the terminal's own palette, which its owner has made readable on dark and on light.
STYLE = {
    "completed": "green",
    "running": "cyan",
    "pending": "yellow",
    "requeued": "yellow",
    "preempted": "yellow",
    "time_limit": "yellow",
    "signal": "yellow",
    "cancelled": "magenta",
}
PART_WORDS = {
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
UNREPORTED = "the script has reported no steps; see docs/training-scripts.md"
METER = 30
RECIPE_DIGITS = 7  # of its hash; `list --recipe` takes as few


def styled(word: str) -> Text:
    return Text(word, style=STYLE.get(word, "red"))


def local_time(t: float | None) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(t)) if t else "-"


def steps_of(seen: Look) -> str:
    if seen.step is None:
        return "-"
    return f"{seen.step}/{seen.total_steps}" if seen.total_steps else str(seen.step)


def render(seen: Look, prediction: Prediction, width: int, signs: Glyphs) -> RenderableType:
    head = Table.grid(padding=(0, 2))
    head.add_row("run", Text(seen.run.id, style="bold"))
    head.add_row("state", styled(seen.state))
    head.add_row("job", f"{seen.job_id or '-'} ({seen.backend})")
    head.add_row("layout", Text(_layout_of(seen.run)))
    head.add_row("step", UNREPORTED if seen.step is None and seen.goodput.ratio is None else steps_of(seen))
    if seen.skipped_steps or seen.roll_backs:
        told = [counted(seen.skipped_steps, "step"), "skipped,", counted(seen.roll_backs, "roll-back")]
        head.add_row("trouble", Text(" ".join(told), style="yellow"))
    if seen.view is not None and seen.view.state == "PENDING":
        estimate = f", expected to start {local_time(seen.view.start_time)}" if seen.view.start_time else ""
        head.add_row("waits for", f"{seen.view.reason or 'the scheduler'}{estimate}")
    if seen.silence:
        head.add_row("note", Text(f"the scheduler gave no answer: {seen.silence}", style="red"))
    if seen.cancelling:
        head.add_row("note", Text("cancelled by its owner, and not ended yet", style="magenta"))
    if seen.undecided:
        head.add_row("stopped", Text(seen.undecided, style="red"))
    if seen.to_continue:
        # In a row of its own: a line that is broken in the middle of a command can't be copied.
        head.add_row("continue", Text(seen.to_continue, style="bold", no_wrap=True, overflow="ignore"))
    for words in attempts.troubles(seen.run, seen.history):
        head.add_row("note", Text(words, style="red"))
    stopped = seen.history[-1].stopped if seen.history else None
    if stopped:
        head.add_row("stopped", Text(stopped, style="red"))
    for title, words in contract_rows(seen.contract):
        head.add_row(title, Text(words, overflow="fold"))
    head.add_row("folder", Text(str(seen.run.path), overflow="fold"))
    parts = [head, _attempts(seen, width), *predicted(prediction, signs), goodput(seen.goodput, signs)]
    return Group(*[line for part in parts for line in (part, Text())][:-1])


def contract_rows(found: Standing | None) -> list[tuple[str, str]]:
    """What there is to say of the run's contract."""
    if found is None:
        return []
    rows = [("task", ", ".join(w for w in (found.task, found.target) if w))]
    if found.value is not None:
        best = "no best yet" if found.best is None else f"best {found.best:.6g} at step {found.best_step}"
        rows.append(("judged by", f"{found.metric}: {best}, last {found.value:.6g} at step {found.step}"))
    elif found.metric.startswith(PREFIX):
        rows.append(("judged by", f"{found.metric}, not evaluated yet"))
    rows.append(("slices", "; ".join(_slice(name, s) for name, s in found.slices.items())))
    if found.used is not None:
        limits = [
            f"{getattr(found.used, name):.3g} {word} used, {left:.3g} left"
            for name, word in (("gpu_hours", "GPU-hours"), ("wall_hours", "hours"), ("cost", "cost"))
            if (left := found.left.get(name)) is not None
        ]
        rows.append(("budget", "; ".join(limits)))
    return [row for row in rows if row[1]]


def _slice(name: str, found: Slice) -> str:
    if found.value is None or found.best is None:
        return f"{name} not known"
    worse = f", worse by {found.regression:.3g} than its best {found.best:.6g}" if found.regression else ""
    return f"{name} {found.value:.6g}{worse}"


def _layout_of(run: RunDir) -> str:
    try:
        return schema.convert(json_files.read(run.plan).value.get("layout"), Layout).words()
    except msgspec.ValidationError:  # of another version
        return "-"


def _steps(attempt: Attempt) -> str:
    first, last = ("-" if step is None else str(step) for step in (attempt.first_step, attempt.last_step))
    return "-" if first == last == "-" else f"{first} to {last}"


def _attempts(seen: Look, width: int) -> RenderableType:
    if not seen.history:
        return Text("no attempt has started yet")
    now, history = time.time(), seen.history
    columns = [
        Column("attempt", [str(a.n) for a in history]),
        Column("job", [a.job_id for a in history]),
        Column(
            "nodes", [f"{a.nodes[0]} +{len(a.nodes) - 1}" if len(a.nodes) > 1 else "".join(a.nodes) for a in history]
        ),
        Column("started", [local_time(a.start) for a in history]),
        Column("ran", [duration((a.end or now) - a.start) if a.start else "-" for a in history], right=True),
        Column("steps", [_steps(a) for a in history], right=True),
        Column("state", [styled(seen.state_of(a)) for a in history]),
    ]
    columns = [c for c in columns if any(str(cell) not in ("", "-") for cell in c.cells)]
    table = fitted(columns, width, dropped=("ran", "nodes", "started"))
    # Below the table: a reason may be a sentence, and a column of 20 cells would break it into ten lines.
    reasons = [Text(f"{a.n}: {a.reason}") for a in seen.history if a.reason]
    return Group(table, *([Text(), *reasons] if reasons else []))


def predicted(found: Prediction, signs: Glyphs) -> list[RenderableType]:
    """A row for what was predicted or measured; nothing where that is nothing at all."""
    rows: list[tuple[str, Pair, Callable[[float], str]]] = [
        ("step", found.step_s, brief_time),
        ("tokens/s a rank", found.tokens_per_s_per_gpu, lambda v: f"{v:,.0f}"),
        ("GPU memory in use", found.peak_gib, lambda v: f"{v:.1f} GiB"),
        ("of it by torch", found.allocated_gib, lambda v: f"{v:.1f} GiB"),
    ]
    rows = [row for row in rows if row[1].predicted is not None or row[1].measured is not None]
    if not rows:
        return []
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for name in ("predicted", "measured", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, pair, shown in rows:
        values = [signs.dash if v is None else shown(v) for v in (pair.predicted, pair.measured)]
        table.add_row(name, *values, number(pair.ratio, signs, 2))
    steps = f" (median of {counted(found.steps, 'step')})" if found.steps else ""
    parts: list[RenderableType] = [Text(f"The plan and the run{steps}", style="bold"), table]
    if found.other_attempts:
        which = f"attempt{'s' * (len(found.other_attempts) > 1)} {', '.join(map(str, found.other_attempts))}"
        parts.append(Text(f"not counted: {which}, on another number of ranks than the plan's"))
    return [Group(*parts)]


def goodput(parts: Goodput, signs: Glyphs) -> RenderableType:
    """The ledger as a table whose times and shares add up to the last row's."""
    seconds = [getattr(parts, name) for name in PARTS]
    whole = round(parts.wall_s)
    times, shares = apportioned(seconds, whole), apportioned(seconds, 100)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column("part")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    table.add_column("meter", no_wrap=True)
    for name, exact, shown, share in zip(PARTS, seconds, times, shares, strict=True):
        if exact <= 0:
            continue
        style = "green" if name == "productive_s" else "red" if name in ("lost_s", "repeated_s") else "blue"
        bar = meter(exact / parts.wall_s, METER, style, signs)
        words = "in the script" if name == "other_s" and parts.ratio is None else PART_WORDS[name]
        table.add_row(words, to_the_second(shown), f"{share}%", bar)
    table.add_row("wall time", to_the_second(whole), "", "")
    lines: list[RenderableType] = [Text(f"Where the time went ({_productive(parts, shares)})", style="bold"), table]
    steps_s = parts.productive_s + parts.repeated_s
    if parts.data_wait_s > 0 and steps_s > 0:
        wait = f"{brief_time(parts.data_wait_s)}, {parts.data_wait_s / steps_s:.1%} of them"
        lines.append(Text(f"within the steps, rank 0 waited for data: {wait}"))
    return Group(*lines)


def _productive(parts: Goodput, shares: Sequence[int]) -> str:
    if parts.effective_ratio is None:
        return f"goodput not known: {UNREPORTED}"
    share = shares[PARTS.index("productive_s")]
    return f"goodput {share}%; {parts.effective_ratio:.0%} of the time with nodes"


def apportioned(values: Sequence[float], total: int) -> list[int]:
    """Whole numbers in the proportion of ``values`` that sum to ``total``: the largest remainders are rounded up. All
    zero where nothing is to be shared."""
    whole = math.fsum(values)
    if whole <= 0:
        return [0] * len(values)
    exact = [v / whole * total for v in values]
    found = [math.floor(v) for v in exact]
    by_remainder = sorted(range(len(values)), key=lambda i: found[i] - exact[i])
    for i in by_remainder[: total - sum(found)]:
        found[i] += 1
    return found


def to_the_second(seconds: int) -> str:
    """``45s``, ``12m05s``, ``3h07m12s``, ``2d04h00m05s``: times that a reader may add up."""
    minutes, s = divmod(seconds, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02d}h{m:02d}m{s:02d}s"
    if hours:
        return f"{h}h{m:02d}m{s:02d}s"
    return f"{m}m{s:02d}s" if minutes else f"{s}s"


def remarks(looks: Sequence[Look]) -> list[Text]:
    """Below the table of runs: why a scheduler's part is missing, once; runs that ended and need their owner's word."""
    silences = dict.fromkeys(x.silence for x in looks if x.silence)
    lines = [f"states are from the runs' own files, without the scheduler's: {words}" for words in silences]
    found = [Text(line, style="red") for line in lines]
    for x in looks:
        why = x.undecided or (f"Slurm holds its job ({x.view.reason})" if x.held and x.view is not None else "")
        if why:
            found.append(Text(f"{x.run.id}: {why}; to continue:", style="red"))
            found.append(Text(f"  {x.to_continue}", style="bold", no_wrap=True, overflow="ignore"))
    return found


def runs_table(looks: Sequence[Look], width: int) -> RenderableType:
    if not looks:
        return Text("no runs yet: start one with `clustertrain submit`")
    started = [next((a.start for a in x.history if a.start), None) for x in looks]
    columns = [
        Column("run", [x.run.id for x in looks]),
        Column("state", [styled(x.state) for x in looks]),
        Column("job", [x.job_id or "-" for x in looks]),
        Column("step", [steps_of(x) for x in looks], right=True),
        Column("attempts", [str(len(x.history)) for x in looks], right=True),
        Column("started", [local_time(t) for t in started]),
        Column("recipe", [x.recipe_hash[:RECIPE_DIGITS] for x in looks]),
    ]
    return fitted(columns, width, dropped=("attempts", "started", "job", "step"))
