"""Delivery of alerts to the events, the agent's log, and the user's command and webhook.

Command and webhook have a separate thread and a short queue. A failure becomes an event ``alert_not_delivered`` and
never affects the run.
"""

from __future__ import annotations

import base64
import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from clustertrain import proc
from clustertrain.config.telemetry import AlertsSpec, is_http_url
from clustertrain.errors import CommandFailed
from clustertrain.run.events import WriteEvent
from clustertrain.telemetry.alerts.gate import CLEARED, Alert

QUEUE_SIZE = 50  # more alerts are dropped
COMMAND_TIMEOUT_S, WEBHOOK_TIMEOUT_S, RETRY_DELAY_S, STOP_TIMEOUT_S = 30.0, 10.0, 1.0, 2.0
_MAX_RESPONSE_BYTES = 4096  # bytes read of a response
_MAX_URL_BYTES = 8192  # bytes read of a file with the webhook's URL


class _DeliveryError(Exception):
    """Delivery failed; ``again`` says whether a retry may succeed."""

    def __init__(self, reason: str, *, retryable: bool = False) -> None:
        super().__init__(reason)
        self.again = retryable


class _WebhookUrlError(Exception):
    """Missing or invalid webhook URL; the message does not contain the URL."""


class Notifier:
    """Sender of alerts.

    Args:
        on_event: called as ``on_event(name, **fields)`` with ``alert`` and ``alert_not_delivered``, in the caller's and
            the notifier's thread, so it must be thread-safe.
        run: included in each message, as one chat may receive alerts of many runs.
        job_id: included in each message.
    """

    def __init__(self, spec: AlertsSpec, on_event: WriteEvent, *, run: str, job_id: str | None = None) -> None:
        self._spec = spec
        self._on_event = on_event
        self._run, self._job_id = run, job_id
        self._queue: queue.Queue[Alert | None] = queue.Queue(QUEUE_SIZE)
        self._quiet = threading.Event()
        self._last_failures: dict[str, str] = {}  # by channel, the last reported reason
        self._start_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def send(self, alerts: Iterable[Alert]) -> None:
        """Write alerts to the events and the log, and queue them for delivery. Thread-safe."""
        for alert in alerts:
            if (self._spec.command or self._spec.has_webhook) and not self._quiet.is_set():
                with self._start_lock:
                    self._enqueue(alert)
            self._on_event("alert", **_event_fields(alert))
            print(f"clustertrain agent: {format_alert(alert)}", file=sys.stderr, flush=True)

    def quiet(self) -> None:
        """Stop sending and abandon deliveries in progress, because the grace period is for the checkpoint.

        Events and log continue.
        """
        self._quiet.set()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Drop queued alerts; return False if a webhook blocks the thread longer than ``timeout_s``."""
        self._quiet.set()
        thread = self._thread
        if thread is None:
            return True
        with contextlib.suppress(queue.Full):  # the thread then checks the flag after each alert
            self._queue.put_nowait(None)
        thread.join(timeout_s)
        return not thread.is_alive()

    def _enqueue(self, alert: Alert) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._deliver_loop, name="alerts", daemon=True)
            try:
                thread.start()
            except RuntimeError as e:  # the process limit is reached; the next alert tries again
                self._report_failure("thread", f"cannot start a thread: {e}")
                return
            self._thread = thread
        try:
            self._queue.put_nowait(alert)
        except queue.Full:
            self._report_failure("queue", f"more than {QUEUE_SIZE} alerts queued")

    def _deliver_loop(self) -> None:
        while not self._quiet.is_set():
            alert = self._queue.get()
            if alert is None or self._quiet.is_set():
                return
            body = msgspec.json.encode(alert_payload(alert, self._run, self._job_id))
            if self._spec.command:
                self._deliver("command", self._run_command, body)
            if self._spec.has_webhook:
                self._deliver("webhook", self._post_webhook, body)

    def _deliver(self, channel: str, send: Callable[[bytes], None], body: bytes) -> None:
        if self._quiet.is_set():
            return
        try:
            send(body)
        except (CommandFailed, _DeliveryError) as e:
            self._report_failure(channel, str(e))
        except Exception as e:  # the thread's edge. Only the type: the message may quote the secret URL
            self._report_failure(channel, f"unexpected {type(e).__name__}")
        else:
            self._last_failures.pop(channel, None)
            self._last_failures.pop("queue", None)

    def _report_failure(self, channel: str, reason: str) -> None:
        """Report a failure once, until delivery works again or fails for another reason."""
        if self._quiet.is_set() or self._last_failures.get(channel) == reason:
            return
        self._last_failures[channel] = reason
        target = {"command": self._spec.command[:1], "webhook": [_redacted_url(self._spec)]}.get(channel, [])
        self._on_event("alert_not_delivered", channel=channel, to="".join(target), reason=reason)
        print(f"clustertrain agent: cannot deliver an alert by {channel} {''.join(target)}: {reason}", file=sys.stderr)

    def _run_command(self, body: bytes) -> None:
        proc.run_with_stdin(
            self._spec.command, body + b"\n", timeout_s=COMMAND_TIMEOUT_S, should_cancel=self._quiet.is_set
        )

    def _post_webhook(self, body: bytes) -> None:
        try:
            url = _resolve_url(self._spec)
        except _WebhookUrlError as e:
            raise _DeliveryError(str(e)) from None
        try:
            post(url, body)
        except _DeliveryError as e:
            if not e.again or self._quiet.wait(RETRY_DELAY_S):
                raise
            post(url, body)


def post(url: str, body: bytes, timeout_s: float = WEBHOOK_TIMEOUT_S) -> None:
    """POST JSON without following redirects, which would change it to GET or leak the secret URL.

    Raises:
        _DeliveryError: the request failed; the message does not contain the URL.
    """
    # Imported here because it takes about 30 ms, only needed with a webhook.
    import http.client
    from urllib.error import HTTPError, URLError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NoRedirectHandler(HTTPRedirectHandler):
        def redirect_request(self, *args: object, **kwargs: object) -> None:
            return None

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise _DeliveryError("the URL is neither http nor https")
    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "clustertrain"}
    request = Request(_strip_credentials(parts), data=body, headers={**headers, **_auth_header(parts)}, method="POST")
    try:
        with build_opener(NoRedirectHandler).open(request, timeout=timeout_s) as response:
            response.read(_MAX_RESPONSE_BYTES)
    except HTTPError as e:
        e.close()
        if 300 <= e.code < 400:
            raise _DeliveryError(f"HTTP status {e.code}, a redirect: set the URL to its target") from None
        raise _DeliveryError(f"HTTP status {e.code}", retryable=e.code >= 500 or e.code == 429) from None
    except TimeoutError:
        raise _DeliveryError(f"no response in {timeout_s:g} s", retryable=True) from None
    except URLError as e:
        timed_out = isinstance(e.reason, TimeoutError)
        reason = (
            f"no response in {timeout_s:g} s" if timed_out else getattr(e.reason, "strerror", None) or "no connection"
        )
        raise _DeliveryError(reason, retryable=True) from None
    except (OSError, http.client.HTTPException, ValueError) as e:
        raise _DeliveryError(f"the response was interrupted ({type(e).__name__})", retryable=True) from None


def _strip_credentials(parts: SplitResult) -> str:
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _auth_header(parts: SplitResult) -> dict[str, str]:
    if parts.username is None:
        return {}
    credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": "Basic " + base64.b64encode(credentials.encode()).decode()}


def format_alert(alert: Alert) -> str:
    """Format an alert as one line, without its fix."""
    if alert.state == CLEARED:
        return f"cleared after {_format_duration(alert.lasted_s or 0.0)}: {alert.text}"
    suppressed = f" ({alert.suppressed} more of this kind were suppressed)" if alert.suppressed else ""
    return f"{alert.severity}: {alert.text}{suppressed}"


def alert_payload(alert: Alert, run: str, job_id: str | None) -> dict[str, Any]:
    """Return the message body. Slack, Mattermost, Rocket.Chat and Zulip show ``text``; programs use the other keys."""
    fix = f"\nfix: {alert.fix}" if alert.fix and alert.state != CLEARED else ""
    text = f"{run}: {format_alert(alert)}{fix}"
    # <, > and & start links and mentions in chats.
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    fields = {k: v for k, v in msgspec.to_builtins(alert).items() if k != "text"}
    return {"text": text, "run": run, "job_id": job_id, "message": alert.text, **fields}


def _event_fields(alert: Alert) -> dict[str, Any]:
    """Return the alert's fields for its event, without ``t``, which the event has already."""
    return {k: v for k, v in msgspec.to_builtins(alert).items() if k != "t" and v is not None}


