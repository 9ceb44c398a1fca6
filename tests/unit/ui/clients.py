"""Clients of the pages, without a socket."""

from __future__ import annotations

from starlette.testclient import TestClient

from clustertrain.ui.server import build_app
from clustertrain.ui.state import UiState

TOKEN = "a-token-of-the-tests"
BASE = "http://127.0.0.1:8470"


def stranger(state: UiState | None = None) -> TestClient:
    """Return a client without the token."""
    return TestClient(build_app(TOKEN, state), base_url=BASE, raise_server_exceptions=False)


def signed_in(state: UiState | None = None) -> TestClient:
    """Return a client that has opened the printed address."""
    client = stranger(state)
    assert client.get(f"/?token={TOKEN}").status_code == 200
    return client
