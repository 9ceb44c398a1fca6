"""The thread of the agent that samples the node once a second into the attempt's folder.

It never harms the run: whatever goes wrong in it ends in an event and a reason in the file, not in the agent.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from clustertrain import clock
from clustertrain.telemetry import allocation
from clustertrain.telemetry.fields import FAST
from clustertrain.telemetry.host import HostReader
from clustertrain.telemetry.nvml import Device, Nvml, NvmlError
from clustertrain.telemetry.processes import JobProcesses
from clustertrain.telemetry.reading import Backoff, GpuReader
from clustertrain.telemetry.store import End, GpuFacts, Header, Processes, Reason, Sample, Writer

OnEvent = Callable[..., Any]


class Intervals(msgspec.Struct, frozen=True):
    """Seconds between samples, between walks over the process tree, and between writes to the file."""

    sample_s: float = 1.0
    processes_s: float = 10.0
    flush_s: float = 5.0


class Sampler:
    """Samples all allocated GPUs of this node and the host.

    Args:
        folder: where the file goes, ``attempt.telemetry / node``.
        node: the node's name.
        environ: the agent's environment, which says what is allocated.
        interval_s: seconds between samples.
        on_event: called as ``on_event(name, **fields)`` from the sampler's thread: ``gpu_lost``, ``gpu_back``,
            ``telemetry_failed``.
        first_rank: global rank of local rank 0; local rank i runs on the i-th allocated GPU. None: not known.
        rank_count: how many ranks the node has, where that may be fewer than GPUs.
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
        intervals: Intervals | None = None,
    ) -> None:
        self._node = node
        self._environ = dict(environ)
        self._intervals = msgspec.structs.replace(intervals or Intervals(), sample_s=interval_s)
        self._on_event = on_event
        self._first_rank = first_rank
        self._rank_count = rank_count
        self._writer = Writer(folder)
        self._nvml = Nvml()
        self._nvml_reason: str | None = None
        self._nvml_retry = Backoff(30, 600)
        self._readers: list[GpuReader] = []
        self._told: dict[tuple[int | None, str], str] = {}
        self._lost: set[str] = set()
        self._write_failed = False
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
            self._event("telemetry_failed", reason=f"no thread could be started: {e}")
            return
        self._ready.wait(timeout_s)

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
            self._writer.add(End(self._elapsed(), reason))
            self._event("telemetry_failed", reason=reason)
        finally:
            self._ready.set()
            self._nvml.close()
            try:
                self._writer.close()
            except OSError as e:
                self._event("telemetry_failed", reason=f"the samples could not be written: {e}")

    def _loop(self) -> None:
        host, tree = HostReader(), JobProcesses(os.getpid())
        self._open_nvml(host)
        self._ready.set()
        self._flush(sync=True)
        every = self._intervals
        start = next_tree = next_flush = clock.monotonic()
        tick = 0
        while not self._stop.wait(start + tick * every.sample_s - clock.monotonic()):
            self._sample(host)
            now = clock.monotonic()
            if now >= next_tree:
                self._processes(tree)
                next_tree = now + every.processes_s
            if now >= next_flush:
                self._flush()
                next_flush = now + every.flush_s
            self._heal(host)
            # From the start, so that nothing drifts. Ticks that a slow driver made us miss show as missing coverage.
            tick = max(tick + 1, int((clock.monotonic() - start) / every.sample_s))
        self._writer.add(End(self._elapsed()))

    def _elapsed(self) -> float:
        return clock.monotonic() - self._begin

    def _open_nvml(self, host: HostReader) -> None:
        """Open NVML, find the allocated GPUs and write the header that says what follows."""
        driver, found = None, allocation.Allocation([], None)
        try:
            driver = self._nvml.open()
            found = allocation.find(self._environ, self._nvml.devices())
            self._nvml_reason = None
        except NvmlError as e:
            self._nvml.close()
            self._nvml_reason = e.reason
            self._nvml_retry.failed(clock.monotonic())
        facts = [self._facts(i, d) for i, d in enumerate(found.devices)]
        self.gpus = [msgspec.to_builtins(f) for f in facts]
        self._readers = [GpuReader(self._nvml, d) for d in found.devices]
        self._told.clear()
        self._begin = clock.monotonic()
        machine = host.facts()
        self._writer.add(
            Header(
                node=self._node,
                t=clock.now(),
                mono=self._begin,
                interval_s=self._intervals.sample_s,
                gpus=facts,
                nvml=self._nvml_reason,
                driver=driver,
                allocation=found.how,
                cpu_count=machine.cpu_count,
                memory_total_bytes=machine.memory_total_bytes,
            )
        )

    def _facts(self, number: int, device: Device) -> GpuFacts:
        idle = self._rank_count is not None and number >= self._rank_count
        ranks = [] if self._first_rank is None or idle else [self._first_rank + number]
        return GpuFacts(**msgspec.structs.asdict(device), ranks=ranks)

    def _sample(self, host: HostReader) -> None:
        at = round(self._elapsed(), 3)
        gpus = [reader.read(FAST) for reader in self._readers]
        machine = host.read()
        self._tell(at, None, host.reasons)
        for number, reader in enumerate(self._readers):
            self._tell(at, number, reader.reasons)
            self._tell_loss(reader)
        self._writer.add(Sample(at, [_short(v) for v in machine], [g and [_short(v) for v in g] for g in gpus]))

    def _tell(self, at: float, gpu: int | None, reasons: Mapping[str, str]) -> None:
        known = {field: reason for (g, field), reason in self._told.items() if g == gpu}
        if known == reasons:
            return
        for field in known.keys() | reasons.keys():
            reason = reasons.get(field)
            if reason != known.get(field):
                self._writer.add(Reason(at, gpu, field, reason))
                self._told.pop((gpu, field), None)
                if reason is not None:
                    self._told[gpu, field] = reason

    def _tell_loss(self, reader: GpuReader) -> None:
        uuid, reason = reader.device.uuid, reader.lost
        if reason is not None and uuid not in self._lost:
            self._lost.add(uuid)
            self._event("gpu_lost", uuid=uuid, index=reader.device.index, reason=reason)
        elif reason is None and uuid in self._lost:
            self._lost.remove(uuid)
            self._event("gpu_back", uuid=uuid, index=reader.device.index)

    def _processes(self, tree: JobProcesses) -> None:
        figures = tree.read()
        if figures is not None:
            job = figures.job
            self._writer.add(Processes(round(self._elapsed(), 3), job.processes, job.memory_bytes, None))

    def _heal(self, host: HostReader) -> None:
        """Open NVML again when it went away under us, or was not there at first. Rarely: opening takes seconds."""
        now = clock.monotonic()
        if self._nvml_reason is not None:
            no_driver = self._nvml_reason.startswith("LIBRARY_NOT_FOUND")
            if not no_driver and self._nvml_retry.due(now):
                self._open_again(host)
        elif any(r.session_dead for r in self._readers) and self._nvml_retry.due(now):
            self._nvml_retry.failed(now)
            self._nvml.close()
            try:
                self._nvml.open()
            except NvmlError:
                return  # each field goes on telling its reason
            for reader in self._readers:
                reader.reopened()

    def _open_again(self, host: HostReader) -> None:
        try:
            self._nvml.open()
        except NvmlError:
            self._nvml_retry.failed(clock.monotonic())
            self._nvml.close()
            return
        self._nvml.close()
        self._open_nvml(host)

    def _flush(self, *, sync: bool = False) -> None:
        try:
            self._writer.flush(sync=sync)
            self._write_failed = False
        except OSError as e:
            if not self._write_failed:
                self._write_failed = True
                self._event("telemetry_failed", reason=f"the samples could not be written, and are kept: {e}")

    def _event(self, name: str, **fields: Any) -> None:
        if self._on_event is None:
            return
        with contextlib.suppress(OSError):  # the disk that refuses the samples refuses the events too
            self._on_event(name, **fields)


def _short(value: float | None) -> float | int | None:
    """Fewer digits in the file: a whole number as such, anything else to 3 places."""
    if value is None:
        return None
    return int(value) if value == int(value) else round(value, 3)
