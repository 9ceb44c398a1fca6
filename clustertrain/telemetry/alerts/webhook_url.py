"""Where the webhook is: in the recipe, or kept out of the run's folder in an environment variable or a file."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from clustertrain.config.telemetry import AlertsSpec, is_http_url

_MAX_BYTES = 8192


class WebhookUrlError(Exception):
    """In words that do not contain what was found."""


def resolve(spec: AlertsSpec) -> str:
    """The webhook's URL, looked up anew for each alert, so that a file may be replaced while the run goes on.

    Raises:
        WebhookUrlError: the variable or the file is not there, or holds no URL.
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
        raise WebhookUrlError(f"{source} holds no URL, as https://host/path")
    return url.strip()


def _first_line(path: str) -> str:
    try:
        with Path(path).open("rb") as f:
            return f.readline(_MAX_BYTES).decode(errors="replace")
    except OSError as e:
        raise WebhookUrlError(f"{path}: {e.strerror}") from None


def redacted(spec: AlertsSpec) -> str:
    """``https://host/…``, as of a URL all but the host may be a secret; or where it is kept."""
    if spec.webhook:
        parts = urlsplit(spec.webhook)
        return f"{parts.scheme}://{parts.hostname}/…"
    return f"${spec.webhook_env}" if spec.webhook_env else spec.webhook_file
