"""Agent thread that samples the node, once per second by default, into the attempt's folder.

Sampling never harms the run: a failure becomes an event and a recorded reason, and never reaches the agent.
"""

from __future__ import annotations

import contextlib
import math
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
from clustertrain.run.events import WriteEvent
from clustertrain.telemetry import fields
from clustertrain.telemetry.observers import EventDispatcher, Observer
from clustertrain.telemetry.readers import allocation
from clustertrain.telemetry.readers.gpu_reader import Backoff, GpuReader
from clustertrain.telemetry.readers.host import HostReader
from clustertrain.telemetry.readers.nvml import Device, Nvml, NvmlError
from clustertrain.telemetry.readers.nvml_events import GpuEvents
from clustertrain.telemetry.readers.processes import JobProcessReader
from clustertrain.telemetry.readers.rank_environment import assign_ranks
from clustertrain.telemetry.readers.watched_job import WatchedJobReader
from clustertrain.telemetry.snapshot import Snapshot
from clustertrain.telemetry.store.writer import GpuFacts, Header, Writer

NAN = float("nan")
_CLOSEST = 0.1  # least distance of two samples, in intervals
_NO_VALUES = {pace: [None] * sum(f.pace == pace for f in fields.GPU) for pace in (fields.FAST, fields.SLOW)}


class Intervals(msgspec.Struct, frozen=True):
    """Sampling intervals in seconds."""

    sample_s: float = 1.0  # between samples
    slow_s: float = 10.0  # between readings of slow fields
    flush_s: float = 10.0  # between writes to the files
    first_flush_s: float | None = None  # until the first write of samples; None: flush_s


def next_tick(tick: int, sampled: float, now: float) -> int:
    """Return the tick of the next sample. Ticks count intervals from the start, so they do not drift.

    A tick that a slow driver has missed lowers the coverage. So does one that comes at once after a late sample: two
    samples at the same time would have one time stamp.

    Args:
        tick: tick of the last sample.
        sampled: when it was taken, in intervals since the start.
        now: the current time, in intervals since the start.
    """
    return max(tick + 1, int(now), math.ceil(sampled + _CLOSEST))


