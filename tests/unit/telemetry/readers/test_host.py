from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from clustertrain import clock
from clustertrain.telemetry.readers.host import HOST_FIELDS, HostReader


def test_values_of_this_machine() -> None:
    host = HostReader()
    assert clock.wait_until(lambda: host.read()[0] is not None, 30, 0.1)
    facts = host.read_facts()
    assert facts.memory_total_bytes
    values = dict(zip(HOST_FIELDS, host.read(), strict=True))
    memory, load = values["memory_used_bytes"], values["load1"]
    assert memory is not None
    assert 0 < memory < facts.memory_total_bytes
    assert load is not None
    assert not {"memory_used_bytes", "load1"} & set(host.reasons)


def test_missing_device_has_reason_not_zero(tmp_path: Path) -> None:
    host = HostReader(tmp_path)
    values = dict(zip(HOST_FIELDS, host.read(), strict=True))
    for name in ("network_rx_bytes", "infiniband_tx_bytes", "disk_read_bytes"):
        assert values[name] is None
        assert host.reasons[name].startswith("NOT_SUPPORTED")


def test_unreadable_field_has_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_proc() -> None:
        raise PermissionError("no /proc here")

    host = HostReader()
    monkeypatch.setattr(psutil, "virtual_memory", no_proc)
    values = dict(zip(HOST_FIELDS, host.read(), strict=True))
    assert values["memory_used_bytes"] is None
    assert values["load1"] is not None
    assert host.reasons["memory_used_bytes"] == "PermissionError: no /proc here"
    assert host.read_facts().memory_total_bytes is None
