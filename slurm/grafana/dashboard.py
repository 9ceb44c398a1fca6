"""Writes clustertrain.json, the dashboard for Grafana, beside itself: python slurm/grafana/dashboard.py

The metrics are those of clustertrain/telemetry/export. A test asks a Prometheus each of these questions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

OUT = Path(__file__).with_name("clustertrain.json")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
CHOSEN = '{run=~"$run",job_id=~"$job",node=~"$node"}'
OF_GPU = "{{node}} gpu {{gpu}}, rank {{rank}}"
OF_RANK = "rank {{rank}}"
OF_NODE = "{{node}}"
WIDTH = 24  # Grafana's columns


class Query(NamedTuple):
    expr: str
    legend: str


class Panel(NamedTuple):
    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    full: float | None = None  # the upper end of the axis


def value(metric: str, legend: str = OF_GPU) -> Query:
    return Query(f"clustertrain_{metric}{CHOSEN}", legend)


def rate(metric: str, legend: str = OF_GPU) -> Query:
    return Query(f"rate(clustertrain_{metric}{CHOSEN}[$__rate_interval])", legend)


def per_run(function: str, query: Query) -> Query:
    return Query(f"{function} by (run) ({query.expr})", "{{run}}")


_SAMPLES = f"sum by (node) (increase(clustertrain_sampler_samples_total{CHOSEN}[$__rate_interval]))"
_MISSED = f"sum by (node) (increase(clustertrain_sampler_missed_total{CHOSEN}[$__rate_interval]))"
STEPS = per_run("max", rate("rank_steps_total"))
TOKENS = per_run("sum", rate("rank_tokens_total"))

AT_A_GLANCE = (
    Panel("GPUs", "Allocated", "none", (Query(f"count(clustertrain_gpu_info{CHOSEN})", ""),), "stat"),
    Panel("Utilization", "Mean of all GPUs", "percentunit",
          (Query(f"avg(clustertrain_gpu_utilization_ratio{CHOSEN})", ""),), "stat"),
    Panel("Power", "Of all GPUs", "watt", (Query(f"sum(clustertrain_gpu_power_watts{CHOSEN})", ""),), "stat"),
    Panel("Steps", "Optimizer steps per second", "ops", (STEPS,), "stat"),
    Panel("Tokens", "Tokens per second, of all ranks", "short", (TOKENS,), "stat"),
    Panel("XIDs", "Errors that the driver reported in the time shown", "none",
          (Query(f"sum(increase(clustertrain_gpu_xids_total{CHOSEN}[$__range]))", ""),), "stat"),
)  # fmt: skip
GPUS = (
    Panel("GPU utilization", "Share of time in which a kernel ran: an upper bound of useful work", "percentunit",
          (value("gpu_utilization_ratio"),), full=1.0),
    Panel("GPU memory used", "Without what the driver reserves", "bytes", (value("gpu_memory_used_bytes"),)),
    Panel("Power", "Drawn by the board", "watt", (value("gpu_power_watts"),)),
    Panel("Temperature", "Of the chip; of the memory where it is told", "celsius",
          (value("gpu_temperature_celsius"), value("gpu_memory_temperature_celsius", OF_GPU + " memory"))),
    Panel("SM clock", "", "hertz", (value("gpu_sm_clock_hertz"),)),
    Panel("Throttled", "Clock held down by power, heat or the board", "percentunit",
          tuple(value(f"gpu_throttle_{why}_ratio", f"{OF_GPU} {why}") for why in ("power", "thermal", "hardware")),
          full=1.0),
    Panel("Tensor cores active", "Share of time (GPM, Hopper and later)", "percentunit",
          (value("gpu_tensor_activity_ratio"),), full=1.0),
    Panel("SM and memory activity", "Shares (GPM, Hopper and later)", "percentunit",
          (value("gpu_sm_activity_ratio", OF_GPU + " SM"), value("gpu_dram_activity_ratio", OF_GPU + " DRAM")),
          full=1.0),
    Panel("NVLink", "", "Bps",
          tuple(rate(f"gpu_nvlink_{way}_bytes_total", f"{OF_GPU} {way}") for way in ("tx", "rx"))),
    Panel("PCIe", "", "Bps", tuple(rate(f"gpu_pcie_{way}_bytes_total", f"{OF_GPU} {way}") for way in ("tx", "rx"))),
)  # fmt: skip
TRAINING = (
    Panel("Step rate", "Optimizer steps per second", "ops", (STEPS,)),
    Panel("Tokens per second", "Of all ranks", "short", (TOKENS,)),
    Panel("Waiting for data", "Share of the time", "percentunit", (rate("rank_data_wait_seconds_total", OF_RANK),)),
    Panel("Phase", "What each rank is in", "none", (value("rank_phase", OF_RANK),), "state-timeline"),
)
HEALTH = (
    Panel("XIDs", "By number, since the attempt began", "none",
          (value("gpu_xids_by_number_total", OF_GPU + ": XID {{xid}}"),)),
    Panel("Memory errors", "ECC, in the interval", "none",
          tuple(Query(f"increase(clustertrain_gpu_ecc_{kind}_total{CHOSEN}[$__rate_interval])", f"{OF_GPU} {kind}")
                for kind in ("corrected", "uncorrected"))),
    Panel("Coverage", "Samples taken of those that were due", "percentunit",
          (Query(f"{_SAMPLES} / ({_SAMPLES} + {_MISSED})", OF_NODE),), full=1.0),
    Panel("Host", "Busy share of all processors", "percentunit", (value("host_cpu_ratio", OF_NODE),), full=1.0),
)  # fmt: skip
# run/heartbeat.py PHASES; the test compares.
PHASES = ("idle", "startup", "restore", "train", "checkpoint", "evaluation", "shutdown")


def build() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, found, columns, height in (
        ("At a glance", AT_A_GLANCE, 6, 4),
        ("GPUs", GPUS, 2, 8),
        ("Training", TRAINING, 2, 8),
        ("Health", HEALTH, 2, 8),
    ):
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}})  # fmt: skip
        y += 1
        width = WIDTH // columns
        for i, panel in enumerate(found):
            at = {"x": i % columns * width, "y": y + i // columns * height, "w": width, "h": height}
            panels.append(_panel(panel, len(panels) + 1, at))
        y += -(-len(found) // columns) * height
    return {
        "uid": "clustertrain",
        "title": "clustertrain",
        "description": "GPUs, steps and errors of clustertrain's runs",
        "tags": ["clustertrain", "gpu"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, at: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.full is not None:
        defaults["max"] = panel.full
    options: dict[str, Any] = {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                               "tooltip": {"mode": "multi", "sort": "desc"}}  # fmt: skip
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    if panel.kind == "state-timeline":
        words = {str(code): {"text": word, "index": code} for code, word in enumerate(PHASES)}
        defaults = {"mappings": [{"type": "value", "options": words}]}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": q.expr, "legendFormat": q.legend or "__auto"}
            for i, q in enumerate(panel.queries)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    known = "clustertrain_sampler_samples_total"
    found: list[dict[str, Any]] = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}
    ]
    for name, label, where in (
        ("run", "run", ""),
        ("job", "job_id", '{run=~"$run"}'),
        ("node", "node", '{run=~"$run",job_id=~"$job"}'),
    ):
        query = f"label_values({known}{where}, {label})"
        found.append(
            {
                "name": name,
                "label": name.capitalize(),
                "type": "query",
                "datasource": SOURCE,
                "definition": query,
                "query": {"query": query, "refId": name},
                "refresh": 2,
                "sort": 2,
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "current": {"text": ["All"], "value": ["$__all"]},
                "hide": 0,
            }
        )
    return found


if __name__ == "__main__":
    OUT.write_text(json.dumps(build(), indent=1) + "\n")
