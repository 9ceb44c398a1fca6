"""The thread of the agent that samples the node once a second into the attempt's folder.

It never harms the run: whatever goes wrong in it ends in an event and a reason in the file, not in the agent.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from clustertrain import clock
from clustertrain.run import heartbeat
from clustertrain.telemetry import fields
from clustertrain.telemetry.observers import Observer, OnEvent, Telling
from clustertrain.telemetry.readers import allocation
from clustertrain.telemetry.readers.gpu_reader import Backoff, GpuReader
from clustertrain.telemetry.readers.host import HostReader
from clustertrain.telemetry.readers.nvml import Device, Nvml, NvmlError
from clustertrain.telemetry.readers.nvml_events import GpuEvents
from clustertrain.telemetry.readers.processes import JobProcesses
from clustertrain.telemetry.snapshot import Snapshot
from clustertrain.telemetry.store.writer import GpuFacts, Header, Writer

NAN = float("nan")
_BLANK = {pace: [None] * sum(f.pace == pace for f in fields.GPU) for pace in (fields.FAST, fields.SLOW)}


class Intervals(msgspec.Struct, frozen=True):
    """Seconds between samples, between readings of what is slow to read, and between writes to the file."""

    sample_s: float = 1.0
    slow_s: float = 10.0
    flush_s: float = 10.0


class Sampler:
    """Samples all allocated GPUs of this node, the host, and what the node's ranks tell of themselves.

    Args:
        folder: where the segments go, ``attempt.telemetry / node``.
        node: the node's name.
        environ: the agent's environment, which says what is allocated.
        interval_s: seconds between samples.
        on_event: called as ``on_event(name, **fields)`` from the sampler's thread: ``gpu_lost``, ``gpu_back``,
            ``gpu_event``, ``telemetry_failed``.
        first_rank: global rank of local rank 0; local rank i runs on the i-th allocated GPU. None: not known.
        rank_count: how many ranks the node has, where that may be fewer than GPUs.
        beats: the folder in which the ranks tell of themselves.
        observers: are handed each sample.
        intervals: the other intervals; ``interval_s`` wins over its ``sample_s``.
    """

    def __init__(
        self,
        folder: Path,
        node: str,
        environ: Mapping[str, str],
        interval_s: float = 1.0,
        on_event: OnEvent | None = None,
        *,
        first_rank: int | None = None,
        rank_count: int | None = None,
        beats: Path | None = None,
        observers: Sequence[Observer] = (),
        intervals: Intervals | None = None,
    ) -> None:
        self._node = node
        self._environ = dict(environ)
        self._intervals = msgspec.structs.replace(intervals or Intervals(), sample_s=interval_s)
        self._tell = Telling(on_event, node, observers)
        self._first_rank = first_rank
        self._rank_count = rank_count
        self._beats_in = beats
        self._ranks: list[int] = []
        self._beats: heartbeat.Reader | None = None
        self._writer = Writer(folder)
        self._nvml = Nvml()
        self._nvml_reason: str | None = None
        self._nvml_retry = Backoff(30, 600)
        self._events: GpuEvents | None = None
        self._readers: list[GpuReader] = []
        self._facts: list[GpuFacts] = []
        self._columns: dict[fields.Pace, list[str]] = {}
        self._newest: dict[fields.Pace, array[float]] = {}
        self._told_of: dict[str, dict[str, str]] = {}  # by device, the reasons that stand in the file
        self._write_failed = False
        self._cpus: int | None = None  # of the job
        self._begin = 0.0
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self.gpus: list[dict[str, Any]] = []

    @property
    def nvml_reason(self) -> str | None:
        """Why there are no GPU figures; None while there are."""
        return self._nvml_reason

    def start(self, timeout_s: float = 20.0) -> None:
        """Start sampling, and wait until ``gpus`` is known: NVML takes seconds to open where no daemon keeps it up."""
        try:
            self._thread.start()
        except RuntimeError as e:  # the limit on processes is reached
            self._tell.event("telemetry_failed", reason=f"no thread could be started: {e}")
            return
        self._ready.wait(timeout_s)

    def ask_to_stop(self) -> None:
        """Let the thread end, and do not wait for it."""
        self._stop.set()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Write what waits and end. False when the driver or the disk held the thread longer than ``timeout_s``."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as e:  # the thread's edge: telemetry must not end the run
            where = traceback.extract_tb(e.__traceback__)[-1]
            reason = f"{type(e).__name__}: {e} ({Path(where.filename).name}:{where.lineno})"
            self._guarded_end(reason)
            self._tell.event("telemetry_failed", reason=reason)
        finally:
            self._ready.set()
            self._nvml.close()
            try:
                self._writer.close()
            except OSError as e:
                self._tell.event("telemetry_failed", reason=f"the samples could not be written: {e}")

    def _guarded_end(self, reason: str) -> None:
        with contextlib.suppress(Exception):  # the writer may be what failed
            self._writer.end(self._elapsed(), reason)

    def _loop(self) -> None:
        host, processes = HostReader(), JobProcesses(os.getpid())
        self._open(host)
        self._ready.set()
        self._flush()  # who looks in the first seconds finds what was allocated
        every = self._intervals
        start = next_slow = clock.monotonic()
        next_flush = start + every.flush_s
        tick = 0
        while not self._stop.wait(start + tick * every.sample_s - clock.monotonic()):
            beats = self._beats.read() if self._beats else {}
            self._fast(beats)
            now = clock.monotonic()
            if now >= next_slow:
                self._slow(host, processes, beats)
                self._tell.returned(now)
                next_slow = now + every.slow_s
            if now >= next_flush:
                self._flush()
                next_flush = now + every.flush_s
            self._observe()
            self._heal(host)
            # From the start, so that nothing drifts. Ticks that a slow driver made us miss show as missing coverage.
            tick = max(tick + 1, int((clock.monotonic() - start) / every.sample_s))
        self._tell.rest(self._facts)
        self._writer.end(self._elapsed())

    def _elapsed(self) -> float:
        return clock.monotonic() - self._begin

    def _open(self, host: HostReader) -> None:
        """Open NVML, find the allocated GPUs and begin a segment that says what follows."""
        driver, found = None, allocation.Allocation([], None)
        try:
            driver = self._nvml.open()
            found = allocation.find(self._environ, self._nvml.devices())
            self._nvml_reason = None
        except NvmlError as e:
            self._nvml.close()
            self._nvml_reason = e.reason
            self._nvml_retry.failed(clock.monotonic())
        count = len(found.devices) if self._rank_count is None else self._rank_count
        first = self._first_rank
        self._ranks = [] if first is None else list(range(first, first + count))
        self._beats = heartbeat.Reader(self._beats_in, self._ranks) if self._beats_in else None
        self._facts = [self._facts_of(i, d) for i, d in enumerate(found.devices)]
        self.gpus = [msgspec.to_builtins(f) for f in self._facts]
        self._readers = [GpuReader(self._nvml, d) for d in found.devices]
        self._listen()
        self._told_of.clear()
        self._begin = clock.monotonic()
        self._begin_segment(host, driver, found.how)

    def _begin_segment(self, host: HostReader, driver: str | None, how: str | None) -> None:
        machine = host.facts()
        share = allocation.allocated(self._environ)
        self._cpus = share.cpus
        fast, slow = (fields.columns(len(self._facts), self._ranks, pace) for pace in (fields.FAST, fields.SLOW))
        self._columns = {fields.FAST: fast, fields.SLOW: slow}
        self._newest = {pace: array("d", [NAN]) * len(columns) for pace, columns in self._columns.items()}
        self._writer.begin(
            Header(
                node=self._node,
                t=clock.now(),
                mono=self._begin,
                interval_s=self._intervals.sample_s,
                slow_s=self._intervals.slow_s,
                gpus=self._facts,
                ranks=self._ranks,
                nvml=self._nvml_reason,
                driver=driver,
                allocation=how,
                cpu_count=machine.cpu_count,
                cpu_allocated=share.cpus,
                memory_total_bytes=machine.memory_total_bytes,
                memory_allocated_bytes=share.memory_bytes,
                fast=fast,
                slow=slow,
            )
        )

    def _facts_of(self, number: int, device: Device) -> GpuFacts:
        ranks = [self._ranks[number]] if number < len(self._ranks) else []
        return GpuFacts(**msgspec.structs.asdict(device), ranks=ranks)

    def _fast(self, beats: Mapping[int, heartbeat.Beat]) -> None:
        at = self._elapsed()
        row = self._gpu_values(fields.FAST)
        for rank in self._ranks:
            b = beats.get(rank)
            row += [None] * 5 if b is None else [b.step, b.phase, b.tokens, b.data_wait_s, b.forward_s]
        self._put(fields.FAST, at, row)
        if self._events is not None:
            self._tell.errors(self._events.poll(), self._facts, at)

    def _slow(self, host: HostReader, processes: JobProcesses, beats: Mapping[int, heartbeat.Beat]) -> None:
        at = self._elapsed()
        row = [*self._gpu_values(fields.SLOW), *host.read()]
        self._reasons(at, "host", host.reasons)
        found = processes.read({rank: b.pid for rank, b in beats.items()})
        job = None if found is None else found.job
        row += [None] * 3 if job is None else [job.memory_bytes, job.cpu_s, job.processes]
        for rank in self._ranks:
            figures = None if found is None else found.ranks.get(rank)
            row += [None] * 2 if figures is None else [figures.memory_bytes, figures.cpu_s]
        self._put(fields.SLOW, at, row)

    def _gpu_values(self, pace: fields.Pace) -> list[float | None]:
        row: list[float | None] = []
        at = self._elapsed()
        for number, reader in enumerate(self._readers):
            row += reader.read(pace) or _BLANK[pace]
            self._reasons(at, f"gpu{number}", reader.reasons)
            if self._tell.health(reader.device, reader.lost) and self._events is not None:
                self._events.open()  # it came back
        return row

    def _put(self, pace: fields.Pace, at: float, row: list[float | None]) -> None:
        values = array("d", [NAN if value is None else value for value in row])
        self._newest[pace] = values
        (self._writer.fast if pace == fields.FAST else self._writer.slow)(at, values)

    def _observe(self) -> None:
        if not self._tell.observers:
            return
        values: dict[str, float] = {}
        for pace, columns in self._columns.items():
            values.update(zip(columns, self._newest[pace], strict=True))
        snapshot = Snapshot(clock.now(), clock.monotonic(), self._node, self._facts, self._ranks, values, self._cpus)
        self._tell.sample(snapshot)

    def _reasons(self, at: float, device: str, reasons: Mapping[str, str]) -> None:
        """Write the reasons that have changed."""
        known = self._told_of.get(device, {})
        if known == reasons:
            return
        for field in known.keys() | reasons.keys():
            reason = reasons.get(field)
            if reason != known.get(field):
                self._writer.null(at, fields.column(device, field), reason)
        self._told_of[device] = dict(reasons)

    def _heal(self, host: HostReader) -> None:
        """Open NVML again when it went away under us, or was not there at first. Rarely: opening takes seconds."""
        now = clock.monotonic()
        if self._nvml_reason is not None:
            no_driver = self._nvml_reason.startswith("LIBRARY_NOT_FOUND")
            if not no_driver and self._nvml_retry.due(now):
                self._open_late(host)
        elif any(r.session_dead for r in self._readers) and self._nvml_retry.due(now):
            self._nvml_retry.failed(now)
            self._nvml.close()
            try:
                self._nvml.open()
            except NvmlError:
                return  # each field goes on telling its reason
            for reader in self._readers:
                reader.reopened()
            self._listen()

    def _open_late(self, host: HostReader) -> None:
        try:
            self._nvml.open()
        except NvmlError:
            self._nvml_retry.failed(clock.monotonic())
            self._nvml.close()
            return
        self._nvml.close()
        self._writer.end(self._elapsed())
        self._open(host)

    def _listen(self) -> None:
        """To what the driver tells by itself."""
        devices = [r.device for r in self._readers]
        self._events = GpuEvents(self._nvml, devices) if devices else None
        if self._events is not None:
            self._events.open()
            told = [d.uuid for d in devices if d.uuid not in self._events.reasons]
            self._tell.listening(told)

    def _flush(self) -> None:
        try:
            self._writer.flush()
            self._write_failed = False
        except OSError as e:
            if not self._write_failed:
                self._write_failed = True
                self._tell.event("telemetry_failed", reason=f"the samples could not be written, and are kept: {e}")
