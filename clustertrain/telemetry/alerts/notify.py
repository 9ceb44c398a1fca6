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

WAITING = 50  # alerts in the queue; more are dropped and counted
COMMAND_S, WEBHOOK_S, PAUSE_S, STOP_S = 30.0, 10.0, 1.0, 2.0
_ANSWER = 4096  # bytes of an answer that are read

OnEvent = Callable[..., Any]


class _NotDelivered(Exception):
    """``again``: a second try may do."""

    def __init__(self, reason: str, *, again: bool = False) -> None:
        super().__init__(reason)
        self.again = again


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
        self._queue: queue.Queue[Alert | None] = queue.Queue(WAITING)
        self._quiet = threading.Event()
        self._failing: dict[str, str] = {}  # by way: the reason that was told last
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def send(self, alerts: Iterable[Alert]) -> None:
        """Hand over, from any thread; returns at once but for the line in the events."""
        for alert in alerts:
            if (self._spec.command or self._spec.has_webhook) and not self._quiet.is_set():
                with self._starting:
                    self._enqueue(alert)
            self._on_event("alert", **_fields(alert))
            print(f"clustertrain agent: {in_words(alert)}", file=sys.stderr, flush=True)

    def quiet(self) -> None:
        """The ranks have been told to stop: from here on nothing is sent, and what is under way is given up. The grace
        time belongs to the checkpoint. Events and log go on."""
        self._quiet.set()

    def stop(self, timeout_s: float = STOP_S) -> bool:
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
            thread = threading.Thread(target=self._deliver_all, name="alerts", daemon=True)
            try:
                thread.start()
            except RuntimeError as e:  # the limit on processes is reached; the next alert tries again
                self._failed("thread", f"no thread could be started: {e}")
                return
            self._thread = thread
        try:
            self._queue.put_nowait(alert)
        except queue.Full:
            self._failed("queue", f"more than {WAITING} alerts wait")

    def _deliver_all(self) -> None:
        while not self._quiet.is_set():
            alert = self._queue.get()
            if alert is None or self._quiet.is_set():
                return
            body = msgspec.json.encode(message(alert, self._run, self._job_id))
            if self._spec.command:
                self._try("command", self._command, body)
            if self._spec.has_webhook:
                self._try("webhook", self._webhook, body)

    def _try(self, way: str, deliver: Callable[[bytes], None], body: bytes) -> None:
        if self._quiet.is_set():
            return
        try:
            deliver(body)
        except (CommandFailed, _NotDelivered) as e:
            self._failed(way, str(e))
        except Exception as e:  # the thread's edge. The type alone: the message may quote the URL, which is a secret
            self._failed(way, f"unexpected {type(e).__name__}")
        else:
            self._failing.pop(way, None)
            self._failing.pop("queue", None)

    def _failed(self, way: str, reason: str) -> None:
        """One event until it works again, or fails for another reason."""
        if self._quiet.is_set() or self._failing.get(way) == reason:
            return
        self._failing[way] = reason
        to = {"command": self._spec.command[:1], "webhook": [webhook_url.shown(self._spec)]}.get(way, [])
        self._on_event("alert_not_delivered", way=way, to="".join(to), reason=reason)
        print(f"clustertrain agent: an alert was not delivered by {way} {''.join(to)}: {reason}", file=sys.stderr)

    def _command(self, body: bytes) -> None:
        proc.tell(self._spec.command, body + b"\n", timeout_s=COMMAND_S, given_up=self._quiet.is_set)

    def _webhook(self, body: bytes) -> None:
        try:
            url = webhook_url.of(self._spec)
        except webhook_url.NoAddress as e:
            raise _NotDelivered(str(e)) from None
        try:
            post(url, body)
        except _NotDelivered as e:
            if not e.again or self._quiet.wait(PAUSE_S):
                raise
            post(url, body)


def post(url: str, body: bytes, timeout_s: float = WEBHOOK_S) -> None:
    """POST JSON. Redirects are not followed: they would turn it into a GET, or take the secret of the URL elsewhere.

    Raises:
        _NotDelivered: in words that do not contain the URL.
    """
    # Here: importing it takes some 30 ms, which an agent without a webhook need not spend.
    import http.client
    from urllib.error import HTTPError, URLError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class Refuse(HTTPRedirectHandler):
        def redirect_request(self, *args: Any, **kwargs: Any) -> None:
            return None

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise _NotDelivered("the URL is neither http nor https")
    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "clustertrain"}
    request = Request(_without_user(parts), data=body, headers={**headers, **_login(parts)}, method="POST")
    try:
        with build_opener(Refuse).open(request, timeout=timeout_s) as answer:
            answer.read(_ANSWER)
    except HTTPError as e:
        e.close()
        if 300 <= e.code < 400:
            raise _NotDelivered(f"it answered {e.code}, a redirect: name the URL that it leads to") from None
        raise _NotDelivered(f"it answered {e.code}", again=e.code >= 500 or e.code == 429) from None
    except TimeoutError:
        raise _NotDelivered(f"no answer in {timeout_s:g} s", again=True) from None
    except URLError as e:
        late = isinstance(e.reason, TimeoutError)
        reason = f"no answer in {timeout_s:g} s" if late else getattr(e.reason, "strerror", None) or "no connection"
        raise _NotDelivered(reason, again=True) from None
    except (OSError, http.client.HTTPException, ValueError) as e:
        raise _NotDelivered(f"the answer broke off ({type(e).__name__})", again=True) from None


def _without_user(parts: SplitResult) -> str:
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _login(parts: SplitResult) -> dict[str, str]:
    if parts.username is None:
        return {}
    word = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": "Basic " + base64.b64encode(word.encode()).decode()}


def in_words(alert: Alert) -> str:
    """One line, without the fix."""
    if alert.state == CLEARED:
        return f"cleared after {_long(alert.lasted_s or 0.0)}: {alert.text}"
    more = f" ({alert.held_back} more of this kind were not told)" if alert.held_back else ""
    return f"{alert.severity}: {alert.text}{more}"


def message(alert: Alert, run: str, job_id: str | None) -> dict[str, Any]:
    """What is sent. Slack, Mattermost, Rocket.Chat and Zulip show ``text``; the other keys are for programs."""
    fix = f"\nfix: {alert.fix}" if alert.fix and alert.state != CLEARED else ""
    text = f"{run}: {in_words(alert)}{fix}"
    # <, > and & begin links and mentions there.
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    rest = {k: v for k, v in msgspec.to_builtins(alert).items() if k != "text"}
    return {"text": text, "run": run, "job_id": job_id, "message": alert.text, **rest}


def _fields(alert: Alert) -> dict[str, Any]:
    """For the event, which has a ``t`` and a name of its own."""
    return {k: v for k, v in msgspec.to_builtins(alert).items() if k != "t" and v is not None}


def _long(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
