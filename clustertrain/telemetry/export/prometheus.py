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
from clustertrain.telemetry.export.metric_names import METRICS, PREFIX, Metric
from clustertrain.telemetry.snapshot import Snapshot
from clustertrain.telemetry.store.writer import GpuFacts

BASE = ("run", "job_id", "attempt", "node")
LABELS = {"gpu": (*BASE, "gpu", "uuid", "rank"), "host": BASE, "rank": (*BASE, "rank")}


class _Own(NamedTuple):
    """A metric that is no recorded field."""

    metric: Metric
    labels: tuple[str, ...]


def _own(name: str, text: str, labels: tuple[str, ...], *, counter: bool = False) -> _Own:
    return _Own(Metric(f"{PREFIX}_{name}", counter, 1.0, text), labels)


_INFO = _own("gpu_info", "What the GPU is, always 1", (*LABELS["gpu"], "name", "minor", "parent"))
_MEMORY = _own("gpu_memory_total_bytes", "Device memory that there is", LABELS["gpu"])
_XIDS = _own("gpu_xids_total", "Errors that the driver reported of the GPU (XID)", LABELS["gpu"], counter=True)
_BY_NUMBER = _own(
    "gpu_xids_by_number_total", "The same by the number of the error", (*LABELS["gpu"], "xid"), counter=True
)
_SAMPLES = _own("sampler_samples_total", "Samples taken of the node", BASE, counter=True)
_MISSED = _own("sampler_missed_total", "Samples that were due and not taken", BASE, counter=True)
_LAST = _own("sampler_last_sample_timestamp_seconds", "When the newest sample was taken", BASE)
OWN = (_INFO, _MEMORY, _XIDS, _BY_NUMBER, _SAMPLES, _MISSED, _LAST)


class SnapshotCollector(Collector):
    """Reads ``feed`` when it is scraped. It takes no lock: the sampler never waits for a scrape."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def describe(self) -> Iterable[Family]:
        return _families().values()

    def collect(self) -> Iterator[Family]:
        found = _families()
        snapshot = self._feed.newest
        if snapshot is not None:
            base = _base(self._feed.labels)
            self._sampler(found, base, snapshot)
            if self._feed.fresh(snapshot):
                self._gpus(found, base, snapshot.gpus)
                _values(found, base, snapshot)
        return (family for family in found.values() if family.samples)

    def _sampler(self, found: Mapping[str, Family], base: tuple[str, ...], snapshot: Snapshot) -> None:
        _add(found, _SAMPLES.metric, base, self._feed.samples)
        _add(found, _MISSED.metric, base, self._feed.missed)
        _add(found, _LAST.metric, base, snapshot.t)

    def _gpus(self, found: Mapping[str, Family], base: tuple[str, ...], gpus: list[GpuFacts]) -> None:
        for gpu in gpus:
            labels = (*base, *_gpu_labels(gpu))
            _add(found, _INFO.metric, (*labels, gpu.name or "", _number(gpu.minor), gpu.parent or ""), 1.0)
            if gpu.memory_total_bytes is not None:
                _add(found, _MEMORY.metric, labels, gpu.memory_total_bytes)
            xids = self._feed.xids_of(gpu.uuid)
            if xids is not None:
                # From 0 on, or rate() and increase() would not see the first. A number's own series begins at 1.
                _add(found, _XIDS.metric, labels, sum(xids.values()))
                for xid, count in sorted(xids.items()):
                    _add(found, _BY_NUMBER.metric, (*labels, str(xid)), count)


def _families() -> dict[str, Family]:
    """Every metric without samples, by name, in the order in which they are shown."""
    found = {m.name: _family(m, LABELS[device]) for device, known in METRICS.items() for m in known.values()}
    found.update((own.metric.name, _family(own.metric, own.labels)) for own in OWN)
    return found


def _family(metric: Metric, labels: tuple[str, ...]) -> Family:
    kind = CounterMetricFamily if metric.counter else GaugeMetricFamily
    return kind(metric.name, metric.text, labels=labels)


def _values(found: Mapping[str, Family], base: tuple[str, ...], snapshot: Snapshot) -> None:
    gpus = {f"gpu{i}": (*base, *_gpu_labels(gpu)) for i, gpu in enumerate(snapshot.gpus)}
    devices = {**gpus, "host": base, **{f"rank{r}": (*base, str(r)) for r in snapshot.ranks}}
    for column, value in snapshot.values.items():
        device, name = fields.split(column)
        labels, metric = devices.get(device), METRICS.get(device.rstrip("0123456789"), {}).get(name)
        if labels is not None and metric is not None and not math.isnan(value):  # what is missing is absent
            _add(found, metric, labels, value * metric.scale)


def _add(found: Mapping[str, Family], metric: Metric, labels: tuple[str, ...], value: float) -> None:
    family = found[metric.name]
    family.add_metric(labels, value)  # type: ignore[attr-defined]  # of both kinds, and of their base not


def _base(labels: Labels) -> tuple[str, ...]:
    return (labels.run, labels.job_id, str(labels.attempt), labels.node)


def _gpu_labels(gpu: GpuFacts) -> tuple[str, str, str]:
    return (_number(gpu.index), gpu.uuid, ",".join(map(str, gpu.ranks)))


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def registry_of(feed: Feed) -> CollectorRegistry:
    """With our metrics alone: none of the agent's own process and of Python."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(feed))
    return registry


def render(feed: Feed) -> bytes:
    """Prometheus's text format, version 0.0.4."""
    return generate_latest(registry_of(feed))
