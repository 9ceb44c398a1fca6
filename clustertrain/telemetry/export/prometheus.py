"""Newest snapshot as Prometheus metrics. Imports prometheus-client, so it is loaded only for runs that export.

The names of the recorded fields are derived from :mod:`clustertrain.telemetry.fields`, so new fields are exported
automatically: base units, ``_total`` for counters, ratios 0-1. A test checks them with ``promtool``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from clustertrain.run.heartbeat import PHASES
from clustertrain.telemetry import fields
from clustertrain.telemetry.export.feed import Feed, Labels
from clustertrain.telemetry.fields import Field
from clustertrain.telemetry.snapshot import Snapshot
from clustertrain.telemetry.store.writer import GpuFacts

PREFIX = "clustertrain"
# unit: (suffix of our name, suffix for Prometheus, scale).
# https://prometheus.io/docs/practices/naming/#base-units
_UNITS = {
    "ratio": ("", "_ratio", 1.0),
    "W": ("_w", "_watts", 1.0),
    "J": ("_j", "_joules", 1.0),
    "s": ("_s", "_seconds", 1.0),
    "°C": ("_c", "_celsius", 1.0),
    "MHz": ("_mhz", "_hertz", 1e6),
    "steps": ("step", "steps", 1.0),
}


class PrometheusMetric(NamedTuple):
    """One exported metric."""

    name: str  # as in the exposition format
    is_counter: bool
    scale: float  # factor for the recorded value
    help_text: str


def metric_for_field(device: str, field: Field) -> PrometheusMetric:
    """Return the metric of a field; ``device`` is ``gpu``, ``host`` or ``rank``."""
    suffix, prometheus_suffix, scale = _UNITS.get(field.unit, ("", "", 1.0))
    name = f"{PREFIX}_{device}_{field.name.removesuffix(suffix)}{prometheus_suffix}"
    is_counter = field.metric_type == "counter"
    help_text = field.description[0].upper() + field.description[1:]
    if field.unit == "phase":
        help_text = "Current phase of the rank: " + ", ".join(f"{code} {phase}" for code, phase in enumerate(PHASES))
    return PrometheusMetric(f"{name}_total" if is_counter else name, is_counter, scale, help_text)


METRICS: dict[str, dict[str, PrometheusMetric]] = {
    device: {f.name: metric_for_field(device, f) for f in device_fields}
    for device, device_fields in (("gpu", fields.GPU), ("host", fields.HOST), ("rank", fields.RANK))
}

BASE_LABELS = ("run", "job_id", "attempt", "node")
LABELS_BY_DEVICE = {"gpu": (*BASE_LABELS, "gpu", "uuid", "rank"), "host": BASE_LABELS, "rank": (*BASE_LABELS, "rank")}


class _ExtraMetric(NamedTuple):
    """Metric that is not a recorded field."""

    metric: PrometheusMetric
    labels: tuple[str, ...]


def _extra_metric(name: str, help_text: str, labels: tuple[str, ...], *, is_counter: bool = False) -> _ExtraMetric:
    return _ExtraMetric(PrometheusMetric(f"{PREFIX}_{name}", is_counter, 1.0, help_text), labels)


_INFO = _extra_metric(
    "gpu_info", "Properties of the GPU as labels, always 1", (*LABELS_BY_DEVICE["gpu"], "name", "minor", "parent")
)
_MEMORY = _extra_metric("gpu_memory_total_bytes", "Total device memory", LABELS_BY_DEVICE["gpu"])
_XIDS = _extra_metric(
    "gpu_xids_total", "Errors of the GPU reported by the driver (XID)", LABELS_BY_DEVICE["gpu"], is_counter=True
)
_XIDS_BY_NUMBER = _extra_metric(
    "gpu_xids_by_number_total",
    "Errors of the GPU reported by the driver, by XID",
    (*LABELS_BY_DEVICE["gpu"], "xid"),
    is_counter=True,
)
_SAMPLES = _extra_metric("sampler_samples_total", "Samples taken of the node", BASE_LABELS, is_counter=True)
_MISSED = _extra_metric("sampler_missed_total", "Samples that were due but not taken", BASE_LABELS, is_counter=True)
_LAST = _extra_metric("sampler_last_sample_timestamp_seconds", "Time of the newest sample", BASE_LABELS)
EXTRA_METRICS = (_INFO, _MEMORY, _XIDS, _XIDS_BY_NUMBER, _SAMPLES, _MISSED, _LAST)


class SnapshotCollector(Collector):
    """Collector that reads ``feed`` on each scrape, without a lock: the sampler never waits for a scrape."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def describe(self) -> Iterable[Family]:
        return _build_families().values()

    def collect(self) -> Iterator[Family]:
        families = _build_families()
        snapshot = self._feed.newest
        if snapshot is not None:
            base_labels = _base_label_values(self._feed.labels)
            self._add_sampler_metrics(families, base_labels, snapshot)
            if self._feed.is_fresh(snapshot):
                self._add_gpu_metrics(families, base_labels, snapshot.gpus)
                _add_field_metrics(families, base_labels, snapshot)
        return (family for family in families.values() if family.samples)

    def _add_sampler_metrics(
        self, families: Mapping[str, Family], base_labels: tuple[str, ...], snapshot: Snapshot
    ) -> None:
        _add_sample(families, _SAMPLES.metric, base_labels, self._feed.samples)
        _add_sample(families, _MISSED.metric, base_labels, self._feed.missed)
        _add_sample(families, _LAST.metric, base_labels, snapshot.t)

    def _add_gpu_metrics(
        self, families: Mapping[str, Family], base_labels: tuple[str, ...], gpus: list[GpuFacts]
    ) -> None:
        for gpu in gpus:
            labels = (*base_labels, *_gpu_labels(gpu))
            _add_sample(
                families, _INFO.metric, (*labels, gpu.name or "", _format_int(gpu.minor), gpu.parent or ""), 1.0
            )
            if gpu.memory_total_bytes is not None:
                _add_sample(families, _MEMORY.metric, labels, gpu.memory_total_bytes)
            xids = self._feed.xid_counts(gpu.uuid)
            if xids is not None:
                # The total starts at 0 so that rate() and increase() see the first error. Series by XID start at 1.
                _add_sample(families, _XIDS.metric, labels, sum(xids.values()))
                for xid, count in sorted(xids.items()):
                    _add_sample(families, _XIDS_BY_NUMBER.metric, (*labels, str(xid)), count)


