"""The newest snapshot as Prometheus's metrics. Imports prometheus-client: only for a run that exports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from clustertrain.telemetry import fields
from clustertrain.telemetry.export.feed import Feed, Labels
from clustertrain.telemetry.export.metric_names import METRICS, PREFIX, PrometheusMetric
from clustertrain.telemetry.snapshot import Snapshot
from clustertrain.telemetry.store.writer import GpuFacts

BASE_LABELS = ("run", "job_id", "attempt", "node")
LABELS_BY_DEVICE = {"gpu": (*BASE_LABELS, "gpu", "uuid", "rank"), "host": BASE_LABELS, "rank": (*BASE_LABELS, "rank")}


class _ExtraMetric(NamedTuple):
    """A metric that is no recorded field."""

    metric: PrometheusMetric
    labels: tuple[str, ...]


def _extra_metric(name: str, help_text: str, labels: tuple[str, ...], *, is_counter: bool = False) -> _ExtraMetric:
    return _ExtraMetric(PrometheusMetric(f"{PREFIX}_{name}", is_counter, 1.0, help_text), labels)


_INFO = _extra_metric("gpu_info", "What the GPU is, always 1", (*LABELS_BY_DEVICE["gpu"], "name", "minor", "parent"))
_MEMORY = _extra_metric("gpu_memory_total_bytes", "Device memory that there is", LABELS_BY_DEVICE["gpu"])
_XIDS = _extra_metric(
    "gpu_xids_total", "Errors that the driver reported of the GPU (XID)", LABELS_BY_DEVICE["gpu"], is_counter=True
)
_XIDS_BY_NUMBER = _extra_metric(
    "gpu_xids_by_number_total",
    "The same by the number of the error",
    (*LABELS_BY_DEVICE["gpu"], "xid"),
    is_counter=True,
)
_SAMPLES = _extra_metric("sampler_samples_total", "Samples taken of the node", BASE_LABELS, is_counter=True)
_MISSED = _extra_metric("sampler_missed_total", "Samples that were due and not taken", BASE_LABELS, is_counter=True)
_LAST = _extra_metric("sampler_last_sample_timestamp_seconds", "When the newest sample was taken", BASE_LABELS)
EXTRA_METRICS = (_INFO, _MEMORY, _XIDS, _XIDS_BY_NUMBER, _SAMPLES, _MISSED, _LAST)


class SnapshotCollector(Collector):
    """Reads ``feed`` when it is scraped. It takes no lock: the sampler never waits for a scrape."""

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
                # From 0 on, or rate() and increase() would not see the first. A number's own series begins at 1.
                _add_sample(families, _XIDS.metric, labels, sum(xids.values()))
                for xid, count in sorted(xids.items()):
                    _add_sample(families, _XIDS_BY_NUMBER.metric, (*labels, str(xid)), count)


def _build_families() -> dict[str, Family]:
    """Every metric without samples, by name, in the order in which they are shown."""
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
        if labels is not None and metric is not None and not math.isnan(value):  # what is missing is absent
            _add_sample(families, metric, labels, value * metric.scale)


def _add_sample(
    families: Mapping[str, Family], metric: PrometheusMetric, labels: tuple[str, ...], value: float
) -> None:
    family = families[metric.name]
    family.add_metric(labels, value)  # type: ignore[attr-defined]  # of both kinds, and of their base not


def _base_label_values(labels: Labels) -> tuple[str, ...]:
    return (labels.run, labels.job_id, str(labels.attempt), labels.node)


def _gpu_labels(gpu: GpuFacts) -> tuple[str, str, str]:
    return (_format_int(gpu.index), gpu.uuid, ",".join(map(str, gpu.ranks)))


def _format_int(value: int | None) -> str:
    return "" if value is None else str(value)


def build_registry(feed: Feed) -> CollectorRegistry:
    """With our metrics alone: none of the agent's own process and of Python."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(feed))
    return registry


def render(feed: Feed) -> bytes:
    """Prometheus's text format, version 0.0.4."""
    return generate_latest(build_registry(feed))
