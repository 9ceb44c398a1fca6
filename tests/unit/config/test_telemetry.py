"""The ``[telemetry]`` table: values that cannot work are refused at submission."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.config.parsing.documents import build, parse_toml
from clustertrain.config.recipe import Recipe
from clustertrain.config.telemetry import TelemetrySpec
from clustertrain.errors import ConfigError


def read(text: str) -> TelemetrySpec:
    return build(parse_toml(text, "it.toml"), Recipe, "it.toml").telemetry


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "key",
    [
        "telemetry.alerts.idle_min",
        "telemetry.alerts.hang_min",
        "telemetry.alerts.memory",
        "telemetry.interval_s",
        "telemetry.flush_s",
        "optim.lr",
    ],
)
def test_nonfinite_number_is_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"it.toml: {key} = {value}"):
        read(f"{key} = {value}")


def test_nonfinite_number_in_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optim\.betas = nan"):
        read("optim.betas = [0.9, nan]")


@pytest.mark.parametrize(
    "url",
    [
        "http://exa mple/x",
        "https://host/a path",
        "https://host/\\nx",
        "https://h\u00f6st/x",
        "https://host:99999/x",
        "https://host:port/x",
        "https://[::1/x",
        "https://-host/x",
        "https://host_/..x\\t",
        "https://:443/x",
        "https://a..b/x",
    ],
)
def test_invalid_webhook_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="webhook"):
        read(f'telemetry.alerts.webhook = "{url}"')


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.org/services/T0/B0/x?a=1&b=%20",
        "http://me:pass@localhost:8080",
        "https://[2001:db8::1]:8443/x",
        "http://192.0.2.7/x",
        "https://my_host.local./x",
    ],
)
def test_valid_webhook_url_is_accepted(url: str) -> None:
    assert read(f'telemetry.alerts.webhook = "{url}"').alerts.webhook == url


@pytest.mark.parametrize("address", ["nonsense host", "http://host", "host:9400", "a,b", "[::1]", "-x", " "])
def test_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        read(f'telemetry.prometheus = {{port = 9400, address = "{address}"}}')


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::", "::1", "fe80::1%eth0", "node-1.example.org", "n1"])
def test_valid_address_is_accepted(address: str) -> None:
    assert read(f'telemetry.prometheus = {{port = 9400, address = "{address}"}}').prometheus.address == address


@pytest.mark.parametrize(("port", "accepted"), [(65503, True), (65504, False), (65535, False), (0, True), (-1, False)])
def test_port_leaves_room_for_retries(port: int, accepted: bool) -> None:
    table: dict[str, Any] = {"telemetry": {"prometheus": {"port": port}}}
    if accepted:
        assert build(table, Recipe, "it.toml").telemetry.prometheus.port == port
        return
    with pytest.raises(ConfigError, match=f"port = {port}: must lie between 0 and 65503"):
        build(table, Recipe, "it.toml")


def test_webhook_url_may_come_from_env_or_file() -> None:
    assert read('telemetry.alerts.webhook_env = "MY_HOOK"').alerts.has_webhook
    assert read('telemetry.alerts.webhook_file = "/home/me/.hook"').alerts.has_webhook
    assert not read("telemetry.alerts.xid = false").alerts.has_webhook


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('webhook_env = "https://host/very-secret"', "the name of an environment variable"),
        ('webhook_env = "1X"', "the name of an environment variable"),
        ('webhook_file = "hook"', "absolute"),
        ('webhook = "https://host/x"\nwebhook_env = "HOOK"', "webhook and webhook_env are mutually exclusive"),
        ('webhook_file = "/x"\nwebhook_env = "HOOK"', "keep one"),
    ],
)
def test_invalid_webhook_source_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as e:
        read("\n".join(f"telemetry.alerts.{line}" for line in text.splitlines()))
    assert "very-secret" not in str(e.value)
