"""The tracking process: ``python -m clustertrain.tracking RUN_DIR --attempt N``.

It runs next to the ranks until its standard input closes. The node agent holds the other end, so the process also ends
if the agent dies. It then uploads the remaining rows and exits; its parent kills it if that takes too long.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

from clustertrain import clock, fsio
from clustertrain.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_SUCCESS, ClusterTrainError
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import RunDir, open_run
from clustertrain.tracking import run_facts
from clustertrain.tracking.endings import attempt_ending
from clustertrain.tracking.registry import build_tracker
from clustertrain.tracking.tracker import POLL_S, TrackerUploader

NICENESS = 10  # the ranks and their data workers have priority


class TrackingOwner:
    """Ownership of the run's tracking, which belongs to the process that started last.

    It is recorded in a file, because locks are unreliable on NFS and Lustre. A process that outlives its attempt exits
    when the file names another one.
    """

    def __init__(self, run: RunDir) -> None:
        self._path = run.tracking / "owner.json"
        self._token = f"{os.uname().nodename}-{os.getpid()}-{os.urandom(4).hex()}"
        fsio.make_folder(run.tracking)
        fsio.write_json(self._path, {"owner": self._token, "t": clock.now()})

    def is_superseded(self) -> bool:
        """Return whether another process has taken over the run."""
        owner = fsio.poll_json(self._path)
        return isinstance(owner, dict) and owner.get("owner") != self._token


def track(run: RunDir, attempt: int, stop_event: threading.Event) -> int:
    """Upload rows until ``stop_event`` is set and none remain; return the exit code."""
    log = EventLog(run.attempt(attempt).events_path("tracking"))

    def report_error(tracker: str, reason: str) -> None:
        log.write("tracking_failed", tracker=tracker, reason=reason)
        print(f"clustertrain tracking: {tracker}: {reason}", file=sys.stderr, flush=True)

    owner = TrackingOwner(run)
    metadata = run_facts.load_run_metadata(run, attempt)
    uploaders = []
    for name in metadata.spec.trackers:
        try:
            tracker = build_tracker(name, run, metadata)
        except Exception as e:  # a library that cannot be imported must not stop the other trackers
            report_error(name, f"{type(e).__name__}: {e}")
            continue
        uploaders.append(TrackerUploader(run, tracker, report_error, get_ending=lambda: attempt_ending(run, attempt)))
    for uploader in uploaders:
        uploader.thread.start()
    while not stop_event.wait(POLL_S):
        if owner.is_superseded():
            print("clustertrain tracking: ended: another process tracks the run now", file=sys.stderr, flush=True)
            return EXIT_SUCCESS
    for uploader in uploaders:
        uploader.request_stop()
    for uploader in uploaders:
        uploader.thread.join()
    log.close()
    return EXIT_FAILED if any(uploader.failed for uploader in uploaders) else EXIT_SUCCESS


def _wait_for_stdin_eof(stop_event: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    stop_event.set()


def main() -> int:
    argv = sys.argv[1:]
    if len(argv) != 3 or argv[1] != "--attempt":
        print("usage: python -m clustertrain.tracking RUN_DIR --attempt N", file=sys.stderr)
        return EXIT_CONFIG
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    stop_event = threading.Event()
    threading.Thread(target=_wait_for_stdin_eof, args=(stop_event,), daemon=True).start()
    try:
        return track(open_run(Path(argv[0])), int(argv[2]), stop_event)
    except (ClusterTrainError, OSError) as e:
        print(f"clustertrain tracking: {e}", file=sys.stderr, flush=True)
        return EXIT_FAILED


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Skip the interpreter's shutdown, in which libraries wait for threads or servers.
    os._exit(code)
