"""What submit says of where alerts go."""

from __future__ import annotations

import sys

from clustertrain.launch.alerting import notes
from clustertrain.spec.telemetry import AlertsSpec


def test_nothing_is_said_of_what_is_well() -> None:
    assert notes(AlertsSpec(), share=True) == []
    spec = AlertsSpec(command=[sys.executable], webhook="https://hooks.example.org/secret")
    assert notes(spec, share=False) == []
    assert notes(AlertsSpec(webhook="http://localhost:8080/x"), share=False) == []


def test_what_is_odd_is_a_note_without_the_secret() -> None:
    spec = AlertsSpec(command=["no-such-program-at-all"], webhook="http://hooks.example.org/secret")
    found = notes(spec, share=True)
    assert len(found) == 3
    assert "no-such-program-at-all" in found[0] and "encryption" in found[1] and "--share" in found[2]
    assert "secret" not in " ".join(found)
