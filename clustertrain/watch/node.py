"""The process on each node of a watched job: the sampler, as long as the watching command lives.

It is a task of a step of the job (:mod:`.step`) and reads a lease from its standard input: a byte every few seconds.
It leaves at the end of the input, after a signal, and when no byte has come for some time (:mod:`.node_request`), as
after a partition of the network. It writes only to the run folder, and never signals another process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from clustertrain import clock, schema, settings
from clustertrain.config.telemetry import AlertsSpec
from clustertrain.errors import EXIT_CONFIG, EXIT_SUCCESS
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import RunDir
from clustertrain.telemetry.alerts.monitor import AlertMonitor
from clustertrain.telemetry.readers.watched_job import WatchedJobReader
from clustertrain.telemetry.sampler import Intervals, Sampler
from clustertrain.watch.node_request import LEASE_S, NodeRequest

FOLDER_S = 20.0  # until a network file system shows a folder that another machine has created
FLUSH_S = 5.0
FIRST_FLUSH_S = 0.0  # after the first sample, for which the user waits
STOP_S = 3.0  # less than KillWait: the end of the job must not wait for this process
_LOWEST_PRIORITY = 19
# A job may ask Slurm for a signal before its end, which reaches all of its steps.
_IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGALRM, signal.SIGCONT)


class _Leave(Exception):
    """A signal asked this process to leave."""


def main() -> int:
    """Sample this node until the lease ends."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _raise_leave)
    try:
        return _run(schema.decode(sys.argv[2].encode(), NodeRequest), os.environ)
    except _Leave:
        return EXIT_SUCCESS


def _raise_leave(number: int, frame: FrameType | None) -> None:
    raise _Leave


def _run(request: NodeRequest, environ: Mapping[str, str]) -> int:
    os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)
    node = environ.get(settings.SLURMD_NODENAME) or os.uname().nodename
    attempt = RunDir(Path(request.run)).attempt(request.attempt)
    if not clock.wait_until(lambda: attempt.telemetry in _list_folder(attempt.path), FOLDER_S, 0.2):
        _report(node, f"it does not see {attempt.path}; $CLUSTERTRAIN_HOME must be on a file system of all nodes")
        return EXIT_CONFIG
    log = EventLog(attempt.events_path(f"agent-{node}-{environ.get('SLURM_STEP_ID', os.getpid())}"))
    alerts = AlertMonitor(
        AlertsSpec(),
        node,
        log.write,
        run=RunDir(Path(request.run)).id,
        job_id=request.job_id,
        telemetry=attempt.telemetry if node == request.comparing_node else None,
    )
    sampler = Sampler(
        attempt.telemetry / node,
        node,
        _complete_environ(request, environ),
        request.interval_s,
        on_event=log.write,
        watched_job=WatchedJobReader(request.number, node=node),
        observers=[alerts],
        intervals=Intervals(flush_s=max(FLUSH_S, request.interval_s), first_flush_s=FIRST_FLUSH_S),
    )
    try:
        sampler.start()
        alerts.start()
        _report(node, None)
        _hold_lease(sys.stdin.fileno())
    except _Leave:
        pass
    finally:
        _stop(sampler, alerts, log)
    return EXIT_SUCCESS


def _list_folder(folder: Path) -> list[Path]:
    """List a folder; an NFS client then asks the server instead of its cache."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _complete_environ(request: NodeRequest, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with what a step does not get: the job's memory, and that it has no GPUs here."""
    memory = {settings.SLURM_MEM_PER_NODE: str(request.memory_mib)} if request.memory_mib else {}
    no_gpus = {} if request.has_gpus else {settings.CUDA_VISIBLE_DEVICES: ""}
    return {**environ, **memory, **no_gpus}


def _report(node: str, error: str | None) -> None:
    """Report on standard output that the node is sampled, or why it is not."""
    print(json.dumps({"node": node, "step": os.environ.get("SLURM_STEP_ID"), "error": error}), flush=True)


def _hold_lease(fd: int) -> None:
    """Return when the watching command has left, or is not heard of any more."""
    while select.select([fd], [], [], LEASE_S)[0] and os.read(fd, 4096):
        pass


def _stop(sampler: Sampler, alerts: AlertMonitor, log: EventLog) -> None:
    """End, without waiting long for the driver or the file system."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    sampler.request_stop()
    alerts.quiet()
    is_complete = sampler.stop(STOP_S)
    alerts.stop(0.5)
    if not is_complete:
        os._exit(EXIT_SUCCESS)
    log.close()
