"""Notes on the alert targets of a recipe. They are not errors: compute nodes may differ from this host."""

from __future__ import annotations

import os
import shutil
from collections.abc import Container
from pathlib import Path
from urllib.parse import urlsplit

from clustertrain.config.job import RunSpec
from clustertrain.config.telemetry import AlertsSpec

_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


def check_run_alerts(spec: RunSpec) -> list[str]:
    """Return notes on the alerts of ``spec``, with the environment that the job will have."""
    return check_alerts(
        spec.recipe.telemetry.alerts,
        share=spec.job.share,
        environ={*os.environ, *spec.secret_env},
        public_env={name for name in spec.env if name not in spec.secret_env},
    )


def check_alerts(spec: AlertsSpec, *, share: bool, environ: Container[str], public_env: Container[str]) -> list[str]:
    """Return notes on targets that may not work or may leak a secret.

    Args:
        share: the group can read the run's folder.
        environ: names of the variables that the job inherits or gets from ``--env``.
        public_env: names of the variables that the recipe and the profile set.
    """
    notes = []
    if spec.command and shutil.which(spec.command[0]) is None:
        missing = f"telemetry.alerts.command: no program {spec.command[0]!r} on this host"
        notes.append(f"{missing}; alerts are sent from the compute nodes")
    if spec.webhook_env:
        notes += _check_webhook_env(spec.webhook_env, environ, public_env)
    if spec.webhook_file:
        notes += _check_webhook_file(Path(spec.webhook_file))
    if share and len(spec.command) > 1:
        notes.append(
            "telemetry.alerts.command: its arguments are stored in spec.toml, which --share makes readable by the "
            "group; pass a token with --env"
        )
    parts = urlsplit(spec.webhook)
    if parts.scheme == "http" and parts.hostname not in _LOCAL_HOSTS:
        notes.append(f"telemetry.alerts.webhook: {parts.hostname} receives the alerts and the URL unencrypted")
    return notes


def _check_webhook_env(name: str, environ: Container[str], public_env: Container[str]) -> list[str]:
    if name in public_env:
        return [f"telemetry.alerts.webhook_env: {name} is set in [env], which is stored in spec.toml and job.sh"]
    if name not in environ:
        return [f"telemetry.alerts.webhook_env: {name} is not set here; the job inherits this environment"]
    return []


def _check_webhook_file(path: Path) -> list[str]:
    try:
        mode = path.stat().st_mode
    except OSError as e:
        return [f"telemetry.alerts.webhook_file: {path}: {e.strerror} on this host; every node must see it"]
    if mode & 0o077:
        return [f"telemetry.alerts.webhook_file: {path} can be read by others; run chmod 600"]
    return []
