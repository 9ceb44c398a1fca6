"""The table of all runs, kept up to date from the files that change.

The thread of :class:`clustertrain.ui.live.Hub` looks at sizes and times of files. What takes longer is left to two
other threads: one asks the scheduler, once per interval for all runs, and reads the runs that have changed; the other
computes utilization and insights. A run that has ended is read once.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from clustertrain import clock, reading
from clustertrain.errors import ClusterTrainError
from clustertrain.report.progress import Progress, load_progress
from clustertrain.run import metrics, state
from clustertrain.run.lookup import list_runs
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.run_status import RunStatus, SchedulerAnswers, Unreadable, run_statuses
from clustertrain.ui.cache import Cache, make_key
from clustertrain.ui.details import DetailsReader, Wanted
from clustertrain.ui.live import Change
from clustertrain.ui.rows import Details, RunRow, make_row
from clustertrain.ui.stamps import Stamp, status_files, take_stamp

SCHEDULER_INTERVAL_S = 5.0
MAX_SCHEDULER_SHARE = 0.2  # of the time, for queries of a slow scheduler
ENDED_INTERVAL_S = 10.0  # between looks at the files of a run that has ended: its owner may continue it
CHUNK = 12  # runs that are shown at once while the table is read for the first time
MAX_SHOWN = 24  # runs that are read while their rows come from the cache, before the others are looked at again
DETAILS_INTERVAL_S = 60.0  # for a running run
MAX_DETAILS_SHARE = 0.05
NOT_ASKED = "it has not answered yet"
READ_ALL_S = 60.0
PATIENCE_S = 3.0  # before the page says so


@dataclass
class _Entry:
    """What is known about one run."""

    run: RunDir
    status: RunStatus | Unreadable | None
    """None: only its row is known, from the cache."""
    progress: Progress
    stamp: Stamp
    metrics_stamp: Stamp = ()
    looked_s: float = 0.0
    """Monotonic time of the last look at its files."""
    details: Details | None = None
    details_stamp: Stamp | None = None
    """Stamp of the files that the details describe."""
    details_due_s: float = 0.0
    version: int = 0
    row: RunRow | None = None

    @property
    def is_final(self) -> bool:
        return not isinstance(self.status, RunStatus) or self.status.is_final


class KnownRun(NamedTuple):
    """A run that can be read, for pages that sum over runs."""

    status: RunStatus
    details: Details | None
    stamp: Stamp
    """Of its files."""


class RunsTable:
    """The rows of all runs; a :class:`clustertrain.ui.live.Topic`."""

    def __init__(self, notify: Callable[[], None] = lambda: None) -> None:
        """``notify`` is called when another thread has changed rows."""
        self._notify = notify
        self._lock = threading.RLock()
        self._boot = secrets.token_hex(4)  # cursors of another server are unknown
        self._version = 0
        self._entries: dict[str, _Entry] = {}
        self._removed: dict[str, int] = {}
        self._facts: dict[str, Any] = {"total": 0, "complete": False, "problem": None, "scheduler": []}
        self._facts_version = 0
        self._known_runs: list[RunDir] = []
        self._reader: threading.Thread | None = None
        self._next_scheduler_s = 0.0
        self._details = DetailsReader(self._take_details)
        self._rows = Cache("rows", RunRow)
        self._is_read = False
        self._is_closed = False
        self._started_s = clock.monotonic()

    def close(self) -> None:
        """End the threads soon."""
        self._is_closed = True
        self._details.close()

    def refresh(self, *, wait: bool = False) -> bool:
        """Look for changes; ``wait`` until those that were found have been read."""
        before = self._version
        try:
            runs = list_runs()
        except (ClusterTrainError, OSError) as e:
            self._state_facts(problem=str(e))
            runs = []
        else:
            self._state_facts(problem=None)
        self._forget({run.id for run in runs})
        with self._lock:
            self._known_runs = runs
            entries = [self._entries.get(run.id) for run in runs]
        new = [run for run, entry in zip(runs, entries, strict=True) if entry is None or entry.status is None]
        changed = [entry.run for entry in entries if entry is not None and self._look(entry)]
        self._is_read = not new
        self._state_facts(total=len(runs), complete=None not in entries)
        is_scheduler_due = clock.monotonic() >= self._next_scheduler_s
        if new or changed or is_scheduler_due:
            self._start_reading(new, changed, is_scheduler_due=is_scheduler_due, wait=wait)
        self._state_scheduler_errors()
        self._start_details()
        return self._version != before

    def read_all(self) -> None:
        """Look for changes, and wait until each run has been read once; not for the scheduler."""

        def is_read() -> bool:
            self.refresh()
            return self._is_read or self._is_closed

        clock.wait_until(is_read, READ_ALL_S)

    def _look(self, entry: _Entry) -> bool:
        """Follow the steps of a running run; return whether the run must be read again."""
        now = clock.monotonic()
        if entry.is_final and now < entry.looked_s + ENDED_INTERVAL_S:
            return False
        entry.looked_s = now
        if take_stamp(status_files(entry.run)) != entry.stamp:
            return True
        self._follow_steps(entry)
        return False

    def _follow_steps(self, entry: _Entry) -> None:
        """Take step, rate and loss from new rows of metrics, which costs little."""
        if not isinstance(entry.status, RunStatus) or entry.status.state != state.RUNNING or not entry.status.history:
            return
        stamp = take_stamp(entry.run.metrics_files(entry.status.history[-1].n))
        if stamp == entry.metrics_stamp:
            return
        entry.metrics_stamp = stamp
        row = metrics.find_latest_row(entry.run)
        if row is not None:
            status = dataclasses.replace(entry.status, step=int(row["step"]))
            self._publish([dataclasses.replace(entry, status=status, progress=_load_progress(status))])

    def _start_reading(
        self, new: Sequence[RunDir], changed: Sequence[RunDir], *, is_scheduler_due: bool, wait: bool
    ) -> None:
        with self._lock:
            if self._reader is None or not self._reader.is_alive():
                arguments = (new, changed, is_scheduler_due)
                self._reader = threading.Thread(target=self._read, args=arguments, name="ui-status", daemon=True)
                self._reader.start()
            reader = self._reader
        if wait:
            reader.join()
        else:
            reader.join(0.1)  # mostly enough for a few runs

    def _read(self, new: Sequence[RunDir], changed: Sequence[RunDir], is_scheduler_due: bool) -> None:
        """Read runs that are not shown yet from their files, then all active ones with the scheduler's answer.

        Those that are shown from the cache come last, some in each call.
        """
        self._show_cached(new)
        with self._lock:
            missing = [run for run in new if run.id not in self._entries]
            shown = [run for run in new if run.id in self._entries]
        self._read_chunks(missing)
        self._state_facts(complete=True)
        with self._lock:
            active = [e.run for e in self._entries.values() if not e.is_final]
        is_scheduler_due = is_scheduler_due or bool(missing)
        due = {run.id: run for run in ([*active, *changed] if is_scheduler_due else changed)}
        if due and not self._is_closed:
            started = clock.monotonic()
            self._read_runs(list(due.values()), None)
            if is_scheduler_due:
                elapsed_s = clock.monotonic() - started
                self._next_scheduler_s = clock.monotonic() + max(SCHEDULER_INTERVAL_S, elapsed_s / MAX_SCHEDULER_SHARE)
        self._read_chunks(shown[:MAX_SHOWN])
        self._is_read = not shown[MAX_SHOWN:]
        if new and self._is_read:
            self._save_rows()

    def _read_chunks(self, runs: Sequence[RunDir]) -> None:
        for i in range(0, len(runs), CHUNK):
            if not self._is_closed:
                self._read_runs(runs[i : i + CHUNK], SchedulerAnswers(not_asked=NOT_ASKED))

    def _show_cached(self, runs: Sequence[RunDir]) -> None:
        """Show the rows of ended runs as an earlier server has read them, until they have been read again."""
        found = []
        for run in runs:
            stamp = take_stamp(status_files(run))
            row = self._rows.get(make_key(run.id, stamp))
            if row is not None and run.id not in self._entries:
                found.append(_Entry(run, None, Progress(), stamp, row=row))
        self._publish(found)
        self._notify()

    def _save_rows(self) -> None:
        with self._lock:
            ended = [e for e in self._entries.values() if isinstance(e.status, RunStatus) and e.status.is_final]
            rows = {make_key(e.run.id, e.stamp): e.row for e in ended if e.row is not None}
        self._rows.add(rows)
        self._rows.save()

    def _read_runs(self, runs: Sequence[RunDir], answers: SchedulerAnswers | None) -> None:
        # The stamps come first: what is written meanwhile changes them again.
        stamps = {run.id: take_stamp(status_files(run)) for run in runs}
        now = clock.monotonic()
        entries = []
        for run, status in zip(runs, run_statuses(runs, answers), strict=True):
            progress = Progress() if isinstance(status, Unreadable) else _load_progress(status)
            known = self._entries.get(run.id)
            fresh = _Entry(run, status, progress, stamps[run.id], looked_s=now)
            if known is not None:
                fresh = dataclasses.replace(known, status=status, progress=progress, stamp=fresh.stamp, looked_s=now)
            entries.append(self._with_cached_details(fresh))
        self._publish(entries)
        self._notify()

    def _with_cached_details(self, entry: _Entry) -> _Entry:
        if entry.details_stamp == entry.stamp or not isinstance(entry.status, RunStatus):
            return entry
        cached = self._details.find_cached(_want(entry, entry.status))
        if cached is None:
            return entry
        return dataclasses.replace(entry, details=cached, details_stamp=entry.stamp)

    def _start_details(self) -> None:
        """Compute the details that are missing or old, newest runs first."""
        now = clock.monotonic()
        with self._lock:
            entries = [self._entries[run.id] for run in self._known_runs if run.id in self._entries]
        if self._is_read:
            self._details.start(
                [_want(e, e.status) for e in entries if isinstance(e.status, RunStatus) and _needs_details(e, now)]
            )

    def _take_details(self, found: Mapping[Wanted, Details], run_s: float) -> None:
        now = clock.monotonic()
        entries = []
        with self._lock:
            for wanted, details in found.items():
                entry = self._entries.get(wanted.run.id)
                if entry is not None:
                    due_s = now + max(DETAILS_INTERVAL_S, run_s / MAX_DETAILS_SHARE)
                    entries.append(
                        dataclasses.replace(entry, details=details, details_stamp=wanted.stamp, details_due_s=due_s)
                    )
        self._publish(entries)
        self._notify()

    def _publish(self, entries: Iterable[_Entry]) -> None:
        """Replace the entries of these runs; rows that differ get a new version."""
        with self._lock:
            for entry in entries:
                known = self._entries.get(entry.run.id)
                row = entry.row
                if entry.status is not None:
                    row = make_row(entry.run, entry.status, entry.progress, entry.details)
                if row is not None and (known is None or known.row != row):
                    self._version += 1
                    entry.version = self._version
                    self._removed.pop(row.run, None)
                elif known is not None:
                    entry.version = known.version
                entry.row = row
                self._entries[entry.run.id] = entry

    def _forget(self, run_ids: set[str]) -> None:
        with self._lock:
            for run_id in [run_id for run_id in self._entries if run_id not in run_ids]:
                self._version += 1
                row = self._entries.pop(run_id).row
                if row is not None:
                    self._removed[row.run] = self._version

    def _state_facts(self, **facts: Any) -> None:
        with self._lock:
            if any(self._facts[name] != value for name, value in facts.items()):
                self._facts |= facts
                self._version += 1

    def _state_scheduler_errors(self) -> None:
        with self._lock:
            statuses = [e.status for e in self._entries.values() if not e.is_final]
        errors = {s.scheduler_error for s in statuses if isinstance(s, RunStatus) and s.scheduler_error}
        if clock.monotonic() < self._started_s + PATIENCE_S:
            errors.discard(NOT_ASKED)
        self._state_facts(scheduler=sorted(errors))

    def changes_since(self, cursor: str | None) -> Change | None:
        boot, _, text = (cursor or "").partition("-")
        known = int(text) if boot == self._boot and reading.is_unsigned_int(text) else None
        with self._lock:
            if self._version in (0, known):
                return None
            rows = [e.row for e in self._entries.values() if e.version > (known or 0)]
            removed = [run for run, version in self._removed.items() if version > (known or 0)]
            data = {"now": clock.now(), "full": known is None, "rows": rows, "removed": removed, **self._facts}
            return Change(data, f"{self._boot}-{self._version}")

    def document(self) -> dict[str, Any]:
        """Return all rows that are known by now, with the cursor for what follows."""
        change = self.changes_since(None)
        if change is None:
            return {"now": clock.now(), "full": True, "rows": [], "removed": [], "cursor": None, **self._facts}
        return {**change.data, "cursor": change.cursor}

    def statuses(self) -> dict[str, RunStatus | Unreadable]:
        """Return the statuses that are known by now, by run id."""
        with self._lock:
            return {run_id: e.status for run_id, e in self._entries.items() if e.status is not None}

    def known_runs(self) -> list[KnownRun]:
        """Return the runs that can be read, newest first."""
        with self._lock:
            entries = [self._entries[run.id] for run in self._known_runs if run.id in self._entries]
        return [KnownRun(e.status, e.details, e.stamp) for e in entries if isinstance(e.status, RunStatus)]


def _load_progress(status: RunStatus) -> Progress:
    return load_progress(status, clock.now(), with_failure=False)


def _want(entry: _Entry, status: RunStatus) -> Wanted:
    return Wanted(entry.run, status.state, entry.stamp, status.is_final)


def _needs_details(entry: _Entry, now: float) -> bool:
    if not isinstance(entry.status, RunStatus) or not entry.status.history:
        return False
    is_old = not entry.is_final or entry.details_stamp != entry.stamp
    return is_old and now >= entry.details_due_s
