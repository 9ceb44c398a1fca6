"""Time until `clustertrain ui` shows 200 runs, until it shows a change, and its memory and processor time.

The server is a separate process, as a user starts it. One client reads the pages as a browser does, over a socket.

start   the address is printed, first rows, all rows: at the first start, and at a later one, which finds what is
        known about ended runs in the user's cache folder.
open    the home page, with all rows in it, while the server runs; and the page of sweeps and of usage.
update  from a new row of metrics in a run's file to the event that has it, in a stream that is open.
idle    processor time per second while one page is open and nothing changes; memory.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks import measure
from clustertrain import settings
from tests import ui_home

RUNS = 200
CHANGES = 10
IDLE_S = 20.0
SAMPLES = 60  # of telemetry per node: their number does not matter for a table that reads roll-ups


def main() -> int:
    result = measure.context(("clustertrain", "starlette", "uvicorn"))
    with tempfile.TemporaryDirectory(prefix="ui-benchmark-") as scratch:
        home = Path(scratch, "home")
        ui_home.use_home(home)
        running = make_home(home)
        env = {**measure.child_environ(os.environ), settings.HOME: str(home), "PYTHONPATH": str(measure.ROOT)}
        env[settings.XDG_CACHE_HOME] = str(Path(scratch, "cache"))
        result["runs"] = RUNS
        with Server(env) as server:
            result["first_start"] = server.measure_start()
            server.connect("/usage").read()  # when all runs have been read, what is known about ended ones is kept
            time.sleep(2.0)
        with Server(env) as server:
            result["later_start"] = server.measure_start()
            result["open_s"] = {path: server.measure_open(path) for path in ("/", "/sweeps", "/usage")}
            result["update_s"] = measure.spread(list(measure_updates(server, running)))
            result["idle"] = server.measure_idle(IDLE_S)
            result["details_s"] = server.wait_for_details()
            result["memory_mb"] = server.memory_mb()
    return measure.write_with_targets("ui", result, check_targets(result))


def check_targets(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    values = [
        ("first rows at the first start, after the address: at most 1 s", result["first_start"]["first_rows_s"], 1.0),
        (f"all {RUNS} rows at a later start, after the address: at most 1 s", result["later_start"]["all_rows_s"], 1.0),
        (f"home page with {RUNS} runs in a running server: at most 1 s", result["open_s"]["/"]["median"], 1.0),
        ("change of a file to the event, the slowest: at most 2 s", result["update_s"]["max"], 2.0),
        ("processor time per second with an open page: at most 0.1", result["idle"]["cpu_s_per_s"], 0.1),
        ("memory: at most 200 MB", result["memory_mb"], 200.0),
    ]
    return [{"words": words, "value": value, "at_most": bound, "met": value <= bound} for words, value, bound in values]


def make_home(home: Path) -> Path:
    """Create the runs and a sweep; return the folder of the newest one, which is running."""
    now, newest = time.time(), None
    for i, made in enumerate(ui_home.made_runs(RUNS)):
        made.samples = SAMPLES
        run = ui_home.make_run(home, now, made, seed=i)
        newest = newest or run
    points = [({"optim.lr": lr}, ui_home.Made("sweep", telemetry=False, rows=100)) for lr in (1e-4, 3e-4, 1e-3)]
    ui_home.make_sweep(home, now, "lr-abcdef", points)
    assert newest is not None
    return newest.path


class Server:
    """`clustertrain ui` in a process."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._started = time.perf_counter()
        argv = [sys.executable, "-m", "clustertrain", "ui", "--no-browser"]
        self._process = subprocess.Popen(argv, env=dict(env), cwd=measure.ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        url = self._process.stdout.readline().strip()
        self._printed = time.perf_counter()
        address, _, self._token = url.partition("/?token=")
        self._port = int(address.rpartition(":")[2])
        if not self._token:
            raise measure.CannotRun(f"the server did not start: {url}")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.send_signal(2)
        self._process.communicate(timeout=30)

    def connect(self, path: str, timeout_s: float = 60.0) -> http.client.HTTPResponse:
        """Send a request and return its response, whose body has not been read."""
        cookie = {"Cookie": f"clustertrain-ui-{self._port}={self._token}"}
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
            try:
                connection.request("GET", path, headers=cookie)
                response = connection.getresponse()
            except ConnectionResetError:  # bound, but not yet served
                continue
            if response.status != 200:
                raise measure.CannotRun(f"{path}: {response.status} {response.read()[:300]!r}")
            return response

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the changes of the table."""
        response = self.connect("/api/live/runs")
        while True:
            line = response.readline()
            if not line:
                return
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])

    def measure_start(self) -> dict[str, float]:
        """Return seconds from the start of the command to its address, and from there to the first and to all rows."""
        rows: set[str] = set()
        first_s = 0.0
        for change in self.events():
            rows |= {row["run"] for row in change["rows"]}
            first_s = first_s or (time.perf_counter() - self._printed if rows else 0.0)
            if len(rows) >= RUNS and change["complete"]:
                break
        return {
            "address_s": round(self._printed - self._started, 3),
            "first_rows_s": round(first_s, 3),
            "all_rows_s": round(time.perf_counter() - self._printed, 3),
        }

    def measure_open(self, path: str) -> dict[str, float]:
        times = []
        for _ in range(5):
            started = time.perf_counter()
            self.connect(path).read()
            times.append(time.perf_counter() - started)
        return {**measure.spread(times), "first": round(times[0], 4)}

    def measure_idle(self, seconds: float) -> dict[str, float]:
        response = self.connect("/api/live/runs")
        process = psutil.Process(self._process.pid)
        before, started = sum(process.cpu_times()[:2]), time.perf_counter()
        time.sleep(seconds)
        used = sum(process.cpu_times()[:2]) - before
        response.close()
        return {"seconds": seconds, "cpu_s_per_s": round(used / (time.perf_counter() - started), 4)}

    def wait_for_details(self) -> float:
        """Return the seconds from the start of the command until utilization and insights of all runs are known."""
        known: set[str] = set()
        expected = None
        for change in self.events():
            if expected is None:
                expected = {row["run"] for row in change["rows"] if row["attempts"]}
            known |= {row["run"] for row in change["rows"] if row["details"] is not None}
            if expected <= known:
                break
        return round(time.perf_counter() - self._started, 1)

    def memory_mb(self) -> float:
        return round(psutil.Process(self._process.pid).memory_info().rss / 1e6, 1)


def measure_updates(server: Server, run: Path) -> Iterator[float]:
    """Yield the seconds from a new row of metrics to its event."""
    events = server.events()
    next(events)
    path = max((run / "metrics").iterdir(), key=lambda p: p.stat().st_mtime)
    for i in range(CHANGES):
        time.sleep(0.37 * (i % 3))  # at different moments between two looks
        loss = 1000.0 + i
        with path.open("a") as f:
            f.write(json.dumps({"step": 100_000 + i, "t": time.time(), "loss": loss, "step_s": 1.0}) + "\n")
        written = time.perf_counter()
        while not any(row["run"] == run.name and row["loss"] == loss for row in next(events)["rows"]):
            pass
        yield time.perf_counter() - written


if __name__ == "__main__":
    sys.exit(main())