class Sampler:
    """Samples all allocated GPUs of this node, the host, and the heartbeats of the node's ranks.

    Args:
        folder: parent of the segments, ``attempt.telemetry / node``.
        node: the node's name.
        environ: the agent's environment, which determines the allocated devices.
        interval_s: seconds between samples.
        on_event: called as ``on_event(name, **fields)`` from the sampler's thread: ``gpu_lost``, ``gpu_back``,
            ``gpu_event``, ``telemetry_failed``.
        first_rank: global rank of local rank 0; local rank i runs on the i-th allocated GPU. None if unknown.
        rank_count: number of ranks on the node; by default one per allocated GPU.
        heartbeat_dir: folder of the ranks' heartbeats.
        watched_job: finds the ranks and the processes of a job that was started without clustertrain. Its ranks have
            no heartbeats, and each GPU has the rank that is likely to use it.
        observers: receive each sample and each GPU error.
        intervals: the other intervals; ``interval_s`` overrides its ``sample_s``.
    """

    def __init__(
        self,
        folder: Path,
        node: str,
        environ: Mapping[str, str],
        interval_s: float = 1.0,
        on_event: WriteEvent | None = None,
        *,
        first_rank: int | None = None,
        rank_count: int | None = None,
        heartbeat_dir: Path | None = None,
        watched_job: WatchedJobReader | None = None,
        observers: Sequence[Observer] = (),
        intervals: Intervals | None = None,
    ) -> None:
        self._node = node
        self._environ = dict(environ)
        self._intervals = msgspec.structs.replace(intervals or Intervals(), sample_s=interval_s)
        self._dispatcher = EventDispatcher(on_event, node, observers)
        self._first_rank = first_rank
        self._rank_count = rank_count
        self._heartbeat_dir = heartbeat_dir
        self._watched_job = watched_job
        self._ranks: list[int] = []
        self._ranks_by_gpu: dict[str, list[int]] = {}  # by UUID
        self._driver: str | None = None
        self._allocated = allocation.Allocation([], None)
        self._heartbeat_reader: heartbeat.HeartbeatReader | None = None
        self._writer = Writer(folder)
        self._nvml = Nvml()
        self._nvml_error: str | None = None
        self._nvml_retry = Backoff(30, 600)
        self._gpu_events: GpuEvents | None = None
        self._readers: list[GpuReader] = []
        self._gpu_facts: list[GpuFacts] = []
        self._columns: dict[fields.Pace, list[str]] = {}
        self._latest: dict[fields.Pace, array[float]] = {}
        self._recorded_reasons: dict[str, dict[str, str]] = {}  # by device, the reasons already in the file
        self._write_failed = False
        self._allocated_cpus: int | None = None  # of the job
        self._segment_start = 0.0
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self.gpus: list[dict[str, Any]] = []

    @property
    def nvml_error(self) -> str | None:
        """Reason why GPUs cannot be sampled; None while they can."""
        return self._nvml_error

    def start(self, timeout_s: float = 20.0) -> None:
        """Start sampling and wait until ``gpus`` is known.

        NVML takes seconds to open unless the persistence daemon keeps the driver loaded.
        """
        try:
            self._thread.start()
        except RuntimeError as e:  # the process limit is reached
            self._dispatcher.write_event("telemetry_failed", reason=f"cannot start the sampler thread: {e}")
            return
        self._ready.wait(timeout_s)

    def request_stop(self) -> None:
        """Request the thread to end, without waiting for it."""
        self._stop.set()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Write pending samples and end; return False if the driver or the disk blocks longer than ``timeout_s``."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as e:  # the thread's edge: telemetry must not end the run
            frame = traceback.extract_tb(e.__traceback__)[-1]
            reason = f"{type(e).__name__}: {e} ({Path(frame.filename).name}:{frame.lineno})"
            self._end_after_failure(reason)
            self._dispatcher.write_event("telemetry_failed", reason=reason)
        finally:
            self._ready.set()
            self._nvml.close()
            try:
                self._writer.close()
            except OSError as e:
                self._dispatcher.write_event("telemetry_failed", reason=f"cannot write the samples: {e}")

    def _end_after_failure(self, reason: str) -> None:
        with contextlib.suppress(Exception):  # the writer itself may have failed
            self._writer.end(self._elapsed(), reason)

    def _loop(self) -> None:
        host, processes = HostReader(), self._watched_job or JobProcessReader(os.getpid())
        self._open_nvml(host)
        self._ready.set()
        self._flush()  # so that readers see the allocated devices in the first seconds
        intervals = self._intervals
        start = next_slow = clock.monotonic()
        next_flush = start + (intervals.flush_s if intervals.first_flush_s is None else intervals.first_flush_s)
        tick = 0
        while not self._stop.wait(start + tick * intervals.sample_s - clock.monotonic()):
            heartbeats = self._heartbeat_reader.read() if self._heartbeat_reader else {}
            sampled = clock.monotonic()
            self._fast(heartbeats)
            now = clock.monotonic()
            if now >= next_slow:
                self._slow(host, processes, heartbeats)
                self._adopt_ranks(host)
                self._dispatcher.notify_recovered(now)
                next_slow = now + intervals.slow_s
            if now >= next_flush:
                self._flush()
                next_flush = now + intervals.flush_s
            self._observe()
            self._recover_nvml(host)
            tick = next_tick(
                tick, (sampled - start) / intervals.sample_s, (clock.monotonic() - start) / intervals.sample_s
            )
        self._dispatcher.flush(self._gpu_facts)
        self._writer.end(self._elapsed())

    def _elapsed(self) -> float:
        return clock.monotonic() - self._segment_start

    def _open_nvml(self, host: HostReader) -> None:
        """Open NVML, find the allocated GPUs and begin a segment with their header."""
        self._driver, self._allocated = None, allocation.Allocation([], None)
        try:
            self._driver = self._nvml.open()
            self._allocated = allocation.find_allocation(self._environ, self._nvml.devices())
            self._nvml_error = None
        except NvmlError as e:
            self._nvml.close()
            self._nvml_error = e.reason
            self._nvml_retry.record_failure(clock.monotonic())
        self._readers = [GpuReader(self._nvml, d) for d in self._allocated.devices]
        self._watch_events()
        if self._watched_job is not None:
            self._watched_job.read()
        self._start_segment(host)

    def _start_segment(self, host: HostReader) -> None:
        """Begin a segment with the ranks as they are now."""
        devices = self._allocated.devices
        if self._watched_job is not None:
            self._ranks = [r.rank for r in self._watched_job.ranks]
            self._ranks_by_gpu = assign_ranks(self._watched_job.ranks, devices)
        else:
            count = len(devices) if self._rank_count is None else self._rank_count
            first_rank = self._first_rank
            self._ranks = [] if first_rank is None else list(range(first_rank, first_rank + count))
            self._ranks_by_gpu = {d.uuid: [r] for d, r in zip(devices, self._ranks, strict=False)}
        self._heartbeat_reader = (
            heartbeat.HeartbeatReader(self._heartbeat_dir, self._ranks) if self._heartbeat_dir else None
        )
        self._gpu_facts = [self._gpu_facts_for(d) for d in devices]
        self.gpus = [msgspec.to_builtins(f) for f in self._gpu_facts]
        self._recorded_reasons.clear()
        self._segment_start = clock.monotonic()
        self._begin_segment(host)

    def _adopt_ranks(self, host: HostReader) -> None:
        """Begin another segment if a watched job has started other ranks. Ranks that have ended remain columns."""
        if self._watched_job is None or not self._watched_job.ranks:
            return
        ranks = [r.rank for r in self._watched_job.ranks]
        by_gpu = assign_ranks(self._watched_job.ranks, self._allocated.devices)
        if (ranks, by_gpu) != (self._ranks, self._ranks_by_gpu) and not set(ranks) < set(self._ranks):
            self._writer.end(self._elapsed())
            self._start_segment(host)

    def _begin_segment(self, host: HostReader) -> None:
        host_facts = host.read_facts()
        host_share = allocation.read_host_allocation(self._environ)
        self._allocated_cpus = host_share.cpus
        fast, slow = (
            fields.column_names(len(self._gpu_facts), self._ranks, pace) for pace in (fields.FAST, fields.SLOW)
        )
        self._columns = {fields.FAST: fast, fields.SLOW: slow}
        self._latest = {pace: array("d", [NAN]) * len(columns) for pace, columns in self._columns.items()}
        self._writer.begin(
            Header(
                node=self._node,
                t=clock.now(),
                mono=self._segment_start,
                interval_s=self._intervals.sample_s,
                slow_s=self._intervals.slow_s,
                gpus=self._gpu_facts,
                ranks=self._ranks,
                nvml_error=self._nvml_error,
                driver=self._driver,
                allocation_source=self._allocated.source,
                cpu_count=host_facts.cpu_count,
                cpu_allocated=host_share.cpus,
                memory_total_bytes=host_facts.memory_total_bytes,
                memory_allocated_bytes=host_share.memory_bytes,
                fast=fast,
                slow=slow,
            )
        )

    def _gpu_facts_for(self, device: Device) -> GpuFacts:
        return GpuFacts(**msgspec.structs.asdict(device), ranks=self._ranks_by_gpu.get(device.uuid, []))

    def _fast(self, heartbeats: Mapping[int, heartbeat.Heartbeat]) -> None:
        elapsed_s = self._elapsed()
        row = self._gpu_values(fields.FAST)
        for rank in self._ranks:
            beat = heartbeats.get(rank)
            row += (
                [None] * 5 if beat is None else [beat.step, beat.phase, beat.tokens, beat.data_wait_s, beat.forward_s]
            )
        self._record_row(fields.FAST, elapsed_s, row)
        if self._gpu_events is not None:
            self._dispatcher.report_errors(self._gpu_events.poll(), self._gpu_facts, elapsed_s)

    def _slow(
        self,
        host: HostReader,
        processes: JobProcessReader | WatchedJobReader,
        heartbeats: Mapping[int, heartbeat.Heartbeat],
    ) -> None:
        elapsed_s = self._elapsed()
        row = [*self._gpu_values(fields.SLOW), *host.read()]
        self._record_reasons(elapsed_s, "host", host.reasons)
        usage = processes.read({rank: b.pid for rank, b in heartbeats.items()})
        job = None if usage is None else usage.job
        row += [None] * 3 if job is None else [job.memory_bytes, job.cpu_s, job.processes]
        for rank in self._ranks:
            rank_usage = None if usage is None else usage.ranks.get(rank)
            row += [None] * 2 if rank_usage is None else [rank_usage.memory_bytes, rank_usage.cpu_s]
        self._record_row(fields.SLOW, elapsed_s, row)

    def _gpu_values(self, pace: fields.Pace) -> list[float | None]:
        row: list[float | None] = []
        elapsed_s = self._elapsed()
        for gpu_index, reader in enumerate(self._readers):
            row += reader.read(pace) or _NO_VALUES[pace]
            self._record_reasons(elapsed_s, f"gpu{gpu_index}", reader.reasons)
            if self._dispatcher.update_health(reader.device, reader.lost_reason) and self._gpu_events is not None:
                self._gpu_events.open()  # it came back
        return row

    def _record_row(self, pace: fields.Pace, elapsed_s: float, row: list[float | None]) -> None:
        values = array("d", [NAN if value is None else value for value in row])
        self._latest[pace] = values
        (self._writer.fast if pace == fields.FAST else self._writer.slow)(elapsed_s, values)

    def _observe(self) -> None:
        if not self._dispatcher.observers:
            return
        values: dict[str, float] = {}
        for pace, columns in self._columns.items():
            values.update(zip(columns, self._latest[pace], strict=True))
        snapshot = Snapshot(
            clock.now(), clock.monotonic(), self._node, self._gpu_facts, self._ranks, values, self._allocated_cpus
        )
        self._dispatcher.notify_sample(snapshot)

    def _record_reasons(self, elapsed_s: float, device: str, reasons: Mapping[str, str]) -> None:
        """Write the reasons that changed."""
        recorded = self._recorded_reasons.get(device, {})
        if recorded == reasons:
            return
        for field in recorded.keys() | reasons.keys():
            reason = reasons.get(field)
            if reason != recorded.get(field):
                self._writer.null(elapsed_s, fields.column_name(device, field), reason)
        self._recorded_reasons[device] = dict(reasons)

    def _recover_nvml(self, host: HostReader) -> None:
        """Reopen NVML if it was lost or failed to open, with backoff because opening takes seconds."""
        now = clock.monotonic()
        if self._nvml_error is not None:
            no_driver = self._nvml_error.startswith("LIBRARY_NOT_FOUND")
            if not no_driver and self._nvml_retry.is_due(now):
                self._open_nvml_late(host)
        elif any(r.needs_reopen for r in self._readers) and self._nvml_retry.is_due(now):
            self._nvml_retry.record_failure(now)
            self._nvml.close()
            try:
                self._nvml.open()
            except NvmlError:
                return  # each field keeps its reason
            for reader in self._readers:
                reader.on_reopen()
            self._watch_events()

    def _open_nvml_late(self, host: HostReader) -> None:
        try:
            self._nvml.open()
        except NvmlError:
            self._nvml_retry.record_failure(clock.monotonic())
            self._nvml.close()
            return
        self._nvml.close()
        self._writer.end(self._elapsed())
        self._open_nvml(host)

    def _watch_events(self) -> None:
        """Subscribe to the driver's error events."""
        devices = [r.device for r in self._readers]
        self._gpu_events = GpuEvents(self._nvml, devices) if devices else None
        if self._gpu_events is not None:
            self._gpu_events.open()
            watched = [d.uuid for d in devices if d.uuid not in self._gpu_events.reasons]
            self._dispatcher.notify_watched(watched)

    def _flush(self) -> None:
        try:
            self._writer.flush()
            self._write_failed = False
        except OSError as e:
            if not self._write_failed:
                self._write_failed = True
                self._dispatcher.write_event(
                    "telemetry_failed", reason=f"cannot write the samples, kept in memory: {e}"
                )
