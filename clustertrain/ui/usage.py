"""The page of usage: GPU-hours by week, and what they went into, over all runs.

The hours are those of the budget: each GPU from the start of an attempt to its end; on CPUs, a rank counts as a GPU.
What they went into is the goodput ledger of each run; GPUs that were never used come from its telemetry.
"""

from __future__ import annotations

import datetime
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from clustertrain import clock
from clustertrain.report.status import GOODPUT_LABELS
from clustertrain.run import state as run_state
from clustertrain.run.usage import budget
from clustertrain.run.usage.budget import Span
from clustertrain.run.usage.goodput import TIME_CATEGORIES, Goodput
from clustertrain.ui.live import Change
from clustertrain.ui.pages import json_response
from clustertrain.ui.rows import run_url
from clustertrain.ui.runs_table import KnownRun, RunsTable
from clustertrain.ui.stamps import Stamp
from clustertrain.ui.state import UiState

WEEKS, MIN_WEEKS = 12, 6  # shown
MAX_RUNS = 10  # with the most waste
MAX_AGE_S = 10 * 366 * 86400.0
INTERVAL_S = 60.0  # after which the hours of running runs count as changed
PRODUCTIVE, IDLE, UNKNOWN = "productive", "idle_gpus", "unknown"
# A job holds no GPU in the queue.
CAUSES = (
    PRODUCTIVE,
    IDLE,
    *(name.removesuffix("_s") for name in TIME_CATEGORIES[1:] if name != "productive_s"),
    UNKNOWN,
)
LABELS = {
    PRODUCTIVE: "productive steps",
    IDLE: "GPUs never used",
    UNKNOWN: "program without reported steps",
    **{name.removesuffix("_s"): label for name, label in GOODPUT_LABELS.items() if name != "productive_s"},
}
# Neither waste nor known to be productive: the remainder between steps.
NOT_WASTE = frozenset({PRODUCTIVE, UNKNOWN, "other"})
GpuHours = dict[str, float]


class Week(msgspec.Struct, frozen=True):
    """One week."""

    start: str
    """Its Monday, in the server's time zone."""
    gpu_hours: float
    by_cause: GpuHours


class WastefulRun(msgspec.Struct, frozen=True):
    """A run that wasted many GPU-hours."""

    run: str
    url: str
    gpu_hours: float
    wasted_gpu_hours: float
    cause: str
    """The largest one."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-hours of all runs."""

    runs: int
    gpu_hours: float
    wasted_gpu_hours: float
    by_cause: GpuHours
    weeks: list[Week]
    """The last 6 to 12 weeks, oldest first; not more than there were runs in."""
    most_wasteful: list[WastefulRun]
    without_telemetry: int
    """Runs whose idle GPUs are not known (yet)."""


class _Share(NamedTuple):
    """One run's part."""

    by_week: dict[datetime.date, float]
    by_cause: GpuHours


