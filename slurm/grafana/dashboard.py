"""Generator of the Grafana dashboard clustertrain.json, next to this file: python slurm/grafana/dashboard.py

The metrics are those of clustertrain/telemetry/export. A test runs each query against a Prometheus.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

OUT = Path(__file__).with_name("clustertrain.json")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SELECTED = '{run=~"$run",job_id=~"$job",node=~"$node"}'
GPU_LEGEND = "{{node}} gpu {{gpu}}, rank {{rank}}"
RANK_LEGEND = "rank {{rank}}"
NODE_LEGEND = "{{node}}"
WIDTH = 24  # Grafana's columns


class Query(NamedTuple):
    expr: str
    legend: str


class Panel(NamedTuple):
    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    axis_max: float | None = None


def gauge(metric: str, legend: str = GPU_LEGEND) -> Query:
    return Query(f"clustertrain_{metric}{SELECTED}", legend)


def rate(metric: str, legend: str = GPU_LEGEND) -> Query:
    return Query(f"rate(clustertrain_{metric}{SELECTED}[$__rate_interval])", legend)


def per_run(function: str, query: Query) -> Query:
    return Query(f"{function} by (run) ({query.expr})", "{{run}}")


_SAMPLES = f"sum by (node) (increase(clustertrain_sampler_samples_total{SELECTED}[$__rate_interval]))"
_MISSED = f"sum by (node) (increase(clustertrain_sampler_missed_total{SELECTED}[$__rate_interval]))"
STEPS = per_run("max", rate("rank_steps_total"))
TOKENS = per_run("sum", rate("rank_tokens_total"))

OVERVIEW = (
    Panel("GPUs", "Allocated", "none", (Query(f"count(clustertrain_gpu_info{SELECTED})", ""),), "stat"),
    Panel("Utilization", "Mean of all GPUs", "percentunit",
          (Query(f"avg(clustertrain_gpu_utilization_ratio{SELECTED})", ""),), "stat"),
    Panel("Power", "Sum of all GPUs", "watt", (Query(f"sum(clustertrain_gpu_power_watts{SELECTED})", ""),), "stat"),
    Panel("Steps", "Optimizer steps per second", "ops", (STEPS,), "stat"),
    Panel("Tokens", "Tokens per second, sum of all ranks", "short", (TOKENS,), "stat"),
    Panel("XIDs", "Errors that the driver reported in the selected time range", "none",
          (Query(f"sum(increase(clustertrain_gpu_xids_total{SELECTED}[$__range]))", ""),), "stat"),
)  # fmt: skip
GPUS = (
    Panel("GPU utilization", "Share of time in which a kernel ran: an upper bound on useful work", "percentunit",
          (gauge("gpu_utilization_ratio"),), axis_max=1.0),
    Panel("GPU memory used", "Excluding the memory that the driver reserves", "bytes",
          (gauge("gpu_memory_used_bytes"),)),
    Panel("Power", "Drawn by the board", "watt", (gauge("gpu_power_watts"),)),
    Panel("Temperature", "Of the chip, and of the memory if it is reported", "celsius",
          (gauge("gpu_temperature_celsius"), gauge("gpu_memory_temperature_celsius", GPU_LEGEND + " memory"))),
    Panel("SM clock", "", "hertz", (gauge("gpu_sm_clock_hertz"),)),
    Panel("Throttled", "Share of time in which power, heat or the board limits the clock", "percentunit",
          tuple(gauge(f"gpu_throttle_{cause}_ratio", f"{GPU_LEGEND} {cause}")
                for cause in ("power", "thermal", "hardware")),
          axis_max=1.0),
    Panel("Tensor cores active", "Share of time (GPM, Hopper and later)", "percentunit",
          (gauge("gpu_tensor_activity_ratio"),), axis_max=1.0),
    Panel("SM and memory activity", "Shares (GPM, Hopper and later)", "percentunit",
          (gauge("gpu_sm_activity_ratio", GPU_LEGEND + " SM"), gauge("gpu_dram_activity_ratio", GPU_LEGEND + " DRAM")),
          axis_max=1.0),
    Panel("NVLink", "", "Bps",
          tuple(rate(f"gpu_nvlink_{direction}_bytes_total", f"{GPU_LEGEND} {direction}")
                for direction in ("tx", "rx"))),
    Panel("PCIe", "", "Bps",
          tuple(rate(f"gpu_pcie_{direction}_bytes_total", f"{GPU_LEGEND} {direction}")
                for direction in ("tx", "rx"))),
)  # fmt: skip
TRAINING = (
    Panel("Step rate", "Optimizer steps per second", "ops", (STEPS,)),
    Panel("Tokens per second", "Sum of all ranks", "short", (TOKENS,)),
    Panel("Waiting for data", "Share of time", "percentunit", (rate("rank_data_wait_seconds_total", RANK_LEGEND),)),
    Panel("Phase", "Phase of each rank", "none", (gauge("rank_phase", RANK_LEGEND),), "state-timeline"),
)
HEALTH = (
    Panel("XIDs", "By number, since the attempt began", "none",
          (gauge("gpu_xids_by_number_total", GPU_LEGEND + ": XID {{xid}}"),)),
    Panel("Memory errors", "ECC errors per interval", "none",
          tuple(Query(f"increase(clustertrain_gpu_ecc_{kind}_total{SELECTED}[$__rate_interval])",
                      f"{GPU_LEGEND} {kind}")
                for kind in ("corrected", "uncorrected"))),
    Panel("Coverage", "Share of due samples that were taken", "percentunit",
          (Query(f"{_SAMPLES} / ({_SAMPLES} + {_MISSED})", NODE_LEGEND),), axis_max=1.0),
    Panel("Host", "Busy share of all processors", "percentunit", (gauge("host_cpu_ratio", NODE_LEGEND),), axis_max=1.0),
)  # fmt: skip
# As in run/heartbeat.py; a test compares them.
PHASES = ("idle", "startup", "restore", "train", "checkpoint", "evaluation", "shutdown")


def build() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row_panels, columns, height in (
        ("At a glance", OVERVIEW, 6, 4),
        ("GPUs", GPUS, 2, 8),
        ("Training", TRAINING, 2, 8),
        ("Health", HEALTH, 2, 8),
    ):
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}})  # fmt: skip
        y += 1
        width = WIDTH // columns
        for i, panel in enumerate(row_panels):
            position = {"x": i % columns * width, "y": y + i // columns * height, "w": width, "h": height}
            panels.append(_panel(panel, len(panels) + 1, position))
        y += -(-len(row_panels) // columns) * height
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


def _panel(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.axis_max is not None:
        defaults["max"] = panel.axis_max
    options: dict[str, Any] = {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                               "tooltip": {"mode": "multi", "sort": "desc"}}  # fmt: skip
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    if panel.kind == "state-timeline":
        phases = {str(code): {"text": name, "index": code} for code, name in enumerate(PHASES)}
        defaults = {"mappings": [{"type": "value", "options": phases}]}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": q.expr, "legendFormat": q.legend or "__auto"}
            for i, q in enumerate(panel.queries)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    metric = "clustertrain_sampler_samples_total"
    variables: list[dict[str, Any]] = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}
    ]
    for name, label, selector in (
        ("run", "run", ""),
        ("job", "job_id", '{run=~"$run"}'),
        ("node", "node", '{run=~"$run",job_id=~"$job"}'),
    ):
        query = f"label_values({metric}{selector}, {label})"
        variables.append(
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
    return variables


if __name__ == "__main__":
    OUT.write_text(json.dumps(build(), indent=1) + "\n")