def _build_families() -> dict[str, Family]:
    """Return every metric without samples, by name, in display order."""
    families = {
        m.name: _build_family(m, LABELS_BY_DEVICE[device])
        for device, metrics in METRICS.items()
        for m in metrics.values()
    }
    families.update((extra.metric.name, _build_family(extra.metric, extra.labels)) for extra in EXTRA_METRICS)
    return families


def _build_family(metric: PrometheusMetric, labels: tuple[str, ...]) -> Family:
    family_type = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
    return family_type(metric.name, metric.help_text, labels=labels)


def _add_field_metrics(families: Mapping[str, Family], base_labels: tuple[str, ...], snapshot: Snapshot) -> None:
    gpus = {f"gpu{i}": (*base_labels, *_gpu_labels(gpu)) for i, gpu in enumerate(snapshot.gpus)}
    devices = {**gpus, "host": base_labels, **{f"rank{r}": (*base_labels, str(r)) for r in snapshot.ranks}}
    for column, value in snapshot.values.items():
        device, name = fields.split_column(column)
        labels, metric = devices.get(device), METRICS.get(device.rstrip("0123456789"), {}).get(name)
        if labels is not None and metric is not None and not math.isnan(value):  # missing values are not exported
            _add_sample(families, metric, labels, value * metric.scale)


def _add_sample(
    families: Mapping[str, Family], metric: PrometheusMetric, labels: tuple[str, ...], value: float
) -> None:
    family = families[metric.name]
    family.add_metric(labels, value)  # type: ignore[attr-defined]  # both subclasses have it, their base does not


def _base_label_values(labels: Labels) -> tuple[str, ...]:
    return (labels.run, labels.job_id, str(labels.attempt), labels.node)


def _gpu_labels(gpu: GpuFacts) -> tuple[str, str, str]:
    return (_format_int(gpu.index), gpu.uuid, ",".join(map(str, gpu.ranks)))


def _format_int(value: int | None) -> str:
    return "" if value is None else str(value)


def build_registry(feed: Feed) -> CollectorRegistry:
    """Return a registry with only our metrics, without those of the agent's process and of Python."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(feed))
    return registry


def render(feed: Feed) -> bytes:
    """Render the metrics in Prometheus's text format, version 0.0.4."""
    return generate_latest(build_registry(feed))
