"""Who may read the pages of `clustertrain ui`."""

from __future__ import annotations

import pytest

from tests.unit.ui.clients import BASE, TOKEN, signed_in, stranger

FOREIGN = [
    {"host": "attacker.example:8470"},
    {"host": "127.0.0.1.attacker.example"},
    {"host": "127.0.0.1:8470@attacker.example"},
    {"host": ""},
    {"origin": "http://attacker.example"},
    {"origin": "http://127.0.0.1:9999"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"},
]


@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/ui.css", "/api/live/runs", "/runs/x", "/nothing"])
def test_nothing_is_shown_without_the_token(path: str) -> None:
    client = stranger()
    for query in ("", "?token=", "?token=wrong", f"?token={TOKEN}x", "?token=%C3%BC"):
        answer = client.get(path + query)
        assert answer.status_code == 401 and "?token=" in answer.text and not answer.cookies


def test_the_token_becomes_a_cookie_of_this_port_and_leaves_the_address() -> None:
    client = stranger()
    answer = client.get(f"/sweeps?x=1&token={TOKEN}")
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"clustertrain-ui-8470={TOKEN};")
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Domain" not in cookie
    assert 'content="0;url=/sweeps?x=1"' in answer.text and TOKEN not in answer.text
    assert client.get("/").status_code == 200


def test_the_cookie_of_another_port_does_not_count() -> None:
    client = signed_in()
    assert client.get("/", headers={"host": "localhost:8471"}).status_code == 401
    assert client.get("/", headers={"host": "localhost:8470"}).status_code == 200


def test_going_on_after_the_token_stays_on_this_server() -> None:
    answer = stranger().get(f"{BASE}//attacker.example/%22%3E%3Cscript%3E?token={TOKEN}")
    assert 'content="0;url=/attacker.example/%22%3E%3Cscript%3E"' in answer.text and "<script>" not in answer.text


@pytest.mark.parametrize("headers", FOREIGN)
def test_requests_of_other_sites_are_rejected(headers: dict[str, str]) -> None:
    client = signed_in()
    for path in ("/", "/api/runs", f"/?token={TOKEN}"):
        assert client.get(path, headers=headers).status_code == 403


def test_a_link_on_another_site_may_open_a_page() -> None:
    assert signed_in().get("/", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}).is_success


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_reading_is_possible(method: str) -> None:
    answer = signed_in().request(method, "/api/runs")
    assert answer.status_code == 405 and answer.headers["allow"] == "GET, HEAD"


def test_a_broken_cookie_header_is_no_token() -> None:
    answer = stranger().get("/", headers={"cookie": b"a;;=\x80; clustertrain-ui-8470"})
    assert answer.status_code == 401


@pytest.mark.parametrize("other", ['state={"a": 1}', "a=b c", "word", "t@x=1", "path=/x", 'open="'])
def test_odd_cookies_of_other_servers_do_not_hide_the_token(other: str) -> None:
    cookies = f"{other}; clustertrain-ui-8470={TOKEN}"
    assert stranger().get("/static/ui.css", headers={"cookie": cookies}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/static/runs.js", "/nothing", "/api/runs"])
def test_pages_load_nothing_from_elsewhere(path: str) -> None:
    answer = signed_in().get(path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["referrer-policy"] == "no-referrer"
