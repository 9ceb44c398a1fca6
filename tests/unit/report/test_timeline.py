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


def at(t: float, kind: str, text: str = "", end: float | None = None) -> TimelineEvent:
    return TimelineEvent(T0 + t, kind, text, None if end is None else T0 + end)


@pytest.fixture
def preempted() -> Summary:
    """Up to 3,000 s, a wait, and again from 3,600 s on."""
    first = attempt(
        1,
        0,
        3000,
        "preempted",
        at(600, "first_step"),
        at(1200, "checkpoint", "step 10", 1300),
        at(2400, "signal", "SIGTERM on n1"),
        at(2500, "stop_agreed", "step 20"),
        at(2990, "requeued", "scontrol requeue"),
    )
    second = attempt(
        2,
        3600,
        None,
        None,
        at(3700, "restored", "step 20", 4200),
        at(4200, "first_step"),
        at(5000, "evaluation", "", 5600),
        at(6000, "xid", "XID 63 on GPU 1 of n2"),
    )
    values = [0.9] * 30 + [None] * 6 + [0.9] * 36
    found = with_gpus(healthy(), timeline=Timeline(100.0, values))
    return replace(found, attempts=[first, second])


def lines(summary: Summary, width: int = 84, every: bool = False, encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding)
    console = terminal.make_console(out, width)
    terminal.emit(console, *timeline.render(summary, width, terminal.glyphs(console), every))
    out.flush()
    return raw.getvalue().decode(encoding).splitlines()


def row(found: list[str], name: str) -> str:
    (line,) = (x for x in found if x.startswith(name + " "))
    return line[timeline.LABEL_WIDTH :].ljust(72)


def test_all_rows_share_one_axis(preempted: Summary) -> None:
    """72 cells of 100 s."""
    found = lines(preempted)
    attempts, phases, use, marks = (row(found, n) for n in ("attempts", "phases", "utilization", "events"))
    assert attempts.startswith("[1 preempted──")
    assert (attempts[30], attempts[31:36], attempts[36:46], attempts[71]) == ("]", " " * 5, "[2 running", ">")
    assert phases == (
        "s" * 6 + "=" * 6 + "c" + "=" * 12 + "d" * 5 + " " * 6 + "s" + "r" * 5 + "=" * 8 + "e" * 6 + "=" * 16
    )
    assert use[28:40].strip("▇") == " " * 6, "nothing was recorded between the attempts"
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
    ticks = row(found, "time")
    assert ticks.index("30m") == 18
    assert ticks.index("1h ") == 36


def test_the_letters_are_explained_and_the_events_told(preempted: Summary) -> None:
    text = "\n".join(lines(preempted))
    for words in ("= training", "r restore", "d shutdown", "X 1 XID", "c 1 checkpoint", "f 2 first steps"):
        assert words in text
    assert "    40m  signal: SIGTERM on n1" in text
    assert "  1h40m  XID 63 on GPU 1 of n2" in text
    assert "step 10" not in text, "checkpoints are counted"


def test_many_events_are_counted_unless_all_are_asked_for(preempted: Summary) -> None:
    many = [at(100.0 * i, "signal", f"number {i}") for i in range(30)]
    found = replace(preempted, attempts=[attempt(1, 0, 3000, "preempted", at(1, "first_step"), *many)])
    text = "\n".join(lines(found))
    assert "22 earlier ones" in text
    assert "number 21\n" not in text
    assert "number 21\n" in "\n".join(lines(found, every=True))


def test_many_short_attempts_do_not_overflow() -> None:
    found = replace(healthy(), attempts=[attempt(n, 20.0 * n, 20.0 * n + 15, "preempted") for n in range(1, 300)])
    assert max(map(len, lines(found, 80))) <= 80


def test_in_ascii(preempted: Summary) -> None:
    assert row(lines(preempted, encoding="ascii"), "attempts").startswith("[1 preempted--")


def test_a_script_without_a_session_has_no_phases() -> None:
    found = replace(healthy(), attempts=[attempt(1, 0, 7200, "completed")])
    assert not any(line.startswith("phases") for line in lines(found))


def test_without_any_time_there_is_no_timeline() -> None:
    assert timeline.render(replace(healthy(), attempts=[], window=TimeWindow(None, None)), 80, terminal.UNICODE) == []
    assert timeline.render(replace(healthy(), attempts=[], window=TimeWindow(T0, T0)), 80, terminal.UNICODE) == []


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0"), (45, "45s"), (1800, "30m"), (5400, "1h30m"), (172800, "2d"), (129600, "1d12h"), (3601, "1h1s")],
)
def test_elapsed_time(seconds: float, words: str) -> None:
    assert timeline.format_elapsed(seconds) == words