def _format_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _resolve_url(spec: AlertsSpec) -> str:
    """Return the webhook's URL, read again for each alert so that a file may be replaced during the run.

    Raises:
        _WebhookUrlError: the variable or the file is missing, or contains no URL.
    """
    if spec.webhook:
        return spec.webhook
    if spec.webhook_env:
        url = os.environ.get(spec.webhook_env)
        if url is None:
            raise _WebhookUrlError(f"the environment variable {spec.webhook_env} is not set on this node")
        source = f"the environment variable {spec.webhook_env}"
    else:
        url, source = _read_first_line(spec.webhook_file), spec.webhook_file
    if not is_http_url(url.strip()):
        raise _WebhookUrlError(f"{source} contains no URL of the form https://host/path")
    return url.strip()


def _read_first_line(path: str) -> str:
    try:
        with Path(path).open("rb") as f:
            return f.readline(_MAX_URL_BYTES).decode(errors="replace")
    except OSError as e:
        raise _WebhookUrlError(f"{path}: {e.strerror}") from None


def _redacted_url(spec: AlertsSpec) -> str:
    """Return ``https://host/…`` without the parts that may be secret, or the variable or file with the URL."""
    if spec.webhook:
        parts = urlsplit(spec.webhook)
        return f"{parts.scheme}://{parts.hostname}/…"
    return f"${spec.webhook_env}" if spec.webhook_env else spec.webhook_file
