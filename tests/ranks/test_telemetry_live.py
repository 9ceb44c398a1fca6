"""A run with simulated GPUs: metrics and alerts while it is active, and its records afterwards."""

from __future__ import annotations

import csv
import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from clustertrain import clock
from clustertrain.run import events
from clustertrain.run.run_dir import RunDir
from tests import runs
from tests.fakes.nvml.build import Stub
from tests.fakes.nvml.fixture import nvml_library, nvml_stub
from tests.runs import LOCAL, Run

__all__ = ["nvml_library", "nvml_stub"]
pytestmark = pytest.mark.ranks

# After ten seconds, the second GPU has an uncorrectable ECC error.
GPUS = """
device 0 utilization 90
device 0 power 600000
device 1 utilization 88
device 1 power 590000
event 1 10 xid 48
"""
TELEMETRY = """
[telemetry]
interval_s = 0.5
flush_s = 1
[telemetry.alerts]
command = {command}
[telemetry.prometheus]
port = 19410
textfile = {textfile}
"""


@pytest.fixture
def run(nvml_stub: Stub, tmp_path: Path) -> Iterator[Run]:
    nvml_stub.drive(GPUS)
    (tmp_path / "textfile").mkdir()
    save_stdin = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())"
    command = json.dumps([sys.executable, "-c", save_stdin, str(tmp_path / "alert.json")])
    table = TELEMETRY.format(command=command, textfile=json.dumps(str(tmp_path / "textfile")))
    recipe = runs.write_recipe(tmp_path, steps=100_000, more=table)
    clean_env = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_"))}
    env = {**clean_env, **nvml_stub.environ(), "CLUSTERTRAIN_HOME": str(tmp_path / "home")}
    options = (*LOCAL, "--nodes", "1", "--gpus", "2", "--layout", "ddp")
    submitted_run = runs.submit(env, *options, str(recipe))
    yield submitted_run
    submitted_run.cancel_if_active()
    submitted_run.wait_until_final()


def events_named(run: Run, event: str) -> list[events.Event]:
    return list(events.filter_by_name(events.for_attempt(RunDir(run.path).attempt(1)), event))


def test_active_run_exports_and_alerts_and_is_readable_later(run: Run, tmp_path: Path) -> None:
    run.wait_for_step(20)
    assert clock.wait_until(lambda: len(events_named(run, "exporter_started")) == 2, 60, 0.2), run.explain()
    (exporter,) = (e for e in events_named(run, "exporter_started") if e.get("port"))
    with urllib.request.urlopen(f"http://{exporter['address']}:{exporter['port']}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    assert 'clustertrain_gpu_utilization_ratio{attempt="1",gpu="1"' in page.replace(" ", "")
    assert "clustertrain_rank_steps_total" in page
    assert clock.wait_until(lambda: bool(list((tmp_path / "textfile").glob("*.prom"))), 60, 0.2)
    assert clock.wait_until(lambda: bool(events_named(run, "alert")), 60, 0.2), run.explain()
    (alert,) = (e for e in events_named(run, "alert") if e["code"] == "xid")
    assert (alert["rank"], alert["severity"]) == (1, "critical")
    alert_file = tmp_path / "alert.json"  # written by a command: the file exists before its content
    assert (
        clock.wait_until(lambda: alert_file.exists() and alert_file.read_text().rstrip().endswith("}"), 60, 0.2)
        or alert_file.read_text()
    )
    assert json.loads(alert_file.read_text())["run"] == run.id
    live = json.loads(run.call("top", "--once", "--json", run.id).stdout)
    assert live["step"] >= 20

    run.call("cancel", run.id)
    run.wait_until_final()
    assert list((tmp_path / "textfile").glob("*.prom")) == []
    report = json.loads(run.call("telemetry", run.id, "--json").stdout)
    (insight,) = (n for n in report["insights"] if n["code"] == "xid")
    assert (insight["rank"], insight["uuid"]) == (1, report["gpus"][1]["uuid"])
    assert report["training"]["steps"] >= 20
    assert report["goodput"]["wall_s"] > 0
    run.call("telemetry", run.id, "--html", str(tmp_path / "page.html"), "--csv", str(tmp_path / "all.csv"))
    assert "<html" in (tmp_path / "page.html").read_text()
    with (tmp_path / "all.csv").open() as f:
        rows = list(csv.DictReader(f))
    assert {r["device"] for r in rows} == {"gpu0", "gpu1", "host", "rank0", "rank1"}
    assert {float(r["utilization"]) for r in rows if r["device"] == "gpu1" and r["utilization"]} == {0.88}
