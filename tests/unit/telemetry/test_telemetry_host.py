from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from clustertrain import clock
from clustertrain.telemetry.host import HOST_FIELDS, HostReader, ProcessTree


def test_the_figures_of_this_machine() -> None:
    host = HostReader()
    assert clock.wait_until(lambda: host.read()[0] is not None, 30, 0.1)
    facts = host.facts()
    assert facts.memory_total_bytes
    _, memory, load = host.read()
    assert memory is not None
    assert 0 < memory < facts.memory_total_bytes
    assert load is not None
    assert host.reasons == {}


def test_a_figure_that_cannot_be_read_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_proc() -> None:
        raise PermissionError("no /proc here")

    host = HostReader()
    monkeypatch.setattr(psutil, "virtual_memory", no_proc)
    values = dict(zip(HOST_FIELDS, host.read(), strict=True))
    assert values["memory_used_bytes"] is None
    assert values["load1"] is not None
    assert host.reasons == {"memory_used_bytes": "PermissionError: no /proc here"}
    assert host.facts().memory_total_bytes is None


def test_the_processes_below_one() -> None:
    tree = ProcessTree(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        first = tree.read()
        second = tree.read()
        child.kill()
    assert first is not None
    assert first.count >= 1
    assert first.rss_bytes > 0
    assert first.cpu_cores is None
    assert second is not None
    assert second.cpu_cores is not None


def test_a_root_that_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert ProcessTree(child.pid).read() is None
