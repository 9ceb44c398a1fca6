"""Where alerts go: into the events and the agent's log, and to the command and the webhook that the user named.

Command and webhook have a thread of their own and a short queue. Whatever goes wrong with them is an event
``alert_not_delivered``, and never the run's trouble.
"""

from __future__ import annotations

import base64
import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from clustertrain import proc
from clustertrain.config.telemetry import AlertsSpec
from clustertrain.errors import CommandFailed
from clustertrain.telemetry.alerts import webhook_url
from clustertrain.telemetry.alerts.gate import CLEARED, Alert

QUEUE_SIZE = 50  # alerts in the queue; more are dropped and counted
COMMAND_TIMEOUT_S, WEBHOOK_TIMEOUT_S, RETRY_DELAY_S, STOP_TIMEOUT_S = 30.0, 10.0, 1.0, 2.0
_MAX_RESPONSE_BYTES = 4096  # bytes of an answer that are read

OnEvent = Callable[..., Any]


class _DeliveryError(Exception):
    """``again``: a second try may do."""

    def __init__(self, reason: str, *, retryable: bool = False) -> None:
        super().__init__(reason)
        self.again = retryable


class Notifier:
    """Hands alerts on.

    Args:
        on_event: called as ``on_event(name, **fields)``: ``alert``, ``alert_not_delivered``. From the caller's thread
            and from the notifier's own, so it must be safe in both.
        run, job_id: stand in what is sent, since one chat may get the alerts of many runs.
    """

    def __init__(self, spec: AlertsSpec, on_event: OnEvent, *, run: str, job_id: str | None = None) -> None:
        self._spec = spec
        self._on_event = on_event
        self._run, self._job_id = run, job_id
        self._queue: queue.Queue[Alert | None] = queue.Queue(QUEUE_SIZE)
        self._quiet = threading.Event()
        self._last_failures: dict[str, str] = {}  # by way: the reason that was told last
        self._start_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def send(self, alerts: Iterable[Alert]) -> None:
        """Hand over, from any thread; returns at once but for the line in the events."""
        for alert in alerts:
            if (self._spec.command or self._spec.has_webhook) and not self._quiet.is_set():
                with self._start_lock:
                    self._enqueue(alert)
            self._on_event("alert", **_event_fields(alert))
            print(f"clustertrain agent: {format_alert(alert)}", file=sys.stderr, flush=True)

    def quiet(self) -> None:
        """The ranks have been told to stop: from here on nothing is sent, and what is under way is given up. The grace
        time belongs to the checkpoint. Events and log go on."""
        self._quiet.set()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Give up what waits. False when a webhook held the thread for more than two seconds; it ends by itself."""
        self._quiet.set()
        thread = self._thread
        if thread is None:
            return True
        with contextlib.suppress(queue.Full):  # then it looks at the flag after each
            self._queue.put_nowait(None)
        thread.join(timeout_s)
        return not thread.is_alive()

    def _enqueue(self, alert: Alert) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._deliver_loop, name="alerts", daemon=True)
            try:
                thread.start()
            except RuntimeError as e:  # the limit on processes is reached; the next alert tries again
                self._report_failure("thread", f"no thread could be started: {e}")
                return
            self._thread = thread
        try:
            self._queue.put_nowait(alert)
        except queue.Full:
            self._report_failure("queue", f"more than {QUEUE_SIZE} alerts wait")

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
        except Exception as e:  # the thread's edge. The type alone: the message may quote the URL, which is a secret
            self._report_failure(channel, f"unexpected {type(e).__name__}")
        else:
            self._last_failures.pop(channel, None)
            self._last_failures.pop("queue", None)

    def _report_failure(self, channel: str, reason: str) -> None:
        """One event until it works again, or fails for another reason."""
        if self._quiet.is_set() or self._last_failures.get(channel) == reason:
            return
        self._last_failures[channel] = reason
        target = {"command": self._spec.command[:1], "webhook": [webhook_url.redacted(self._spec)]}.get(channel, [])
        self._on_event("alert_not_delivered", way=channel, to="".join(target), reason=reason)
        print(
            f"clustertrain agent: an alert was not delivered by {channel} {''.join(target)}: {reason}", file=sys.stderr
        )

    def _run_command(self, body: bytes) -> None:
        proc.run_with_stdin(
            self._spec.command, body + b"\n", timeout_s=COMMAND_TIMEOUT_S, should_cancel=self._quiet.is_set
        )

    def _post_webhook(self, body: bytes) -> None:
        try:
            url = webhook_url.resolve(self._spec)
        except webhook_url.WebhookUrlError as e:
            raise _DeliveryError(str(e)) from None
        try:
            post(url, body)
        except _DeliveryError as e:
            if not e.again or self._quiet.wait(RETRY_DELAY_S):
                raise
            post(url, body)


def post(url: str, body: bytes, timeout_s: float = WEBHOOK_TIMEOUT_S) -> None:
    """POST JSON. Redirects are not followed: they would turn it into a GET, or take the secret of the URL elsewhere.

    Raises:
        _NotDelivered: in words that do not contain the URL.
    """
    # Here: importing it takes some 30 ms, which an agent without a webhook need not spend.
    import http.client
    from urllib.error import HTTPError, URLError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NoRedirectHandler(HTTPRedirectHandler):
        def redirect_request(self, *args: Any, **kwargs: Any) -> None:
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
            raise _DeliveryError(f"it answered {e.code}, a redirect: name the URL that it leads to") from None
        raise _DeliveryError(f"it answered {e.code}", retryable=e.code >= 500 or e.code == 429) from None
    except TimeoutError:
        raise _DeliveryError(f"no answer in {timeout_s:g} s", retryable=True) from None
    except URLError as e:
        timed_out = isinstance(e.reason, TimeoutError)
        reason = (
            f"no answer in {timeout_s:g} s" if timed_out else getattr(e.reason, "strerror", None) or "no connection"
        )
        raise _DeliveryError(reason, retryable=True) from None
    except (OSError, http.client.HTTPException, ValueError) as e:
        raise _DeliveryError(f"the answer broke off ({type(e).__name__})", retryable=True) from None


def _strip_credentials(parts: SplitResult) -> str:
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _auth_header(parts: SplitResult) -> dict[str, str]:
    if parts.username is None:
        return {}
    credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": "Basic " + base64.b64encode(credentials.encode()).decode()}


def format_alert(alert: Alert) -> str:
    """One line, without the fix."""
    if alert.state == CLEARED:
        return f"cleared after {_format_duration(alert.lasted_s or 0.0)}: {alert.text}"
    suppressed = f" ({alert.held_back} more of this kind were not told)" if alert.held_back else ""
    return f"{alert.severity}: {alert.text}{suppressed}"


def alert_payload(alert: Alert, run: str, job_id: str | None) -> dict[str, Any]:
    """What is sent. Slack, Mattermost, Rocket.Chat and Zulip show ``text``; the other keys are for programs."""
    fix = f"\nfix: {alert.fix}" if alert.fix and alert.state != CLEARED else ""
    text = f"{run}: {format_alert(alert)}{fix}"
    # <, > and & begin links and mentions there.
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    fields = {k: v for k, v in msgspec.to_builtins(alert).items() if k != "text"}
    return {"text": text, "run": run, "job_id": job_id, "message": alert.text, **fields}


def _event_fields(alert: Alert) -> dict[str, Any]:
    """For the event, which has a ``t`` and a name of its own."""
    return {k: v for k, v in msgspec.to_builtins(alert).items() if k != "t" and v is not None}


def _format_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
