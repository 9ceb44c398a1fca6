"""A real Prometheus scrapes the exporter and evaluates every query of the Grafana dashboard."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from clustertrain import clock
from clustertrain.config.telemetry import ExporterSpec
from clustertrain.run.heartbeat import PHASES
from clustertrain.telemetry.export.exporter import Exporter
from slurm.grafana import dashboard
from tests.paths import ROOT
from tests.unit.telemetry.export.test_http_server import PORT_ATTEMPTS, WAIT_S, WatchedExporter, free_port
from tests.unit.telemetry.snapshots import LABELS, full, snapshot

DASHBOARD = ROOT / "slurm" / "grafana" / "clustertrain.json"
CONFIG = """
global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}
scrape_configs:
  - job_name: clustertrain
    static_configs: [{{targets: ['127.0.0.1:{port}']}}]
"""


class Prometheus:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as e:
            if e.code >= 500:
                raise  # the server is not up yet
            return json.load(e)

    def query(self, expr: str) -> list[dict[str, Any]]:
        answer = self.get("/api/v1/query", query=expr)
        assert answer["status"] == "success", f"{expr}: {answer}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def wait_for(self, expr: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = []

        def has_result() -> bool:
            nonlocal result
            try:
                result = self.query(expr)
            except OSError:  # the server is not up yet
                return False
            return bool(result)

        assert clock.wait_until(has_result, WAIT_S), f"no answer to {expr}: {self.get('/api/v1/targets')}"
        return result


def _feed(exporter: Exporter, stop_event: threading.Event) -> None:
    """Feed a working node: every counter grows by 10 per tick."""
    for tick in itertools.count():
        values = {c: 0.5 if "ratio" in c or "utilization" in c else 10.0 * tick for c in full()}
        values |= {"gpu0.utilization": 0.87, "gpu1.utilization": 0.0, "rank8.phase": float(PHASES.index("train"))}
        del values["gpu1.power_w"]
        exporter.observe(snapshot(values))
        if stop_event.wait(0.1):
            return


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: slurm/install-packages")
    folder = tmp_path_factory.mktemp("prometheus")
    watched = WatchedExporter(ExporterSpec(port=free_port(PORT_ATTEMPTS)))
    (folder / "config.yml").write_text(CONFIG.format(port=watched.start()))
    stop_event = threading.Event()
    feeder = threading.Thread(target=_feed, args=(watched.exporter, stop_event), daemon=True)
    watched.exporter.watch_xids(["GPU-0"])
    watched.exporter.record_xid("GPU-1", 79)
    feeder.start()
    port = free_port()
    argv = ["prometheus", f"--config.file={folder / 'config.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    argv += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with (folder / "log").open("wb") as log, subprocess.Popen(argv, stdout=log, stderr=log, cwd=folder) as child:
        try:
            server = Prometheus(port)
            server.wait_for(f"count_over_time(clustertrain_sampler_samples_total[{WAIT_S:.0f}s]) > 3")
            yield server
        finally:
            child.terminate()
            child.wait(WAIT_S)
            stop_event.set()
            feeder.join(WAIT_S)
            assert watched.exporter.stop(WAIT_S)


@pytest.mark.long
def test_prometheus_has_values_with_labels(prometheus: Prometheus) -> None:
    (target,) = prometheus.get("/api/v1/targets")["data"]["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    by_uuid = {r["metric"]["uuid"]: r for r in prometheus.query("clustertrain_gpu_utilization_ratio")}
    assert {uuid: float(r["value"][1]) for uuid, r in by_uuid.items()} == {"GPU-0": 0.87, "GPU-1": 0.0}
    labels = {k: v for k, v in by_uuid["GPU-0"]["metric"].items() if k not in ("__name__", "instance", "job")}
    base = {"run": LABELS.run, "job_id": LABELS.job_id, "attempt": "2", "node": LABELS.node}
    assert labels == {**base, "gpu": "0", "uuid": "GPU-0", "rank": "8"}
    assert [r["metric"]["uuid"] for r in prometheus.query("clustertrain_gpu_power_watts")] == ["GPU-0"]
    (xid,) = prometheus.query("clustertrain_gpu_xids_by_number_total")
    assert xid["metric"]["xid"] == "79" and xid["value"][1] == "1"
    # Counters have a rate.
    (series,) = prometheus.query('rate(clustertrain_rank_tokens_total{rank="8"}[30s]) > 0')
    assert series["metric"]["rank"] == "8"


def _expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


@pytest.mark.long
def test_dashboard_queries_have_results(prometheus: Prometheus) -> None:
    empty = []
    variables = {"$__rate_interval": "30s", "$__range": "30s", "$run": ".*", "$job": ".*", "$node": ".*"}
    for expr in _expressions():
        query = expr
        for variable, value in variables.items():
            query = query.replace(variable, value)
        if not prometheus.query(query):
            empty.append(expr)
    assert empty == []
    names = prometheus.get("/api/v1/label/run/values", **{"match[]": "clustertrain_sampler_samples_total"})
    assert names["data"] == [LABELS.run]


@pytest.mark.long
def test_documented_queries_have_results(prometheus: Prometheus) -> None:
    lines = re.findall(
        r"^(?:clustertrain_|sum by).*$", (ROOT / "docs" / "guides" / "metrics-export.md").read_text(), re.MULTILINE
    )
    assert len(lines) == 2
    assert [line for line in lines if not prometheus.query(line)] == []
    (series,) = prometheus.query(lines[0])  # the other rank is not in that phase
    assert series["metric"]["rank"] == "8"


def test_dashboard_matches_its_script() -> None:
    assert json.loads(DASHBOARD.read_text()) == dashboard.build(), "python slurm/grafana/dashboard.py"


def test_dashboard_layout() -> None:
    built = dashboard.build()
    ids = [p["id"] for p in built["panels"]]
    assert len(ids) == len(set(ids))
    cells = [
        (x, y)
        for at in (p["gridPos"] for p in built["panels"])
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < dashboard.WIDTH
    assert [v["name"] for v in built["templating"]["list"]] == ["datasource", "run", "job", "node"]
    assert dashboard.PHASES == PHASES
    assert all(("$run" in expr and "$job" in expr and "$node" in expr) for expr in _expressions())
