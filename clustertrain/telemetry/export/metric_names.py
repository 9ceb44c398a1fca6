"""Prometheus names of the recorded fields: base units, ``_total`` for counters, ratios 0-1.

The names are derived from :mod:`clustertrain.telemetry.fields`, so new fields are exported automatically. A test checks
them with ``promtool``.
"""

from __future__ import annotations

from typing import NamedTuple

from clustertrain.run.heartbeat import PHASES
from clustertrain.telemetry import fields
from clustertrain.telemetry.fields import Field

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