class UsageReader:
    """Sums over the runs of the table; what an ended run used is computed once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[str, tuple[Stamp, list[Span]]] = {}

    def read(self, runs: Sequence[KnownRun], now: float) -> Usage:
        """Return the usage at ``now``, UTC epoch s."""
        with self._lock:
            shares = [(known, compute_share(known, self._list_spans(known, now), now)) for known in runs]
        by_cause, by_week = _sum_shares(share for _, share in shares)
        today = datetime.datetime.fromtimestamp(now).date()
        monday = today - datetime.timedelta(days=today.weekday())
        oldest, newest = (monday - datetime.timedelta(weeks=count - 1) for count in (WEEKS, MIN_WEEKS))
        first = min(max(min(by_week, default=monday), oldest), newest)
        mondays = [first + datetime.timedelta(weeks=i) for i in range((monday - first).days // 7 + 1)]
        wasteful = sorted(shares, key=lambda pair: -_sum_waste(pair[1].by_cause))[:MAX_RUNS]
        return Usage(
            runs=len(runs),
            gpu_hours=sum(by_cause.values()),
            wasted_gpu_hours=_sum_waste(by_cause),
            by_cause=by_cause,
            weeks=[Week(day.isoformat(), sum(by_week[day].values()), by_week[day]) for day in mondays],
            most_wasteful=[_describe(*pair) for pair in wasteful if _sum_waste(pair[1].by_cause) > 0],
            without_telemetry=sum(known.details is None for known in runs if known.status.history),
        )

    def _list_spans(self, known: KnownRun, now: float) -> list[Span]:
        run = known.status.run
        cached = self._spans.get(run.id)
        if known.status.is_final and cached is not None and cached[0] == known.stamp:
            return cached[1]
        spans = budget.list_spans(run, known.status.history, now if known.status.state == run_state.RUNNING else None)
        self._spans[run.id] = known.stamp, spans
        return spans


def compute_share(known: KnownRun, spans: Sequence[Span], now: float) -> _Share:
    """Return the GPU-hours of one run up to ``now`` by week, and by what they went into."""
    by_week: dict[datetime.date, float] = defaultdict(float)
    for span in spans:
        # Damaged files may have any time.
        for day, hours in split_by_week(max(span.start, now - MAX_AGE_S), min(span.end, now)):
            by_week[day] += hours * span.gpus
    idle_hours = known.details.idle_gpu_hours if known.details is not None else 0.0
    return _Share(dict(by_week), split_by_cause(known.status.goodput, sum(by_week.values()), idle_hours))


def split_by_week(start: float, end: float) -> Iterator[tuple[datetime.date, float]]:
    """Yield the Monday of each week between two times (UTC epoch s), in the local time zone, with the hours in it."""
    while start < end:
        day = datetime.datetime.fromtimestamp(start).date()
        monday = day - datetime.timedelta(days=day.weekday())
        next_monday = datetime.datetime.combine(monday + datetime.timedelta(weeks=1), datetime.time()).timestamp()
        yield monday, (min(end, next_monday) - start) / 3600
        start = next_monday


def split_by_cause(goodput: Goodput, gpu_hours: float, idle_hours: float) -> GpuHours:
    """Return ``gpu_hours`` in proportion to the goodput ledger. What idle GPUs held is taken from productive steps."""
    seconds = {name.removesuffix("_s"): getattr(goodput, name) for name in TIME_CATEGORIES[1:]}
    allocated_s = sum(seconds.values())
    if allocated_s <= 0 or gpu_hours <= 0:
        return {}
    hours = {cause: gpu_hours * s / allocated_s for cause, s in seconds.items() if s > 0}
    if goodput.ratio is None:  # the program reported no step: what it did is not known
        hours[UNKNOWN] = hours.pop("other", 0.0)
    idle = min(idle_hours, hours.get(PRODUCTIVE, 0.0))
    if idle > 0:
        hours |= {PRODUCTIVE: hours[PRODUCTIVE] - idle, IDLE: idle}
    return {cause: hours[cause] for cause in CAUSES if hours.get(cause)}


def _sum_shares(shares: Iterator[_Share]) -> tuple[GpuHours, dict[datetime.date, GpuHours]]:
    """Return the sums over all runs, in all and by week. In each of its weeks a run has the same parts."""
    total: GpuHours = defaultdict(float)
    by_week: dict[datetime.date, GpuHours] = defaultdict(lambda: defaultdict(float))
    for share in shares:
        run_hours = sum(share.by_week.values())
        for cause, hours in share.by_cause.items():
            total[cause] += hours
            for day, day_hours in share.by_week.items():
                by_week[day][cause] += hours * day_hours / run_hours
    return _sorted(total), defaultdict(dict, {day: _sorted(hours) for day, hours in by_week.items()})


def _sorted(hours: GpuHours) -> GpuHours:
    return {cause: hours[cause] for cause in CAUSES if cause in hours}


def _sum_waste(by_cause: GpuHours) -> float:
    return sum(hours for cause, hours in by_cause.items() if cause not in NOT_WASTE)


def _describe(known: KnownRun, share: _Share) -> WastefulRun:
    run_id = known.status.run.id
    causes = {cause: hours for cause, hours in share.by_cause.items() if cause not in NOT_WASTE}
    return WastefulRun(
        run_id, run_url(run_id), sum(share.by_cause.values()), sum(causes.values()), max(causes, key=causes.__getitem__)
    )


class UsageTopic:
    """Says when the page has to be loaded again; a :class:`clustertrain.ui.live.Topic`.

    That is when a run appears, changes its state or is deleted, and each minute for the hours of running runs, which
    grow all the time.
    """

    def __init__(self, table: RunsTable) -> None:
        self._table, self._cursor = table, make_cursor(table)

    def refresh(self) -> bool:
        self._table.refresh()
        before, self._cursor = self._cursor, make_cursor(self._table)
        return self._cursor != before

    def changes_since(self, cursor: str | None) -> Change | None:
        return None if cursor == self._cursor else Change({}, self._cursor)


def make_cursor(table: RunsTable) -> str:
    """Return the minute and a hash of the states of all runs."""
    states = frozenset((run_id, getattr(status, "state", None)) for run_id, status in table.statuses().items())
    return f"{int(clock.now() // INTERVAL_S)}-{hash(states) & 0xFFFFFFFFFFFFFFFF:x}"


def routes(state: UiState) -> list[Route]:
    reader = UsageReader()

    def read() -> tuple[Usage, str]:
        """Return the usage, and the cursor of what changes after it."""
        state.table.read_all()
        cursor = make_cursor(state.table)
        return reader.read(state.table.known_runs(), clock.now()), cursor

    def show(request: Request) -> Response:
        usage, cursor = read()
        return state.pages.render(
            "usage.html.j2", "usage", u=usage, labels=LABELS, causes=CAUSES, data={"cursor": cursor}
        )

    def document(request: Request) -> Response:
        return json_response(read()[0])

    async def live(request: Request) -> Response:
        return state.hub.stream(request, "usage", lambda: UsageTopic(state.table))

    return [Route("/usage", show), Route("/api/usage", document), Route("/api/live/usage", live)]
