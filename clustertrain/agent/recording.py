"""The agent's telemetry: the sampler, who watches it, and what becomes of its files when the ranks have ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from clustertrain import clock, fsio, proc
from clustertrain.errors import ClusterTrainError
from clustertrain.run.events import EventLog
from clustertrain.run.folder import AttemptDir, RunDir
from clustertrain.run.spec import load_spec
from clustertrain.spec.telemetry import TelemetrySpec
from clustertrain.telemetry.alerts.watch import Watch
from clustertrain.telemetry.export.exporter import Exporter
from clustertrain.telemetry.export.feed import Labels
from clustertrain.telemetry.sampler import Intervals, Sampler
from clustertrain.telemetry.segments import blocks
from clustertrain.telemetry.snapshot import Snapshot

COMPACTION_S = 120.0  # below batch's AFTER_RESULTS_S
WORTH_BYTES = 256 << 10  # a Parquet file of fewer samples is no smaller, and costs seconds of a core to make
_POLL_S = 0.1


class Recording:
    """Samples this node while its ranks run.

    Args:
        ranks: the node's global ranks.
        beats: the folder in which the ranks tell of themselves.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: AttemptDir,
        node: str,
        ranks: Sequence[int],
        *,
        environ: Mapping[str, str],
        beats: Path,
        several_nodes: bool,
        log: EventLog,
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._folder = attempt.telemetry / node
        self._log = log
        self._leftovers: subprocess.Popen[bytes] | None = None
        self._stopped = False
        spec = self._spec()
        self._sampler: Sampler | None = None
        if not spec.enabled:
            return
        job_id = str((fsio.read_json(attempt.record) or {}).get("job_id") or "")
        first_of_several = attempt.telemetry if ranks[0] == 0 and several_nodes else None
        self._watch = Watch(spec.alerts, node, log.write, run=run.id, job_id=job_id or None, telemetry=first_of_several)
        labels = Labels(run.id, job_id, attempt.n, node)
        self._exporter = _Exported(Exporter(spec.prometheus, labels, log.write, spec.interval_s))
        self._sampler = Sampler(
            self._folder,
            node,
            environ,
            spec.interval_s,
            on_event=log.write,
            first_rank=ranks[0],
            rank_count=len(ranks),
            beats=beats,
            observers=[self._watch, self._exporter],
            intervals=Intervals(flush_s=spec.flush_s),
        )

    def _spec(self) -> TelemetrySpec:
        try:
            return load_spec(self._run).recipe.telemetry
        except ClusterTrainError as e:  # batch has read it before; telemetry is no reason to end a run
            self._log.write("telemetry_failed", reason=f"its settings cannot be read, the defaults stand: {e}")
            return TelemetrySpec()

    @property
    def gpus(self) -> list[dict[str, object]]:
        return [] if self._sampler is None else self._sampler.gpus

    def start(self) -> None:
        if self._sampler is not None:
            self._sampler.start()
            self._watch.start()
            self._exporter.to.start()

    def quiet(self) -> None:
        """The ranks have been told to stop: what costs time beside them ends."""
        if self._leftovers is not None:
            proc.end(self._leftovers, 0.0)
        if self._sampler is not None:
            self._watch.quiet()

    def compact_earlier(self) -> None:
        """Begin on what attempts before this one left, beside the training and with the least priority."""
        left = [
            folder
            for attempt in self._run.attempts()
            if attempt.n < self._attempt.n and attempt.telemetry.is_dir()
            for node in sorted(attempt.telemetry.iterdir())
            for folder in sorted(node.iterdir())
            if _worth(folder)
        ]
        if left:
            self._leftovers = _compaction(left)

    def stop(self) -> None:
        """Write what waits and end; what compaction is under way is left as it is."""
        if self._leftovers is not None:
            proc.end(self._leftovers, 0.5)
        if self._sampler is not None and not self._stopped:
            self._stopped = True
            self._sampler.stop()
            self._watch.stop()
            self._exporter.to.stop()

    def compact(self, interrupted: Callable[[], bool]) -> None:
        """After :meth:`stop`, and never in a grace time: make this attempt's files small, until ``interrupted``."""
        folders = sorted(filter(_worth, self._folder.iterdir())) if self._folder.is_dir() else []
        if not folders:
            return
        child = _compaction(folders)
        try:
            clock.wait_until(lambda: child.poll() is not None or interrupted(), COMPACTION_S, _POLL_S)
        finally:
            proc.end(child, 0.5)
        if child.returncode:
            self._log.write("telemetry_left", why=f"compaction ended with code {child.returncode}; nothing is lost")


class _Exported:
    """The exporter as an observer of the sampler."""

    def __init__(self, to: Exporter) -> None:
        self.to = to

    def listening(self, uuids: Sequence[str]) -> None:
        self.to.watch_xids(uuids)

    def observe(self, snapshot: Snapshot) -> None:
        self.to.observe(snapshot)

    def event(self, kind: str, uuid: str, *, xid: int | None = None, count: int = 1) -> None:
        if kind == "xid" and xid is not None:
            self.to.xid(uuid, xid, count)


def _compaction(folders: Sequence[Path]) -> subprocess.Popen[bytes]:
    """Of segments that nobody writes any more."""
    argv = [sys.executable, "-m", "clustertrain.telemetry.segments.compact", "--ended", *map(str, folders)]
    return proc.start(argv, ignore_stop_signals=True)


def _worth(folder: Path) -> bool:
    try:
        return (folder / blocks.NAME).stat().st_size >= WORTH_BYTES
    except OSError:
        return False
