"""The text timeline: rows, legend, listed events."""

from __future__ import annotations

import io

import pytest

from clustertrain.report import terminal, timeline
from clustertrain.telemetry.report_schema import AttemptSummary, Summary, Timeline, TimelineEvent, TimeWindow
from tests.unit.telemetry.summaries import T0, healthy, replace, with_gpus


def attempt(n: int, start: float, end: float | None, ending: str | None, *marks: TimelineEvent) -> AttemptSummary:
    window = TimeWindow(T0 + start, T0 + (end if end is not None else 7200.0))
    return AttemptSummary(
        n, str(4710 + n), window, ["n1"], T0 + start, None if end is None else T0 + end, ending, list(marks)
    )


def mark(t: float, kind: str, text: str = "", end: float | None = None) -> TimelineEvent:
    return TimelineEvent(T0 + t, kind, text, None if end is None else T0 + end)


@pytest.fixture
def preempted() -> Summary:
    """Return a run of two attempts: 0 s to 3,000 s, and 3,600 s to now."""
    first = attempt(
        1,
        0,
        3000,
        "preempted",
        mark(600, "first_step"),
        mark(1200, "checkpoint", "step 10", 1300),
        mark(2400, "signal", "SIGTERM on n1"),
        mark(2500, "stop_agreed", "step 20"),
        mark(2990, "requeued", "scontrol requeue"),
    )
    second = attempt(
        2,
        3600,
        None,
        None,
        mark(3700, "restored", "step 20", 4200),
        mark(4200, "first_step"),
        mark(5000, "evaluation", "", 5600),
        mark(6000, "xid", "XID 63 on GPU 1 of n2"),
    )
    values = [0.9] * 30 + [None] * 6 + [0.9] * 36
    summary = with_gpus(healthy(), timeline=Timeline(100.0, values))
    return replace(summary, attempts=[first, second], state="running")


def render_lines(summary: Summary, width: int = 84, show_all: bool = False, encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding)
    console = terminal.make_console(out, width)
    terminal.emit(console, *timeline.render(summary, width, terminal.glyphs(console), show_all))
    out.flush()
    return raw.getvalue().decode(encoding).splitlines()


def row(lines: list[str], name: str) -> str:
    (line,) = (x for x in lines if x.startswith(name + " "))
    return line[timeline.LABEL_WIDTH :].ljust(72)


def test_rows_share_one_axis(preempted: Summary) -> None:
    """The axis has 72 cells of 100 s."""
    lines = render_lines(preempted)
    attempts, phases, utilization, marks = (row(lines, n) for n in ("attempts", "phases", "utilization", "events"))
    assert attempts.startswith("[1 preempted──")
    assert (attempts[30], attempts[31:36], attempts[36:46], attempts[71]) == ("]", " " * 5, "[2 running", ">")
    assert "[2 no end recorded──" in row(render_lines(replace(preempted, state="failed")), "attempts")
    assert phases == (
        "s" * 6 + "=" * 6 + "c" + "=" * 12 + "d" * 5 + " " * 6 + "s" + "r" * 5 + "=" * 8 + "e" * 6 + "=" * 16
    )
    assert utilization[28:40].strip("▇") == " " * 6, "nothing was recorded between the attempts"
    assert [(i, sign) for i, sign in enumerate(marks) if sign != " "] == [
        (6, "f"),
        (12, "c"),
        (24, "!"),
        (25, "S"),
        (29, "Q"),
        (37, "r"),
        (42, "f"),
        (50, "e"),
        (60, "X"),
    ]
    ticks = row(lines, "time")
    assert ticks.index("30m") == 18
    assert ticks.index("1h ") == 36


def test_legend_and_listed_events(preempted: Summary) -> None:
    text = "\n".join(render_lines(preempted))
    for expected in ("= training", "r restore", "d shutdown", "X 1 XID", "c 1 checkpoint", "f 2 first steps"):
        assert expected in text
    assert "    40m  signal: SIGTERM on n1" in text
    assert "  1h40m  XID 63 on GPU 1 of n2" in text
    assert "step 10" not in text, "checkpoints are counted"


def test_many_events_are_counted_without_show_all(preempted: Summary) -> None:
    signals = [mark(100.0 * i, "signal", f"number {i}") for i in range(30)]
    summary = replace(preempted, attempts=[attempt(1, 0, 3000, "preempted", mark(1, "first_step"), *signals)])
    text = "\n".join(render_lines(summary))
    assert "22 earlier events" in text
    assert "number 21\n" not in text
    assert "number 21\n" in "\n".join(render_lines(summary, show_all=True))


def test_many_short_attempts_do_not_overflow() -> None:
    summary = replace(healthy(), attempts=[attempt(n, 20.0 * n, 20.0 * n + 15, "preempted") for n in range(1, 300)])
    assert max(map(len, render_lines(summary, 80))) <= 80


def test_ascii_output(preempted: Summary) -> None:
    assert row(render_lines(preempted, encoding="ascii"), "attempts").startswith("[1 preempted--")


def test_script_without_session_has_no_phases() -> None:
    summary = replace(healthy(), attempts=[attempt(1, 0, 7200, "completed")])
    assert not any(line.startswith("phases") for line in render_lines(summary))


def test_no_timeline_without_a_duration() -> None:
    assert timeline.render(replace(healthy(), attempts=[], window=TimeWindow(None, None)), 80, terminal.UNICODE) == []
    assert timeline.render(replace(healthy(), attempts=[], window=TimeWindow(T0, T0)), 80, terminal.UNICODE) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (45, "45s"), (1800, "30m"), (5400, "1h30m"), (172800, "2d"), (129600, "1d12h"), (3601, "1h1s")],
)
def test_format_elapsed(seconds: float, text: str) -> None:
    assert timeline.format_elapsed(seconds) == text
