"""The application and its server."""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import threading
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from clustertrain.errors import ClusterTrainError, NotFound, PermissionDenied, UsageError
from clustertrain.ui import compare_page, run_page, runs_page, sweeps, usage
from clustertrain.ui.auth import TOKEN_PARAMETER, Guard
from clustertrain.ui.pages import json_response
from clustertrain.ui.state import UiState

ADDRESS = "127.0.0.1"
DEFAULT_PORT = 8470
TRIED_PORTS = 20
SHUTDOWN_S = 2  # for requests that are being answered


def make_token() -> str:
    return secrets.token_urlsafe(24)


def build_app(token: str, state: UiState | None = None) -> ASGIApp:
    """Return the application for ``$CLUSTERTRAIN_HOME``; each request needs ``token``.

    Raises:
        ConfigError: the installation is incomplete.
    """
    state = state or UiState()

    def static(request: Request) -> Response:
        return state.pages.file(request.path_params["name"])

    app = Starlette(
        routes=[
            Route("/static/{name}", static),
            *(route for page in (runs_page, run_page, compare_page, sweeps, usage) for route in page.routes(state)),
        ],
        exception_handlers={
            ClusterTrainError: _explain(state, _describe_error),
            HTTPException: _explain(state, _describe_http_error),
            OSError: _explain(state, _describe_os_error),
            Exception: _explain(state, _describe_defect),
        },
    )
    app.state.ui = state
    return Guard(app, token)


_Description = tuple[int, str, str | None]  # status, message, fix


def _explain(state: UiState, describe: Callable[[Exception], _Description]) -> Callable[[Request, Exception], Response]:
    """Return a handler that answers with a page or, below /api, with JSON."""

    def handle(request: Request, error: Exception) -> Response:
        code, message, fix = describe(error)
        if request.url.path.startswith("/api/"):
            return json_response({"error": message, "fix": fix}, code)
        return state.pages.render("error.html.j2", status_code=code, message=message, fix=fix)

    return handle


def _describe_error(error: Exception) -> _Description:
    assert isinstance(error, ClusterTrainError)
    code = (
        404 if isinstance(error, NotFound)
        else 403 if isinstance(error, PermissionDenied)
        else 400 if isinstance(error, UsageError)
        else 500
    )  # fmt: skip
    return code, error.message, error.fix


def _describe_http_error(error: Exception) -> _Description:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return 404, "there is no such page", "the links at the top lead to all pages"
    return error.status_code, error.detail, None


def _describe_os_error(error: Exception) -> _Description:
    """Describe a failure of the file system, which is no defect: a stale handle, a name that is too long."""
    assert isinstance(error, OSError)
    return 500, f"{error.filename or 'a file'}: {error.strerror or error}", "load the page again"


def _describe_defect(error: Exception) -> _Description:
    return 500, f"this page cannot be shown: {type(error).__name__}: {error}", None


def bind(port: int | None) -> socket.socket:
    """Return a socket that listens on ``port`` of the loopback interface, by default on the first free one.

    Raises:
        UsageError: the port cannot be used, or no port is free.
    """
    candidates = range(DEFAULT_PORT, DEFAULT_PORT + TRIED_PORTS) if port is None else (port,)
    for candidate in candidates:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((ADDRESS, candidate))
            listener.listen(128)
        except OSError as e:
            listener.close()
            if port is not None:
                raise UsageError(
                    f"--port {port}: {e.strerror or e}",
                    fix="choose another port, or leave out --port to use the next free one",
                ) from e
            continue
        return listener
    last = DEFAULT_PORT + TRIED_PORTS - 1
    raise UsageError(f"ports {DEFAULT_PORT} to {last} are all in use", fix="pass a free port with --port")


def format_url(port: int, token: str, path: str = "/") -> str:
    return f"http://{ADDRESS}:{port}{path}?{TOKEN_PARAMETER}={token}"


class _Server(uvicorn.Server):
    """Ends streams, which never end by themselves, as soon as it is asked to stop."""

    def __init__(self, config: uvicorn.Config, state: UiState) -> None:
        super().__init__(config)
        self._state = state

    def handle_exit(self, sig: int, frame: object) -> None:
        self._state.close()
        super().handle_exit(sig, frame)  # type: ignore[arg-type]


def serve(listener: socket.socket, token: str) -> None:
    """Serve until SIGINT, SIGTERM or, unless it is ignored, SIGHUP. Raise as :func:`build_app`."""
    state = UiState()
    # The browser takes a moment to start, in which most of the table is read.
    threading.Thread(target=state.table.refresh, name="ui-first-look", daemon=True).start()
    config = uvicorn.Config(
        build_app(token, state),
        log_level="warning",
        access_log=False,  # it would print the token
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    server = _Server(config, state)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # the terminal was closed; nohup has it ignored
        signal.signal(signal.SIGHUP, server.handle_exit)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it has ended
        server.run(sockets=[listener])
