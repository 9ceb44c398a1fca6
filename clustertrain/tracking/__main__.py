"""The process beside the ranks: ``python -m clustertrain.tracking RUN_DIR [--attempt N]``.

It ends when its standard input does: the agent holds the other end, so that it ends with the agent too. Then it hands
on what has been written, and leaves; who started it kills it where that takes too long.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

from clustertrain import clock, fsio
from clustertrain.errors import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, ClusterTrainError
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import RunDir, open_run
from clustertrain.tracking import run_facts
from clustertrain.tracking.endings import of_attempt
from clustertrain.tracking.tracker import POLL_S, Handing, make

NICENESS = 10  # the ranks and their loaders come first


class Owner:
    """Which process tracks the run: the one that came last. A file and not a lock, which NFS and Lustre break; one that
    outlived its attempt leaves when it sees another name."""

    def __init__(self, run: RunDir) -> None:
        self._path = run.tracking / "owner.json"
        self._mark = f"{os.uname().nodename}-{os.getpid()}-{os.urandom(4).hex()}"
        fsio.make_folder(run.tracking)
        fsio.write_json(self._path, {"owner": self._mark, "t": clock.now()})

    def gone(self) -> bool:
        found = fsio.peek_json(self._path)
        return isinstance(found, dict) and found.get("owner") != self._mark


def track(run: RunDir, attempt: int, told: threading.Event) -> int:
    """Until ``told`` is set and all is handed on; returns the exit code."""
    log = EventLog(run.attempt(attempt).events_of("tracking"))

    def tell(tracker: str, reason: str) -> None:
        log.write("tracking_failed", tracker=tracker, reason=reason)
        print(f"clustertrain tracking: {tracker}: {reason}", file=sys.stderr, flush=True)

    owner = Owner(run)
    about = run_facts.of_run(run, attempt)
    handings = []
    for name in about.spec.to:
        try:
            tracker = make(name, run, about)
        except Exception as e:  # a library that does not import is no reason to go without the others
            tell(name, f"{type(e).__name__}: {e}")
            continue
        handings.append(Handing(run, tracker, tell, ending=lambda: of_attempt(run, attempt)))
    for handing in handings:
        handing.thread.start()
    while not told.wait(POLL_S):
        if owner.gone():
            print("clustertrain tracking: another process tracks the run now", file=sys.stderr, flush=True)
            return EXIT_DONE
    for handing in handings:
        handing.ask_to_stop()
    for handing in handings:
        handing.thread.join()
    log.close()
    return EXIT_FAILED if any(h.failed for h in handings) else EXIT_DONE


def _until_input_ends(told: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    told.set()


def main() -> int:
    words = sys.argv[1:]
    if len(words) != 3 or words[1] != "--attempt":
        print("usage: python -m clustertrain.tracking RUN_DIR --attempt N", file=sys.stderr)
        return EXIT_CONFIG
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    told = threading.Event()
    threading.Thread(target=_until_input_ends, args=(told,), daemon=True).start()
    try:
        return track(open_run(Path(words[0])), int(words[2]), told)
    except (ClusterTrainError, OSError) as e:
        print(f"clustertrain tracking: {e}", file=sys.stderr, flush=True)
        return EXIT_FAILED


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Past the interpreter's end, where a library waits for its threads or for a server.
    os._exit(code)
