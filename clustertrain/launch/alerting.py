"""What is odd about where a recipe sends its alerts. Notes and no errors: compute nodes are not this host."""

from __future__ import annotations

import shutil
from urllib.parse import urlsplit

from clustertrain.spec.telemetry import AlertsSpec

_HERE = ("localhost", "127.0.0.1", "::1")


def notes(spec: AlertsSpec, *, share: bool) -> list[str]:
    """``share``: the run's folder is open to the group."""
    found = []
    if spec.command and shutil.which(spec.command[0]) is None:
        missing = f"telemetry.alerts.command: no program {spec.command[0]!r} on this host"
        found.append(f"{missing}; alerts are sent from the compute nodes")
    if not spec.webhook:
        return found
    parts = urlsplit(spec.webhook)
    if parts.scheme == "http" and parts.hostname not in _HERE:
        found.append(f"telemetry.alerts.webhook: {parts.hostname} gets the alerts, and the URL, without encryption")
    if share:
        found.append("telemetry.alerts.webhook stands in spec.toml, which --share lets the group read")
    return found
