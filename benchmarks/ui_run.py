"""The page of one run in `clustertrain ui`: a run of 1,024 GPUs for a week, with 163,000 steps and 1,024 logs.

open       a server that has just started: from the request of the page to state, progress and attempts; then each part
           that its tabs ask for. With Chromium, also from the navigation until the first tab shows the progress.
update     from the moment that a row or a log line is in the file to its arrival in the stream of the page.
memory     peak of the server, without its child processes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.measure import CannotRun

NODES, GPUS, DAY_S, INTERVAL_S = 128, 8, 86_400, 10.0
STEPS, STEP_S = 163_000, 3.7
T0 = 1_790_000_000.0
RUN = "week-abc234"
ROUNDS = 5
PARTS = ("curves?name=loss&name=validation_loss", "timeline", "logs", "logs/lines?key=1/rank-0", "setup", "checkpoints")
_PACKAGES = ("clustertrain", "numpy", "starlette", "uvicorn")


def main() -> int:
    result = measure.context(_PACKAGES)
    with tempfile.TemporaryDirectory(prefix="ui-run-benchmark-") as scratch:
        result.update(measure_run_page(Path(scratch)))
    return measure.write_with_targets("ui_run", result, check_targets(result))


def check_targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    values = [
        ("1,024 GPUs for a week: state and progress within 1 s", result["open"]["status_s"]["median"], 1.0),
        ("a row is on its way to the page within 2 s", result["update"]["row_s"]["max"], 2.0),
        ("a log line is on its way to the page within 2 s", result["update"]["line_s"]["max"], 2.0),
    ]
    if result["open"]["browser_s"] is not None:
        values.insert(1, ("the page shows its progress within 1 s", result["open"]["browser_s"]["median"], 1.0))
    return [{"words": words, "value": value, "at_most": bound, "met": value <= bound} for words, value, bound in values]


def measure_run_page(folder: Path) -> dict[str, Any]:
    """Make the run in ``folder`` and measure its page."""
    home = folder / "home"
    run = make_week(home)
    opened = [_open_once(home) for _ in range(ROUNDS)]
    with _serving(home) as server:
        update = {"row_s": _measure_rows(server, run), "line_s": _measure_lines(server, run)}
        memory_mb = server.memory_mb()
    return {
        "gpus": NODES * GPUS,
        "steps": STEPS,
        "open": {
            "status_s": measure.spread([o["status_s"] for o in opened]),
            "parts_s": {part: measure.spread([o[part] for o in opened]) for part in PARTS},
            "telemetry_s": measure.spread([o["telemetry_s"] for o in opened]),
            "telemetry_kb": round(opened[0]["telemetry_bytes"] / 1e3),
            "browser_s": _measure_browser(home),
        },
        "update": update,
        "memory_mb": memory_mb,
    }


def make_week(home: Path) -> Path:
    """Create the run: telemetry of 128 nodes at 10 s, rows, events and logs; return its folder."""
    from benchmarks.telemetry_data import copy_segment, make_header, new_run, write_segment
    from clustertrain import fsio
    from clustertrain.telemetry.store.compact import compact

    header = make_header("node000", GPUS, 0, T0, INTERVAL_S)
    week, _ = write_segment(home / "week", header, int(7 * DAY_S / INTERVAL_S), flush_s=600)
    compact(week)
    names = [f"node{i:03d}" for i in range(NODES)]
    attempt = new_run(home, RUN, names)
    for i, node in enumerate(names):
        copy_segment(week, attempt.telemetry / node / "0", make_header(node, GPUS, GPUS * i, T0, INTERVAL_S))
    run = attempt.path.parent.parent
    for path in (run / "metrics", run / "events", attempt.events, attempt.logs):
        path.mkdir()
    with (run / "metrics" / "attempt-1.jsonl").open("w") as f:
        for step in range(1, STEPS + 1):
            f.write(json.dumps(_make_row(step)) + "\n")
    log = fsio.JsonlAppender(attempt.events_path("batch"))
    log.append({"t": T0 - 60, "event": "started", "job_id": "4711", "nodes": names})
    log.append({"t": T0, "event": "first_step", "step": 1, "total": 200_000})
    for i in range(1, int(7 * DAY_S / 1800)):
        save = {"event": "checkpoint", "step": int(1800 * i / STEP_S), "stall_s": 2.0, "save_s": 25.0}
        log.append({"t": T0 + 1800 * i, **save})
    log.close()
    for rank in range(NODES * GPUS):
        attempt.rank_log(rank).write_text("".join(f"step {s} of rank {rank}\n" for s in range(2000)))
    return run


def _make_row(step: int) -> dict[str, float]:
    return {
        "step": step, "t": T0 + STEP_S * step, "loss": 8 / (1 + step / 2000) + step % 7 * 0.01, "lr": 3e-4,
        "grad_norm": 1.1 + step % 5 * 0.1, "clipped": 0, "clip_fraction": 0.01, "step_s": STEP_S,
        "tokens_per_s": 1.4e8, "data_wait_s": 0.01, "allocated_gib": 71.1, "sum_step_s": STEP_S * step,
        "sum_tokens": 524_288 * step, "sum_data_wait_s": 0.01 * step,
    }  # fmt: skip


class _Server:
    """A running server, and requests to it with the token."""

    def __init__(self, address: str, pid: int) -> None:
        url = urllib.parse.urlsplit(address)
        self.address, self._pid = address, pid
        self._host, self._port = url.hostname or "", url.port or 0
        token = urllib.parse.parse_qs(url.query)["token"][0]
        self._headers = {"Cookie": f"clustertrain-ui-{self._port}={token}"}

    def get(self, path: str) -> bytes:
        connection = self._connect(path)
        with contextlib.closing(connection):
            response = connection.getresponse()
            body = response.read()
        if response.status != 200:
            raise CannotRun(f"GET {path}: {response.status} {body[:300]!r}")
        return body

    def stream(self, path: str) -> Iterator[dict[str, Any]]:
        """Yield the changes of a stream."""
        with contextlib.closing(self._connect(path)) as connection:
            response = connection.getresponse()
            while line := response.readline():
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def _connect(self, path: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=120)
        connection.request("GET", path, headers=self._headers)
        return connection

    def memory_mb(self) -> float:
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        return round(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024 / 1e6, 1)


@contextlib.contextmanager
def _serving(home: Path) -> Iterator[_Server]:
    argv = [sys.executable, "-m", "clustertrain", "ui", "--no-browser", "--home", str(home)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=measure.ROOT)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address.startswith("http"):
            raise CannotRun(f"the server printed {address!r}")
        yield _Server(address, process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=60)


def _open_once(home: Path) -> dict[str, Any]:
    """Return the durations of the first requests to a server that has just started, in s."""
    with _serving(home) as server:
        started = time.perf_counter()
        server.get(f"/runs/{RUN}")
        server.get(f"/api/runs/{RUN}")
        result: dict[str, Any] = {"status_s": time.perf_counter() - started}
        for part in PARTS:
            started = time.perf_counter()
            server.get(f"/api/runs/{RUN}/{part}")
            result[part] = time.perf_counter() - started
        started = time.perf_counter()
        result["telemetry_bytes"] = len(server.get(f"/api/runs/{RUN}/telemetry"))
        result["telemetry_s"] = time.perf_counter() - started
    return result


def _measure_rows(server: _Server, run: Path) -> dict[str, float]:
    """Return how long new rows take from the file to the stream."""
    path = run / "metrics" / "attempt-1.jsonl"
    changes = server.stream(f"/api/live/runs/{RUN}")
    next(changes)
    server.get(f"/api/runs/{RUN}/curves?name=loss")
    return _measure_arrival(
        changes,
        lambda i: _append(path, json.dumps(_make_row(STEPS + i)) + "\n"),
        lambda change, i: any(r["step"] == STEPS + i for r in change.get("rows") or ()),
    )


def _measure_lines(server: _Server, run: Path) -> dict[str, float]:
    """Return how long new lines of a log take from the file to the stream."""
    path = run / "attempts" / "1" / "logs" / "rank-7.log"
    changes = server.stream(f"/api/live/runs/{RUN}/log?key=1/rank-7")
    next(changes)
    return _measure_arrival(
        changes,
        lambda i: _append(path, f"line number {i}\n"),
        lambda change, i: any(text == f"line number {i}" for _, text in change["lines"]),
    )


def _measure_arrival(changes: Iterator[dict[str, Any]], write: Any, is_it: Any) -> dict[str, float]:
    durations = []
    for i in range(1, 2 * ROUNDS + 1):
        threading.Event().wait(0.37 * i % 1)  # at another moment of the server's interval each time
        write(i)
        started = time.perf_counter()
        next(change for change in changes if is_it(change, i))
        durations.append(time.perf_counter() - started)
    return measure.spread(durations)


def _append(path: Path, text: str) -> None:
    with path.open("a") as f:
        f.write(text)


def _measure_browser(home: Path) -> dict[str, float] | None:
    """Return how long Chromium takes from the navigation to the progress of the run; None without Chromium."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright import sync_api
    except ImportError:
        return None
    if chromium is None:
        return None
    durations = []
    with sync_api.sync_playwright() as playwright, _serving(home) as server:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(server.address)
        page.wait_for_url("**/")
        for _ in range(ROUNDS + 1):
            page.goto("about:blank")
            started = time.perf_counter()
            page.goto(server.address.partition("/?")[0] + f"/runs/{RUN}", wait_until="commit")
            page.wait_for_selector(".progress-line strong")
            durations.append(time.perf_counter() - started)
        browser.close()
    return measure.spread(durations[1:])


if __name__ == "__main__":
    sys.exit(main())
