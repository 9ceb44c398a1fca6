"""Lookup of the webhook's URL: in the recipe, or, to keep it out of the run's folder, in a variable or a file."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from clustertrain.config.telemetry import AlertsSpec, is_http_url

_MAX_BYTES = 8192


class WebhookUrlError(Exception):
    """Missing or invalid webhook URL; the message does not contain the URL."""


def resolve(spec: AlertsSpec) -> str:
    """Return the webhook's URL, read again for each alert so that a file may be replaced during the run.

    Raises:
        WebhookUrlError: the variable or the file is missing, or contains no URL.
    """
    if spec.webhook:
        return spec.webhook
    if spec.webhook_env:
        url = os.environ.get(spec.webhook_env)
        if url is None:
            raise WebhookUrlError(f"the environment variable {spec.webhook_env} is not set on this node")
        source = f"the environment variable {spec.webhook_env}"
    else:
        url, source = _first_line(spec.webhook_file), spec.webhook_file
    if not is_http_url(url.strip()):
        raise WebhookUrlError(f"{source} contains no URL of the form https://host/path")
    return url.strip()


def _first_line(path: str) -> str:
    try:
        with Path(path).open("rb") as f:
            return f.readline(_MAX_BYTES).decode(errors="replace")
    except OSError as e:
        raise WebhookUrlError(f"{path}: {e.strerror}") from None


def redacted(spec: AlertsSpec) -> str:
    """Return ``https://host/…`` without the parts that may be secret, or the variable or file with the URL."""
    if spec.webhook:
        parts = urlsplit(spec.webhook)
        return f"{parts.scheme}://{parts.hostname}/…"
    return f"${spec.webhook_env}" if spec.webhook_env else spec.webhook_file
