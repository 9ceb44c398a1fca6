"""Where the webhook is: in the recipe, or kept out of the run's folder in an environment variable or a file."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from clustertrain.config.telemetry import AlertsSpec, is_url

_MOST_BYTES = 8192


class NoAddress(Exception):
    """In words that do not contain what was found."""


def of(spec: AlertsSpec) -> str:
    """The webhook's URL, looked up anew for each alert, so that a file may be replaced while the run goes on.

    Raises:
        NoAddress: the variable or the file is not there, or holds no URL.
    """
    if spec.webhook:
        return spec.webhook
    if spec.webhook_env:
        found = os.environ.get(spec.webhook_env)
        if found is None:
            raise NoAddress(f"the environment variable {spec.webhook_env} is not set on this node")
        where = f"the environment variable {spec.webhook_env}"
    else:
        found, where = _first_line(spec.webhook_file), spec.webhook_file
    if not is_url(found.strip()):
        raise NoAddress(f"{where} holds no URL, as https://host/path")
    return found.strip()


def _first_line(name: str) -> str:
    try:
        with Path(name).open("rb") as f:
            return f.readline(_MOST_BYTES).decode(errors="replace")
    except OSError as e:
        raise NoAddress(f"{name}: {e.strerror}") from None


def shown(spec: AlertsSpec) -> str:
    """``https://host/…``, as of a URL all but the host may be a secret; or where it is kept."""
    if spec.webhook:
        parts = urlsplit(spec.webhook)
        return f"{parts.scheme}://{parts.hostname}/…"
    return f"${spec.webhook_env}" if spec.webhook_env else spec.webhook_file
