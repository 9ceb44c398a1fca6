"""Who may read: whoever has the token, in a request that a page of this server made.

Other users of the machine can connect to the port, and pages of other sites can make the user's browser do so. The
token keeps out the former. The checks of Host, Origin and Sec-Fetch-Site keep out the latter, also a site whose name
resolves to 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import hmac
import html
import urllib.parse
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_PARAMETER = "token"
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
_READING = frozenset({"GET", "HEAD"})
_HEADERS = {
    # `data:` images: the icon, and the marker of a <select>.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """Wraps the application: rejects foreign requests, and adds the headers that protect its pages."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            response = self._check(scope)
            await (response or self._app)(scope, receive, _with_headers(send))
        else:  # no WebSocket is served
            await send({"type": "websocket.close", "code": 1008})

    def _check(self, scope: Scope) -> Response | None:
        """Return the response to a request that the application must not see."""
        headers = Headers(scope=scope)
        if (refusal := find_refusal(scope["method"], headers)) is not None:
            return refusal
        query = urllib.parse.parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        cookie_name = name_cookie(headers["host"])
        if _matches(dict(query).get(TOKEN_PARAMETER), self._token):
            rest = urllib.parse.urlencode([(name, value) for name, value in query if name != TOKEN_PARAMETER])
            return _sign_in(scope["path"], rest, cookie_name, self._token)
        if _matches(cookie_parser(headers.get("cookie", "")).get(cookie_name), self._token):
            return None
        return PlainTextResponse(
            "This page needs the token of its server.\n"
            "Open the address that `clustertrain ui` printed; it ends with ?token=…\n",
            401,
        )


def find_refusal(method: str, headers: Mapping[str, str]) -> Response | None:
    """Return the response to a request that no page or user of this server makes; otherwise None."""
    host = headers.get("host", "")
    if _split_host(host)[0] not in LOOPBACK_NAMES:
        return PlainTextResponse("Use the address 127.0.0.1 or localhost.\n", 403)
    if "origin" in headers and headers["origin"] != f"http://{host}":
        return PlainTextResponse("Requests of other sites are rejected.\n", 403)
    # A link on another site may open a page. Nothing else may come from another site, or from another port.
    is_navigation = headers.get("sec-fetch-mode", "navigate") == "navigate"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not is_navigation:
        return PlainTextResponse("Requests of other sites are rejected.\n", 403)
    if method not in _READING:
        return PlainTextResponse("This server only reads: use GET.\n", 405, {"Allow": "GET, HEAD"})
    return None


def name_cookie(host: str) -> str:
    """Return the name of the cookie for a Host header.

    A browser sends a cookie to all ports of a host, so each port has its own name. The port is the one that the browser
    sees: behind `ssh -L` it may differ from the server's.
    """
    return f"clustertrain-ui-{_split_host(host)[1] or 80}"


def _split_host(host: str) -> tuple[str, str]:
    """Return name and port of a Host header; the port is empty if there is none."""
    name, _, port = host.rpartition(":")
    return (name, port) if port.isascii() and port.isdigit() else (host, "")


def _matches(given: str | None, token: str) -> bool:
    # Bytes: compare_digest rejects strings that are not ASCII.
    return given is not None and hmac.compare_digest(given.encode(errors="replace"), token.encode())


def _sign_in(path: str, query: str, cookie_name: str, token: str) -> Response:
    """Set the cookie and go on without the token, so that it stays in no history, bookmark or screenshot.

    A page that goes on by itself, not a redirect: a browser sends a Strict cookie after a redirect only if the first
    address was typed, not if it was a link in a chat or a mail.
    """
    # Two slashes at the start would be another host.
    target = "/" + urllib.parse.quote(path).lstrip("/") + (f"?{query}" if query else "")
    response = HTMLResponse(
        '<!DOCTYPE html><html lang="en"><title>clustertrain</title><link rel="icon" href="data:,">'
        f'<meta http-equiv="refresh" content="0;url={html.escape(target, quote=True)}">'
        f'<p><a href="{html.escape(target, quote=True)}">Continue</a></p></html>'
    )
    response.set_cookie(cookie_name, token, httponly=True, samesite="strict", path="/")
    return response


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
            headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return send_with_headers
