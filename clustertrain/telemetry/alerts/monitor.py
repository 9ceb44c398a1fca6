"""Monitoring of a running job from one node: its rules, the comparison with other nodes, and alert delivery."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from clustertrain import clock
from clustertrain.config.telemetry import AlertsSpec
from clustertrain.run.events import WriteEvent
from clustertrain.telemetry.alerts.cross_node import CrossNodeRules
from clustertrain.telemetry.alerts.gate import Alert
from clustertrain.telemetry.alerts.notify import STOP_TIMEOUT_S, Notifier
from clustertrain.telemetry.alerts.rules import AlertRules
from clustertrain.telemetry.alerts.training_events import TrainingEventReader
from clustertrain.telemetry.snapshot import Snapshot
from clustertrain.telemetry.store.latest import LatestReader

COMPARE_INTERVAL_S = 60.0  # longer if there are so many nodes that comparing exceeds MAX_CPU_SHARE
MAX_CPU_SHARE = 0.001  # of a core


class AlertMonitor:
    """Observer of the sampler that raises alerts.

    Args:
        on_event: see :class:`.Notifier`; called from several threads.
        telemetry: ``attempt.telemetry`` on the first node of a multi-node run; None on other nodes.
        events: file of rank 0's events on its node; None on other nodes.
    """

    def __init__(
        self,
        spec: AlertsSpec,
        node: str,
        on_event: WriteEvent,
        *,
        run: str,
        job_id: str | None = None,
        telemetry: Path | None = None,
        events: Path | None = None,
    ) -> None:
        self._notifier = Notifier(spec, on_event, run=run, job_id=job_id)
        self._rules = AlertRules(spec, node)
        self._cross_node = CrossNodeRules(spec, node)
        self._snapshots = LatestReader(telemetry) if telemetry is not None else None
        self._training_events = TrainingEventReader(events) if events is not None and spec.training else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._compare_loop, name="alerts-across", daemon=True)
        self._failed = False
        self._on_event = on_event

    def start(self) -> None:
        if self._snapshots is not None:
            try:
                self._thread.start()
            except RuntimeError as e:  # the process limit is reached
                self._on_event("telemetry_failed", reason=f"nodes are not compared: cannot start a thread: {e}")

    def observe(self, snapshot: Snapshot) -> None:
        """Evaluate the rules. Called in the sampler's thread after each tick.

        Never raises: the first failure is reported, and all rules are evaluated again at the next tick.
        """
        try:
            alerts = self._rules.observe(snapshot)
            for finding in self._training_events.read(snapshot.mono) if self._training_events is not None else ():
                alert = self._rules.add_finding(finding, snapshot.t, snapshot.mono)
                alerts += [] if alert is None else [alert]
        except Exception as e:  # must not end the sampler's thread
            self._report_failure(e)
            return
        if alerts:
            self._send(alerts)

    def watch_errors(self, uuids: Sequence[str]) -> None:
        """Ignore which devices report errors; the rules do not depend on it."""

    def record_error(self, kind: str, uuid: str, *, xid: int | None = None, count: int = 1) -> None:
        """Raise or clear the alert of a device event; ``count`` occurrences give one alert.

        Called in the sampler's thread. ``kind`` is ``xid``, ``ecc_uncorrected``, ``gpu_lost`` or ``gpu_back``.
        """
        self._send(self._rules.event(kind, uuid, clock.now(), clock.monotonic(), xid=xid))

    def quiet(self) -> None:
        """Stop sending alerts and comparing nodes, because the ranks are stopping; events and log continue."""
        self._stop.set()
        self._notifier.quiet()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Stop the threads; return False if one does not end in time. They end with the process."""
        self._stop.set()
        notifier_stopped = self._notifier.stop(timeout_s)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return notifier_stopped and not self._thread.is_alive()

    def _send(self, alerts: list[Alert]) -> None:
        try:
            self._notifier.send(alerts)
        except Exception as e:  # such as a closed log
            self._report_failure(e)

    def _report_failure(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            self._on_event("telemetry_failed", reason=f"an alert rule failed: {type(error).__name__}: {error}")

    def _compare_loop(self) -> None:
        pause_s = COMPARE_INTERVAL_S
        while not self._stop.wait(pause_s):
            start_s = time.thread_time()
            try:
                self._compare_nodes()
            except Exception as e:  # the thread's edge
                self._report_failure(e)
            pause_s = max(COMPARE_INTERVAL_S, (time.thread_time() - start_s) / MAX_CPU_SHARE)

    def _compare_nodes(self) -> None:
        if self._snapshots is None:
            return
        snapshots = [record.snapshot for record in self._snapshots.read() if record.snapshot is not None]
        alerts = self._cross_node.observe(snapshots, clock.now(), clock.monotonic())
        self._rules.remote_steps = self._cross_node.steps
        if alerts and not self._stop.is_set():
            self._send(alerts)
