"""The agent's telemetry: the sampler with its observers, and compaction of its files after the ranks have ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from clustertrain import clock, extras, proc
from clustertrain.config.telemetry import TelemetrySpec
from clustertrain.errors import ClusterTrainError
from clustertrain.run import json_files
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.telemetry.alerts.monitor import AlertMonitor
from clustertrain.telemetry.export.exporter import Exporter
from clustertrain.telemetry.export.feed import Labels
from clustertrain.telemetry.sampler import Intervals, Sampler
from clustertrain.telemetry.snapshot import Snapshot
from clustertrain.telemetry.store import jsonl_blocks

COMPACTION_S = 120.0  # less than AFTER_RESULTS_S of the batch process
MIN_COMPACT_BYTES = 256 << 10  # for less, a Parquet file is not smaller but takes seconds of a core to write
STOP_S = 5.0  # for the sampler, the alerts and the exporter together
HURRIED_STOP_S = 2.0  # while the job is being ended
INTERRUPT_POLL_S = 1.0
REAP_S = 0.5
_POLL_S = 0.1


class NodeTelemetry:
    """Telemetry of one node while its ranks run.

    Args:
        ranks: the node's global ranks.
        heartbeat_dir: folder of the ranks' heartbeats.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: AttemptDir,
        node: str,
        ranks: Sequence[int],
        *,
        environ: Mapping[str, str],
        heartbeat_dir: Path,
        several_nodes: bool,
        log: EventLog,
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._folder = attempt.telemetry / node
        self._log = log
        self._earlier_compaction: subprocess.Popen[bytes] | None = None
        self._stopped = False
        spec = self._load_spec()
        self._sampler: Sampler | None = None
        if not spec.enabled:
            return
        job_id = str(json_files.poll_document(attempt.record).get("job_id") or "")
        cross_node_telemetry = attempt.telemetry if ranks[0] == 0 and several_nodes else None
        self._alert_monitor = AlertMonitor(
            spec.alerts,
            node,
            log.write,
            run=run.id,
            job_id=job_id or None,
            telemetry=cross_node_telemetry,
            events=attempt.events_path("rank-0") if ranks[0] == 0 else None,
        )
        labels = Labels(run.id, job_id, attempt.n, node)
        self._exporter = _ExporterObserver(Exporter(spec.prometheus, labels, log.write, spec.interval_s))
        self._sampler = Sampler(
            self._folder,
            node,
            environ,
            spec.interval_s,
            on_event=log.write,
            first_rank=ranks[0],
            rank_count=len(ranks),
            heartbeat_dir=heartbeat_dir,
            observers=[self._alert_monitor, self._exporter],
            intervals=Intervals(flush_s=spec.flush_s),
        )

    def _load_spec(self) -> TelemetrySpec:
        try:
            return load_spec(self._run).recipe.telemetry
        except (ClusterTrainError, OSError) as e:  # the batch process has read it; telemetry must not end a run
            self._log.write("telemetry_failed", reason=f"its settings cannot be read, using the defaults: {e}")
            return TelemetrySpec()

    @property
    def gpus(self) -> list[dict[str, object]]:
        return [] if self._sampler is None else self._sampler.gpus

    def start(self) -> None:
        if self._sampler is not None:
            self._sampler.start()
            self._alert_monitor.start()
            self._exporter.exporter.start()

    def suspend(self) -> None:
        """End work that competes with the stopping ranks, without waiting."""
        if self._earlier_compaction is not None:
            self._earlier_compaction.kill()
        if self._sampler is not None:
            self._alert_monitor.quiet()

    def compact_earlier(self) -> None:
        """Start a low-priority compaction of the files of earlier attempts."""
        folders = [a.telemetry for a in self._run.attempts() if a.n < self._attempt.n]
        if folders and extras.is_installed("pyarrow"):
            self._earlier_compaction = self._start_compaction(folders)

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Write buffered data and end, without waiting longer for the driver, the disk or the network."""
        if self._earlier_compaction is not None:
            _kill(self._earlier_compaction)
        if self._sampler is None or self._stopped:
            return
        self._stopped = True
        deadline = clock.monotonic() + timeout_s
        self._sampler.request_stop()
        self._alert_monitor.quiet()
        for stop in (self._sampler.stop, self._alert_monitor.stop, self._exporter.exporter.stop):
            stop(max(0.0, deadline - clock.monotonic()))

    def compact(self, interrupted: Callable[[], bool]) -> None:
        """Compact this attempt's files until ``interrupted``. Call it after :meth:`stop`, never in a grace time."""
        if not self._should_compact():
            return
        if not extras.is_installed("pyarrow"):  # the samples stay as they are, and a later attempt may compact them
            hint = extras.install_command("pyarrow")
            self._log.write("telemetry_not_compacted", reason=f"the package pyarrow is not installed: {hint}")
            return
        child = self._start_compaction([self._folder])
        if child is None:
            return
        deadline = clock.monotonic() + COMPACTION_S
        # Once per second: ``interrupted`` reads a file, on every node, possibly from a busy file system.
        while not clock.wait_until(lambda: child.poll() is not None, INTERRUPT_POLL_S, _POLL_S):
            if interrupted() or clock.monotonic() > deadline:
                _kill(child)  # the next compaction completes its work
                return
        if child.returncode:
            self._log.write(
                "telemetry_not_compacted", reason=f"compaction ended with code {child.returncode}; nothing is lost"
            )

    def _should_compact(self) -> bool:
        """Return whether there is enough to compact, so that most short attempts do not start a process."""
        try:
            return any(f.stat().st_size >= MIN_COMPACT_BYTES for f in self._folder.glob(f"*/{jsonl_blocks.NAME}"))
        except OSError:
            return False

    def _start_compaction(self, folders: Sequence[Path]) -> subprocess.Popen[bytes] | None:
        """Start to compact segments that have ended; return None if no process could be started."""
        argv = proc.python_module_argv(sys.executable, "clustertrain.telemetry.store.compact", "--ended", "--quiet")
        argv += ["--at-least", str(MIN_COMPACT_BYTES), *map(str, folders)]
        try:
            return proc.start(argv, ignore_stop_signals=True)
        except OSError as e:  # for example at the limit on processes
            self._log.write("telemetry_not_compacted", reason=f"compaction could not be started: {e}")
            return None


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a process, without waiting long for one that hangs in the file system."""
    child.kill()
    clock.wait_until(lambda: child.poll() is not None, REAP_S, _POLL_S / 2)


class _ExporterObserver:
    """The exporter as an observer of the sampler."""

    def __init__(self, exporter: Exporter) -> None:
        self.exporter = exporter

    def watch_errors(self, uuids: Sequence[str]) -> None:
        self.exporter.watch_xids(uuids)

    def observe(self, snapshot: Snapshot) -> None:
        self.exporter.observe(snapshot)

    def record_error(self, kind: str, uuid: str, *, xid: int | None = None, count: int = 1) -> None:
        if kind == "xid" and xid is not None:
            self.exporter.record_xid(uuid, xid, count)
